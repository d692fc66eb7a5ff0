"""What was tried for each method before a comparison, as a file beside its tables."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from pydantic import AliasChoices, Field

from feddg.records import JsonFile, Number, Row

TUNING: Final = "tuning.json"
_TRIALS: Final = "trials.csv"


def tuning_beside(kept: Path) -> Path:
    """Returns the file of what was tried and picked, beside one of kept results."""
    return kept.with_suffix(f".{TUNING}")


def trials_beside(kept: Path) -> Path:
    """Returns the file of the trials' own kept results, beside that of their table."""
    return kept.with_suffix(f".{_TRIALS}")


class TriedRow(Row):
    """A combination of values that was tried for a method.

    Attributes:
        method: the method's label.
        held_out: what the columns hold out that it was tried for.
        values: the values by field.
        metric: what chooses rounds in its trials (``evaluate.select_by``).
        over: how it is taken over domains (``evaluate.select_over``).
        score: the mean of that on in-domain validation over its trials, 0 to 1; None where a trial
            failed or the metric is not defined for its images.
        trials: how many there are.
        constant: in how many of them the model is no better than one that always names the same
            class, on in-domain validation; None where this is not on record.
        picked: whether the table is run with it.
    """

    method: str
    held_out: str = ""
    values: dict[str, str]
    metric: str = "accuracy"
    over: str = "domain_mean"
    score: Number | None = Field(None, validation_alias=AliasChoices("score", "accuracy"))
    trials: int
    constant: int | None = Field(None, ge=0)
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

    def after(self, earlier: "TuningFile | None") -> "TuningFile":
        """Returns this file behind what an earlier one says of other methods and hold-outs.

        A table may be carried out column by column. Choices by another rule, number of rounds or
        other seeds are not this table's, and are left out.
        """
        settings = (self.rule, self.rounds, self.seeds)
        if earlier is None or settings != (earlier.rule, earlier.rounds, earlier.seeds):
            return self
        own = {(row.method, row.held_out) for row in self.tried}
        others = [row for row in earlier.tried if (row.method, row.held_out) not in own]
        return self.model_copy(update={"tried": (*others, *self.tried)})

    def remarks(self) -> list[str]:
        """Returns what to know about the choices: models that learned nothing, ends, and ties."""
        groups: dict[tuple[str, str], list[TriedRow]] = {}
        for row in self.tried:
            groups.setdefault((row.method, row.held_out), []).append(row)
        said = []
        for (method, held_out), rows in groups.items():
            for row in (row for row in rows if row.picked):
                where = f"{method}{f', {held_out} held out' if held_out else ''}"
                if row.constant:
                    said.append(
                        f"{where}: by the picked values, in {row.constant} of {row.trials} trials "
                        "the model is no better than one that always names the same class, so that "
                        "the choice says little; give trials more rounds (tune.rounds), pretrained "
                        "weights, or other values"
                    )
                said += [f"{where}: {edge}" for edge in _edges(row, rows)]
                equal = [other for other in rows if other.score == row.score]
                if len(equal) > 1:
                    said.append(
                        f"{where}: {len(equal)} combinations do equally well; the first counts"
                    )
        return said


def _edges(picked: TriedRow, rows: Sequence[TriedRow]) -> Iterator[str]:
    """Which numbers of a choice are the first or last of their grid."""
    for name, text in picked.values.items():
        try:
            values = sorted({float(row.values[name]) for row in rows})
            value = float(text)
        except (KeyError, ValueError):
            continue  # words have no order
        off = value == 0 == values[0]  # nothing is below none of it
        if len(values) > 1 and value in (values[0], values[-1]) and not off:
            end, beyond = ("lowest", "lower") if value == values[0] else ("highest", "higher")
            yield f"{name} {text} is the {end} that was tried; a {beyond} one may do better"
