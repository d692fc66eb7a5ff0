"""Commands that run one experiment: ``run``, ``resume``, ``demo``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from feddg.cli.common import (
    AgainOption,
    DryRunOption,
    ExperimentCommand,
    OutOption,
    PredictionsOption,
    QuietOption,
    TrackOption,
    VerboseOption,
    resumable,
    show_results,
    takes,
    track,
    whole_numbers,
)
from feddg.cli.common import seeds as read_seeds

if TYPE_CHECKING:
    from feddg.comparison.plan import Plan
    from feddg.experiment import Experiment


def with_weights_at_hand(said: dict[str, Any], file: Path | None) -> dict[str, Any]:
    """Returns what is said, or that without weights, where a preset's cannot be downloaded.

    Weights that the user names stay: then it is an error that they cannot be had. A network that
    is to learn from scratch because nobody has weights is told of in a line.

    Args:
        said: the fields that flags set.
        file: the experiment file below them.

    Raises:
        ExperimentError: together they are no valid experiment.
    """
    from feddg.data.data_set import SCRATCH
    from feddg.experiment import expand, explain, load_experiment, read_fields
    from feddg.settings import merge

    below = read_fields(file, expand(said))
    named = merge(below, expand(said))
    chosen = load_experiment(file, said)
    if chosen.data.root is not None and not chosen.data.root.is_dir():
        return said  # which is an error, and the one thing to say
    unsaid = not named.get("preset") and not {"weights", "backbone"} & {*named.get("model", {})}
    if unsaid and not _can_be_had(chosen):
        said = merge(said, {"model": {"weights": None}})
    found = explain(said, below)
    if any(setting.source.startswith(f"preset {SCRATCH}") for setting in found.values()):
        backbone, size, rate, rounds = (
            found[path].value
            for path in ("model.backbone", "data.image_size", "train.lr", "train.rounds")
        )
        typer.echo(
            f"no pretrained weights: {backbone} at {size} pixels learns from scratch, learning "
            f"rate {rate:g}, {rounds} rounds; expect less than with weights from ImageNet "
            "(--weights imagenet, or a file)",
            err=True,
        )
    return said


def plan_with_weights_at_hand(plan: "Plan") -> "Plan":
    """Returns a plan as it is, or without weights; see :func:`with_weights_at_hand`.

    What single methods say of weights stays, as does a plan that compares weights or networks.

    Args:
        plan: a plan with all that flags set.
    """
    from feddg.errors import ExperimentError
    from feddg.settings import merge

    if {"model.weights", "model.backbone", "preset"} & {*plan.settings}:
        return plan
    try:
        base = with_weights_at_hand(plan.base, None)
    except ExperimentError:
        return plan  # an axis may complete it; else its runs say what is wrong
    if base == plan.base:
        return plan
    return plan.model_copy(update={"base": merge(plan.base, {"model": {"weights": None}})})


def _can_be_had(experiment: "Experiment") -> bool:
    from feddg.settings import TORCHVISIONS

    if experiment.model.weights != TORCHVISIONS:
        return True
    from feddg.errors import WeightsError
    from feddg.models.backbones import fetch_imagenet

    try:
        fetch_imagenet(experiment.model.backbone)
    except WeightsError as error:
        typer.echo(f"{error}. Nothing was said of weights, so it is the latter", err=True)
        return False
    return True


# Commands that run one experiment: ``run``, ``resume``, ``demo``.


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
        from feddg.cli.output import show_experiment

        show_experiment(said, experiment, out)
        return
    track(tracked)
    from feddg.api import run_in
    from feddg.cli.output import observer
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
    from feddg.cli.output import observer

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
    from feddg.cli.output import ManyBars, print_comparison
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
