"""The papers' tables carried out one after another: nothing twice, nobody stopped by another."""

import itertools
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from feddg.cli import app
from feddg.comparison.results_file import read_results
from scripts import load_script

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "papers"
PLAN = {
    "base": {
        "data": {"source": "digits", "image_size": 8},
        "clients": {"number": 2},
        "train": {"rounds": 1, "local_epochs": 1, "batch_size": 256},
    },
    "hold_out": ["sketch"],
    "seeds": 1,
}


@pytest.fixture
def campaign(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return load_script(FOLDER / "campaign.py")


@pytest.fixture
def root(tmp_path, campaign):
    """Two tables that share a run."""
    pages = campaign.pages
    for folder in (pages.PLANS, pages.DATA):
        (tmp_path / folder).mkdir(parents=True)
    for name, methods in (("first", ["fedavg", "fedprox"]), ("second", ["fedavg"])):
        fields = PLAN | {"name": name, "title": name, "methods": methods}
        (tmp_path / pages.PLANS / f"{name}.yaml").write_text(yaml.safe_dump(fields))
    (tmp_path / pages.INDEX).write_text(f"# All\n\n{pages.BEGIN}\n{pages.END}\n")
    return tmp_path


def test_tables_follow_each_other_and_share_their_runs(root, campaign, runs_here, monkeypatch):
    monkeypatch.chdir(root)
    shown = []

    def compare(arguments):
        result = CliRunner().invoke(app, arguments)
        shown.append(" ".join(result.output.split()))
        return result.exit_code

    assert campaign.carry_out([], ["--quiet"], root, compare) == []
    assert "2 runs: 0 complete" in shown[0]
    assert "1 runs: 1 complete" in shown[1].replace("1 run:", "1 runs:")
    data = root / campaign.pages.DATA
    first, second = (read_results(data / f"{name}.csv") for name in ("first", "second"))
    assert [row.method for row in first] == ["fedavg", "fedprox"]
    assert second == first[:1]
    for name, cells in (("first", "2 of 2"), ("second", "1 of 1")):
        page = (root / campaign.pages.PAGES / f"{name}.md").read_text()
        assert f"**{cells} cells are run.**" in page
        index = (root / campaign.pages.INDEX).read_text()
        assert f"[{name}](data/papers/{name}.csv): {cells} cells, 1 seed, " in index


def test_a_table_that_fails_is_named_and_the_next_is_run(root, campaign):
    asked = []

    def compare(arguments):
        asked.append(Path(arguments[1]).stem)
        assert arguments[-2:] == ["--root", "PACS"]
        return 1 if asked[-1] == "first" else 0

    assert campaign.carry_out([], ["--root", "PACS"], root, compare) == ["first"]
    assert asked == ["first", "second"]


def test_an_interruption_ends_the_campaign(root, campaign):
    asked = []

    def compare(arguments):
        asked.append(arguments)
        return 130

    with pytest.raises(SystemExit) as ended:
        campaign.carry_out([], [], root, compare)
    assert ended.value.code == 130
    assert len(asked) == 1
    with pytest.raises(SystemExit, match="no plan third; there are: first, second"):
        campaign.carry_out(["third"], [], root, compare)


def test_the_results_of_every_other_table_are_known(campaign):
    root = campaign.pages.ROOT
    name = "pardon_table2_pacs"
    said = campaign.command(name, ["--jobs", "2"], root)
    own, *known = [Path(b).stem for a, b in itertools.pairwise(said) if a == "--results"]
    every = {path.stem for path in (root / campaign.pages.DATA).glob("*.csv")}
    assert set(known) == {stem for stem in every - {name} if not stem.endswith(".trials")}
    assert own == name
