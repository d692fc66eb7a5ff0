"""``feddg data``: get images and look at them; ``feddg cache``: what is kept between runs."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from feddg import api
from feddg.cli.common import (
    ExperimentCommand,
    JsonOption,
    OptionsCommand,
    QuietOption,
    options_of,
    print_json,
    takes,
)

data_app = typer.Typer(
    help="Get images, and look at them before training.",
    no_args_is_help=True,
    suggest_commands=False,
)


@data_app.command("get", cls=OptionsCommand)
@options_of("feddg.data.download:get_data_set", "keep source=from revision")
def get_data(
    options: dict[str, Any],
    name: Annotated[str, typer.Argument(help="a published data set; docs/data_sets.md")],
    root: Annotated[Path, typer.Option(help="the folder it goes to")],
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", help="you have read its licence and accept it")
    ] = False,
    quiet: QuietOption = False,
) -> None:
    """Download a published data set, once its licence is accepted; it goes on where it was cut."""
    from feddg.cli.progress import working

    definition = api.DATA_SETS.find(name)
    typer.echo("\n".join(api.about(definition)))
    publication = definition.publication
    assert publication is not None
    if not (publication.files or publication.mirror):
        typer.echo("It has to be fetched by hand:")
        for number, step in enumerate(publication.steps, start=1):
            typer.echo(f"  {number}. {step}")
        raise typer.Exit(1)
    chosen = [("--revision", options.get("revision")), ("--from", options.get("source"))]
    more = [str(text) for option in chosen if option[1] for text in option]
    words = ["feddg", "data", "get", name, "--root", str(root), *more, "--accept-licence"]
    if not accept_licence:
        typer.echo(
            f"Nothing was downloaded. If you accept its licence: {shlex.join(words)}", err=True
        )
        raise typer.Exit(1)
    with working(quiet) as progress:
        received = api.get_data_set(definition, root.expanduser(), progress, **options)
    for file, found in received.items():
        typer.echo(f"sha256 {found}  {file}")
    typer.echo(f"Now: feddg data inspect --data {name} --root {root}")


@data_app.command("inspect", cls=ExperimentCommand)
@takes("data", "hold_out", "clients", "seed")
@options_of("feddg.api:inspect_data", "croissant")
def inspect_data(
    options: dict[str, Any],
    overrides: dict[str, Any],
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Count images per domain and class, find bad files, show how clients would look."""
    from feddg.cli.progress import working

    with working(quiet) as progress:
        found = api.inspect_data(progress=progress, **options, **overrides)
    if as_json:
        print_json(found)
    else:
        api.print_inspection(found)
    if (croissant := options.get("croissant")) is not None:
        typer.echo(f"written: {croissant}, {croissant.with_suffix('.csv')}", err=as_json)


cache_app = typer.Typer(help="Show, or clear, the cache of decoded images.", suggest_commands=False)


@cache_app.callback(invoke_without_command=True)
def show(context: typer.Context, as_json: JsonOption = False) -> None:
    """Show where decoded images are kept, and how much; `feddg cache clear` removes them."""
    if context.invoked_subcommand is not None:
        return
    folder, found = api.cache_folder(), api.contents(api.cache_folder())
    if as_json:
        kinds = {
            kind: {"entries": held.entries, "bytes": held.size} for kind, held in found.items()
        }
        print_json({"folder": str(folder), "kinds": kinds})
        return
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    table = Table("kind", "entries", "size", "what it is", box=None, pad_edge=False)
    about = {kind: what for kind, (what, _) in api.KINDS.items()}
    about[api.OTHER] = "not feddg's; never removed"
    for kind, held in found.items():
        table.add_row(kind, str(held.entries), decimal(held.size), about[kind])
    typer.echo(f"{folder} (the environment's FEDDG_CACHE says where)")
    Console().print(table)


@cache_app.command("clear")
def clear_cache(
    kind: Annotated[
        list[str] | None,
        typer.Option(help="what to remove, a kind that `feddg cache` shows; all of it by default"),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
) -> None:
    """Remove what is kept; the next runs make again what they need. Do not do so during a run."""
    from rich.filesize import decimal

    if unknown := [one for one in kind or () if one not in api.KINDS]:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(api.KINDS)}")
    chosen, folder = kind or list(api.KINDS), api.cache_folder()
    found = api.contents(folder)
    size = sum(found[name].size for name in chosen)
    what = f"{', '.join(chosen)} in {folder}: {decimal(size)}"
    if not size and not any(found[name].entries for name in chosen):
        typer.echo(f"nothing to remove: {what}")
        return
    if not yes:
        typer.confirm(f"Remove {what}?", abort=True)
    api.clear(folder, chosen)
    typer.echo(f"removed {what}")
