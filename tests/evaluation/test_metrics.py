"""Metrics against scikit-learn, and one that is added."""

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as theirs

from feddg.data.pixels import ArrayPixels
from feddg.errors import FeddgError
from feddg.evaluation.accuracy import Evaluation
from feddg.evaluation.metrics import (
    METRICS,
    OF_A_DECISION,
    Metric,
    Predictions,
    measure,
    register_metric,
)
from federations import colored_images

CLASSES = 4


def confusion(labels, predicted):
    return theirs.confusion_matrix(labels, predicted, labels=range(CLASSES))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=60))
def test_what_follows_from_counts_equals_scikit_learn(pairs):
    labels, predicted = zip(*pairs)
    found = measure(Predictions(confusion(labels, predicted)))
    assert found["accuracy"] == theirs.accuracy_score(labels, predicted)
    recalls = theirs.recall_score(
        labels, predicted, labels=sorted(set(labels)), average="macro", zero_division=0
    )
    assert found["balanced_accuracy"] == pytest.approx(recalls, abs=1e-12)
    f1 = theirs.f1_score(
        labels, predicted, labels=sorted(set(labels)), average="macro", zero_division=0
    )
    assert found["macro_f1"] == pytest.approx(f1, abs=1e-12)
    assert found["largest_class_share"] == max(map(labels.count, labels)) / len(labels)


def predictions(logits, labels):
    """What a metric sees, for logits ``(n, classes)``."""
    logits, labels = torch.as_tensor(logits).float(), torch.as_tensor(labels)
    return Predictions(confusion(labels.numpy(), logits.argmax(1).numpy()), logits, labels)


ROWS = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(-3, 3), min_size=4, max_size=4)),
    min_size=1,
    max_size=40,
)


@given(ROWS)
def test_auroc_equals_scikit_learn_with_ties_and_missing_classes(rows):
    labels, logits = numpy.array([row[0] for row in rows]), numpy.array([row[1] for row in rows])
    found = measure(predictions(logits, labels)).get("auroc")
    shares = torch.as_tensor(logits).float().double().softmax(1).numpy()
    both = [c for c in range(CLASSES) if 0 < (labels == c).sum() < len(labels)]
    areas = [theirs.roc_auc_score(labels == c, shares[:, c]) for c in both]
    assert found == (pytest.approx(numpy.mean(areas), abs=1e-9) if areas else None)


def test_auroc_by_hand():
    # Class 0 above class 1 in 3 of 4 pairs, and the same the other way round.
    logits = [[3.0, 0, -9, -9], [1.0, 0, -9, -9], [2.0, 0, -9, -9], [0.0, 0, -9, -9]]
    assert measure(predictions(logits, [0, 0, 1, 1]))["auroc"] == pytest.approx(0.75)


@given(ROWS, st.floats(0.1, 10))
def test_what_ranks_alike_has_the_same_accuracy_and_order_of_images_never_matters(rows, scale):
    labels, logits = numpy.array([row[0] for row in rows]), numpy.array([row[1] for row in rows])
    order = numpy.arange(len(rows))
    once, back = (measure(predictions(logits[i], labels[i])) for i in (order, order[::-1]))
    assert once == pytest.approx(back, abs=1e-9)
    assert all(0 <= value <= 1 for value in once.values())
    assert measure(predictions(logits * scale, labels))["accuracy"] == once["accuracy"]


@given(ROWS)
def test_calibration_error_is_at_most_the_mean_gap_and_at_least_the_gap_of_the_means(rows):
    labels, logits = numpy.array([row[0] for row in rows]), numpy.array([row[1] for row in rows])
    seen = predictions(logits, labels)
    confidence = seen.logits.double().softmax(1).amax(1).numpy()
    right = (seen.logits.argmax(1) == seen.labels).numpy()
    found = measure(seen)["calibration_error"]
    assert abs(right.mean() - confidence.mean()) - 1e-9 <= found
    assert found <= numpy.abs(right - confidence).mean() + 1e-9


def test_calibration_error_by_hand():
    # Three images sure to 0.97 of which two are right; two in another bin, sure to 0.5, one right.
    logits = numpy.log([[0.97, 0.01, 0.01, 0.01]] * 3 + [[0.5, 0.2, 0.2, 0.1]] * 2)
    gap = 3 / 5 * abs(2 / 3 - 0.97) + 2 / 5 * abs(1 / 2 - 0.5)
    found = measure(predictions(logits, [0, 0, 1, 0, 1]))["calibration_error"]
    assert found == pytest.approx(gap, abs=1e-6)


def test_certain_and_right_is_calibrated_and_certain_and_wrong_is_not():
    certain = torch.eye(4) * 1000
    assert measure(predictions(certain, range(4)))["calibration_error"] == 0
    assert measure(predictions(certain, [1, 2, 3, 0]))["calibration_error"] == 1


def test_logits_that_are_not_numbers_leave_their_metrics_out():
    found = measure(predictions([[float("nan")] * 4, [0.0] * 4], [0, 1]))
    assert not {"auroc", "calibration_error"} & found.keys()


def test_nothing_is_defined_without_images():
    assert measure(Predictions(numpy.zeros((3, 3), dtype=numpy.int64))) == {}


@pytest.fixture
def entropy(monkeypatch):
    """A metric that needs logits, registered for one test."""
    len(METRICS)
    monkeypatch.setattr(METRICS, "_found", dict(METRICS._found))

    def compute(predictions):
        assert predictions.logits.shape == (len(predictions.labels), 3)
        logs = predictions.logits.log_softmax(1)
        return float(-(logs.exp() * logs).sum(1).mean())

    return register_metric(
        Metric(name="entropy", summary="nats", compute=compute, needs_logits=True)
    )


class Constant(torch.nn.Module):
    def forward(self, images):
        return torch.tensor([2.0, 0.0, 0.0]).expand(len(images), 3)


def test_a_new_metric_is_one_definition_and_every_score_has_it(entropy):
    pixels, labels = colored_images(18)
    domains = numpy.repeat([0, 1], 9)
    measured = Evaluation(
        ArrayPixels(pixels),
        {"test": numpy.arange(18)},
        labels,
        domains,
        ("one", "other"),
        3,
        4,
        torch.device("cpu"),
    )
    for score in measured.scores(Constant()):
        assert (
            list(score.metrics)
            == [name for name in METRICS if name not in OF_A_DECISION]
            == [
                "accuracy",
                "balanced_accuracy",
                "macro_f1",
                "auroc",
                "calibration_error",
                "largest_class_share",
                "entropy",
            ]
        )
        assert score.metrics["accuracy"] == score.accuracy == pytest.approx(1 / 3)
        shares = numpy.exp([2, 0, 0]) / numpy.exp([2, 0, 0]).sum()
        assert score.metrics["entropy"] == pytest.approx(-(shares * numpy.log(shares)).sum())
        assert {row.metric: row.value for row in score.rows(1)} == {
            "loss": score.loss,
            **score.metrics,
        }
    assert "entropy" not in measure(Predictions(numpy.eye(3, dtype=numpy.int64)))


def test_two_metrics_of_one_name_and_undefined_values(entropy):
    with pytest.raises(FeddgError, match="two metrics are called 'entropy'"):
        register_metric(Metric(name="entropy", summary="", compute=len))
    register_metric(Metric(name="undefined", summary="", compute=lambda predictions: float("nan")))
    assert "undefined" not in measure(Predictions(numpy.eye(3, dtype=numpy.int64)))
