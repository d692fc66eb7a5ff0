"""What several commands share: options, the end of a run, JSON."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

OutOption = Annotated[Path, typer.Option("--out", help="the run folder's parent")]
TrackOption = Annotated[
    str | None,
    typer.Option(
        "--track",
        help="also follow runs with mlflow, wandb (extras of the package)",
        envvar="FEDDG_TRACK",
    ),
]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="no progress: neither bars nor lines")
]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="lines instead of bars, as where there is no screen")
]
JsonOption = Annotated[bool, typer.Option("--json", help="machine-readable")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="show what would be run; run nothing")
]
AgainOption = Annotated[
    bool,
    typer.Option("--again", help="start anew, beside the old run, where its images were others"),
]

PredictionsOption = Annotated[
    bool,
    typer.Option(
        "--predictions",
        help="keep what is predicted of every image (Parquet, private), for `feddg paired`",
    ),
]


def track(names: str | None) -> None:
    """Has runs followed; the environment reaches runs in processes of their own, too."""
    if names is not None:
        os.environ["FEDDG_TRACK"] = names


def print_json(content: Any) -> None:
    """Prints content as JSON."""
    typer.echo(json.dumps(content, indent=1, ensure_ascii=False))


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Says how to go on when Ctrl-C ends a run."""
    try:
        yield
    except KeyboardInterrupt:
        remedy = f"`feddg resume {folder}` goes on from the last completed round"
        typer.echo(f"interrupted; {remedy}", err=True)
        raise typer.Exit(130) from None


def show_results(folders: list[Path], report: Path) -> None:
    """Prints the accuracies of finished runs, and where everything about them is."""
    from rich.console import Console

    from feddg.cli.tables import findings_text, results_table

    Console().print(results_table(folders))
    if notes := findings_text(folders):
        typer.echo(notes)
    for folder in folders:
        typer.echo(f"run folder: {folder}")
    typer.echo(f"report: {report.resolve()}")
