"""The core: what a reader must understand of a federation. It knows nothing else of the package."""

import ast
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import feddg

PACKAGE = Path(feddg.__file__).parent
PACKAGES = {"clients", "federation", "methods", "models", "styles", "evaluation"}
MODULES = {
    *("errors", "registry", "settings", "messages", "records", "storage", "rng", "diagnostics"),
    "text",
    *("privacy", "privacy.building", "privacy.defence", "privacy.robust"),
    *("data", "data.pixels", "data.augment"),
}
HEAVY = {"pandas", "plotly", "matplotlib", "sklearn", "cryptography", "tensorboard"}
"""Packages that importing the core may not load."""


def modules(package: Path) -> dict[str, Path]:
    """Every module's file by its dotted name without ``feddg.``."""
    found = {}
    for source in sorted(package.rglob("*.py")):
        *folders, stem = source.relative_to(package).with_suffix("").parts
        found[".".join(folders if stem == "__init__" else (*folders, stem))] = source
    return found


def is_core(name: str) -> bool:
    return name in MODULES or name.partition(".")[0] in PACKAGES


@functools.cache
def named_in(text: str) -> set[str]:
    """The package's names that a file imports, wherever it does, or that it holds as text."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return {name.removeprefix("feddg.") for name in found if name.startswith("feddg.")} - {""}


def beyond(package: Path) -> list[str]:
    """What the core names that is not of it: ``who -> whom``."""
    all_of_it = modules(package)
    inside = {name: source for name, source in all_of_it.items() if is_core(name)}
    return [
        f"{name} -> {other}"
        for name, source in inside.items()
        for other in sorted(named_in(source.read_text("utf-8")) & all_of_it.keys() - inside.keys())
    ]


def loaded(package: Path) -> set[str]:
    """The heavy packages, and modules of this one outside the core, that importing it loads."""
    names = [name for name in modules(package) if is_core(name)]
    lines = [f"import feddg.{name}" for name in names] + ["import sys", "print(*sys.modules)"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = set(done.stdout.split())
    ours = {name.removeprefix("feddg.") for name in found if name.startswith("feddg.")} - {""}
    return (found & HEAVY) | {name for name in ours if not is_core(name)}


def test_every_name_in_the_list_is_a_module():
    assert modules(PACKAGE).keys() >= PACKAGES | MODULES


def test_the_core_names_nothing_else_of_the_package():
    assert beyond(PACKAGE) == []


def test_importing_the_core_loads_nothing_else_and_nothing_heavy():
    assert loaded(PACKAGE) == set()


@pytest.fixture
def copied(tmp_path):
    return shutil.copytree(
        PACKAGE, tmp_path / "feddg", ignore=shutil.ignore_patterns("__pycache__")
    )


@pytest.mark.parametrize(
    ("planted", "told"),
    [
        ("import feddg.runs\n", ["federation.server -> runs"]),
        ("def late():\n    from feddg.runs.folder import RunFolder\n", None),
        ("from importlib import import_module\nimport_module('feddg.report')\n", None),
        ("PAGES = 'feddg.report.page'\n", ["federation.server -> report.page"]),
    ],
    ids=["import", "late import", "import of a text", "text"],
)
def test_what_a_module_of_the_core_names_is_found(copied, planted, told):
    server = copied / "federation" / "server.py"
    server.write_text(server.read_text("utf-8") + "\n\n" + planted, encoding="utf-8")
    found = beyond(copied)
    assert found == told if told else found


@pytest.mark.slow
def test_a_heavy_package_in_the_core_is_found(copied):
    server = copied / "federation" / "server.py"
    server.write_text(server.read_text("utf-8") + "\n\nimport pandas\n", encoding="utf-8")
    assert loaded(copied) == {"pandas"}
