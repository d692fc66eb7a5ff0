"""Definitions found by name: registered by a program or by another package."""

import logging
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from feddg.data.data_set import DATA_SETS, load_source, register_source
from feddg.errors import DataError, FeddgError, RunError
from feddg.registry import Registry
from feddg.runs.table import SELECTION_RULES, NumberTable, SelectionRule, add_rule
from published_trees import write_tree


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


def test_a_notebooks_cell_may_register_its_rule_again(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(SELECTION_RULES, "_found", dict(SELECTION_RULES))
    fresh.setattr(SELECTION_RULES, "_aliases", dict(SELECTION_RULES._aliases))
    for answer in (1, 2):
        cell: dict = {"__name__": "notebook"}
        exec(f"def choose(table):\n    return {answer}\n", cell)
        add_rule(SelectionRule("mine", "Mine", cell["choose"]))
    assert SELECTION_RULES["mine"].choose(NumberTable()) == 2
    with pytest.raises(RunError, match=r"two .*'final': .*final_round and notebook\.choose"):
        add_rule(SelectionRule("final", "Final", cell["choose"]))


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


def test_a_class_of_another_package_without_a_name_is_none_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Nameless:
        name = ""

    class Named:
        name, aliases = "own", ("other",)

    entries = [
        SimpleNamespace(name=kind.__name__, value="theirs", load=lambda kind=kind: kind)
        for kind in (Nameless, Named)
    ]
    monkeypatch.setattr("feddg.registry.entry_points", lambda group: entries)
    registry: Registry[type] = Registry("thing", group="things")
    assert [*registry] == ["own"]
    assert registry.find("other") is Named
    with pytest.raises(FeddgError, match="Nameless has no name"):
        registry.find("Nameless")


def test_threads_wait_until_all_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are read by many threads, and the first DICOM among them loads their formats."""
    reads, go_on = threading.Event(), threading.Event()
    registry: Registry[type] = Registry("thing", "slow_things")
    shared = ModuleType("shared_with_slow_things")
    shared.reads, shared.go_on, shared.registry = reads, go_on, registry  # type: ignore[attr-defined]
    (tmp_path / "slow_things.py").write_text(
        "from shared_with_slow_things import go_on, reads, registry\n"
        "assert not registry\n"  # who is being read may look in, and waits for nobody
        "reads.set()\n"
        "assert go_on.wait(60)\n"
        "registry.add('int', int)\n"
    )
    monkeypatch.setitem(sys.modules, shared.__name__, shared)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "slow_things", raising=False)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(registry.find, "int")
        assert reads.wait(60)
        second = pool.submit(registry.find, "int")
        threading.Timer(0.2, go_on.set).start()
        assert first.result() is second.result() is int
    sys.modules.pop("slow_things")


def test_a_registry_that_could_not_be_read_says_so_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_things.py").write_text("raise OSError('half a file')\n")
    registry: Registry[type] = Registry("thing", "broken_things")
    for _ in range(2):
        with pytest.raises(OSError, match="half a file"):
            registry.find("int")
