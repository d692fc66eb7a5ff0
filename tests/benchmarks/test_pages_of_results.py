"""Pages of results are made from the CSV files beside them: making them again changes nothing."""

import importlib.util
from pathlib import Path

import pytest

from feddg.comparing.kept_results import KeptResults
from feddg.rows import VAL

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"vista.md": "vista_search.csv"}


@pytest.fixture(scope="module")
def page():
    spec = importlib.util.spec_from_file_location(
        "page", ROOT / "benchmarks" / "serving" / "page.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("name", "data"), PAGES.items())
def test_a_page_is_that_of_its_results(page, name, data):
    kept = KeptResults.read(ROOT / "docs" / "results" / "data" / data)
    text = (ROOT / "docs" / "results" / name).read_text("utf-8")
    assert page.remade(text, kept) == text


def test_the_search_shows_validation_and_never_the_test_domains(page):
    kept = KeptResults.read(ROOT / "docs" / "results" / "data" / "vista_search.csv")
    table = page.search_table(kept)
    for result in kept.results:
        assert f"{100 * result.accuracy(split=VAL):.1f}" in table
    by_hand = [r.accuracy(split=VAL) for r in kept.results if r.method == "randconv"]
    row = next(line for line in table.splitlines() if line.startswith("| RandConv"))
    assert row.endswith(f"| {100 * sum(by_hand) / len(by_hand):.1f} |")
