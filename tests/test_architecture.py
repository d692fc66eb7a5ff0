"""Who imports whom: downwards only, and nobody around a corner."""

import ast
import functools
from pathlib import Path

import feddg

PACKAGE = Path(feddg.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
LEVELS = (
    {
        "errors",
        "settings",
        "registry",
        "readers",
        "messages",
        "records",
        "storage",
        "rng",
        "views",
        "diagnostics",
        "text",
    },
    {"data"},
    {"models"},
    {"styles"},
    {"clients"},
    {"methods"},
    {"privacy"},
    {"evaluation"},
    {"experiment"},
    {"federation"},
    {"runs"},
    {"comparison", "prediction", "attacks"},
    {"progress", "report"},
    {"deploy", "serving"},
    {"api", "options", "simple"},
    {"cli", "commands", "testing"},
)
"""Packages and single modules from the ground up; those of one level may not import each other,
except on the ground, where circles are what a test below looks for."""
RANK = {name: rank for rank, names in enumerate(LEVELS) for name in names}
FRONT = {"__init__", "__main__"}


@functools.cache
def parsed(source: Path) -> ast.Module:
    return ast.parse(source.read_text("utf-8"))


@functools.cache
def imports(source: Path) -> set[str]:
    """Dotted names of the package's modules that a module imports, late imports too."""
    found = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.startswith("feddg.")}


def package_of(source: Path) -> str:
    """Its package, or ``commands``: what a package brings for the command line is at the top."""
    inside = source.relative_to(PACKAGE).with_suffix("").parts
    return "commands" if inside[1:] == ("commands",) else inside[0]


def test_every_package_and_module_at_the_top_has_its_level():
    assert {package_of(source) for source in SOURCES} - FRONT == RANK.keys()


def test_imports_point_downwards():
    upwards = []
    for source in SOURCES:
        package = package_of(source)
        others = {name.split(".")[1] for name in imports(source)} & RANK.keys() - {package}
        if package not in FRONT:
            upwards += [(source, o) for o in others if RANK[o] >= RANK[package] and RANK[o] > 0]
    assert not upwards


def test_no_module_imports_itself_around_a_corner():
    known = {
        ".".join(("feddg", *source.relative_to(PACKAGE).with_suffix("").parts)): source
        for source in SOURCES
    }
    graph = {name: imports(source) & known.keys() for name, source in known.items()}
    tops = {name for name in graph if not name.endswith("__init__")}
    done: set[str] = set()

    def visit(name, path):
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for other in graph[name] & tops:
                if not _late(known[name], other):
                    visit(other, (*path, name))
            done.add(name)

    for name in sorted(tops):
        visit(name, ())


def _late(source: Path, other: str) -> bool:
    """Whether a module imports another only inside functions or for the type checker."""
    for node in parsed(source).body:
        if isinstance(node, ast.Import) and other in {alias.name for alias in node.names}:
            return False
        if isinstance(node, ast.ImportFrom):
            names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            if other in names:
                return False
    return True
