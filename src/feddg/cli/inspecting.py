"""``feddg data``: get published images, and look at images before training."""

from pathlib import Path
from typing import Annotated, Any

import typer

from feddg.cli.common import JsonOption, QuietOption, print_json
from feddg.cli.flags import ExperimentCommand, takes

app = typer.Typer(
    help="Get images, and look at them before training.",
    no_args_is_help=True,
    suggest_commands=False,
)


@app.callback()
def data() -> None:
    """Get images, and look at them before training."""


@app.command("get")
def get_data(
    name: Annotated[str, typer.Argument(help="a published data set; docs/data_sets.md")],
    root: Annotated[Path, typer.Option(help="the folder it goes to")],
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", help="you have read its licence and keep to it")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="archives stay once unpacked")] = False,
    quiet: QuietOption = False,
) -> None:
    """Download a published data set, once its licence is accepted; it goes on where it was cut."""
    from feddg.cli.progress import working
    from feddg.data.data_set import DATA_SETS
    from feddg.data.download import about, get_data_set

    definition = DATA_SETS.find(name)
    typer.echo("\n".join(about(definition)))
    publication = definition.publication
    assert publication is not None
    if not publication.files:
        typer.echo("It has to be asked for by hand:")
        for number, step in enumerate(publication.steps, start=1):
            typer.echo(f"  {number}. {step}")
        raise typer.Exit(1)
    again = f"feddg data get {name} --root {root} --accept-licence"
    if not accept_licence:
        typer.echo(f"Nothing was downloaded. If you keep to its licence: {again}", err=True)
        raise typer.Exit(1)
    with working(quiet) as progress:
        received = get_data_set(definition, root.expanduser(), progress, keep=keep)
    for file, found in received.items():
        typer.echo(f"sha256 {found}  {file}")
    typer.echo(f"Now: feddg data inspect --data {name} --root {root}")


@app.command("inspect", cls=ExperimentCommand)
@takes("data", "hold_out", "clients", "seed")
def inspect_data(
    said: dict[str, Any],
    as_json: JsonOption = False,
    croissant: Annotated[
        Path | None,
        typer.Option(help="also write metadata as Croissant (.json), and a table beside it (.csv)"),
    ] = None,
    quiet: QuietOption = False,
) -> None:
    """Count images per domain and class, find bad files, show how clients would look."""
    from feddg.cli.progress import working
    from feddg.experiment import Experiment
    from feddg.runs.inspection import inspect_experiment, print_inspection
    from feddg.settings import merge

    experiment = Experiment(**merge({"model": {"weights": None}}, said))
    with working(quiet) as progress:
        found = inspect_experiment(experiment, progress)
    if as_json:
        print_json(found)
    else:
        print_inspection(found)
    if croissant is not None:
        from feddg.data.croissant import write_croissant
        from feddg.data.data_set import DATA_SETS, load_images_of

        definition = DATA_SETS.find(experiment.data.source)
        files = write_croissant(load_images_of(experiment.data), definition, croissant)
        typer.echo(f"written: {files[0]}, {files[1]}", err=as_json)
