"""Columns of CSV files, and what is none."""

import csv
from pathlib import Path

import pytest

from feddg.data.columns import read_columns
from feddg.data.data_set import load_source
from feddg.errors import DataError
from published_trees import NAMES, hospital, write_table


@pytest.mark.parametrize("between", [";", "\t"])
def test_semicolons_and_tabs_separate_too(tmp_path: Path, between: str) -> None:
    rows = hospital(tmp_path)
    with open(tmp_path / "t.csv", "w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, delimiter=between).writerows([NAMES, *rows])
    table = load_source("table", tmp_path / "t.csv")
    assert list(table.paths) == [row[0] for row in rows]


@pytest.mark.parametrize("missing", ["path", "label", "domain"])
def test_a_missing_column_is_named_with_those_that_are_there(tmp_path: Path, missing: str) -> None:
    names = [name if name != missing else "Other" for name in NAMES]
    with pytest.raises(DataError, match=rf"no column '{missing}'.*Other.*data\.options"):
        load_source("table", write_table(tmp_path / "t.csv", hospital(tmp_path), names))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'path,label,domain\n"a', "cannot be read as CSV"),
        (b"path,path,label,domain\na,b,c,d\n", "two columns called 'path'"),
        (b"sep=;\npath;label;domain\na;b;c\n", "row 2 of t.csv .* first row, 'sep=;', names 2 col"),
        ("path,label,domain".encode("utf-16"), "not UTF-8 text .* save it so"),
    ],
)
def test_files_that_are_no_tables(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(DataError, match=words):
        load_source("table", tmp_path / "t.csv")


def test_a_part_of_an_allowed_text_is_not_allowed(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("tumor,center\n1,3\n01,12\n")
    cells = read_columns(tmp_path / "t.csv", ("tumor", "center"))
    for name, allowed in (("tumor", "01"), ("center", "01234")):
        with pytest.raises(DataError, match=rf"row 3 of t\.csv has .* as {name}"):
            cells.check(name, allowed)
