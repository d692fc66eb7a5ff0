"""Plans of papers and of ours: they parse, expand to what tables hold, and run when made small."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import published_trees
from feddg.cli import app
from feddg.comparison.compare import carry_out_comparison, prepare_comparison
from feddg.comparison.plan import PAPERS, distinct, expand_plan, load_plan
from feddg.comparison.pool import Watcher, run_here
from feddg.comparison.results import Results
from feddg.data.data_set import DATA_SETS
from feddg.report.page import write_comparison
from feddg.runs.reading import read_run
from scripts import load_script

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PLANS = PAPERS
EXPECTED = {
    # methods x scenarios x further values x seeds, counted from the papers' tables
    "pardon/table1_pacs": 7 * 4 * 3,
    "pardon/table1_office_home": 7 * 4 * 3,
    "pardon/table2_pacs": 7 * 4 * 3,
    "pardon/table2_office_home": 7 * 4 * 3,
    "pardon/table3_iwildcam": 7 * 3 * 3,
    "pardon/table6_heterogeneity": 7 * 4 * 3,
    "pardon/table7_clients": 7 * 5 * 3,
    "pardon/table8_time": 7,
    "pardon/table10_noise": 4 * 4 * 3,
    "pardon/table11_ablation": 6 * 3,
    "pardon/figure10_gamma1": 2 * 6 * 3,
    "pardon/figure10_gamma2": 2 * 6 * 3,
    "ccst/table1_pacs": 6 * 4 * 3,
    "ccst/table1_office_home": 6 * 4 * 3,
    "ccst/table2_levels": 7 * 4 * 3,
    "ccst/figure4b_orthogonality": 10 * 4 * 3,
    "fedig/table1_mixing": 5 * 4 * 4,
    "fedig/table2_objectives": 5 * 4 * 4,
    "fedig/table3_components": 6 * 4 * 4,
    "fedig/table4_cost": 5 * 4,
    "fedig/table5_pacs": 16 * 4 * 4,
    "fedig/table6_range": 4 * 4 * 4,
    "fedig/table7_vlcs": 16 * 4 * 4,
    "fedig/table8_office_home": 16 * 4 * 4,
    "fedig/table9_silos": 4 * 4 * 4,
    "fedig/table10_silos": 4 * 4 * 4,
    "fedig/table11_silos": 4 * 4 * 4,
    "fedig/table12_personal": 2 * 4 * 4,
    "bai/pacs": 14 * 4 * 3 * 3,
    "bai/iwildcam": 14 * 3 * 3,
    "bai/camelyon17": 14 * 3 * 3,
    "bai/femnist": 14 * 3 * 3,
    "feddg_ga/pacs": 3 * 4 * 3,
    "fedccrl/pacs": 4 * 4 * 3,
}
SHARED = {"pardon/figure10_gamma1": 5 * 3, "pardon/figure10_gamma2": 5 * 3}
"""Cells whose run stands in several columns: FedAvg has no gamma."""
SHORTENED = {
    # the tables that one machine can carry out, with the figures of their own axes and seeds
    "pardon_table1_pacs": 7 * 4 * 3,
    "pardon_table2_pacs": 7 * 4 * 3,
    "pardon_table6_heterogeneity": 7 * 3 * 3,
    "pardon_table7_clients": 7 * 3 * 3,
    "pardon_table10_noise": 4 * 4 * 3,
    "pardon_table11_ablation": 6 * 3,
    "pardon_figure10_gamma1": 2 * 6 * 3,
    "pardon_figure10_gamma2": 2 * 6 * 3,
    "ccst_table1_pacs": 6 * 4 * 3,
    "ccst_table2_levels": 7 * 4 * 3,
    "ccst_figure4b_orthogonality": 10 * 4 * 3,
    "fedig_table2_objectives": 5 * 4 * 3,
    "fedig_table3_components": 6 * 4 * 3,
    "fedig_table5_pacs": 16 * 4 * 3,
    "fedig_table9_silos": 4 * 4,
    "fedig_table10_silos": 4 * 4,
    "fedig_table11_silos": 4 * 4,
}
OUR_OWN = {
    "digits/methods": 24 * 4 * 3,
    "emoji/learning_rate": 3,
    "emoji/lite0": 19 * 4 * 3,
    "emoji/small": 19 * 4 * 3,
    "reference_lines/digits": 4 * 4 * 3,
    "reference_lines/pacs": 4 * 4 * 3,
    "reference_lines/pacs_short": 4 * 4 * 3,
    "serving/ablation": 5 * 4 * 5,
    "methods/grid": 4 * 4,
    "methods/pacs": 10 * 4,
    "methods/bai_pacs_64": 14 * 4 * 2 * 2,
    "methods/fourteen_domains_64": 11 * 14,
    "methods/fourteen_other_rate_64": 7 * 14,
    "methods/fourteen_rates_64_higher": 3,
    "methods/fourteen_thirty_64": 7 * 14 * 2,
    "methods/fourteen_thirty_64_lower": 3,
    "methods/pacs_60k_64": 8 * 4 * 2 * 3,
    "methods/fourteen_rates_64": 10 * 3,
    "methods/fourteen_rates_64_lower": 5 * 2,
    "baseline/three_clients_64": 16 * 2,
    "baseline/three_clients_64_further": 7 * 2,
    "baseline/hundred_clients_64": 6 * 2,
    "baseline/pardon_parts_64": 2 * 2,
    "baseline/four_columns_96": 4,
    "baseline/four_columns_160": 4,
    "baseline/pooled_160": 4,
    "baseline/pooled_96": 4,
    "baseline/curve_64": 2,
    "baseline/curve_96": 2,
    "own_size/pacs_64": 8 * 4 * 3,
    "own_size/pacs_160": 8 * 2,
    "own_size/pacs_64_default": 8 * 4,
    "own_size/pacs_224_resnet50": 6 * 4,
    "own_size/sketch_224": 8,
    "own_size/sketch_64_rounds": 8 * 2,
    "own_size/three_clients_160": 1,
    "serving/digits": 10 * 4 * 5,
    "serving/equal_images": 2 * 4 * 5,
    "serving/pacs": 12 * 4 * 3,
    "serving/pacs_three_clients": 11 * 4 * 3,
    "serving/search": 10 * 4,
    "serving/search_pacs": 11 * 4,
    "without_weights/learning_rate": 4 * 2,
    "without_weights/recipe": 3 * 2,
    "styles/codecs_digits": 9 * 4 * 3,
    "styles/codecs_pacs": 7 * 4 * 3,
    "styles/pardon_margin": 4 * 4 * 3,
}
WRONG_AVERAGES = {
    # printed averages that are not the mean of their printed row, checked by hand
    ("pardon/table2_office_home", "test", "feddg-ga"): "54.43",
    ("pardon/table3_iwildcam", "test", "fedgma"): "44.78",
    ("pardon/table6_heterogeneity", "test", "feddg-ga"): "57.48",
    ("pardon/table6_heterogeneity", "val", "fpl"): "95.70",
    ("pardon/table7_clients", "val", "feddg-ga"): "67.79",
    ("pardon/table7_clients", "test", "feddg-ga"): "84.07",
    ("pardon/table7_clients", "test", "pardon"): "90.20",
    ("ccst/table1_office_home", "test", "CCST (Overall, K=3)"): "63.44",
    ("ccst/table2_levels", "test", "Single (K=3)"): "84.91",
}


def test_every_plan_is_listed():
    papers = {str(p.relative_to(PLANS))[:-5] for p in PLANS.glob("*/*.yaml")}
    others = {str(p.relative_to(BENCHMARKS))[:-5] for p in BENCHMARKS.glob("*/*.yaml")}
    shortened = {f"short/{name}" for name in SHORTENED}
    assert (papers, others) == (set(EXPECTED) | shortened, set(OUR_OWN))


def test_a_plan_of_no_paper_expands_to_distinct_runs(subtests):
    for name in OUR_OWN:
        with subtests.test(name=name):
            cells = expand_plan(load_plan(BENCHMARKS / f"{name}.yaml"))
            assert len(cells) == len(distinct(cells)) == OUR_OWN[name]


def test_a_plan_expands_to_the_table_it_is_for(subtests):
    for name in EXPECTED:
        with subtests.test(name=name):
            plan = load_plan(PLANS / f"{name}.yaml")
            cells = expand_plan(plan)
            assert len(cells) == EXPECTED[name]
            assert len(distinct(cells)) == len(cells) - SHARED.get(name, 0)
            assert plan.notes["differences"]
            assert plan.notes["paper"]["source"]
            table = Results.of_rows([], plan)
            for split, rows in plan.notes["paper"].get("values", {}).items():
                assert set(rows) <= set(table.methods), (name, split)
                for row in rows.values():
                    assert list(row) == list(dict.fromkeys(row))
                    assert set(row) == set(table.columns), (name, split)


def test_a_shortened_plan_is_the_papers_made_small(subtests):
    for name in SHORTENED:
        with subtests.test(name=name):
            plan = load_plan(PLANS / "short" / f"{name}.yaml")
            first, _, rest = name.partition("_")
            whole = load_plan(PLANS / first / f"{rest}.yaml")
            cells = expand_plan(plan)
            assert len(cells) == SHORTENED[name]
            assert [variant.name for variant in plan.methods] == [v.name for v in whole.methods]
            assert "fedavg" in {variant.name for variant in plan.methods}
            assert plan.notes["paper"] == whole.notes["paper"]
            told, of_whole = (one.notes["differences"] for one in (plan, whole))
            assert told[: len(of_whole)] == of_whole
            for cell in cells:
                said = cell.experiment
                assert (said.data.image_size, said.model.backbone) == (96, "resnet18")
                assert f"{said.train.rounds} rounds" in " ".join(told)
                assert (said.server.averaging, said.evaluate.averages) == ("swa", "every")


@pytest.fixture(scope="module")
def tiny_pacs(tmp_path_factory):
    domains = ("photo", "art_painting", "cartoon", "sketch")
    return fake_images(tmp_path_factory.mktemp("pacs") / "images", domains)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if place > 1 else ())
        for place, name in enumerate(SHORTENED)
    ],
)
def test_a_shortened_plan_shows_what_it_would_run(name, tiny_pacs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = str(PLANS / "short" / f"{name}.yaml")
    said = ["--root", str(tiny_pacs), "--dry-run"]
    result = CliRunner().invoke(app, ["compare", plan, *said], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "0 complete" in result.output
    assert not list(tmp_path.rglob("*.safetensors"))


def test_the_averages_marked_are_those_that_do_not_match():
    pages, marked = load_script(BENCHMARKS / "papers" / "pages.py"), {}
    for name in EXPECTED:
        paper = load_plan(PLANS / f"{name}.yaml").notes["paper"]
        for split, averages in paper.get("average", {}).items():
            for method, printed in averages.items():
                row = paper["values"][split][method]
                if mark := pages.mark_of(printed, row, list(row)):
                    marked[name, split, method] = mark.strip(" *()")
    assert marked == WRONG_AVERAGES


KINDS = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")


def fake_images(folder, domains, names=KINDS, images=6):
    """A tiny data set ``domain/class/*.png``, the benchmark's split file and PACS' lists."""
    random = np.random.default_rng(0)
    rows = [",split,domain_remapped,domain,category,y,path"]
    for d, domain in enumerate(domains):
        lists = {"train": [], "crossval": [], "test": []}
        for y, name in enumerate(names):
            place = folder / domain / name
            place.mkdir(parents=True)
            for i in range(images):
                pixels = random.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{i}.png")
                seen = "id_val" if i == 0 else "train"
                split = (seen, seen, "val", "test")[d]
                file = f"{domain}/{name}/{i}.png"
                rows.append(f"{len(rows) - 1},{split},{d},{domain},{name},{y},{file}")
                for of in ("test", "crossval" if i == 0 else "train"):
                    lists[of].append(f"{file} {y + 1}\n")
        for of, lines in lists.items():
            (folder / f"{domain}_{of}_kfold.txt").write_text("".join(lines))
    (folder.parent / "split.csv").write_text("\n".join(rows) + "\n")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_a_plan_made_small_runs_a_cell(name, tmp_path):
    plan = load_plan(PLANS / f"{name}.yaml")
    pacs = ("photo", "art_painting", "cartoon", "sketch")
    home = ("Art", "Clipart", "Product", "Real_World")
    domains = plan.domains or (home if "office_home" in name else pacs)
    if "iwildcam" in name:
        root = published_trees.iwildcam(tmp_path / "images")
    else:
        named = plan.base["data"]["source"] in ("vlcs", "office_home")
        names = DATA_SETS[plan.base["data"]["source"]].classes[:7] if named else KINDS
        root = fake_images(tmp_path / "images", domains, names)
    small = {
        "data": {"root": root, "image_size": 32, "id_val": 0.2, "id_test": 0.2},
        "model": {"weights": None, "backbone": "resnet18", "normalization": "train"},
        "train": {"rounds": 1, "local_epochs": 1, "local_steps": None, "batch_size": 16},
    }
    if plan.base.get("clients", {}).get("partition") != "domain" and "fedig" not in name:
        small["clients"] = {"number": 4, "per_round": 2}
    work = prepare_comparison(
        plan.fixed(small).model_copy(update={"seeds": (0,)}), tmp_path / "out"
    )
    # The last method of a table is the one that the table is about.
    (outcome,) = run_here([work.missing[-1]], tmp_path / "cache", Watcher())
    assert outcome.status == "completed", outcome.error
    assert read_run(outcome.cell.folder).rounds_done == 1
    done = carry_out_comparison(replace(work, missing=[]))
    write_comparison(done.folder)
    assert "Accuracy" in done.report.read_text("utf-8")
