"""The choices of tuning: every combination that was tried for a method, and which was picked."""

from collections.abc import Iterator, Sequence
from typing import Final

from pydantic import Field

from feddg.diagnostics import Diagnostic, warning
from feddg.records import JsonFile, Number, Row
from feddg.runs.diagnostics import IN_WORDS, MAJORITY
from feddg.settings import grouped

TUNING: Final = "tuning.json"


class TriedRow(Row):
    """One combination of values that was tried for a method.

    Attributes:
        method: the method's label.
        held_out: the held-out test domains of the columns it was tried for.
        values: the values by field.
        metric: the metric that chooses rounds in its trials (``evaluate.select_by``).
        over: how the metric is taken over domains (``evaluate.select_over``).
        score: mean of that metric on in-domain validation over its trials, 0 to 1; None if a trial
            failed or the metric is undefined for its images.
        trials: number of trials.
        constant: number of trials whose model is no better on in-domain validation than always
            predicting one class; None if not recorded.
        picked: whether these values are used for the table.
        epsilons: by field of ``privacy``, the largest epsilon of each trial, and of the run.
    """

    method: str
    held_out: str = ""
    values: dict[str, str]
    metric: str = "accuracy"
    over: str = "domain_mean"
    score: Number | None = None
    trials: int
    constant: int | None = Field(None, ge=0)
    picked: bool
    epsilons: dict[str, float] = Field(default_factory=dict)


class TuningFile(JsonFile):
    """The trials before a comparison, and the chosen values: ``tuning.json``.

    Attributes:
        rule: the selection rule for the round of a trial.
        rounds: rounds of a trial.
        seeds: seeds of the trials.
        tried: all combinations.
    """

    rule: str
    rounds: int | None = None
    seeds: tuple[int, ...]
    tried: tuple[TriedRow, ...]

    def after(self, earlier: "TuningFile | None") -> "TuningFile":
        """Returns this file merged with an earlier one's other methods and hold-outs.

        A table may be run column by column. Choices with another rule, number of rounds or other
        seeds are dropped.
        """
        settings = (self.rule, self.rounds, self.seeds)
        if earlier is None or settings != (earlier.rule, earlier.rounds, earlier.seeds):
            return self
        chosen = {(row.method, row.held_out) for row in self.tried}
        others = [row for row in earlier.tried if (row.method, row.held_out) not in chosen]
        return self.model_copy(update={"tried": (*others, *self.tried)})

    def diagnostics(self) -> Iterator[Diagnostic]:
        """Yields warnings about privacy, and about choices: of useless models, at a grid's end."""
        yield from self._about_privacy()
        for row in (row for row in self.tried if row.picked):
            rows = [o for o in self.tried if (o.method, o.held_out) == (row.method, row.held_out)]
            where = f"{row.method}{f', {row.held_out} held out' if row.held_out else ''}"
            if row.constant:
                text = (
                    f"{where}: with the picked values the model is {IN_WORDS[MAJORITY]} in "
                    f"{row.constant} of {row.trials} trials, so that the choice means little."
                )
                advice = "Try more rounds (tune.rounds), pretrained weights, or other values."
                yield warning("tuned-on-nothing-learned", text, advice)
            for text, advice in _edges(row, rows):
                yield warning("edge-of-the-grid", f"{where}: {text}", advice)

    def _about_privacy(self) -> Iterator[Diagnostic]:
        """Yields what a method's trials and the run that they are for may cost together."""
        for name in dict.fromkeys(name for row in self.tried for name in row.epsilons):
            spent = grouped(
                ((row.method, row.held_out), row.epsilons.get(name, 0) * (row.trials + row.picked))
                for row in self.tried
            )
            text = (
                "Trials spend privacy, too: those of one method and hold-out, and one run with the "
                f"values that they picked, together cost at most {name} "
                f"{max(map(sum, spent.values())):g} (basic composition; their deltas add up, too). "
                "Other runs, and the pick itself, come on top."
            )
            yield warning("trials-cost-privacy", text)


def _edges(picked: TriedRow, rows: Sequence[TriedRow]) -> Iterator[tuple[str, str]]:
    """Yields chosen numbers at an end of their grid, with what to try next."""
    for name, text in picked.values.items():
        others = (row for row in rows if row.score == picked.score and row.values.get(name) != text)
        if any({**row.values, name: text} == picked.values for row in others):
            continue  # the value makes no difference there
        try:
            values = sorted({float(row.values[name]) for row in rows})
            value = float(text)
        except (KeyError, ValueError):
            continue  # words have no order
        off = value == 0 == values[0]  # nothing is below none of it
        if len(values) > 1 and value in (values[0], values[-1]) and not off:
            end, beyond = ("lowest", "lower") if value == values[0] else ("highest", "higher")
            yield f"{name} {text} is the {end} that was tried.", f"Try a {beyond} one, too."
