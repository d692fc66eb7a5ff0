"""What a run's numbers say against themselves, from its rows alone."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Final

import numpy

from feddg.errors import RunError
from feddg.evaluation.metrics import Predictions, measure
from feddg.records import LAST, TEST, VAL, EvaluationRow
from feddg.runs.reading import Evaluations, find_rule, read_run

# Intervals for shares of counted things: what one run's accuracy leaves open.


LEVEL: Final = 0.95
_Z: Final = NormalDist().inv_cdf((1 + LEVEL) / 2)


@dataclass(frozen=True, slots=True)
class ShareInterval:
    """A share with the ends of its 95 % confidence interval, all in [0, 1]."""

    share: float
    low: float
    high: float

    def includes(self, share: float) -> bool:
        """Whether a share lies between the ends, both taken in."""
        return self.low <= share <= self.high


def wilson(share: float, examples: int) -> ShareInterval:
    """Returns the interval of Wilson (1927), Journal of the American Statistical Association 22.

    It says how far a share may be from the one that endless examples of the same kind would give.
    It knows nothing of other seeds, clients or domains.

    Args:
        share: the share found, in [0, 1].
        examples: of how many; at least 1.

    Raises:
        ValueError: there are no examples, or the share is none.
    """
    if examples < 1 or not 0 <= share <= 1:
        raise ValueError(f"no share of examples: {share} of {examples}")
    pull = _Z**2 / examples
    middle = (share + pull / 2) / (1 + pull)
    reach = _Z * math.sqrt(share * (1 - share) / examples + pull / (4 * examples)) / (1 + pull)
    # The ends of 0 and 1 are exact; rounding must not push the share itself outside.
    return ShareInterval(
        share, min(share, max(0.0, middle - reach)), max(share, min(1.0, middle + reach))
    )


def mean_of_shares(parts: Sequence[tuple[float, int]]) -> ShareInterval:
    """Returns the mean of independent shares with its interval; for a single one, Wilson's.

    Args:
        parts: the shares, each with the number of its examples; at least one.

    Raises:
        ValueError: a part has no examples, or there is no part.
    """
    return mean_of_intervals([wilson(share, examples) for share, examples in parts])


def mean_of_intervals(parts: Sequence[ShareInterval]) -> ShareInterval:
    """Returns the mean of independent shares, each counted once, with its interval.

    The ends recover the variances from the parts' own ends (Zou and Donner 2008, Statistics in
    Medicine 27, "method of variance estimates recovery").

    Raises:
        ValueError: there is no part.
    """
    if not parts:
        raise ValueError("the mean of no shares")
    mean = math.fsum(part.share for part in parts) / len(parts)
    below = math.hypot(*(part.share - part.low for part in parts)) / len(parts)
    above = math.hypot(*(part.high - part.share for part in parts)) / len(parts)
    return ShareInterval(mean, max(0.0, mean - below), min(1.0, mean + above))


NEARLY_ALL: Final = 0.8
"""A share of the predictions from which on one class counts as nearly all of them ..."""
TOO_OFTEN: Final = 0.2
"""... when it is that much more often predicted than true."""
WINDOW: Final = 3
"""The end of a run: a third of its steps from one evaluation to the next, these at least ..."""
LEAST_STEPS: Final = 2
"""... or, in a short run, as many as there are, but no fewer than these."""
ONE_WAY: Final = 0.75
"""A rise is a rise when it is this part, or more, of all the movement up and down ..."""
LEAST_RISE: Final = 0.01
"""... and a point of accuracy at least ..."""
NOT_LEVELLED: Final = 0.25
"""... and its last third went on at this part, or more, of its mean pace."""


class Severity(IntEnum):
    """How much a finding takes from a number; the larger, the more."""

    NOTE = 1
    CAUTION = 2
    ALARM = 3


class FindingKind(StrEnum):
    """What can be found."""

    CONSTANT = "no better than a constant model"
    ONE_CLASS = "nearly always the same class"
    BELOW_START = "below its own round 0"
    RISING = "still rising at the last round"
    UNSTEADY = "rounds move more than methods differ"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a reader must know beside an accuracy.

    Attributes:
        kind: what it is; its value is how a table says it.
        severity: how much it takes from the number.
        figure: the number that shows it, a share in [0, 1]: what a constant model reaches; the
            share of the commonest prediction; the accuracy of round 0; the rise; the movement.
        beside: what ``figure`` is held against: the accuracy; that class's share of the images;
            the accuracy; the number of rounds of the rise; the margin.
        class_id: of ``ONE_CLASS``, which class.
    """

    kind: FindingKind
    severity: Severity
    figure: float
    beside: float
    class_id: int | None = None


@dataclass(frozen=True, slots=True)
class Standing:
    """The accuracy of one split after one round, and what it must be read beside.

    All are shares in [0, 1], means over the split's domains, each counted once; None where the
    rows do not tell.

    Attributes:
        round: after which round.
        accuracy: with its 95 % interval over images.
        constant: what the best model that always names one class reaches.
        balanced: balanced accuracy.
        balanced_interval: its interval over images; needs the confusions.
        chance: balanced accuracy of guessing: one over the classes that have images.
        predicted: share of each class among the predictions ``(classes,)``.
        true: share of each class among the images ``(classes,)``.
    """

    round: int
    accuracy: ShareInterval
    constant: float | None = None
    balanced: float | None = None
    balanced_interval: ShareInterval | None = None
    chance: float | None = None
    predicted: Sequence[float] | None = None
    true: Sequence[float] | None = None

    @property
    def most_predicted(self) -> tuple[int, float] | None:
        """The class named most often, and its share of the predictions."""
        if self.predicted is None:
            return None
        most = int(numpy.argmax(self.predicted))
        return most, self.predicted[most]


def accuracy_interval(rows: Sequence[EvaluationRow]) -> ShareInterval | None:
    """Returns the mean accuracy of rows with its interval; None where one is no accuracy."""
    parts = [(row.accuracy, row.examples) for row in rows]
    if not parts or not all(0 <= share <= 1 and count > 0 for share, count in parts):
        return None
    return mean_of_shares(parts)


def measured(row: EvaluationRow, name: str) -> float | None:
    """Returns a metric of a row, computed from its confusion where it was not recorded."""
    if name in row.metrics or row.confusion is None:
        return row.metrics.get(name)
    return measure(Predictions(numpy.array(row.confusion))).get(name)


def mean_measured(rows: Sequence[EvaluationRow], name: str) -> float | None:
    """Returns the mean of a metric over rows; None where one of them lacks it."""
    values = [value for row in rows if (value := measured(row, name)) is not None]
    return math.fsum(values) / len(rows) if rows and len(values) == len(rows) else None


def standing(evaluations: Evaluations, round_: int | None, split: str = TEST) -> Standing | None:
    """Returns how a split stood after a round; None where it was not evaluated."""
    rows = evaluations.at(round_, split) if round_ is not None else []
    accuracy = accuracy_interval(rows)
    if round_ is None or accuracy is None:
        return None
    constant = mean_measured(rows, "largest_class_share")
    balanced = mean_measured(rows, "balanced_accuracy")
    confusions = [numpy.array(row.confusion, dtype=float) for row in rows if row.confusion]
    confusions = [counts for counts in confusions if counts.sum() > 0]
    if len(confusions) < len(rows):
        return Standing(round_, accuracy, constant, balanced)
    true = numpy.mean([counts.sum(axis=1) / counts.sum() for counts in confusions], axis=0)
    predicted = numpy.mean([counts.sum(axis=0) / counts.sum() for counts in confusions], axis=0)
    seen = [counts[counts.sum(axis=1) > 0] for counts in confusions]
    return Standing(
        round=round_,
        accuracy=accuracy,
        # One constant model for all domains: the class that is commonest in their mean.
        constant=float(true.max()),
        balanced=balanced,
        balanced_interval=_balanced_interval(confusions),
        chance=float(numpy.mean([1 / len(counts) for counts in seen])),
        predicted=predicted.tolist(),
        true=true.tolist(),
    )


def _balanced_interval(confusions: Sequence[numpy.ndarray]) -> ShareInterval:
    """Mean over domains of the mean recall, each recall an independent share of its images."""
    found = []
    for counts in confusions:
        support = counts.sum(axis=1)
        parts = [
            (float(counts[index, index] / total), int(total))
            for index, total in enumerate(support)
            if total > 0
        ]
        found.append(mean_of_shares(parts))
    return mean_of_intervals(found)


def findings(
    evaluations: Evaluations, round_: int | None, split: str = TEST, weights: str = LAST
) -> list[Finding]:
    """Returns what must be said beside the accuracy of a round, the gravest first.

    Args:
        evaluations: the run's.
        round_: the round whose accuracy is shown; None gives no finding.
        split: whose accuracy.
        weights: whose accuracy is shown; how it rose over the rounds is the last weights' matter.
    """
    found = standing(evaluations.of(weights), round_, split)
    if found is None:
        return []
    said = [
        _constant(found),
        _one_class(found),
        _below_start(evaluations, found, split),
        _rising(evaluations, found, split),
    ]
    return sorted((one for one in said if one is not None), key=lambda one: -one.severity)


def _constant(found: Standing) -> Finding | None:
    """No better than a constant model: by the share of images, or by the mean over classes."""
    if found.constant is None or found.round == 0:
        return None
    by_images = found.accuracy.low <= found.constant
    by_classes = found.balanced_interval is not None and (
        found.balanced_interval.low <= (found.chance or 0.0)
    )
    if not by_images and not by_classes:
        return None
    return Finding(
        FindingKind.CONSTANT, Severity.ALARM, found.constant, beside=found.accuracy.share
    )


def _one_class(found: Standing) -> Finding | None:
    if found.most_predicted is None or found.true is None or found.round == 0:
        return None
    class_id, share = found.most_predicted
    if share < NEARLY_ALL or share - found.true[class_id] < TOO_OFTEN:
        return None
    return Finding(
        FindingKind.ONE_CLASS, Severity.CAUTION, share, found.true[class_id], class_id=class_id
    )


def _below_start(evaluations: Evaluations, found: Standing, split: str) -> Finding | None:
    start = evaluations.accuracy(0, split)
    if found.round == 0 or start is None or not found.accuracy.share < start:
        return None
    return Finding(FindingKind.BELOW_START, Severity.ALARM, start, beside=found.accuracy.share)


def _rising(evaluations: Evaluations, found: Standing, split: str) -> Finding | None:
    """Whether, over the end of the run, nearly all movement went upwards, and still does."""
    steps = _end_steps(evaluations, split)
    if found.round != evaluations.rounds[-1] or len(steps) < LEAST_STEPS:
        return None
    rise, path = math.fsum(steps), math.fsum(map(abs, steps))
    latest = steps[-max(1, len(steps) // 3) :]
    levelled = math.fsum(latest) / len(latest) < NOT_LEVELLED * rise / len(steps)
    if rise < LEAST_RISE or rise < ONE_WAY * path or levelled:
        return None
    rounds = evaluations.rounds[-1] - evaluations.rounds[-1 - len(steps)]
    return Finding(FindingKind.RISING, Severity.NOTE, rise, beside=rounds)


def movement(evaluations: Evaluations, split: str = TEST) -> float | None:
    """Returns how far accuracy moves from one evaluation to the next at the end of a run.

    The mean distance of the steps of a run's last third from their mean, which is the trend and no
    unrest: a share in [0, 1]; None where there are too few.
    """
    steps = _end_steps(evaluations, split)
    if len(steps) < LEAST_STEPS:
        return None
    trend = math.fsum(steps) / len(steps)
    return math.fsum(abs(step - trend) for step in steps) / len(steps)


def unsteady(moved: float | None, margin: float) -> Finding | None:
    """Returns the finding that rounds move more than two methods differ, if they do.

    Args:
        moved: :func:`movement`, a mean over the runs of both.
        margin: difference of the two accuracies.
    """
    if moved is None or not moved > abs(margin):
        return None
    return Finding(FindingKind.UNSTEADY, Severity.CAUTION, moved, beside=abs(margin))


def _end_steps(evaluations: Evaluations, split: str) -> list[float]:
    """Steps between evaluations at the end; that from the untrained model is another matter."""
    values = [evaluations.accuracy(round_, split) for round_ in evaluations.rounds if round_ > 0]
    curve = [value for value in values if value is not None and math.isfinite(value)]
    steps = [after - before for before, after in pairwise(curve)]
    return steps[-max(WINDOW, len(steps) // 3) :]


# What is said wherever a run's model is used: how good it is, and if its labels mean nothing.


def cautions(run: Path | str, which: str, round_: int) -> tuple[str, ...]:
    """Returns what must be said of a model before anybody uses it, one sentence each.

    Empty where nothing speaks against it, or where nothing was measured.

    Args:
        run: the run folder.
        which: the model's selection rule, as ``load_model`` takes it.
        round_: the round it is from.

    Raises:
        RunError: the folder holds no run.
    """
    weights = find_rule(which).weights
    evaluations, split = _held_out(run, weights, round_)
    found = findings(evaluations, round_, split, weights)
    alarms = (_sentence(one) for one in found if one.severity is Severity.ALARM)
    return (*_unfinished(Path(run)), *alarms)


def _unfinished(run: Path) -> Iterator[str]:
    record = read_run(run)
    if record.status != "completed":
        yield (
            f"The run has not finished (round {record.rounds_done} of {record.rounds_planned}; "
            f"`feddg resume {run}` goes on): this is not the model that it will serve."
        )


def result_sentence_of(run: Path | str, which: str, round_: int) -> str:
    """Returns how good a model was on held-out domains, with its interval; see :func:`cautions`.

    Raises:
        RunError: the folder holds no run.
    """
    weights = find_rule(which).weights
    evaluations, split = _held_out(run, weights, round_)
    evaluations = evaluations.of(weights)
    found = standing(evaluations, round_, split)
    if found is None:
        return "It was measured on no domain that was held out of its training."
    rows = evaluations.at(round_, split)
    share, domains = found.accuracy, ", ".join(row.domain for row in rows)
    return (
        f"It was right for {share.share:.1%} (95 %: {share.low:.1%} to {share.high:.1%}) of "
        f"{sum(row.examples for row in rows)} images of a domain nobody trained on ({domains})."
    )


def _held_out(run: Path | str, weights: str, round_: int) -> tuple[Evaluations, str]:
    evaluations = read_run(Path(run)).evaluations
    own = evaluations.of(weights)
    split = next((split for split in (TEST, VAL) if own.at(round_, split)), TEST)
    return evaluations, split


def refuse_doubtful(said: tuple[str, ...]) -> None:
    """Ends with an error where something must be said of a model.

    Raises:
        RunError: there is a caution.
    """
    if said:
        raise RunError(f"{said[0]} Train longer, or without --strict if it is only a trial.")


def _sentence(finding: Finding) -> str:
    figure, own = f"{finding.figure:.1%}", f"{finding.beside:.1%}"
    if finding.kind is FindingKind.CONSTANT:
        return (
            "This model is no better than a constant one: on the held-out images always naming "
            f"the largest class is right for {figure}, this model for {own}, and chance explains "
            "the difference, in images or in classes. Its labels mean nothing."
        )
    return (
        f"This model is worse than before its training: then it was right for {figure} of the "
        f"held-out images, now for {own}. Its labels mean nothing."
    )
