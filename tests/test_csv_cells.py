"""Cells of CSV files: no text is taken for a formula, numbers stay numbers, texts come back."""

import csv
import io

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from damage import draw_images
from feddg.csv_cells import as_cell, from_cell
from feddg.data.images import from_folder
from feddg.data.splits import from_csv, hold_out, write_csv
from feddg.report.blocks import Cell, Column, Table
from feddg.report.formats import to_csv

FORMULAS = [
    "'=",
    "''-0.5",
    "=1+1",
    "+cmd|' /C calc'!A0",
    "-2+3",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    "=",
    "-",
    "--1",
]


@pytest.mark.parametrize("text", FORMULAS)
def test_formulas_become_texts(text):
    assert as_cell(text) == f"'{text}"
    assert from_cell(f"'{text}") == text


@pytest.mark.parametrize(
    "value", [-3, -0.5, None, "-0.5", "+1.25", "-1e-05", "-1.20 ± 0.30", "-3 %", "cat", "'cat", ""]
)
def test_numbers_and_other_texts_stay(value):
    assert as_cell(value) == value


@given(st.text() | st.text("'=+-@1a", max_size=4))
def test_no_text_begins_a_formula_and_all_come_back(text):
    cell = as_cell(text)
    begins = cell[:1] in set("=+-@\t\r")
    assert not begins or not set(cell) - set("0123456789.,eE+-% ±")
    assert from_cell(cell) == text


def test_a_split_file_with_such_names_is_read_back(tmp_path):
    images = draw_images(tmp_path / "images")
    (images / "a").rename(images / "=a")
    table = from_folder(images)
    splits = hold_out(table, ["c"], [], id_val=0, id_test=0, seed=0)
    write_csv(table, splits, tmp_path / "split.csv")
    rows = list(csv.reader(io.StringIO((tmp_path / "split.csv").read_text(), newline="")))
    assert not [cell for row in rows[1:] for cell in row if cell.startswith("=")]
    again = from_csv(table, tmp_path / "split.csv")
    assert numpy.array_equal(again.train, splits.train)
    assert numpy.array_equal(again.test, splits.test)


def test_a_reports_tables_hold_none():
    columns = [Column("=method"), Column("accuracy", numeric=True)]
    table = Table(columns, [[Cell("=HYPERLINK(1)"), Cell("-1.5")]])
    rows = list(csv.reader(io.StringIO(to_csv(table))))
    assert rows == [["'=method", "accuracy"], ["'=HYPERLINK(1)", "-1.5"]]
