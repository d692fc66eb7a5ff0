"""Decisions about one class: a threshold, and what it gives after a round.

The threshold is chosen on in-domain validation and applied everywhere else, so that what it gives
on an unseen domain is what a user there would get.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy

from feddg.evaluation.metrics import area_under_roc
from feddg.records import ID_VAL


def ranked(
    positive: numpy.ndarray, scores: numpy.ndarray
) -> tuple[numpy.ndarray, Callable[[numpy.ndarray], float]]:
    """Returns images by falling score, and their average precision if each counts so often."""
    order = numpy.argsort(-scores, kind="stable")
    right, sorted_scores = positive[order].astype(float), scores[order]
    ends = numpy.flatnonzero(numpy.append(sorted_scores[1:] != sorted_scores[:-1], True))

    def precision(weights: numpy.ndarray) -> float:
        hits = numpy.cumsum(weights * right)[ends]
        called = numpy.cumsum(weights)[ends]
        gained = numpy.diff(hits, prepend=0.0)
        parts = numpy.divide(gained * hits, called, out=numpy.zeros_like(hits), where=called > 0)
        return float(parts.sum() / hits[-1]) if hits[-1] else math.nan

    return order, precision


def average_precision(positive: numpy.ndarray, scores: numpy.ndarray) -> float:
    """Returns the sum over thresholds of (R_n - R_{n-1}) P_n, as scikit-learn has it.

    Args:
        positive: ``(n,)`` bool, some of them.
        scores: ``(n,)``; the higher, the more likely positive.
    """
    return ranked(positive, scores)[1](numpy.ones(len(scores)))


def threshold_for(
    positive: numpy.ndarray,
    scores: numpy.ndarray,
    *,
    specificity: float | None = None,
    sensitivity: float | None = None,
) -> float:
    """Returns the threshold that reaches one of the two, and as much as possible of the other.

    An image is called positive if its score is at least the threshold, which lies halfway between
    two scores, so that rounding moves no image across it.

    Args:
        positive: ``(n,)`` bool, with and without the class; there are some of both.
        scores: ``(n,)`` in [0, 1].
        specificity: the least share of the images without the class that are called negative.
        sensitivity: the least share of the images with the class that are called positive.
    """
    if specificity is not None:
        scored = numpy.sort(scores[~positive])
        last = scored[max(math.ceil(specificity * len(scored) - 1e-9), 1) - 1]
        higher = scores[scores > last]
        return float((last + higher.min()) / 2 if len(higher) else (last + 1) / 2 + 1e-9)
    assert sensitivity is not None
    scored = numpy.sort(scores[positive])[::-1]
    first = scored[max(math.ceil(sensitivity * len(scored) - 1e-9), 1) - 1]
    lower = scores[scores < first]
    return float((first + lower.max()) / 2 if len(lower) else first / 2)


@dataclass(frozen=True)
class Decision:
    """A decision about one class.

    Attributes:
        of: the class's number.
        name: the class's name.
        target: ``specificity`` or ``sensitivity``, which the threshold reaches on validation.
        reached: the least share of it, in (0, 1).
        prevalence: share of the class where the model is used; None for that of the images.
    """

    of: int
    name: str
    target: str = "specificity"
    reached: float = 0.95
    prevalence: float | None = None


class Part(NamedTuple):
    """The images of one domain of one split.

    Attributes:
        split: the split.
        domain: the domain.
        positive: ``(n,)`` bool, whether they are of the class.
        scores: ``(n,)`` probability of the class.
        groups: ``(n,)`` integers; None if images are independent.
    """

    split: str
    domain: str
    positive: numpy.ndarray
    scores: numpy.ndarray
    groups: numpy.ndarray | None


def threshold_on(parts: Sequence[Part], decision: Decision) -> float | None:
    """Returns a decision's threshold, from in-domain validation; None where it has no images."""
    inside = [part for part in parts if part.split == ID_VAL]
    if not inside:
        return None
    positive = numpy.concatenate([part.positive for part in inside])
    if positive.all() or not positive.any():
        return None
    scores = numpy.concatenate([part.scores for part in inside])
    return threshold_for(positive, scores, **{decision.target: decision.reached})


def decision_metrics(part: Part, threshold: float | None) -> dict[str, float]:
    """Returns what is defined of a decision, by the names of :mod:`feddg.evaluation.metrics`."""
    positive, scores, values = part.positive, part.scores, dict[str, float]()
    if positive.any() and not positive.all():
        values["decision_auroc"] = area_under_roc(positive, scores)
        values["decision_ap"] = average_precision(positive, scores)
    if threshold is not None:
        hits = (scores >= threshold) == positive
        sides = {"sensitivity": hits[positive], "specificity": hits[~positive]}
        values |= {name: float(side.mean()) for name, side in sides.items() if len(side)}
    return values
