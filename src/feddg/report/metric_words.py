"""What the field calls metrics, and the ways to make one number of several domains."""

from typing import Final

from feddg.report.wording import readable

AGGREGATE_WORDS: Final[dict[str, str]] = {
    "domain_mean": "mean of domains",
    "pooled": "all images pooled",
    "worst_domain": "worst domain",
}
_TITLES = {
    "accuracy": "Accuracy",
    "balanced_accuracy": "Balanced accuracy",
    "macro_f1": "Macro-F1",
    "auroc": "AUROC",
    "calibration_error": "ECE",
    "largest_class_share": "Largest class",
}


def metric_title(name: str) -> str:
    """What the field calls a metric; others by their own name."""
    return _TITLES.get(name, readable(name))
