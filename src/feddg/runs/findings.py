"""What a run's numbers say against themselves: findings about its accuracy, from its rows alone.

An accuracy alone can flatter: a model that always names the commonest class reaches that class's
share. Pages, the console and comparisons take the findings from here and put them into words.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from itertools import pairwise
from typing import Final

import numpy

from feddg.evaluation.metrics import Predictions, measure
from feddg.records import LAST, TEST, EvaluationRow
from feddg.runs.evaluations import Evaluations
from feddg.runs.proportions import ShareInterval, mean_of_intervals, mean_of_shares

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
