"""``feddg cache``: what is kept between runs, and getting rid of it."""

from typing import Annotated

import click
import typer

from feddg.cli.common import JsonOption, print_json
from feddg.storage import KINDS, OTHER, cache_folder, clear, contents

app = typer.Typer(
    help="Where decoded images are kept, how much, and clearing it.", suggest_commands=False
)


@app.callback(invoke_without_command=True)
def show(context: typer.Context, as_json: JsonOption = False) -> None:
    """Show where decoded images are kept, and how much; `feddg cache clear` removes them."""
    if context.invoked_subcommand is not None:
        return
    found = contents(cache_folder())
    if as_json:
        kinds = {
            kind: {"entries": held.entries, "bytes": held.size} for kind, held in found.items()
        }
        print_json({"folder": str(cache_folder()), "kinds": kinds})
        return
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    table = Table("kind", "entries", "size", "what it is", box=None, pad_edge=False)
    about = KINDS | {OTHER: "not feddg's; never removed"}
    for kind, held in found.items():
        table.add_row(kind, str(held.entries), decimal(held.size), about[kind])
    typer.echo(f"{cache_folder()} (the environment's FEDDG_CACHE says where)")
    Console().print(table)


@app.command("clear")
def clear_cache(
    kind: Annotated[
        list[str] | None,
        typer.Option(
            help="what to remove; all of it by default", click_type=click.Choice(list(KINDS))
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
) -> None:
    """Remove what is kept; the next runs make again what they need. Do not do so during a run."""
    from rich.filesize import decimal

    chosen = kind or list(KINDS)
    found = contents(cache_folder())
    size = sum(found[name].size for name in chosen)
    what = f"{', '.join(chosen)} in {cache_folder()}: {decimal(size)}"
    if not size and not any(found[name].entries for name in chosen):
        typer.echo(f"nothing to remove: {what}")
        return
    if not yes:
        typer.confirm(f"Remove {what}?", abort=True)
    clear(cache_folder(), chosen)
    typer.echo(f"removed {what}")
