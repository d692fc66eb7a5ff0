"""What pages of kept results say against their numbers: marks beside them, and sentences."""

from collections.abc import Iterable

from feddg.comparison.results import RISING, KeptTable, constant_name
from feddg.comparison.statistics import Key
from feddg.report.wording import counted
from feddg.runs.reading import FINAL

MARK = " †"
"""Stands behind a number, and behind a method, of which a model is no better than a constant."""
MEANING = (
    f"{MARK.strip()} In at least one run the model is no better than one that always names the "
    "same class: by the share of images, or by the mean over classes, the difference is no more "
    "than chance explains. Such a number says nothing about a method."
)


def mark(places: Iterable[Key], columns: Iterable[str]) -> str:
    """Returns the mark if one of the places lies in one of the columns; nothing otherwise."""
    among = set(columns)
    return MARK if any(column in among for column, _ in places) else ""


def with_meaning(parts: Iterable[str]) -> list[str]:
    """Returns parts of a page, and behind the first what the marks mean where there are some."""
    first, *others = parts
    marked = any(MARK in part for part in others)
    return [first, MEANING, *others] if marked else [first, *others]


def sentences(table: KeptTable) -> list[str]:
    """Returns what is to be known of all runs: how many were still rising, or do not tell."""
    said = []
    told = [r.numbers[RISING] for r in table.results if RISING in r.numbers]
    rising = sum(value > 0 for value in told)
    if rising:
        verb = "was" if rising == 1 else "were"
        said.append(
            f"{counted(rising, 'run')} of {len(told)} {verb} still rising at the last round: "
            "stopped before it was learned what could be."
        )
    silent = sum(constant_name(FINAL) not in r.numbers for r in table.results)
    if silent:
        said.append(
            f"Whether the model is any better than a constant one is not on record for "
            f"{counted(silent, 'run')} (an earlier version kept them)."
        )
    return said
