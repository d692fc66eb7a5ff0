"""What ``feddg run --dry-run`` shows: every setting and where it comes from, and what it takes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from feddg.comparison.estimate import Forecast, forecast
from feddg.data.partition import in_words
from feddg.experiment import DEFAULT, Origin, expand, explain, load_experiment, read_fields
from feddg.runs.execute import is_complete
from feddg.runs.inspection import holdings_table, skew_between


def show_experiment(said: dict[str, Any], file: Path | None, out: Path) -> None:
    """Prints an experiment completely, and what it would take; runs nothing.

    Args:
        said: the fields that flags set.
        file: the experiment file below them.
        out: the run folder's parent.

    Raises:
        FeddgError: it could not be run.
    """
    console = Console()
    experiment = load_experiment(file, said)
    found = explain(said, read_fields(file, expand(said)), str(file))
    console.print(_settings_table(found))
    folder = out / experiment.label
    state = "complete" if is_complete(folder) else "begun" if folder.is_dir() else "new"
    print_line(console, f"run folder: {folder} ({state})")
    _print_forecast(console, forecast(experiment))


def print_line(console: Console, text: str) -> None:
    """Prints a line as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _settings_table(found: Mapping[str, Origin]) -> Table:
    table = Table("setting", "value", "where from", box=None, pad_edge=False)
    for path, setting in found.items():
        style = "dim" if setting.source == DEFAULT else None
        table.add_row(path, escape(_text(setting.value)), escape(setting.source), style=style)
    return table


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None or value == {} else str(value)


def _print_forecast(console: Console, found: Forecast) -> None:
    roles = ", ".join(f"{role} {count}" for role, count in found.splits.items() if count)
    print_line(console, f"images: {roles}")
    console.print(holdings_table(found.clients))
    for line in in_words(skew_between(found.clients)):
        print_line(console, line)
    for promise in found.promises:
        print_line(console, promise)
    print_line(
        console,
        f"memory: {found.weights:,} weights, {decimal(found.weight_bytes)} with gradients and "
        f"optimizer; {decimal(found.pixel_bytes)} of decoded images in the cache",
    )
