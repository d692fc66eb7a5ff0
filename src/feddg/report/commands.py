"""The command that writes pages: ``feddg report``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from feddg.options import OptionsCommand, options_of

app = typer.Typer()
NEEDS = ()
FUNCTIONS = {
    "notebook": "html_of text_of",
    "page": "ensure_report write_report write_comparison",
    "predictions_page": "write_predictions_page write_travel_page",
    "terminal": "print_results print_comparison",
}


@app.command(cls=OptionsCommand, rich_help_panel="Start")
@options_of("feddg.api:report", "out tables")
def report(
    options: dict[str, Any],
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="a run folder, several, or one of `feddg compare`; or its --results file alone, "
            "for tables in Markdown"
        ),
    ],
) -> None:
    """Write the page of one run, or of several together."""
    from feddg import api

    typer.echo(api.report(folders, **options))
