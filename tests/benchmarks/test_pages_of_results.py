"""Tables of results are made from the CSV files in docs/results/data."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest

from scripts import load_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def made():
    return load_script(ROOT / "benchmarks" / "tables.py")


def test_the_tables_of_the_pages_are_those_of_the_files(made):
    """Making them again from the CSV files changes nothing, and every table has its place."""
    remade = made.tables()
    texts = {page: page.read_text("utf-8") for page in made.PAGES}
    for page, text in texts.items():
        assert made.remade(text, remade) == text, f"{page.name}: run `python benchmarks/tables.py`"
    for name in remade:
        assert any(f"<!-- table: {name} -->" in text for text in texts.values()), name


def test_a_mean_is_of_all_columns_or_none(made):
    lines = [line.split("|")[2:-1] for line in made.recipe_columns().splitlines()]
    ours = [[cell.strip() for cell in cells] for cells in lines[2 : -len(made.PUBLISHED)]]
    assert len({*map(tuple, ours)}) > 3
    for *columns, outside, inside in ours:
        assert bool(outside) == bool(inside) == all(columns)


def test_a_reference_line_is_no_recipe_to_choose(made, tmp_path, monkeypatch):
    measured = {"good": (0.8, 0.6), "bad": (0.5, 0.5), made.POOLED: (0.3, 0.9)}
    rows = [
        {"method": method, "held_out": "photo", "budget": 9, "rule": rule, "split": split}
        | {"over": "domain_mean", "metric": "accuracy", "value": value}
        for method, values in measured.items()
        for split, value in zip(("test", "id_val"), values)
        for rule in ("final", "ema")
    ]
    pandas.DataFrame(rows).to_csv(tmp_path / "search.csv")
    monkeypatch.setattr(made, "DATA", tmp_path)
    table = made.recipes("search")
    assert "in 1 of 1 cases" in table
    assert made.POOLED in table


def test_leads_of_a_page_are_corrected_for_the_comparisons_of_its_table(made):
    results = made.Results.read(made.DATA / "own_pacs_64.csv")
    found = results.margins("ema", "FedAvg")
    assert {margin.comparisons for margin in found.values()} == {2}
    assert made.unseen([*results.margins("last_ten", "FedAvg").values(), *found.values()]) in (
        made.own_size()
    )


def test_of_a_methods_rates_the_one_that_is_best_in_domain_counts(made):
    """The lower one if they are equal, and none before all have been run."""

    def run(place, method, in_domain):
        table = SimpleNamespace(where=lambda **of: [SimpleNamespace(value=in_domain)])
        return SimpleNamespace(place=(place, method), method=method, table=table)

    better, worse = run("photo", "FedAvg", 0.8), run("photo", "FedAvg", 0.7)
    high, low = run("photo", "DART", 0.6), run("photo", "DART", 0.6)
    early = run("sketch", "DART", 0.9)
    rows = [(0.001, worse), (0.003, better), (0.003, high), (0.001, low), (0.001, early)]
    assert made.at_chosen_rates(rows, {"FedAvg": 2, "DART": 2}) == [better, low]


def test_a_seed_counts_once_every_method_has_been_run_with_it(made, monkeypatch):
    whole = made.at_best_rate("pacs_60k_64").rows
    read = made.Results.read

    def without(file, plan):
        """The same file, in which one run has not ended."""
        results = read(file, plan)
        place = next(row for row in results.rows if row.method == "FedBN")
        return replace(results, rows=[row for row in results.rows if row is not place])

    monkeypatch.setattr(made.Results, "read", without)
    methods = made.load_plan(ROOT / "benchmarks/methods/pacs_60k_64.yaml").methods
    seeds = [row.seed for row in whole]
    left = [row.seed for row in made.at_best_rate("pacs_60k_64").rows]
    assert seeds.count(0) == len(methods) * 4
    assert left == [seed for seed in seeds if seed != 0]
