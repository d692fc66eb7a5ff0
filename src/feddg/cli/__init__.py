"""The command line: thin, no logic of its own.

A module per group of commands: ``run`` (demo, run, compare, resume, forget, methods) and ``data``.
Commands that read run folders come with their packages (:mod:`feddg.readers`), those of other
packages from the entry-point group ``feddg.commands``: a function, whose parameters become
arguments and options, or a Typer app. What they share is in :mod:`feddg.options`. Heavy imports
wait until a command needs them.
"""

import logging
import sys
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from typer.core import TyperArgument, TyperGroup

from feddg.cli import data, run
from feddg.errors import FeddgError
from feddg.readers import readers
from feddg.text import printable

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

PANELS = ("Start", "Use a model", "Look around", "Between sites", "Further")
"""The headings under which help lists our commands, in the order a beginner meets them."""


class _Grouped(TyperGroup):
    """Lists the commands under their headings; knows those of other packages, too."""

    @cached_property
    def others(self) -> "dict[str, EntryPoint]":
        """The commands of other packages; help loads none of them, and ours are found first."""
        from importlib.metadata import entry_points  # takes a while

        return {entry.name: entry for entry in entry_points(group="feddg.commands")}

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        command = super().get_command(ctx, name)
        return command if command or name not in self.others else _loaded(self.others[name])

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*dict.fromkeys([*self.commands, *self.others])]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        panels: dict[str, list[tuple[str, str]]] = {panel: [] for panel in PANELS}
        for name, command in self.commands.items():
            panel = getattr(command, "rich_help_panel", None)
            panels[panel or PANELS[-1]].append((name, command.get_short_help_str(70)))
        panels["Of other packages"] = [
            (name, entry.dist.name if entry.dist else entry.value)
            for name, entry in self.others.items()
            if name not in self.commands
        ]
        for panel, rows in panels.items():
            if rows:
                with formatter.section(panel):
                    formatter.write_dl(rows)


def _loaded(entry: "EntryPoint") -> click.Command:
    """Returns the command that another package's entry point stands for.

    Raises:
        FeddgError: it cannot be loaded.
    """
    try:
        loaded = entry.load()
        if not isinstance(loaded, typer.Typer):
            made = typer.Typer()
            made.command(entry.name)(loaded)
            loaded = made
        return typer.main.get_command(loaded)
    except Exception as error:
        place = f"command {entry.name!r}: {entry.value}"
        raise FeddgError(f"{place} cannot be loaded: {error}") from error


class _Argument(TyperArgument):
    """An argument that keeps its help, which click sets anew and Typer does not pass on to it."""

    def __init__(self, *, help: str | None = None, **given: Any) -> None:
        super().__init__(**given)
        self.help = help


typer.main.TyperArgument = _Argument  # type: ignore[attr-defined,misc]
# Typer lists arguments among the options.
typer.core.TyperCommand.format_arguments = lambda *_: None  # type: ignore[method-assign]
typer.core.HAS_RICH = False  # boxes around help take as long as all the rest of `feddg --help`
app = typer.Typer(
    name="feddg",
    cls=_Grouped,
    help="Federated domain generalization: train together for a domain that nobody has seen.",
    no_args_is_help=True,
    suggest_commands=False,  # click does
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for package in (run, data, *readers()):
    app.add_typer(package.app, rich_help_panel=package.app.rich_help_panel)


def _say_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version
        from platform import python_version

        from feddg import __version__

        typer.echo(f"feddg {__version__} (torch {version('torch')}, Python {python_version()})")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_say_version,
            is_eager=True,
            help="print the versions of feddg, PyTorch and Python",
        ),
    ] = False,
) -> None: ...


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {_harmless(record.getMessage())}"


def _harmless(text: str) -> str:
    """Returns a text with control characters escaped, so names cannot command the terminal."""
    return "\n".join(map(printable, text.split("\n")))


def main() -> None:
    """Runs the command line; a user's mistake prints one line, not a traceback."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Plain())
    logging.getLogger("feddg").addHandler(handler)
    try:
        app()
    except FeddgError as error:
        typer.echo(f"error: {_harmless(str(error))}", err=True)
        sys.exit(1)
    except OSError as error:  # a disk may fail anywhere; whatever computes says what it was doing
        place = _harmless(f"{error.filename}: ") if error.filename else ""
        typer.echo(f"error: {place}{error.strerror or error}", err=True)
        sys.exit(1)
