"""``feddg data``: get images and look at them."""

import os
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from feddg.options import (
    ExperimentCommand,
    JsonOption,
    OptionsCommand,
    QuietOption,
    options_of,
    print_json,
    takes,
)

app = typer.Typer(
    name="data",
    help="Download data sets, and check images before training.",
    no_args_is_help=True,
    suggest_commands=False,
    rich_help_panel="Look around",
)


@app.command("get", cls=OptionsCommand)
@options_of("feddg.data.download:get_data_set", "keep source=from revision")
def get_data(
    options: dict[str, Any],
    name: Annotated[str, typer.Argument(help="a published data set; docs/data_sets.md lists them")],
    root: Annotated[Path | None, typer.Option(help="folder to download it to")] = None,
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", help="you have read its licence and accept it")
    ] = False,
    quiet: QuietOption = False,
) -> None:
    """Download a published data set, once you have accepted its licence.

    An interrupted download continues.
    """
    from feddg.data.data_set import DATA_SETS
    from feddg.data.download import about, get_data_set
    from feddg.progress import working

    definition = DATA_SETS.find(name)
    typer.echo("\n".join(about(definition)))
    publication = definition.publication
    assert publication is not None
    if not (publication.files or publication.mirror):
        typer.echo("It has to be fetched by hand.")
        raise typer.Exit(1)
    if root is None or not accept_licence:
        typer.echo(
            "Nothing was downloaded. Say where to with --root FOLDER and, if you accept the "
            "licence, --accept-licence.",
            err=True,
        )
        raise typer.Exit(1)
    with working(quiet) as progress:
        received = get_data_set(definition, Path(os.path.expanduser(root)), progress, **options)
    for file, digest in received.items():
        typer.echo(f"sha256 {digest}  {file}")
    typer.echo(f"Now: feddg data inspect --data {name} --root {shlex.quote(str(root))}")


@app.command("inspect", cls=ExperimentCommand)
@takes("data hold_out clients seed")
@options_of("feddg.runs.inspection:inspect_data", "croissant")
def inspect_data(
    options: dict[str, Any],
    overrides: dict[str, Any],
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Count images by domain and class, and find unusable files.

    Also shows what each client would hold. The exit status is 1 if no run could start.
    """
    from feddg.progress import working
    from feddg.runs import inspection

    with working(quiet) as progress:
        survey = inspection.inspect_data(progress=progress, **options, **overrides)
    if as_json:
        print_json(survey)
    else:
        inspection.print_inspection(survey)
    if (croissant := options.get("croissant")) is not None:
        typer.echo(f"written: {croissant}, {croissant.with_suffix('.csv')}", err=as_json)
    if any(diagnostic["severity"] == "error" for diagnostic in survey["diagnostics"]):
        raise typer.Exit(1)
