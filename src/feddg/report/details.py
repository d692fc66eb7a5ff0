"""The sections of a run's page about a decision and about subgroups."""

from feddg.records import Details
from feddg.report.blocks import Block, Fold, Prose, Section
from feddg.report.text import sentence, split_heading, table_from
from feddg.runs.details import worst
from feddg.runs.reading import Run
from feddg.runs.table import SELECTION_RULES, is_same_model
from feddg.settings import grouped


def of_model(details: Details, run: Run | None) -> list[Block]:
    """Returns of which model a run's details are; nothing if of the model of its page.

    Args:
        details: of the run.
        run: the run, for its page; None elsewhere.
    """
    if run is not None and is_same_model(details, run.default_rule.name, run.result.round):
        return []
    title = details.which and SELECTION_RULES.find(details.which).title.lower()
    return [Prose(sentence("of_model", title=title, round=details.round, page=run is not None))]


def decision_section(details: Details, run: Run | None = None) -> Section | None:
    """Returns what a run's decision gives by domain; None without one. See :func:`of_model`."""
    table = details.decision
    if table is None:
        return None
    fold = "Reliability: how many images with such a probability are positive"
    curves = [table_from("reliability", row=row) for row in table.rows]
    about, rows = Prose(sentence("decision", table=table)), table_from("decision", rows=table.rows)
    return Section("Decision", [*of_model(details, run), about, rows, Fold(fold, curves)])


def subgroups_section(details: Details, run: Run | None = None) -> Section | None:
    """Returns accuracy by subgroup, with the worst one named; None without subgroups."""
    rows = details.subgroups
    if not rows:
        return None
    by_split = grouped((split_heading(row.split), row) for row in rows)
    lines = (
        sentence("worst_subgroup", split=split, row=worst(subgroups), subgroups=len(subgroups))
        for split, subgroups in by_split.items()
    )
    about = [*of_model(details, run), *map(Prose, lines)]
    return Section("Subgroups", [*about, table_from("subgroups", rows=rows)])
