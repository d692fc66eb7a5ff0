"""A report's tables in the terminal: what is printed of a run or a comparison that has ended."""

from collections.abc import Sequence

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from feddg.comparison.compare import Comparison
from feddg.prediction.travel import Travel
from feddg.records import Details
from feddg.report import blocks
from feddg.report.details import decision_section, subgroups_section
from feddg.report.predictions_page import sites_table
from feddg.report.run_page import final_table
from feddg.report.tables import about_results, lead_of, main_tables
from feddg.runs.diagnostics import about_result
from feddg.runs.inspection import print_diagnostic
from feddg.runs.reading import Run
from feddg.text import counted, print_line

MOST_NOTES = 3
"""Most notes printed below a comparison's result; its page has all."""


def print_table(console: Console, table: blocks.Table) -> None:
    """Prints a report's table; columns that do not fit the width follow beside the first again."""
    wide = console.options.update(max_width=1 << 16)
    parts = [[0]]
    for place in range(1, len(table.columns)):
        measured = Measurement.get(console, wide, as_rich(table, [*parts[-1], place]))
        if measured.maximum > console.width and len(parts[-1]) > 1:
            parts.append([0])
        parts[-1].append(place)
    for places in parts:
        console.print(as_rich(table, places))
    if table.caption:
        console.print(table.caption, markup=False, highlight=False)


def as_rich(table: blocks.Table, places: Sequence[int]) -> Table:
    """Returns some columns of a report's table for the terminal."""
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in (table.columns[place] for place in places):
        heading = f"{column.heading}\n{column.note}" if column.note else column.heading
        side: JustifyMethod = "right" if column.numeric else "left"
        shown.add_column(escape(heading), justify=side, overflow="fold")
    for row in table.rows:
        texts = [(escape(row[place].text), row[place].strong) for place in places]
        shown.add_row(*(f"[bold]{text}[/]" if strong else text for text, strong in texts))
    return shown


def print_comparison(done: Comparison) -> None:
    """Prints how a comparison came out, and where its results are."""
    console = Console()
    results = done.results.at_largest
    for table in main_tables(done.results, brief=True):
        print_table(console, table)
    if results.rows:
        print_line(console, lead_of(done.results))
    known = about_results(done.results)
    for diagnostic in known[:MOST_NOTES]:
        print_diagnostic(console, diagnostic)
    if (further := len(known) - MOST_NOTES) > 0:
        print_line(console, f"{counted(further, 'more note')} in the report")
    print_line(console, f"folder: {done.folder}")
    print_line(console, f"report: {done.report.resolve()}")


def print_results(done: Run) -> None:
    """Prints the accuracies of a finished run, and where its files are."""
    if done.was_complete:
        typer.echo(f"{done.folder} is complete; nothing is run again", err=True)
    console = Console()
    if done.table:
        typer.echo(f"accuracy in percent, {done.default_rule.title.lower()}")
        print_table(console, final_table(done, brief=True))
    else:
        typer.echo("no accuracy: every image trained, and none was kept aside")
    for diagnostic in about_result(done):
        print_diagnostic(console, diagnostic)
    typer.echo(f"run folder: {done.folder}")
    typer.echo(f"report: {done.report.resolve()}")


def print_tables(*tables: blocks.Table) -> None:
    """Prints tables one after the other."""
    for table in tables:
        print_table(Console(), table)


def print_details(found: Details) -> None:
    """Prints a decision and the accuracy by subgroup."""
    console = Console()
    for section in filter(None, (decision_section(found), subgroups_section(found))):
        for block in section.blocks:
            if isinstance(block, blocks.Table):
                print_table(console, block)
            elif isinstance(block, blocks.Prose):
                print_line(console, block.text)


def print_travel(found: Travel) -> None:
    """Prints the expected accuracy of a model at a new site, and its basis."""
    console = Console()
    if found.expected is not None:
        if found.calibration.sites:
            print_table(console, sites_table(found))
        print_line(console, found.expectation)
    for diagnostic in found.diagnostics:
        print_line(console, str(diagnostic))
