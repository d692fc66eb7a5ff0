"""What was tried for each method before the table was run, and what was picked."""

from collections.abc import Sequence

from feddg.comparison.results import TriedRow, TuningFile
from feddg.report.blocks import Cell, Column, Prose, Section, Table
from feddg.report.kept_findings import MARK, MEANING
from feddg.report.metric_words import AGGREGATE_WORDS, metric_title
from feddg.report.wording import counted, percent, readable, spelled


def tuning_section(tuning: TuningFile | None) -> Section | None:
    """The section, or None where nothing was tried."""
    if tuning is None or not tuning.tried:
        return None
    said = [what_was_tuned(tuning), remarks_of(tuning)]
    if any(row.constant for row in tuning.tried):
        said.append(MEANING)
    prose = [Prose(text) for text in said if text]
    return Section("What was tuned", [*prose, tuning_table(tuning)])


def remarks_of(tuning: TuningFile) -> str:
    """What to know about the choices, in sentences; empty where there is nothing."""
    return " ".join(f"{remark[0].upper()}{remark[1:]}." for remark in tuning.remarks())


def what_was_tuned(tuning: TuningFile) -> str:
    """How the values were picked, in sentences."""
    rounds = f", {counted(tuning.rounds, 'round')} each" if tuning.rounds else ""
    return (
        "Before these runs, each of these combinations was tried, without the domains that are "
        f"held out ({counted(len(tuning.seeds), 'seed')}{rounds}). For each method and each "
        "hold-out, by its own trials, that was picked which did best on in-domain validation: "
        f"{_measured(tuning)}, {tuning.rule.lower()}, mean over trials."
    )


def _measured(tuning: TuningFile) -> str:
    """What picked, in words; all of it where methods differ."""
    found = {
        f"{metric_title(row.metric)} ({AGGREGATE_WORDS.get(row.over, row.over)})"
        for row in tuning.tried
    }
    return " or ".join(sorted(found))


def tuning_table(tuning: TuningFile) -> Table:
    """Every combination that was tried, and what it reached."""
    columns = [
        Column("Method", numeric=False),
        Column("Held out", numeric=False),
        Column("Values", numeric=False),
        Column("In-domain validation", note="%"),
        Column("Trials"),
        Column("", numeric=False),
    ]
    return Table(columns, _rows(tuning.tried))


def _rows(tried: Sequence[TriedRow]) -> list[list[Cell]]:
    return [
        [
            Cell(spelled(row.method), strong=row.picked),
            Cell(readable(row.held_out)),
            Cell(", ".join(f"{name} {value}" for name, value in row.values.items())),
            Cell(_score(row)),
            Cell(str(row.trials)),
            Cell("picked" if row.picked else "", strong=row.picked),
        ]
        for row in tried
    ]


def _score(row: TriedRow) -> str:
    if row.score is None:
        return "no value"
    return percent(row.score) + (MARK if row.constant else "")
