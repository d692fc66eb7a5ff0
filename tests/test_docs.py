"""The pages about methods say what the code says now, and what a page shows of code works."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import feddg
from feddg.comparison.plan import expand_plan, load_plan
from feddg.evaluation.metrics import Predictions
from feddg.methods.base import methods
from federations import CLASSES, SIZE, colored_images
from scripts import load_script

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    return load_script(DOCS / "generate_methods.py").pages()


def test_pages_are_up_to_date(generated):
    written = {file.name: file.read_text("utf-8") for file in (DOCS / "methods").glob("*.md")}
    stale = {name for name in generated | written if generated.get(name) != written.get(name)}
    assert not stale, "run `python docs/generate_methods.py`"


def test_which_method_has_every_method_in_its_family():
    page = (DOCS / "which_method.md").read_text("utf-8").split("## By family")[1].split("##")[0]
    rows = [line.split("|")[1:3] for line in page.splitlines() if "`" in line]
    listed = {family.strip(): set(re.findall(r"`([^`]+)`", names)) for family, names in rows}
    families = load_script(DOCS / "generate_methods.py").FAMILIES
    assert listed == {family: set(names.split()) for family, names in families.items()}


def test_every_page_names_all_hyper_parameters_and_messages(generated):
    for name, method in methods().items():
        if not method.__module__.startswith("feddg.methods."):
            continue
        page = generated[f"{name}.md"]
        for field in method.Settings.model_fields:
            assert f"| `{field}` |" in page
        for message, text in method.sends.items():
            assert f"| `{message}` | {text} |" in page + generated["README.md"]


def test_a_page_has_what_a_method_sends_besides_the_rest_and_what_it_refuses(generated):
    assert "`statistics/style`" in generated["pardon.md"]
    assert "`update/weights/*`" not in generated["pardon.md"]
    assert "[Nothing else](README.md#what-every-update-has)" in generated["fedavg.md"]
    (excluded,) = re.findall(r"Cannot be combined with (.*)\.", generated["csac.md"])
    assert {"`l2d`", "`randconv`", "`rsc`"} <= set(excluded.split(", "))


def test_the_metric_of_the_contributing_page_is_one():
    page = (DOCS.parent / "CONTRIBUTING.md").read_text("utf-8")
    found = re.search(r"```python\n(# mypackage/metrics\.py\n.*?)```", page, re.DOTALL)
    assert found
    made: dict = {}
    exec(found[1], made)
    metric = made["WORST_CLASS"]
    counts = np.array([[3, 1, 0], [2, 2, 0], [0, 0, 0]])
    assert metric.compute(Predictions(confusion=counts)) == 0.5
    assert metric.compute(Predictions(confusion=np.zeros((2, 2), int))) is None
    entry = re.search(r'entry-points\."feddg\.metrics"\]\n(\w+) = "[\w.]+:(\w+)"', page)
    assert entry
    assert made[entry[2]].name == entry[1]


def test_the_plans_of_the_page_on_comparing_are_plans():
    page = (DOCS / "compare.md").read_text("utf-8")
    plans = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    cells = [len(expand_plan(load_plan({"name": "page", **plan}))) for plan in plans]
    assert cells == [3 * 4 * 3 * 2 * 2 * 2 * 3, 2 * (4 + 4 + 2), 3 * 4 * 3]


def test_the_code_of_the_page_on_other_tasks_runs(capsys):
    page = (DOCS / "segmentation.md").read_text("utf-8")
    made: dict = {}
    torch.manual_seed(0)
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, made)
    assert re.match(r"Dice 0\.[5-9]\d, 95 % interval", capsys.readouterr().out)
    assert made["fed"].evaluate(made["sites"][0]).mean > 0.8


def test_the_page_of_an_own_loop_runs(capsys):
    page = (DOCS / "your_own.md").read_text("utf-8")
    assert len(page.split()) <= 300
    sites = [list(zip(*map(torch.from_numpy, site))) for site in map(site_of, range(3))]
    names = dict(zip(("site_a", "site_b", "site_c"), sites))
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * SIZE * SIZE, CLASSES))
    made: dict = {"__name__": "your_own", "net": net, **names}
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    loop, *rest = blocks
    exec(loop, made)
    as_the_library = feddg.Federation(sites[:2], net, lr=0.01).fit(rounds=2)
    own = made["fed"].weights
    assert all(torch.equal(own[name], w) for name, w in as_the_library.weights.items())
    assert not torch.equal(own["classifier.weight"], net[1].weight)
    for block in rest:
        exec(block, made)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in printed[-2:]] == [["1", "40"], ["2", "40"]]
    assert "closeness" in printed[-1]


def site_of(id):
    """Images ``(20, 3, SIZE, SIZE)`` uint8 of a site, and labels."""
    images, labels = colored_images(20, seed=id)
    return images.transpose(0, 3, 1, 2).copy(), labels
