"""The words that pages use for methods, metrics, splits and warnings, and their sentences."""

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final

from jinja2 import Environment, StrictUndefined

from feddg.diagnostics import Diagnostic
from feddg.evaluation.intervals import ShareInterval
from feddg.evaluation.metrics import METRICS, Metric
from feddg.methods.base import title_of
from feddg.records import ID_TEST, ID_VAL, TEST, VAL
from feddg.text import counted, listed, number, percent, percent_sign, readable, size

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


def sentence(macro: str, **values: Any) -> str:
    """Returns a text of ``templates/sentences.j2``.

    Args:
        macro: its name there.
        values: what it is about.
    """
    return str(getattr(_sentences(), macro)(**values)).strip(" ")


@cache
def _sentences() -> Any:
    environment = Environment(undefined=StrictUndefined, autoescape=False)  # pages escape all text
    shown = (capital, counted, listed, number, percent_sign, readable, size)
    environment.filters |= {filter.__name__: filter for filter in shown}
    source = files("feddg.report").joinpath("templates", "sentences.j2").read_text("utf-8")
    return environment.from_string(re.sub(r"\n +", " ", source)).module


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


def interval_words(interval: ShareInterval | None) -> str:
    """Returns ``32.6 to 41.5``, in percent; empty without an interval."""
    return f"{percent(interval.low)} to {percent(interval.high)}" if interval else ""


def warning_words(found: Sequence[Diagnostic]) -> str:
    """Returns the warnings in short, for a heading or a table; empty without warnings."""
    return "; ".join(diagnostic.short for diagnostic in found if diagnostic.severity == "warning")
