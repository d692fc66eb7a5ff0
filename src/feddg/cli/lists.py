"""The command that lists the methods that experiments can name."""

import typer

from feddg.options import JsonOption, print_json

app = typer.Typer()


@app.command(rich_help_panel="Look around")
def methods(as_json: JsonOption = False) -> None:
    """List the methods, with a line about each."""
    from feddg.methods import base

    if as_json:
        rows = [
            {
                "name": name,
                "title": method.title,
                "aliases": list(method.aliases),
                "summary": method.summary,
                "settings": method.Settings.model_json_schema().get("properties", {}),
            }
            for name, method in base.methods().items()
        ]
        print_json(rows)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "aliases", "method", "in one line", box=None, pad_edge=False)
    for method in base.methods().values():
        aliases = ", ".join(method.aliases)
        table.add_row(f"[bold]{method.name}[/]", aliases, method.title, method.summary)
    Console().print(table)
