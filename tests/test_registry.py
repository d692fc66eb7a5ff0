"""Definitions found by name: registered by a program or by another package."""

import logging
import sys
from pathlib import Path

import pytest

from feddg import api
from feddg.data.data_set import DATA_SETS, load_source, register_source
from feddg.errors import DataError
from feddg.evaluation.adaptation import ADAPTATIONS
from feddg.methods.base import methods
from feddg.registry import read_classes
from published_trees import write_tree


def test_lists_read_from_source_are_what_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = (
        (api.listed_methods, methods(), ("name", "title", "aliases", "summary")),
        (api.listed_adaptations, ADAPTATIONS, ("name", "summary", "needs", "changes", "cost")),
    )
    # What a program registers is only known once it is imported.
    for listed, registered, _ in lists:
        assert listed() == [*registered.values()]
    for package in ("feddg.methods", "feddg.evaluation.adaptation"):
        monkeypatch.delitem(sys.modules, package)
    for listed, registered, fields in lists:
        ours = [kind for kind in registered.values() if kind.__module__.startswith("feddg.")]
        expected = [tuple(getattr(kind, field) for field in fields) for kind in ours]
        found = [tuple(getattr(each, field) for field in fields) for each in listed()]
        assert found == expected
    # So are another package's.
    monkeypatch.setattr("feddg.registry.entry_points", lambda group: [group])
    assert read_classes("feddg.methods", "register", "feddg.methods") is None


@pytest.mark.usefixtures("fresh")
def test_a_notebooks_cell_may_register_its_function_again() -> None:
    code = "def load(root):\n    return {}\n"
    for answer in (1, 2):
        cell: dict = {"__name__": "notebook"}
        exec(code.format(answer), cell)
        register_source("mine")(cell["load"])
    assert DATA_SETS["mine"].load(None) == 2
    with pytest.raises(DataError, match="two data sets are called 'digits'"):
        register_source("digits")(cell["load"])


def test_sources_of_other_packages(
    tmp_path: Path, fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = tmp_path / "theirs-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        "[feddg.sources]\ntheirs = their_module:load\nbroken = no_such_module:load\n"
        "whole = their_module:WHOLE\nrenamed = their_module:WHOLE\nnumber = their_module:NUMBER\n"
    )
    (tmp_path / "their_module.py").write_text(
        "from feddg.data.data_set import DataSet\n"
        "from feddg.data.images import from_folder\n"
        "def load(root, *, first=1):\n"
        "    return from_folder(root).take(range(first))\n"
        "WHOLE = DataSet(name='whole', summary='Theirs', load=load, domains=('b', 'a'))\n"
        "NUMBER = 3\n"
    )
    fresh.syspath_prepend(tmp_path)
    images = write_tree(tmp_path / "images", ("a", "b"), ("x", "y"))
    with caplog.at_level(logging.WARNING, logger="feddg"):
        assert {"theirs", "whole", "digits"} <= {*DATA_SETS}
    assert caplog.text.count("cannot be loaded") == 3
    assert DATA_SETS["whole"].domains == ("b", "a")
    assert len(load_source("whole", images, first=2)) == 2
    assert len(load_source("theirs", images, first=3)) == 3
    for name, reason in [
        ("broken", "of no_such_module:load cannot be loaded: No module"),
        ("renamed", "must be called 'whole'"),
        ("number", "not int"),
    ]:
        with pytest.raises(DataError, match=f"'{name}' .*{reason}"):
            load_source(name)
