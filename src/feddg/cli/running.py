"""Commands that run one experiment: ``run``, ``resume``, ``demo``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from feddg.cli.common import (
    AgainOption,
    DryRunOption,
    NoEstimateOption,
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
    no_estimate: NoEstimateOption = False,
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

        show_experiment(said, experiment, out, measure=not no_estimate, quiet=quiet)
        return
    track(tracked)
    from feddg.api import run_in
    from feddg.cli.progress import observer
    from feddg.experiment import load_experiment
    from feddg.runs.execute import is_complete
    from feddg.runs.prepare import cache_folder
    from feddg.runs.same_images import ImagesNow, find_folder

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
@takes("hold_out", "train.rounds", "seed", hold_out="sketch")
def demo(said: dict[str, Any], out: OutOption = Path("runs"), quiet: QuietOption = False) -> None:
    """FedAvg against PARDON on scanned digits drawn in four ways. Offline, about a minute."""
    from feddg.api import run as run_experiment
    from feddg.cli.progress import observer
    from feddg.experiment import Experiment
    from feddg.report import write_report
    from feddg.settings import merge
    from feddg.studies.run_card import ensure_card

    folders = []
    for method in ("fedavg", "pardon"):
        fields = {"data": {"source": "digits"}, "method": {"name": method}}
        chosen = Experiment(**merge(fields, said))
        with resumable(out / chosen.label):
            done = run_experiment(chosen, out, observer=observer(quiet), report=False)
            folders.append(done.folder)
            ensure_card(done.folder)
    held = "-".join((*chosen.hold_out.val, *chosen.hold_out.test))
    show_results(folders, write_report(folders, out / f"demo-{held}-s{chosen.seed}.html"))
