"""The command line: thin, no logic of its own.

A module per group of commands: ``run`` (run, resume, demo), ``compare`` (compare, report),
``use`` (evaluate, adaptations, methods, predict, travel, export, serve, privacy),
``data``, ``deploy``. ``common`` holds what they share: flags made from an
experiment's settings, and the parsing of their values; ``output`` shows plans and results. Heavy
imports wait until a command needs them.
"""

import logging
import sys
from typing import Annotated

import click
import typer
from typer.core import TyperGroup

from feddg.cli import compare, data, deploy, run, use
from feddg.errors import FeddgError
from feddg.text import printable

PANELS = {
    "Start": ("demo", "run", "compare", "report"),
    "Use a model": ("predict", "travel", "serve", "export", "evaluate"),
    "Look around": ("data", "methods", "adaptations", "privacy"),
    "Between sites": ("deploy",),
    "Further": ("resume", "forget"),
}
"""The commands as help lists them."""


class _Grouped(TyperGroup):
    """Lists the commands under headings, in the order a beginner meets them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for names in PANELS.values() for name in names]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for panel, names in PANELS.items():
            with formatter.section(panel):
                formatter.write_dl([(n, self.commands[n].get_short_help_str(70)) for n in names])


typer.core.HAS_RICH = False  # boxes around help take as long as all the rest of `feddg --help`
app = typer.Typer(
    name="feddg",
    cls=_Grouped,
    help="Federated domain generalization: train together, recognise a domain nobody trained on.",
    no_args_is_help=True,
    suggest_commands=False,  # click does
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group in (run.app, compare.app, use.app):
    app.add_typer(group)
app.add_typer(data.data_app, name="data")
app.add_typer(deploy.app, name="deploy")
app.add_typer(use.privacy_app, name="privacy")


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
            help="say which version this is, and on what it runs",
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
