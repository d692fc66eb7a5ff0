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
@options_of("feddg.report.page:report", "out tables")
def report(
    options: dict[str, Any],
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="one or more run folders, a folder of `feddg compare`, or a file of its --results"
        ),
    ],
) -> None:
    """Write the report of a run, or a comparison of several."""
    from feddg.report import page

    typer.echo(page.report(folders, **options))
