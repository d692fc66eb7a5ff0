"""Writes the reference: every setting from its own description, every command from its own help.

The documentation site calls this while it is built, so that these pages cannot fall behind.
"""

import re
import types
import typing
from collections.abc import Iterator
from typing import Any

import click
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from feddg.cli import app
from feddg.methods.base import methods
from feddg.settings import ExperimentSettings

SETTINGS_HEAD = """# Every setting

An experiment's fields, as a file spells them; on the command line `--set FIELD=VALUE` sets any of
them, and those with a flag of their own are in [the command line](command_line.md). Presets of data
sets fill in what you do not say; `feddg run --dry-run` shows what holds in the end, and where it
comes from.
"""
COMMANDS_HEAD = """# The command line

What `--help` says, of every command.
"""
PYTHON = {
    "Running": ("feddg.api", ("run", "resume", "compare")),
    "Data sets and networks of one's own": ("feddg.simple", ("Federation",)),
    "Experiments": ("feddg.experiment", ("Experiment", "load_experiment")),
    "Runs": ("feddg.runs.reading", ("Run", "read_run")),
    "Models": ("feddg.prediction.model", ("load_model",)),
    "Predictions": ("feddg.prediction.predict", ("predict", "Prediction")),
    "Accuracy at a new site": ("feddg.prediction.travel", ("travel", "Travel")),
    "Comparisons": ("feddg.comparison.compare", ("Comparison",)),
    "Watching a run": ("feddg.runs.observer", ("Observer",)),
    "Methods": ("feddg.methods.base", ("Method", "MethodSettings")),
    "Defences": ("feddg.privacy.defence", ("Defence",)),
    "Errors": ("feddg.errors", ("FeddgError",)),
}


def pages() -> dict[str, str]:
    """Returns the reference's pages by file name."""
    return {"settings.md": settings(), "command_line.md": commands(), "python.md": python()}


def settings() -> str:
    """Returns a page with a table for each part of an experiment, and one for each method."""
    parts: list[str] = [SETTINGS_HEAD]
    own = {n: f for n, f in ExperimentSettings.model_fields.items() if not _is_part(f)}
    parts.append(_table("The experiment itself", "", own))
    for name, field in ExperimentSettings.model_fields.items():
        if _is_part(field):
            parts.append(_table(f"`{name}`", f"{name}.", field.annotation.model_fields))
    parts.append("## `method`, by method\n\nBeside `method.name`; each method's page says more.")
    for name, method in methods().items():
        if method.__module__.startswith("feddg.methods.") and method.Settings.model_fields:
            parts.append(_table(f"`{name}`", "method.", method.Settings.model_fields, "###"))
    return "\n\n".join(parts) + "\n"


def commands() -> str:
    """Returns a page with a section for each command."""
    found = typer.main.get_command(app)
    return "\n\n".join([COMMANDS_HEAD, *_sections(found, "feddg")]) + "\n"


def python() -> str:
    """Returns a page of directives, from which the site takes docstrings."""
    head = "# The Python API\n\nWhat the first sections list can be imported from `feddg` itself."
    parts = [head]
    for title, (module, names) in PYTHON.items():
        parts += [f"## {title}", *(f"::: {module}.{name}" for name in names)]
    return "\n\n".join(parts) + "\n"


def _is_part(field: FieldInfo) -> bool:
    kind = field.annotation
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _table(title: str, prefix: str, fields: dict[str, FieldInfo], level: str = "##") -> str:
    rows = [f"{level} {title}", "", "| field | meaning | values | default |", "|---|---|---|---|"]
    for name, field in fields.items():
        meaning = " ".join((field.description or "").split())
        cells = (f"`{prefix}{name}`", meaning, _values(field), _default(field))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be said"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel) or value in ((), {}, None):
        return "none"
    return f"`{', '.join(map(str, value)) if isinstance(value, tuple) else value}`"


def _values(field: FieldInfo) -> str:
    bounds = [_bound(mark) for mark in _marks(field.annotation, field.metadata)]
    return ", ".join([_kind(field.annotation), *filter(None, bounds)])


def _marks(kind: Any, marks: Any) -> Iterator[Any]:
    for mark in marks:
        yield from getattr(mark, "metadata", [mark])
    for part in typing.get_args(kind):
        if typing.get_origin(part) is typing.Annotated:
            yield from _marks(part.__origin__, part.__metadata__)


def _bound(mark: Any) -> str:
    signs = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}
    for name, words in signs.items():
        if getattr(mark, name, None) is not None:
            return f"{words} {getattr(mark, name):g}"
    return ""


def _kind(kind: Any) -> str:
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _kind(inside[0])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in inside)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_kind(part) for part in inside)
    if origin in (tuple, list):
        return f"list of {_kind(inside[0])}"
    names = {int: "whole number", float: "number", str: "text", bool: "`true` or `false`"}
    if kind is type(None):
        return "none"
    return names.get(kind) or ("path" if "Path" in str(kind) else "fields by name")


def _sections(command: click.Command, name: str) -> Iterator[str]:
    context = click.Context(command, info_name=name)
    if isinstance(command, click.Group):
        if command.invoke_without_command and not command.no_args_is_help:
            yield _section(command, context, name)
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            if found is not None and not found.hidden:
                yield from _sections(found, f"{name} {child}")
        return
    yield _section(command, context, name)


def _section(command: click.Command, context: click.Context, name: str) -> str:
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [f"## `{name}`", "", _plain(command.help), "", "```", f"{name} {usage}", "```", ""]
    rows = [row for row in map(_parameter, command.get_params(context)) if row]
    table = ["| | | default |", "|---|---|---|", *rows] if rows else []
    return "\n".join([*lines, *table])


def _parameter(parameter: click.Parameter) -> str:
    if "--help" in parameter.opts:
        return ""
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    if isinstance(parameter, click.Argument):
        names = f"`{(parameter.name or '').upper()}`"
    default: Any = getattr(parameter, "show_default", None)
    default = default if isinstance(default, str) else parameter.default
    shown = "" if default in (None, False, ()) or callable(default) else f"`{default}`"
    said = _plain(getattr(parameter, "help", None))
    return "| " + " | ".join(t.replace("|", "\\|") for t in (names, said, shown)) + " |"


def _plain(text: str | None) -> str:
    return re.sub(r"\s*\n\s*", " ", text or "").strip()
