"""Tables of results are made from the CSV files in docs/results/data."""

from pathlib import Path
from types import SimpleNamespace

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
