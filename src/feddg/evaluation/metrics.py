"""Metrics by name: accuracy, confusion counts, calibration and ranking."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from feddg.errors import ExperimentError
from feddg.registry import Registry

BINS = 15
"""Number of bins of equal width, as in the paper's tables."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """The predictions on the images of one domain of one split.

    Attributes:
        confusion: ``(classes, classes)`` counts, true class by predicted class.
        logits: ``(n, classes)`` float32 on the CPU, unnormalised log-probabilities; None if only
            counts are known, for example from another site.
        labels: ``(n,)`` class ids, int64; None if ``logits`` is.
    """

    confusion: numpy.ndarray
    logits: Tensor | None = None
    labels: Tensor | None = None


Compute = Callable[[Predictions], float | None]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number computed from the predictions on a domain.

    Attributes:
        name: its key in rows and tables.
        summary: one line, with its range.
        compute: returns the number, or None if it is undefined.
        needs_logits: whether it needs logits; without logits it is then left out.
        higher_is_better: the direction of improvement; None for a number that describes the images.
        title: its heading in tables; its name if empty.
    """

    name: str
    summary: str
    compute: Compute
    needs_logits: bool = False
    higher_is_better: bool | None = True
    title: str = ""


METRICS: Registry[Metric] = Registry(
    "metric",
    "feddg.evaluation.metrics",
    group="feddg.metrics",
    error=ExperimentError,
    made_of=Metric,
)
"""All metrics, in the order of tables: ours first, in the order of this file."""


register_metric = METRICS.register
"""Registers a metric under its name."""


def _metric(name: str, title: str, summary: str, **more: Any) -> Callable[[Compute], Compute]:
    """Registers the decorated function as the ``compute`` of a metric."""

    def register(compute: Compute) -> Compute:
        register_metric(Metric(name=name, title=title, summary=summary, compute=compute, **more))
        return compute

    return register


def measure(predictions: Predictions) -> dict[str, float]:
    """Returns every metric that is defined for these predictions, by name."""
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


@_metric("accuracy", "Accuracy", "share of images classified correctly, in [0, 1]")
def _accuracy(predictions: Predictions) -> float | None:
    examples = int(predictions.confusion.sum())
    return int(predictions.confusion.trace()) / examples if examples else None


@_metric(
    "balanced_accuracy",
    "Balanced accuracy",
    "mean over the classes with images of the share classified correctly, in [0, 1]",
)
def _balanced_accuracy(predictions: Predictions) -> float | None:
    support = predictions.confusion.sum(axis=1)
    seen = support > 0
    recall = predictions.confusion.diagonal()[seen] / support[seen]
    return float(recall.mean()) if seen.any() else None


@_metric(
    "macro_f1",
    "Macro-F1",
    "mean over the classes with images of their F1 score, in [0, 1]",
)
def _macro_f1(predictions: Predictions) -> float | None:
    """F1 = 2 hits / (images + predictions) of each class with images (iWildCam's official score).

    Computed as in WILDS: Koh et al. (ICML 2021), section 4.1.1, and its code, which leaves out
    classes without images even if they are predicted.
    """
    support = predictions.confusion.sum(axis=1)
    seen = support > 0
    predicted = predictions.confusion.sum(axis=0)
    scores = 2 * predictions.confusion.diagonal()[seen] / (support + predicted)[seen]
    return float(scores.mean()) if seen.any() else None


@_metric(
    "auroc",
    "AUROC",
    "area under the ROC curve, each class against the rest, mean over the classes with images, in "
    "[0, 1]",
    needs_logits=True,
)
def _auroc(predictions: Predictions) -> float | None:
    """The area of each class against the rest, mean over the classes that are in both."""
    assert predictions.logits is not None
    assert predictions.labels is not None
    scores = predictions.logits.double().softmax(1).numpy()
    one_hot = predictions.labels.numpy()[:, None] == numpy.arange(scores.shape[1])
    defined = one_hot.any(axis=0) & ~one_hot.all(axis=0)
    if not defined.any():
        return None
    pairs = zip(one_hot[:, defined].T, scores[:, defined].T)
    return float(numpy.mean([area_under_roc(*pair) for pair in pairs]))


@_metric(
    "calibration_error",
    "ECE",
    f"expected calibration error over {BINS} bins of confidence, in [0, 1]",
    needs_logits=True,
    higher_is_better=False,
)
def _expected_calibration_error(predictions: Predictions) -> float | None:
    """Expected calibration error: Guo et al., "On Calibration of ..." (ICML 2017), equation 3.

    ECE = sum_b (n_b / n) |accuracy(b) - confidence(b)|, where bin b holds the images whose largest
    probability is in ((b - 1) / 15, b / 15].
    """
    assert predictions.logits is not None
    assert predictions.labels is not None
    labels = predictions.labels
    if not len(labels):
        return None
    # The class is the one that accuracy counts: rounding may make two probabilities equal.
    chosen = predictions.logits.argmax(1)
    confidence = predictions.logits.double().softmax(1).amax(1)
    bins = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    gaps = (chosen == labels).double() - confidence
    sums = torch.zeros(BINS, dtype=torch.float64).index_add(0, bins, gaps)
    return float(sums.abs().sum() / len(labels))


def _of_decision(predictions: Predictions) -> float | None:
    """A decision's numbers need a threshold from validation: ``Evaluation.scores`` adds them."""
    return None


OF_A_DECISION = ("decision_auroc", "decision_ap", "sensitivity", "specificity")
"""The metrics of ``evaluate.decision``."""
for _name, _title, _summary in (
    ("decision_auroc", "AUROC of the decision", "area under its ROC curve, of evaluate.decision"),
    ("decision_ap", "AP of the decision", "average precision of evaluate.decision"),
    ("sensitivity", "Sensitivity", "share of evaluate.decision that is called so"),
    ("specificity", "Specificity", "share of the others that is not called so"),
):
    _metric(_name, _title, f"{_summary}, in [0, 1]")(_of_decision)


@_metric(
    "largest_class_share",
    "Largest class",
    "share of the commonest class, in (0, 1]: what naming it always would reach",
    higher_is_better=None,
)
def _largest_class_share(predictions: Predictions) -> float | None:
    support = predictions.confusion.sum(axis=1)
    return int(support.max()) / int(support.sum()) if support.any() else None


def area_under_roc(positive: numpy.ndarray, scores: numpy.ndarray) -> float:
    """Returns the AUROC by the Mann-Whitney statistic; ties count half.

    For P positives among n, whose scores have ranks r in 1 .. n:
    AUROC = (sum of r over the positives - P (P + 1) / 2) / (P (n - P)) (Hanley and McNeil 1982).

    Args:
        positive: ``(n,)`` bool; some are and some are not.
        scores: ``(n,)``; the higher, the more likely positive.

    Returns:
        In [0, 1]: 0.5 is chance. Not a number if a score is none.
    """
    count = int(positive.sum())
    above = ranks(scores)[positive].sum() - count * (count + 1) / 2
    return float(above / (count * (len(positive) - count)))


def ranks(values: numpy.ndarray) -> numpy.ndarray:
    """Returns ranks from 1; ties get their mean. scipy.stats has it, and is slow to import."""
    if numpy.isnan(values).any():
        return numpy.full(len(values), numpy.nan)
    _, places, counts = numpy.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[places]


def student(freedom: float, level: float = 0.95) -> float:
    """Returns half the width of Student's t interval, in standard errors.

    Args:
        freedom: degrees of freedom, above 0; infinite for the normal distribution.
        level: how often the interval holds the truth, in (0, 1).
    """
    from scipy.special import ndtri, stdtrit  # scipy.stats takes half a second to import

    share = (1 + level) / 2
    return float(ndtri(share) if math.isinf(freedom) else stdtrit(freedom, share))
