"""Tables of results are made from the CSV files in docs/results/data."""

from pathlib import Path

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
