"""Names in docstrings are those of the code: fields, parameters, and what roles refer to."""

import ast
import functools
import re
from pathlib import Path

import feddg

PACKAGE = Path(feddg.__file__).parent
SOURCES = {path: path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def nodes():
    """All functions and classes with their files; not at import, which every worker does."""
    kinds = (*FUNCTIONS, ast.ClassDef)
    trees = {path: ast.walk(ast.parse(text)) for path, text in SOURCES.items()}
    return [
        (path, node) for path, tree in trees.items() for node in tree if isinstance(node, kinds)
    ]


@functools.cache
def classes():
    found = {}
    for _, node in nodes():
        if isinstance(node, ast.ClassDef):
            found.setdefault(node.name, []).append(node)
    return found


def assigned(body):
    targets = [t for node in body if isinstance(node, ast.Assign) for t in node.targets]
    targets += [node.target for node in body if isinstance(node, ast.AnnAssign)]
    return {name.id for t in targets for name in ast.walk(t) if isinstance(name, ast.Name)}


def members(found):
    """What a class and its bases in the package define, in their bodies and on ``self``."""
    names = assigned(found.body)
    for node in ast.walk(found):
        if isinstance(node, FUNCTIONS):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    bases = (re.split(r"[.\[]", ast.unparse(base)) for base in found.bases)
    known = {part for parts in bases for part in parts if part in classes()}
    others = (one for name in known for one in classes()[name] if one is not found)
    return names.union(*map(members, others))


def parameters(function):
    return {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}


def listed(node, section):
    """The names that a docstring's section explains."""
    part = re.search(rf"^{section}:\n((?: .*\n|\n)+)", f"{ast.get_docstring(node)}\n", re.M)
    entries = re.findall(r"^    (\S[^:]*):(?:\s|$)", part[1], re.M) if part else []
    return {name.strip("* ") for entry in entries for name in entry.split(",")}


def test_attributes_and_arguments_in_docstrings_are_there():
    wrong, seen = [], 0
    for path, node in nodes():
        there = {}
        if isinstance(node, ast.ClassDef):
            made = [one for one in node.body if getattr(one, "name", "") == "__init__"]
            there = {"Attributes": members(node)}
            there["Args"] = parameters(made[0]) if made else members(node)
        elif isinstance(node, FUNCTIONS):
            there = {"Args": parameters(node)}
        for section, names in there.items():
            found = listed(node, section)
            seen += len(found)
            wrong += [f"{path.name}:{node.lineno}: {name}" for name in sorted(found - names)]
    assert wrong == []
    assert seen > 2000


def test_what_roles_refer_to_is_there():
    known = {node.name for _, node in nodes()}
    known |= {name for alike in classes().values() for one in alike for name in members(one)}
    known |= {name for text in SOURCES.values() for name in assigned(ast.parse(text).body)}
    known |= {path.stem for path in SOURCES} | {path.parent.name for path in SOURCES}
    roles = [
        (path.name, role, re.sub(r"\s", "", name))
        for path, text in SOURCES.items()
        for role, name in re.findall(r":(class|func|meth|data|attr|mod):`~?([^`]+)`", text)
    ]
    foreign = ("torch.", "numpy.", "pandas.", "subprocess.")
    own = [one for one in roles if not one[2].startswith(foreign)]
    assert [one for one in own if one[2].split(".")[-1] not in known] == []
    assert len(own) > 100
