"""What was tried for each method before the table was run, and what was picked."""

from collections.abc import Sequence

from feddg.comparing.tuning_file import TriedRow, TuningFile
from feddg.report.blocks import Cell, Column, Prose, Section, Table
from feddg.report.wording import counted, percent, spelled


def tuning_section(tuning: TuningFile | None) -> Section | None:
    """The section, or None where nothing was tried."""
    if tuning is None or not tuning.tried:
        return None
    rounds = f", {counted(tuning.rounds, 'round')} each" if tuning.rounds else ""
    text = (
        "Before these runs, each of these combinations was tried in every column, without the "
        f"domains that the column holds out ({counted(len(tuning.seeds), 'seed')}{rounds}). The "
        f"best mean in-domain validation accuracy ({tuning.rule.lower()}) was picked."
    )
    columns = [
        Column("Method", numeric=False),
        Column("Values", numeric=False),
        Column("In-domain validation", note="%"),
        Column("Trials"),
        Column("", numeric=False),
    ]
    return Section("What was tuned", [Prose(text), Table(columns, _rows(tuning.tried))])


def _rows(tried: Sequence[TriedRow]) -> list[list[Cell]]:
    return [
        [
            Cell(spelled(row.method), strong=row.picked),
            Cell(", ".join(f"{name} {value}" for name, value in row.values.items())),
            Cell("a trial failed" if row.accuracy is None else percent(row.accuracy)),
            Cell(str(row.trials)),
            Cell("picked" if row.picked else "", strong=row.picked),
        ]
        for row in tried
    ]
