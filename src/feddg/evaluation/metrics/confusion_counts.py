"""Metrics that follow from who was taken for whom."""

from feddg.evaluation.metrics import Metric, Outcome, register_metric


def _accuracy(outcome: Outcome) -> float | None:
    examples = int(outcome.confusion.sum())
    return int(outcome.confusion.trace()) / examples if examples else None


def _balanced_accuracy(outcome: Outcome) -> float | None:
    support = outcome.confusion.sum(axis=1)
    seen = support > 0
    recall = outcome.confusion.diagonal()[seen] / support[seen]
    return float(recall.mean()) if seen.any() else None


def _largest_class_share(outcome: Outcome) -> float | None:
    support = outcome.confusion.sum(axis=1)
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
        name="largest_class_share",
        summary="share of the commonest class, in (0, 1]: what naming it always would reach",
        compute=_largest_class_share,
        higher_is_better=None,
        order=90,
    )
)
