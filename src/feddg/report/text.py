"""The words of pages for methods, metrics, splits and warnings; their sentences and tables."""

import math
import os
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final

from jinja2 import Environment, StrictUndefined

from feddg.evaluation.metrics import METRICS, Metric
from feddg.methods.base import title_of
from feddg.records import ID_TEST, ID_VAL, TEST, VAL, DecisionRow, Ends, EstimateRow, SubgroupRow
from feddg.report.blocks import Cell, Column, Table
from feddg.runs.intervals import ShareInterval
from feddg.text import (
    MISSING,
    counted,
    duration,
    listed,
    number,
    percent,
    percent_sign,
    readable,
    shortened,
    size,
)

AGGREGATE_WORDS: Final = {
    "domain_mean": "mean of domains",
    "pooled": "all images pooled",
    "worst_domain": "worst domain",
}
SPLIT_WORDS: Final = {
    TEST: "held-out test",
    VAL: "held-out validation",
    ID_VAL: "in-domain validation",
    ID_TEST: "in-domain test",
}
MOST_NAMED: Final = 8
"""Most names that a field of a table lists; more can be unfolded."""
_STRONG, _CHOSE, _ITEM = "\ue000", "\ue001", "\ue002"
_INNER: Final = "\ue003\ue004\ue005\ue006\ue007"
"""In place of the signs in a value that would part fields; before it the marks of a field."""
_HIDDEN: Final = str.maketrans(dict(zip("|[]:\n", _INNER)))
_SHOWN: Final = str.maketrans(dict(zip(_INNER, "|[]:\n")) | dict.fromkeys(_STRONG + _CHOSE))


def sentence(macro: str, **values: Any) -> str:
    """Returns a text of ``templates/sentences.j2``.

    Args:
        macro: its name there.
        values: what it is about.
    """
    return str(getattr(_macros("sentences.j2"), macro)(**values)).strip(" ")


def table_from(macro: str, **values: Any) -> Table:
    """Returns a table of ``templates/tables.j2``, which says how a table is written.

    Args:
        macro: its name there.
        values: what it is about.
    """
    text = str(getattr(_macros("tables.j2", finalize=_hidden), macro)(**values))
    lines, _, caption = text.strip("\n").partition("\n\n")
    (heads, *rows) = ([part.strip(" ") for part in line.split("|")] for line in lines.split("\n"))
    headings = [re.fullmatch(r"(.*?)(?: *\[(.*)\])?(:*)", head) for head in heads]
    parts = [[part.translate(_SHOWN) for part in found.groups("")] for found in headings if found]
    return Table(
        [Column(heading, note, numeric=not kind) for heading, note, kind in parts],
        [[_cell(field) for field in row] for row in rows],
        re.sub(" +", " ", caption).strip(" ").translate(_SHOWN),
        grouped=parts[0][2] == "::",
    )


def _cell(field: str) -> Cell:
    text, *items = (part.translate(_SHOWN) for part in field.split(_ITEM))
    return Cell(text, _STRONG in field, _CHOSE in field, tuple(items))


def _hidden(value: Any) -> str:
    """Returns a value as text in which nothing parts fields; numbers as on all pages."""
    text = number(value) if value is None or isinstance(value, int | float) else str(value)
    return text.translate(_HIDDEN)


@cache
def _macros(name: str, **options: Any) -> Any:
    # Pages escape all text.
    options |= {"undefined": StrictUndefined, "autoescape": False, "trim_blocks": True}
    environment = Environment(**options)
    shown: list[Any] = [capital, chose, counted, digits, duration, ends_words, folded]
    shown += [images_words, interval_words, listed, metric_title, number, percent, percent_sign]
    shown += [points, readable, shortened, size, spelled, split_heading, strong, within]
    environment.filters |= {filter.__name__: filter for filter in shown}
    environment.filters["file_name"] = os.path.basename
    source = files("feddg.report").joinpath("templates", name).read_text("utf-8")
    return environment.from_string(re.sub(r"\n +", " ", source)).module


def strong(text: str, when: bool = True) -> str:
    """Returns a field of a table, emphasised if ``when``."""
    return _STRONG + text if when else text


def chose(text: str, when: bool = True) -> str:
    """Returns a field of a table, marked as what decided which round counts if ``when``."""
    return _CHOSE + text if when else text


def folded(names: Sequence[str]) -> str:
    """Returns names as a field of a table; of many the first, and all of them to be unfolded."""
    if len(names) <= MOST_NAMED:
        return ", ".join(names)
    return _ITEM.join([f"{names[0]} and {len(names) - 1} more", *names])


def digits(value: float | None, count: int = 2) -> str:
    """Returns a number with so many decimals."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:.{count}f}"


def within(mean: float, low: float, high: float, count: int = 2) -> str:
    """Returns a mean with so many decimals, and its interval in brackets if it has one."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return digits(mean, count)
    return f"{digits(mean, count)} [{digits(low, count)}, {digits(high, count)}]"


def points(difference: float | None) -> str:
    """Returns a difference of accuracies as ``+1.3`` points."""
    if difference is None or not math.isfinite(difference):
        return MISSING
    return f"{100 * difference:+.1f}"


def ends_words(ends: Sequence[float] | Ends | None) -> str | None:
    """Returns a share with its interval in percent; None if there is none."""
    if ends is None:
        return None
    share, low, high = ends
    return f"{percent(share)} ({percent(low)} to {percent(high)})"


def images_words(row: DecisionRow | SubgroupRow) -> str:
    """Returns how many images a row counts, and of how many groups if known."""
    groups = "" if row.groups is None else f" in {counted(row.groups, 'group')}"
    return f"{row.images:,}{groups}"


def capital(text: str) -> str:
    """Returns a text that begins with a capital letter; the rest is left alone."""
    return text[:1].upper() + text[1:]


def spelled(method: str) -> str:
    """Returns a method's label for text: its title and distinguishing settings."""
    name, comma, settings = method.partition(",")
    return title_of(name) + comma + settings


def metric_title(name: str) -> str:
    """Returns a metric's title; its own name without one."""
    known: Metric | None = METRICS.get(name)
    return known.title if known and known.title else readable(name)


def split_heading(split: str) -> str:
    """Returns the heading of a split, such as ``Held-out test``."""
    return SPLIT_WORDS[split].capitalize()


def interval_words(interval: ShareInterval | EstimateRow | None) -> str:
    """Returns ``32.6 to 41.5``, in percent; empty without an interval."""
    return f"{percent(interval.low)} to {percent(interval.high)}" if interval else ""
