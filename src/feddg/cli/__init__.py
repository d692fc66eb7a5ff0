"""The command line: thin, no logic of its own.

A module per group of commands: ``running`` (run, resume, demo), ``comparison`` (compare, report),
``measuring`` (evaluate, adaptations, methods), ``paired``, ``predicting`` (predict, export),
``serving_command`` (serve), ``inspecting`` (data), ``style``, ``deployment`` (deploy), ``storage``
(cache), ``attacking`` (privacy). ``flags`` makes the flags of an experiment from its settings
(``field_types``: what they accept), ``parsing`` reads what they say, ``common`` is what commands
share; ``progress`` shows what goes on,
``tables`` what came of it, ``dry_run`` what would. Heavy imports wait until a command needs them.
"""

import logging
import sys
from typing import Annotated

import typer

from feddg.cli import (
    attacking,
    comparison,
    deployment,
    inspecting,
    measuring,
    paired,
    predicting,
    running,
    serving_command,
    storage,
    style,
)
from feddg.errors import FeddgError

app = typer.Typer(
    name="feddg",
    help="Federated domain generalization: train together, recognise a domain nobody trained on.",
    no_args_is_help=True,
    suggest_commands=False,  # click does
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group in (running, comparison, measuring, paired, predicting, serving_command):
    app.add_typer(group.app)
app.add_typer(inspecting.app, name="data")
app.add_typer(style.app, name="style")
app.add_typer(deployment.app, name="deploy")
app.add_typer(storage.app, name="cache")
app.add_typer(attacking.app, name="privacy")


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
        return f"{record.levelname.lower()}: {record.getMessage()}"


def main() -> None:
    """Runs the command line; a user's mistake ends in one line, not in a traceback."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Plain())
    logging.getLogger("feddg").addHandler(handler)
    try:
        app()
    except FeddgError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
    except OSError as error:  # a disk may fail anywhere; whatever computes says what it was doing
        place = f"{error.filename}: " if error.filename else ""
        typer.echo(f"error: {place}{error.strerror or error}", err=True)
        sys.exit(1)
