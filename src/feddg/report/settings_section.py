"""Experiments and environments as tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from feddg.report.blocks import Cell, Column, Table
from feddg.report.wording import MISSING
from feddg.runs.reading import RunRecord, flatten


def differing_settings(runs: Sequence[RunRecord], labels: Sequence[str]) -> Table | None:
    """The settings in which the runs' experiments differ, or None when they do not."""
    flat = [dict(flatten(run.experiment)) for run in runs]
    keys = dict.fromkeys(key for settings in flat for key in settings if key != "name")
    rows = [
        [Cell(key), *(Cell(settings.get(key, MISSING)) for settings in flat)]
        for key in keys
        if len({settings.get(key) for settings in flat}) > 1
    ]
    columns = [Column("Setting", numeric=False)]
    columns += [Column(label, numeric=False) for label in labels]
    return Table(columns, rows, "Everything else is the same in all runs.") if rows else None


def mapping_table(content: Mapping[str, Any], headings: tuple[str, str]) -> Table:
    """A mapping as two columns; nested names are joined by dots."""
    rows = [[Cell(key), Cell(value)] for key, value in flatten(content)]
    return Table([Column(heading, numeric=False) for heading in headings], rows)
