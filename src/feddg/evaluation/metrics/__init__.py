"""Numbers that say how good predictions are, one registered definition each.

A definition is a name and a function of :class:`Predictions`, in a module of this package, or
behind an entry point of the group ``feddg.metrics``. Every evaluation computes all of them, on each
split and domain by itself; averages over domains are the readers' business.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy
from torch import Tensor

from feddg.errors import FeddgError
from feddg.registry import Registry, is_called


@dataclass(frozen=True, eq=False)
class Predictions:
    """What a predictor made of the images of one domain of one split.

    Attributes:
        confusion: ``(classes, classes)`` counts, true class by predicted class.
        logits: ``(n, classes)`` float32 on the CPU, unnormalised log-probabilities; None where only
            counts are known, as from another site.
        labels: ``(n,)`` class ids, int64; None where ``logits`` is.
    """

    confusion: numpy.ndarray
    logits: Tensor | None = None
    labels: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One number for the predictions on a domain.

    Attributes:
        name: its key in rows and tables.
        summary: one line, with its range.
        compute: the number; None where it is not defined for them.
        needs_logits: whether counts are not enough; then it is left out where there are no logits.
        higher_is_better: of two, which is preferred; None for a number that describes the images.
        order: its place in tables; smaller ones first.
    """

    name: str
    summary: str
    compute: Callable[[Predictions], float | None]
    needs_logits: bool = False
    higher_is_better: bool | None = True
    order: int = 100

    @property
    def defined_by(self) -> Callable[[Predictions], float | None]:
        """What tells it from another definition of the same name."""
        return self.compute


METRICS: Registry[Metric] = Registry(
    "metric",
    "feddg.evaluation.metrics",
    group="feddg.metrics",
    order=lambda metric: (metric.order, metric.name),
    adopt=lambda name, loaded: is_called(name, loaded, Metric, FeddgError),
)
"""All metrics, in the order of tables."""


def register_metric(metric: Metric) -> Metric:
    """Makes a metric known.

    Raises:
        FeddgError: another one has its name.
    """
    return METRICS.add(metric.name, metric)


def measure(predictions: Predictions) -> dict[str, float]:
    """Returns every metric by name; one that is not defined for these predictions is left out."""
    values = {
        name: metric.compute(predictions)
        for name, metric in METRICS.items()
        if predictions.logits is not None or not metric.needs_logits
    }
    return {
        name: float(value)
        for name, value in values.items()
        if value is not None and math.isfinite(value)
    }
