"""What was tried for each method before a comparison, as a file beside its tables."""

from typing import Final

from feddg.row_files import JsonFile, Row
from feddg.rows import Number

TUNING: Final = "tuning.json"


class TriedRow(Row):
    """A combination of values that was tried for a method.

    Attributes:
        method: the method's label.
        values: the values by field.
        accuracy: mean in-domain validation accuracy over its trials, 0 to 1; None where a trial
            failed.
        trials: how many there are.
        picked: whether the table is run with it.
    """

    method: str
    values: dict[str, str]
    accuracy: Number | None = None
    trials: int
    picked: bool


class TuningFile(JsonFile):
    """What was tried before a comparison, and what was picked: ``tuning.json``.

    Attributes:
        rule: which round of a trial counts.
        rounds: rounds of a trial.
        seeds: of the trials.
        tried: all combinations.
    """

    rule: str
    rounds: int | None = None
    seeds: tuple[int, ...]
    tried: tuple[TriedRow, ...]
