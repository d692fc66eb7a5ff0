"""The house as a whole: names that mean one thing."""

import ast
from collections import Counter
from pathlib import Path

import pytest

import feddg

PACKAGE = Path(feddg.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
USED_TWICE = {
    # The reader's copies of rows, which move into the rows' own classes.
    "Client": "clients/client.py and runs/reading.py",
    "Evaluation": "evaluation/accuracy.py and runs/reading.py",
    "Refusal": "messages.py and runs/reading.py",
    # A cell of a plan and a cell of a table.
    "Cell": "comparing/plan.py and report/blocks.py",
}


def class_names() -> list[str]:
    """Every class of the package by name, nested ones too."""
    trees = [ast.parse(source.read_text("utf-8")) for source in SOURCES]
    return [n.name for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]


def module_names() -> list[str]:
    """Every module and room of the package by its last name."""
    modules = [source.stem for source in SOURCES if source.stem != "__init__"]
    return modules + [source.parent.name for source in SOURCES if source.stem == "__init__"]


@pytest.mark.parametrize("names", [class_names, module_names])
def test_no_name_is_used_twice(names):
    found = names()
    assert len(found) > 100
    twice = {name for name, count in Counter(found).items() if count > 1}
    assert not twice - USED_TWICE.keys(), "two things have one name: rename one"


def test_no_exception_has_outlived_its_reason():
    counted = Counter([*class_names(), *module_names()])
    assert all(counted[name] > 1 for name in USED_TWICE), "take it out of USED_TWICE"
