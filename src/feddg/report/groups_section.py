"""The groups that a method put clients into before training."""

from feddg.records import SetupRow
from feddg.report.blocks import Cell, Column, Table
from feddg.report.wording import number, readable
from feddg.runs.reading import RunRecord

MOST_NAMED = 8


def groups_table(run: RunRecord, setup: SetupRow) -> Table | None:
    """How many clients each group has, and which; None where the method grouped nobody."""
    rows = [
        [
            Cell(f"By {readable(what).lower()}"),
            Cell(f"Group {place}"),
            Cell(number(len(members))),
            _members([run.client_name(id) for id in members]),
        ]
        for what, groups in setup.groups.items()
        for place, members in enumerate(groups, start=1)
    ]
    columns = [Column("Grouped", numeric=False), Column("Group", numeric=False)]
    columns += [Column("Clients"), Column("Which", numeric=False)]
    return Table(columns, rows, grouped=True) if rows else None


def _members(names: list[str]) -> Cell:
    if len(names) <= MOST_NAMED:
        return Cell(", ".join(names))
    return Cell(f"{names[0]} and {len(names) - 1} more", items=tuple(names))
