"""Commands that run one experiment: ``run``, ``resume``, ``demo``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from feddg import api
from feddg.cli.common import (
    AgainOption,
    DryRunOption,
    ExperimentCommand,
    OutOption,
    PredictionsOption,
    QuietOption,
    TrackOption,
    VerboseOption,
    WorkersOption,
    resumable,
    show_results,
    takes,
    track,
    whole_numbers,
)
from feddg.cli.common import seeds as read_seeds

app = typer.Typer()


@app.command(cls=ExperimentCommand)
@takes()
def run(
    overrides: dict[str, Any],
    experiment: Annotated[Path | None, typer.Argument(help="experiment file (YAML)")] = None,
    out: OutOption = Path("runs"),
    snapshots: Annotated[
        str | None,
        typer.Option(help="rounds whose model is kept in the run's `snapshots`: 1,10,50"),
    ] = None,
    workers: WorkersOption = None,
    tracked: TrackOption = None,
    dry_run: DryRunOption = False,
    again: AgainOption = False,
    predictions: PredictionsOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Run an experiment: from a file, from flags, or both.

    The run's folder holds everything about it. The same experiment is never run twice: a finished
    one is shown, an interrupted one continues.
    """
    kept = whole_numbers("--snapshots", snapshots) if snapshots else []
    if dry_run:
        found = api.preview(experiment, out, **overrides)
        from feddg.cli.output import show_preview

        show_preview(found)
        return
    track(tracked)
    from feddg.cli.progress import observer

    with resumable():
        done = api.run(
            experiment,
            out,
            observer=observer(quiet, verbose),
            snapshots=kept,
            again=again,
            predictions=predictions,
            workers=workers,
            **overrides,
        )
    show_results(done)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="the run folder")],
    workers: WorkersOption = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Continue an interrupted run after its last round."""
    from feddg.cli.progress import observer

    with resumable():
        done = api.resume(folder, observer=observer(quiet, verbose), workers=workers)
    show_results(done)


@app.command(cls=ExperimentCommand)
@takes("method", "hold_out", "train.rounds", several=True)
def demo(
    overrides: dict[str, Any],
    axes: dict[str, Any],
    seeds: Annotated[
        str | None, typer.Option(help="how many (2: seeds 0 and 1), or which: 7,8,9")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="runs at once; one for each core if not said")
    ] = None,
    out: OutOption = Path("runs"),
    quiet: QuietOption = False,
) -> None:
    """Compare training alone and together: offline, two minutes.

    On emoji in four styles, each of which is unseen once.
    """
    from feddg.cli.output import print_comparison
    from feddg.cli.progress import watcher

    if seeds is not None:
        axes["seeds"] = read_seeds(seeds)
    with resumable():
        done = api.demo(out, overrides=overrides, jobs=jobs, watcher=watcher(quiet), **axes)
    print_comparison(done, explained=True)
    if done.failures:
        raise typer.Exit(1)
