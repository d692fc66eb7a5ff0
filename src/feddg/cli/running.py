"""Commands that run one experiment: ``run``, ``resume``, ``demo``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from feddg.cli.common import (
    AgainOption,
    DryRunOption,
    OutOption,
    PredictionsOption,
    QuietOption,
    TrackOption,
    VerboseOption,
    resumable,
    show_results,
    track,
)
from feddg.cli.flags import ExperimentCommand, takes
from feddg.cli.parsing import seeds as read_seeds
from feddg.cli.parsing import whole_numbers
from feddg.cli.weights import with_weights_at_hand

app = typer.Typer()


@app.command(cls=ExperimentCommand)
@takes()
def run(
    said: dict[str, Any],
    experiment: Annotated[Path | None, typer.Argument(help="experiment file (YAML)")] = None,
    out: OutOption = Path("runs"),
    snapshots: Annotated[
        str | None,
        typer.Option(help="rounds whose model is kept for `feddg report --analyses`: 1,10,50"),
    ] = None,
    tracked: TrackOption = None,
    dry_run: DryRunOption = False,
    again: AgainOption = False,
    predictions: PredictionsOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Run an experiment: from a file, from flags, or flags over a file.

    The run's folder holds everything about it. The same experiment is never run twice: a finished
    one is shown, an interrupted one continues.
    """
    kept = whole_numbers("--snapshots", snapshots) if snapshots else []
    said = with_weights_at_hand(said, experiment)
    if dry_run:
        from feddg.cli.dry_run import show_experiment

        show_experiment(said, experiment, out)
        return
    track(tracked)
    from feddg.api import run_in
    from feddg.cli.progress import observer
    from feddg.experiment import load_experiment
    from feddg.runs.execute import is_complete
    from feddg.runs.prepare import cache_folder
    from feddg.runs.provenance import ImagesNow, find_folder

    chosen = load_experiment(experiment, said)
    folder = find_folder(chosen, out, ImagesNow(cache_folder()), again=again)
    if is_complete(folder):
        typer.echo(f"{folder} is complete; nothing is run again", err=True)
    with resumable(folder):
        done = run_in(
            folder,
            chosen,
            observer=observer(quiet, verbose),
            snapshots=kept,
            predictions=predictions,
        )
    show_results([done.folder], done.report)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="the run folder")],
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Continue an interrupted run from its last completed round."""
    from feddg.api import resume as resume_run
    from feddg.cli.progress import observer

    with resumable(folder):
        done = resume_run(folder, observer=observer(quiet, verbose))
    show_results([done.folder], done.report)


@app.command(cls=ExperimentCommand)
@takes("method", "hold_out", "train.rounds", several=True)
def demo(
    said: dict[str, Any],
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
    """Three methods on digits in four styles, each unseen once. Offline, a minute or two."""
    from rich.console import Console

    from feddg.api import compare
    from feddg.cli.progress import ManyBars
    from feddg.cli.tables import print_comparison
    from feddg.comparison.plan import demo_plan, jobs_of_demo
    from feddg.comparison.pool import Watcher

    if seeds is not None:
        axes["seeds"] = read_seeds(seeds)
    plan = demo_plan(axes, said)
    watcher = Watcher() if quiet else ManyBars(Console(stderr=True))
    try:
        done = compare(
            plan,
            out / "demo",
            jobs=jobs_of_demo(plan, jobs),
            watcher=watcher,
            launcher_options={"reuse": "yes"},
        )
    except KeyboardInterrupt:
        typer.echo("interrupted; the same command goes on from here", err=True)
        raise typer.Exit(130) from None
    print_comparison(done, explained=True)
    if done.failures:
        raise typer.Exit(1)
