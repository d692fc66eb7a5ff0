"""Commands that run one experiment: ``demo``, ``run``, ``resume``, ``forget``."""

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from feddg import api
from feddg.errors import ExperimentError
from feddg.options import (
    DryRunOption,
    ExperimentCommand,
    OptionsCommand,
    QuietOption,
    TrackOption,
    VerboseOption,
    options_of,
    resumable,
    show,
    takes,
    track,
    whole_numbers,
)
from feddg.options import seeds as read_seeds

app = typer.Typer()


@app.command(cls=ExperimentCommand, rich_help_panel="Start")
@takes("method hold_out train.rounds", several=True)
@options_of("feddg.api:demo", "out jobs", jobs=(1, None))
def demo(
    options: dict[str, Any],
    overrides: dict[str, Any],
    axes: dict[str, Any],
    seeds: Annotated[
        str | None, typer.Option(help="how many (2 gives seeds 0 and 1), or which: 7,8,9")
    ] = None,
    quiet: QuietOption = False,
) -> None:
    """Compare training alone with training together: offline, two minutes.

    On emoji in four styles, each of which is held out once.
    """
    from feddg.progress import watcher

    if seeds is not None:
        axes["seeds"] = read_seeds(seeds)
    with resumable():
        done = api.demo(overrides=overrides, watcher=watcher(quiet), **options, **axes)
    show("print_comparison", done)
    if done.failures:
        raise typer.Exit(1)


@app.command(cls=ExperimentCommand, rich_help_panel="Start")
@takes()
@options_of("feddg.api:run", "out workers again predictions", workers=(1, None))
def run(
    options: dict[str, Any],
    overrides: dict[str, Any],
    experiment: Annotated[Path | None, typer.Argument(help="experiment file (YAML)")] = None,
    snapshots: Annotated[
        str | None,
        typer.Option(help="rounds whose models are kept in the run's folder `snapshots`: 1,10,50"),
    ] = None,
    tracked: TrackOption = None,
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Run an experiment: from a file, from flags, or both.

    Everything about the run is kept in its folder. The same experiment is never run twice: if it
    is complete, its results are shown; if it was interrupted, it continues.
    """
    kept = whole_numbers("--snapshots", snapshots) if snapshots else []
    for name in overrides.keys() & inspect.signature(api.run).parameters.keys():
        raise ExperimentError(f"--set {name}: an experiment has no such field; use the option")
    if dry_run:
        from feddg.cli.output import show_preview
        from feddg.runs.beforehand import preview

        show_preview(preview(experiment, options["out"], again=options["again"], **overrides))
        return
    track(tracked)
    from feddg.progress import observer

    with resumable():
        watching = observer(quiet, verbose)
        done = api.run(experiment, observer=watching, snapshots=kept, **options, **overrides)
    show("print_results", done)


@app.command(cls=OptionsCommand, rich_help_panel="Further")
@options_of("feddg.api:resume", "workers device", workers=(1, None))
def resume(
    options: dict[str, Any],
    folder: Annotated[Path, typer.Argument(help="the run folder")],
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Continue an interrupted run after the last completed round."""
    from feddg.progress import observer

    with resumable():
        done = api.resume(folder, observer=observer(quiet, verbose), **options)
    show("print_results", done)


@app.command(rich_help_panel="Further")
def forget(
    folder: Annotated[Path, typer.Argument(help="the run folder")],
    client: Annotated[int, typer.Option(help="id of the site that withdraws")],
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Remove a site's data from the model of a complete run.

    This is exact, and possible only for a classifier in closed form (ridge), not for a network
    that was trained.
    """
    from feddg.progress import observer
    from feddg.runs.execute import forget as forgotten

    done = forgotten(folder, client, observer=observer(quiet, verbose))
    typer.echo(f"client {client} no longer has a part in this model")
    show("print_results", done)
