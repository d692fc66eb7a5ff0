"""Names of methods and metrics as prose, and the sentences of pages."""

import ast
import re
from pathlib import Path

import pytest

import feddg.report
from feddg.evaluation.metrics import METRICS, Metric, register_metric
from feddg.report.text import metric_title, spelled, table_from


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("feddg_ga", "FedDG-GA"),
        ("ccst+my_method", "CCST + my_method"),
        ("elcfs", "ELCFS (FedDG)"),
        ("pardon, gamma1 0.5", "PARDON, gamma1 0.5"),
        ("Single (K=1), A+B", "Single (K=1), A+B"),
    ],
)
def test_a_method_s_label_reads_well(label, expected):
    assert spelled(label) == expected


def test_a_metric_carries_its_title(monkeypatch):
    assert metric_title("macro_f1") == "Macro-F1"
    assert metric_title("sharpness") == "sharpness"
    monkeypatch.setattr(METRICS, "_found", dict(METRICS._found))
    own = Metric(name="sharpness", summary="", compute=lambda predictions: 0.0, title="Sharp")
    register_metric(own)
    assert metric_title("sharpness") == "Sharp"


@pytest.mark.parametrize(
    ("template", "function"), [("sentences.j2", "sentence"), ("tables.j2", "table_from")]
)
def test_every_template_is_filled_with_the_values_that_it_takes(template, function):
    folder = Path(feddg.report.__file__).parent
    written = (folder / "templates" / template).read_text("utf-8")
    macros = re.findall(r"{% macro (\w+)\((.*?)\)", written)
    takes = dict(macros)
    assert len(takes) == len(macros)  # the second of a name would replace the first
    said = set()
    for file in folder.glob("*.py"):
        for call in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == function:
                values = (getattr(node, "value", None) for node in ast.walk(call.args[0]))
                names = {value for value in values if isinstance(value, str)}
                given = {keyword.arg for keyword in call.keywords}
                for name in names if None not in given else ():
                    assert given == set(filter(None, takes[name].split(", "))), name
                said |= names
    inner = {name for name in takes if written.count(f"{name}(") > 1}
    assert takes.keys() == said | inner


def test_what_a_value_holds_parts_no_field_of_a_table():
    odd = "a | b\n[c]: **d**"
    table = table_from("environment", values={odd: odd, "x:": "  y"})
    assert [column.heading for column in table.columns] == ["Name", "Value"]
    assert [[cell.text for cell in row] for row in table.rows] == [[odd, odd], ["x:", "y"]]
    (row,) = table_from("groups", groups=[("style", [list("abcdefghi")])]).rows
    assert (row[2].text, row[3].text, row[3].items) == ("9", "a and 8 more", tuple("abcdefghi"))
