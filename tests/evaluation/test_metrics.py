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
from feddg.evaluation.metrics import METRICS, Metric, Predictions, measure, register_metric
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
    assert found["largest_class_share"] == max(map(labels.count, labels)) / len(labels)


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
        Metric(name="entropy", summary="nats", compute=compute, needs_logits=True, order=5)
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
            == list(METRICS)
            == [
                "accuracy",
                "entropy",
                "balanced_accuracy",
                "largest_class_share",
            ]
        )
        assert score.metrics["accuracy"] == score.accuracy == pytest.approx(1 / 3)
        shares = numpy.exp([2, 0, 0]) / numpy.exp([2, 0, 0]).sum()
        assert score.metrics["entropy"] == pytest.approx(-(shares * numpy.log(shares)).sum())
        assert score.row(1).metrics == score.metrics
    assert "entropy" not in measure(Predictions(numpy.eye(3, dtype=numpy.int64)))


def test_two_metrics_of_one_name_and_undefined_values(entropy):
    with pytest.raises(FeddgError, match="two metrics are called 'entropy'"):
        register_metric(Metric(name="entropy", summary="", compute=len))
    register_metric(Metric(name="undefined", summary="", compute=lambda predictions: float("nan")))
    assert "undefined" not in measure(Predictions(numpy.eye(3, dtype=numpy.int64)))
