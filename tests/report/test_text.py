"""Names of methods and metrics as prose."""

import pytest

from feddg.evaluation.metrics import METRICS, Metric, register_metric
from feddg.report.text import metric_title, spelled


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("feddg_ga", "FedDG-GA"),
        ("ccst+my_method", "CCST + my_method"),
        ("elcfs", "ELCFS (FedDG)"),
        ("pardon, gamma1 0.5", "PARDON, gamma1 0.5"),
        ("Single (K=1), A+B", "Single (K=1), A+B"),
    ],
)
def test_a_method_s_label_reads_well(label, expected):
    assert spelled(label) == expected


def test_a_metric_carries_its_title(monkeypatch):
    assert metric_title("macro_f1") == "Macro-F1"
    assert metric_title("sharpness") == "sharpness"
    monkeypatch.setattr(METRICS, "_found", dict(METRICS._found))
    own = Metric(name="sharpness", summary="", compute=lambda predictions: 0.0, title="Sharp")
    register_metric(own)
    assert metric_title("sharpness") == "Sharp"
