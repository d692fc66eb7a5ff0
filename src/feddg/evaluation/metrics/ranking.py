"""How well a model's probabilities rank the images: the area under the ROC curve."""

import numpy

from feddg.evaluation.metrics import Metric, Predictions, register_metric


def _auroc(predictions: Predictions) -> float | None:
    """One class against the rest, by the Mann-Whitney statistic; ties count half.

    For a class with P images among n, whose probabilities have ranks r in 1 .. n:
    AUROC = (sum of r over its images - P (P + 1) / 2) / (P (n - P)) (Hanley and McNeil 1982).
    """
    assert predictions.logits is not None
    assert predictions.labels is not None
    scores = predictions.logits.double().softmax(1).numpy()
    labels = predictions.labels.numpy()
    own = labels[:, None] == numpy.arange(scores.shape[1])
    positive = own.sum(axis=0)
    defined = (positive > 0) & (positive < len(labels))
    if not defined.any():
        return None
    own, positive = own[:, defined], positive[defined]
    # A probability that is not a number ranks nothing: the area is then not a number, either.
    ranked = numpy.stack([_ranks(column) for column in scores[:, defined].T], axis=1)
    ranks = (ranked * own).sum(axis=0)
    areas = (ranks - positive * (positive + 1) / 2) / (positive * (len(labels) - positive))
    return float(areas.mean())


def _ranks(values: numpy.ndarray) -> numpy.ndarray:
    """Ranks from 1; equal values share the mean of theirs. scipy.stats takes long to import."""
    if numpy.isnan(values).any():
        return numpy.full(len(values), numpy.nan)
    _, places, counts = numpy.unique(values, return_inverse=True, return_counts=True)
    shared: numpy.ndarray = (counts.cumsum() - (counts - 1) / 2)[places]
    return shared


register_metric(
    Metric(
        name="auroc",
        summary="area under the ROC curve, each class against the rest, mean over the classes "
        "with images, in [0, 1]",
        compute=_auroc,
        needs_logits=True,
        order=30,
    )
)
