"""The sections of a run's page about a decision and about subgroups."""

from collections.abc import Sequence

from feddg.evaluation.subgroups import worst
from feddg.records import DecisionRow, DecisionTable, Details, Ends, SubgroupRow
from feddg.report.blocks import (
    Block,
    Fold,
    MadeColumn,
    Prose,
    Section,
    column,
    table_of,
    text_column,
)
from feddg.report.tables import points
from feddg.report.text import sentence, split_heading
from feddg.settings import grouped
from feddg.text import counted, percent, readable


def decision_section(details: Details) -> Section | None:
    """Returns what a run's decision gives by domain; None without one."""
    table = details.decision
    if table is None:
        return None
    about = Prose(sentence("decision", table=table))
    return Section("Decision", [about, *_decision_tables(table)])


def _decision_tables(table: DecisionTable) -> list[Block]:
    columns: list[MadeColumn[DecisionRow]] = [
        text_column("Domain", lambda row: readable(row.domain)),
        text_column("Images", _counts),
        column("AUROC", lambda row: ends_words(row.auroc)),
        column("AP", lambda row: ends_words(row.average_precision)),
        column("Sensitivity", lambda row: ends_words(row.sensitivity)),
        column("Specificity", lambda row: ends_words(row.specificity)),
        column("Prevalence", lambda row: percent(row.prevalence)),
        column("Positive predictive value", lambda row: ends_words(row.ppv)),
        column("Negative predictive value", lambda row: ends_words(row.npv)),
    ]
    split: MadeColumn[DecisionRow] = text_column("Split", lambda row: split_heading(row.split))
    points: list[MadeColumn[tuple[float, float, float, float, int]]] = [
        column("Mean probability", lambda point: percent(point[0])),
        column("Share of positives", lambda point: ends_words(point[1:4])),
        column("Images", lambda point: str(point[4])),
    ]
    curves: list[Block] = [
        table_of(row.reliability, points, f"{split_heading(row.split)}, {readable(row.domain)}")
        for row in table.rows
    ]
    fold = "Reliability: how many images with such a probability are positive"
    caption = sentence("decision_caption")
    return [table_of(table.rows, [split, *columns], caption, grouped=True), Fold(fold, curves)]


def _counts(row: DecisionRow | SubgroupRow) -> str:
    groups = "" if row.groups is None else f" in {counted(row.groups, 'group')}"
    of = f", {row.positives:,} positive" if isinstance(row, DecisionRow) else ""
    return f"{row.images:,}{groups}{of}"


def ends_words(ends: Sequence[float] | Ends | None) -> str | None:
    """Returns a share with its interval in percent; None if there is none."""
    if ends is None:
        return None
    share, low, high = ends
    return f"{percent(share)} ({percent(low)} to {percent(high)})"


def subgroups_section(details: Details) -> Section | None:
    """Returns accuracy by subgroup, with the worst one named; None without subgroups."""
    rows = details.subgroups
    if not rows:
        return None
    columns: list[MadeColumn[SubgroupRow]] = [
        text_column("Split", lambda row: split_heading(row.split)),
        text_column("Subgroup", lambda row: f"{readable(row.column)}: {row.value}"),
        text_column("Images", _counts),
        column("Accuracy", lambda row: ends_words(row.accuracy)),
        column("Against the others", lambda row: points(row.difference)),
        column("p (Holm)", lambda row: None if row.p is None else f"{row.p:.2g}"),
    ]
    by_split = grouped((split_heading(row.split), row) for row in rows)
    lines = (
        sentence("worst_subgroup", split=split, row=worst(subgroups), subgroups=len(subgroups))
        for split, subgroups in by_split.items()
    )
    table = table_of(rows, columns, "Accuracy in percent, with 95 % intervals.", grouped=True)
    return Section("Subgroups", [*map(Prose, lines), table])
