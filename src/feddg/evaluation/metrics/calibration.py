"""Whether a model's confidence says how often it is right."""

import torch

from feddg.evaluation.metrics import Metric, Predictions, register_metric

BINS = 15
"""Bins of equal width, as in the paper's tables."""


def _expected_calibration_error(predictions: Predictions) -> float | None:
    """Guo et al., "On Calibration of Modern Neural Networks" (ICML 2017), equation 3.

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


register_metric(
    Metric(
        name="calibration_error",
        summary=f"expected calibration error over {BINS} bins of confidence, in [0, 1]",
        compute=_expected_calibration_error,
        needs_logits=True,
        higher_is_better=False,
        order=40,
    )
)
