"""The command that compares: ``feddg compare``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from feddg import api
from feddg.diagnostics import logged_once
from feddg.options import (
    DryRunOption,
    ExperimentCommand,
    QuietOption,
    TrackOption,
    launcher_options,
    options_of,
    resumable,
    show,
    takes,
    track,
)
from feddg.options import seeds as read_seeds

app = typer.Typer()
PLAN = "plan file (YAML), or a table of a paper, such as pardon/table1_pacs"


@app.command(cls=ExperimentCommand, rich_help_panel="Start")
@takes("method data hold_out clients train server model evaluate preset", several=True)
@options_of("feddg.api:compare", "out again results predictions drop_weights launcher")
def compare(
    options: dict[str, Any],
    overrides: dict[str, Any],
    axes: dict[str, Any],
    plan: Annotated[Path | None, typer.Argument(help=PLAN)] = None,
    seeds: Annotated[
        str | None,
        typer.Option(help="how many (3: seeds 0, 1, 2), or which: 7,8,9 (7, for seed 7 alone)"),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="runs at once; by default several on a GPU, else 1")
    ] = None,
    dry_run: DryRunOption = False,
    tracked: TrackOption = None,
    launcher_option: Annotated[
        list[str] | None, typer.Option(help="an option of the launcher: partition=gpu")
    ] = None,
    quiet: QuietOption = False,
) -> None:
    """Compare methods over held-out domains and seeds, and write a report.

    You can stop it and give the same command again: complete runs are kept, interrupted ones
    continue.
    """
    from feddg.cli.output import print_missing
    from feddg.progress import watcher

    track(tracked)
    if seeds is not None:
        axes["seeds"] = read_seeds(seeds)
    with logged_once(), resumable():
        done = api.compare(
            plan,
            overrides=overrides,
            jobs=jobs,
            watcher=watcher(quiet),
            launcher_options=launcher_options(launcher_option or ()),
            dry_run=dry_run,
            **options,
            **axes,
        )
        if dry_run:
            print_missing(done)
            return
    show("print_comparison", done)
    if done.failures:
        raise typer.Exit(1)
