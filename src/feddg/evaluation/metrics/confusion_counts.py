"""Metrics that follow from who was taken for whom."""

from feddg.evaluation.metrics import Metric, Predictions, register_metric


def _accuracy(predictions: Predictions) -> float | None:
    examples = int(predictions.confusion.sum())
    return int(predictions.confusion.trace()) / examples if examples else None


def _balanced_accuracy(predictions: Predictions) -> float | None:
    support = predictions.confusion.sum(axis=1)
    seen = support > 0
    recall = predictions.confusion.diagonal()[seen] / support[seen]
    return float(recall.mean()) if seen.any() else None


def _macro_f1(predictions: Predictions) -> float | None:
    """F1 = 2 hits / (images + predictions) of each class with images (iWildCam's official score).

    As WILDS computes it: Koh et al., "WILDS" (ICML 2021), section 4.1.1 and its code, which leaves
    out classes without images even where some are predicted.
    """
    support = predictions.confusion.sum(axis=1)
    seen = support > 0
    predicted = predictions.confusion.sum(axis=0)
    scores = 2 * predictions.confusion.diagonal()[seen] / (support + predicted)[seen]
    return float(scores.mean()) if seen.any() else None


def _largest_class_share(predictions: Predictions) -> float | None:
    support = predictions.confusion.sum(axis=1)
    return int(support.max()) / int(support.sum()) if support.any() else None


register_metric(
    Metric(
        name="accuracy",
        summary="share of images classified correctly, in [0, 1]",
        compute=_accuracy,
        order=0,
    )
)
register_metric(
    Metric(
        name="balanced_accuracy",
        summary="mean over the classes with images of the share classified correctly, in [0, 1]",
        compute=_balanced_accuracy,
        order=10,
    )
)
register_metric(
    Metric(
        name="macro_f1",
        summary="mean over the classes with images of their F1 score, in [0, 1]",
        compute=_macro_f1,
        order=20,
    )
)
register_metric(
    Metric(
        name="largest_class_share",
        summary="share of the commonest class, in (0, 1]: what naming it always would reach",
        compute=_largest_class_share,
        higher_is_better=None,
        order=90,
    )
)
