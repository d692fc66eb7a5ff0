"""The sections of a run's page about a decision and about subgroups."""

from feddg.evaluation.subgroups import worst
from feddg.records import Details
from feddg.report.blocks import Fold, Prose, Section
from feddg.report.text import sentence, split_heading, table_from
from feddg.settings import grouped


def decision_section(details: Details) -> Section | None:
    """Returns what a run's decision gives by domain; None without one."""
    table = details.decision
    if table is None:
        return None
    fold = "Reliability: how many images with such a probability are positive"
    curves = [table_from("reliability", row=row) for row in table.rows]
    about, rows = Prose(sentence("decision", table=table)), table_from("decision", rows=table.rows)
    return Section("Decision", [about, rows, Fold(fold, curves)])


def subgroups_section(details: Details) -> Section | None:
    """Returns accuracy by subgroup, with the worst one named; None without subgroups."""
    rows = details.subgroups
    if not rows:
        return None
    by_split = grouped((split_heading(row.split), row) for row in rows)
    lines = (
        sentence("worst_subgroup", split=split, row=worst(subgroups), subgroups=len(subgroups))
        for split, subgroups in by_split.items()
    )
    return Section("Subgroups", [*map(Prose, lines), table_from("subgroups", rows=rows)])
