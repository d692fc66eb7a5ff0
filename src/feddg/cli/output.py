"""Terminal output before a run: its plan, and what prevents it."""

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from feddg.comparison.compare import Comparison, why_hopeless
from feddg.comparison.trials import TRIALS
from feddg.experiment import DEFAULT
from feddg.runs.beforehand import Preview
from feddg.runs.inspection import print_clients, print_diagnostic
from feddg.text import print_line, value_text


def print_missing(done: Comparison) -> None:
    """Prints what prevents a comparison that was not run, and what its next step would be."""
    console = Console(stderr=True)
    if (hopeless := why_hopeless(done)) is not None:
        print_line(console, f"as things are, no run could start: {hopeless}")
    if done.missing and done.folder.name == TRIALS:
        print_line(console, "the table's runs follow, with the values that are picked")


# What ``feddg run --dry-run`` shows: every setting and where it comes from, and what it takes.


def show_preview(found: Preview) -> None:
    """Prints a complete experiment, and its expected cost."""
    console, figures = Console(), found.forecast
    table = Table("setting", "value", "where from", box=None, pad_edge=False)
    for path, setting in found.settings.items():
        style = "dim" if setting.source == DEFAULT else None
        table.add_row(path, escape(value_text(setting.value)), escape(setting.source), style=style)
    console.print(table)
    print_line(console, f"run folder: {found.folder} ({found.state})")
    roles = ", ".join(f"{role} {count}" for role, count in figures.splits.items() if count)
    print_line(console, f"images: {roles}")
    print_clients(console, figures.clients)
    for diagnostic in figures.diagnostics:
        print_diagnostic(console, diagnostic)
    print_line(
        console,
        f"memory: {figures.weights:,} weights, {decimal(figures.weight_bytes)} with gradients and "
        f"optimizer; {decimal(figures.pixel_bytes)} of decoded images in the cache",
    )
