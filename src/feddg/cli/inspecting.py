"""``feddg data``: look at images before training."""

from typing import Any

import typer

from feddg.cli.common import JsonOption, QuietOption, print_json
from feddg.cli.flags import ExperimentCommand, takes

app = typer.Typer(help="Look at images before training.", no_args_is_help=True)


@app.callback()
def data() -> None:
    """Look at images before training."""


@app.command("inspect", cls=ExperimentCommand)
@takes("data", "hold_out", "clients", "seed")
def inspect_data(
    said: dict[str, Any], as_json: JsonOption = False, quiet: QuietOption = False
) -> None:
    """Count images per domain and class, find bad files, show how clients would look."""
    from feddg.cli.progress import working
    from feddg.experiment import Experiment
    from feddg.settings import merge
    from feddg.studies.inspection import inspect_experiment, print_inspection

    experiment = Experiment(**merge({"model": {"weights": None}}, said))
    with working(quiet) as progress:
        found = inspect_experiment(experiment, progress)
    if as_json:
        print_json(found)
    else:
        print_inspection(found)
