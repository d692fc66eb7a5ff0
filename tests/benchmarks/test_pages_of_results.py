"""Tables of results are made from the CSV files in docs/results/data."""

import itertools
from pathlib import Path

import pytest

from feddg.comparison.results import ResultRow, Results
from feddg.report.results_page import tables
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


def test_what_the_tail_explains_of_a_lead():
    """Three cells by hand: a lead of 10 of which the tail of plain averaging takes 6."""
    rows = {"fedavg": (0.50, 0.56), "mixstyle": (0.60, 0.63)}
    results = [
        ResultRow(
            experiment=f"{number:08x}",
            method=method,
            held_out=held_out,
            seed=0,
            numbers={"test_final": final, "test_swa": tail},
        )
        for number, (method, held_out) in enumerate(itertools.product(rows, "abc"))
        for final, tail in [rows[method]]
    ]
    lines = tables(Results.of_rows(results)).splitlines()
    start = next(i for i, line in enumerate(lines) if "both with SWA" in line)
    found = [cell.split(" (")[0].strip() for cell in lines[start + 2].split("|")[1:-1]]
    assert found == ["MixStyle", "+10.0", "+4.0", "+7.0"]
