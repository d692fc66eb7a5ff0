"""The sections of a run's page about a decision and about subgroups."""

from collections.abc import Sequence

from feddg.evaluation.intervals import ShareInterval
from feddg.evaluation.subgroups import worst
from feddg.records import DecisionRow, DecisionTable, Details, Ends, SubgroupRow
from feddg.report.blocks import Block, Fold, Prose, Section, Table, column, table_of, text_column
from feddg.report.text import interval_words, split_heading
from feddg.text import counted, percent, percent_sign, readable

DECISION_CAPTION = (
    "In percent, with 95 % intervals. AP: average precision. The predictive values are for the "
    "prevalence beside them: the positive one says how many of the images called so are so."
)


def decision_section(details: Details) -> Section | None:
    """Returns what a run's decision gives by domain; None without one."""
    table = details.decision
    if table is None:
        return None
    return Section("Decision", [Prose(decision_sentence(table)), *_decision_tables(table)])


def decision_sentence(table: DecisionTable) -> str:
    """Returns what is decided, and by which threshold."""
    what = f"Is it {readable(table.of)}, or not?"
    if table.threshold is None:
        return (
            f"{what} In-domain validation has no image of one of the two, so that no threshold can "
            "be chosen."
        )
    return (
        f"{what} An image counts as {readable(table.of)} from a probability of "
        f"{table.threshold:.3g} on. This threshold was chosen on in-domain validation, to reach "
        f"{table.target} {percent_sign(table.reached)} there; the unseen domain had no say in it."
    )


def _decision_tables(table: DecisionTable) -> list[Block]:
    columns = [
        text_column("Domain", lambda row: readable(row.domain)),
        text_column("Images", lambda row: _counts(row)),
        column("AUROC", lambda row: ends_words(row.auroc)),
        column("AP", lambda row: ends_words(row.average_precision)),
        column("Sensitivity", lambda row: ends_words(row.sensitivity)),
        column("Specificity", lambda row: ends_words(row.specificity)),
        column("Prevalence", lambda row: percent(row.prevalence)),
        column("Positive predictive value", lambda row: ends_words(row.ppv)),
        column("Negative predictive value", lambda row: ends_words(row.npv)),
    ]
    split = text_column("Split", lambda row: split_heading(row.split))
    points = [
        column("Mean probability", lambda point: percent(point[0])),
        column("Share that is so", lambda point: ends_words(point[1:4])),
        column("Images", lambda point: str(point[4])),
    ]
    curves: list[Block] = [
        table_of(row.reliability, points, f"{split_heading(row.split)}, {readable(row.domain)}")
        for row in table.rows
    ]
    fold = "Reliability: how often an image with such a probability is so"
    rows: Table = table_of(table.rows, [split, *columns], DECISION_CAPTION, grouped=True)
    return [rows, Fold(fold, curves)]


def _counts(row: DecisionRow | SubgroupRow) -> str:
    groups = "" if row.groups is None else f" in {counted(row.groups, 'group')}"
    of = f", {row.positives:,} are so" if isinstance(row, DecisionRow) else ""
    return f"{row.images:,}{groups}{of}"


def ends_words(ends: Sequence[float] | Ends | None) -> str | None:
    """Returns a share with its interval in percent; None if there is none."""
    if ends is None:
        return None
    interval = ShareInterval(*ends)
    return f"{percent(interval.share)} ({interval_words(interval)})"


def subgroups_section(details: Details) -> Section | None:
    """Returns accuracy by subgroup, with the worst one named; None without subgroups."""
    rows = details.subgroups
    if not rows:
        return None
    columns = [
        text_column("Split", lambda row: split_heading(row.split)),
        text_column("Subgroup", lambda row: f"{readable(row.column)}: {row.value}"),
        text_column("Images", _counts),
        column("Accuracy", lambda row: ends_words(row.accuracy)),
        column("To all others", lambda row: _points(row.difference)),
        column("p (Holm)", lambda row: None if row.p is None else f"{row.p:.2g}"),
    ]
    return Section(
        "Subgroups",
        [
            *(Prose(sentence) for sentence in worst_sentences(rows)),
            table_of(rows, columns, "Accuracy in percent, with 95 % intervals.", grouped=True),
        ],
    )


def _points(difference: float | None) -> str | None:
    return None if difference is None else f"{100 * difference:+.1f}"


def worst_sentences(rows: Sequence[SubgroupRow]) -> list[str]:
    """Returns, for each split, which subgroup is shown to be worse than the others, if any."""
    found = []
    for split in dict.fromkeys(row.split for row in rows):
        own = [row for row in rows if row.split == split]
        least = worst(own)
        if least is None:
            text = "no subgroup is shown to be worse than the others."
        else:
            text = (
                f"{readable(least.column)} {least.value} is worst, "
                f"{percent_sign(least.accuracy[0])}: {_points(least.difference)} points to all "
                f"others, more than chance among {counted(len(own), 'subgroup')}."
            )
        found.append(f"{split_heading(split)}: {text}")
    return found
