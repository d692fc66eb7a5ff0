"""The words that pages use for methods, metrics, splits and warnings."""

from collections.abc import Sequence
from typing import Final

from feddg.diagnostics import Diagnostic
from feddg.evaluation.intervals import ShareInterval
from feddg.evaluation.metrics import METRICS, Metric
from feddg.methods.base import title_of
from feddg.records import ID_TEST, ID_VAL, TEST, VAL
from feddg.text import percent, readable

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


def spelled(method: str) -> str:
    """Returns a method's label for text: its title and distinguishing settings."""
    name, comma, settings = method.partition(",")
    return title_of(name) + comma + settings


def one_model(name: str, why: str) -> str:
    """Returns the sentence at the top of a page that says which model its numbers belong to."""
    return f"All numbers here are of {name}: {why}. Figures for any other model are labelled."


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
    return "; ".join(one.short for one in found if one.severity == "warning")
