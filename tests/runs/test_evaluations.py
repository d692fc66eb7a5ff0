"""Domains as one number: by hand, what must always hold, and what chooses a round by it."""

import math
from typing import get_args

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as theirs

from feddg import Experiment
from feddg.errors import ExperimentError
from feddg.evaluation.metrics import METRICS, Predictions, measure
from feddg.records import EvaluationRow
from feddg.runs.evaluations import AGGREGATES, Evaluations
from feddg.runs.kept_models import KeptModels
from feddg.runs.reading import read_run
from feddg.runs.selection_rules import BEST_HELD_OUT, BEST_IN_DOMAIN
from feddg.settings import EvaluateSettings


def row(domain, confusion, round=1, split="test", **more):
    """A row as an evaluation writes it."""
    counts = numpy.array(confusion)
    found = measure(Predictions(counts)) | more
    return EvaluationRow(
        round=round,
        split=split,
        domain=domain,
        accuracy=found["accuracy"],
        examples=int(counts.sum()),
        metrics=found,
        confusion=counts.tolist(),
    )


ROWS = [
    row("a", [[3, 1], [0, 4]], calibration_error=0.1),
    row("b", [[1, 0], [1, 0]], calibration_error=0.3),
]


def test_three_aggregates_by_hand():
    found = Evaluations(ROWS)
    assert found.value(1, "test") == found.accuracy(1, "test") == pytest.approx((7 / 8 + 1 / 2) / 2)
    assert found.value(1, "test", aggregate="pooled") == pytest.approx(8 / 10)
    assert found.value(1, "test", aggregate="worst_domain") == 1 / 2
    # Pooled: class 0 has 4 of 5, class 1 has 4 of 5.
    assert found.value(1, "test", "balanced_accuracy", "pooled") == pytest.approx(0.8)
    assert found.value(1, "test", "calibration_error", "worst_domain") == 0.3
    assert found.value(1, "test", "calibration_error", "pooled") is None
    assert found.value(1, "test", "largest_class_share", "worst_domain") is None
    assert (
        found.value(2, "test")
        is found.value(None, "test")
        is found.value(1, "test", "mine")
        is None
    )


CONFUSIONS = st.lists(
    st.lists(st.integers(0, 5), min_size=9, max_size=9).filter(any), min_size=1, max_size=5
)


@given(CONFUSIONS)
def test_pooled_is_one_domain_and_means_lie_between_the_worst_and_the_best(cells):
    counts = [numpy.reshape(cell, (3, 3)) for cell in cells]
    found = Evaluations(row(str(i), count) for i, count in enumerate(counts))
    true, predicted = numpy.array(
        [pair for count in counts for pair in numpy.argwhere(count).repeat(count[count > 0], 0)]
    ).T
    together = theirs.f1_score(
        true, predicted, labels=numpy.unique(true), average="macro", zero_division=0
    )
    assert found.value(1, "test", "macro_f1", "pooled") == pytest.approx(together)
    accuracy = theirs.accuracy_score(true, predicted)
    assert found.value(1, "test", "accuracy", "pooled") == pytest.approx(accuracy)
    for metric in ("accuracy", "balanced_accuracy", "macro_f1"):
        worst, mean = (found.value(1, "test", metric, a) for a in ("worst_domain", "domain_mean"))
        best = max(entry.metric(metric) for entry in found.at(1, "test"))
        assert worst - 1e-12 <= mean <= best + 1e-12


def test_without_counts_only_accuracy_is_pooled():
    bare = [entry.model_copy(update={"confusion": None}) for entry in ROWS]
    found = Evaluations(bare)
    assert found.value(1, "test", "accuracy", "pooled") == pytest.approx(0.8)
    assert found.value(1, "test", "macro_f1", "pooled") is None
    assert found.support("test", "a") is None


def test_support_is_that_of_the_images_however_many_models_were_asked():
    three = numpy.array([[3, 1], [0, 4]]) * 3
    asked = row("a", three).model_copy(update={"examples": 8})
    assert Evaluations([asked]).support("test", "a") == [4, 4]
    assert Evaluations(ROWS).support("test", "b") == [1, 1]


def test_all_metrics_are_listed_in_the_order_of_tables_and_strange_ones_last():
    found = Evaluations([row("a", [[1, 0], [0, 1]], mine=0.5)]).metrics("test")
    known = [name for name in METRICS if name in found]
    assert found == [*known, "mine"]
    assert set(AGGREGATES) == {"domain_mean", "pooled", "worst_domain"}


@pytest.mark.parametrize("split", ["val", "id_val"])
def test_a_round_is_chosen_by_the_metric_asked_for(split):
    # Round 1 names the commonest class always; round 2 finds the rare one, too.
    lazy, fair = [[90, 0], [10, 0]], [[70, 20], [0, 10]]
    rows = [row("a", lazy, 1, split), row("a", fair, 2, split)]
    rule = BEST_HELD_OUT if split == "val" else BEST_IN_DOMAIN
    chosen = {
        by: rule.choose(Evaluations(rows, select_by=by))
        for by in ("accuracy", "balanced_accuracy", "macro_f1")
    }
    assert chosen == {"accuracy": 1, "balanced_accuracy": 2, "macro_f1": 2}


def test_every_metric_with_a_better_end_chooses_and_less_may_be_better():
    rows = [
        row("a", [[1, 1], [1, 1]], 1, "id_val", auroc=0.9, calibration_error=0.3),
        row("a", [[1, 1], [1, 1]], 2, "id_val", auroc=0.5, calibration_error=0.1),
        row("a", [[1, 1], [1, 1]], 3, "id_val", auroc=math.nan, calibration_error=math.nan),
    ]
    chosen = {
        by: BEST_IN_DOMAIN.choose(Evaluations(rows, select_by=by))
        for by in ("auroc", "calibration_error", "nobody_measured")
    }
    assert chosen == {"auroc": 1, "calibration_error": 2, "nobody_measured": None}


def test_domains_become_one_number_as_asked():
    def of(round_, small, large):
        hits = [row("a", [[small, 0], [4 - small, 0]], round_, "id_val")]
        return [*hits, row("b", [[large, 0], [40 - large, 0]], round_, "id_val")]

    rows = [*of(1, 4, 12), *of(2, 1, 30), *of(3, 2, 24)]  # means .65 .5 .55, worst .3 .25 .5
    chosen = {
        over: BEST_IN_DOMAIN.choose(Evaluations(rows, select_over=over)) for over in AGGREGATES
    }
    assert chosen == {"domain_mean": 1, "pooled": 2, "worst_domain": 3}
    worst = [
        row("a", [[1, 0], [0, 1]], 1, "id_val", calibration_error=0.4),
        row("b", [[1, 0], [0, 1]], 1, "id_val", calibration_error=0.1),
        row("a", [[1, 0], [0, 1]], 2, "id_val", calibration_error=0.3),
        row("b", [[1, 0], [0, 1]], 2, "id_val", calibration_error=0.3),
    ]
    both = {
        over: BEST_IN_DOMAIN.choose(
            Evaluations(worst, select_by="calibration_error", select_over=over)
        )
        for over in ("domain_mean", "worst_domain")
    }
    assert both == {"domain_mean": 1, "worst_domain": 2}


def test_the_registry_of_metrics_is_the_one_list_that_select_by_takes_from():
    able = {name for name, metric in METRICS.items() if metric.higher_is_better is not None}
    assert {"auroc", "calibration_error", "macro_f1"} <= able
    for name in able:
        made = Experiment(data="digits", hold_out="sketch", evaluate={"select_by": name})
        assert made.evaluate.select_by == name
    with pytest.raises(ExperimentError, match=r"select_by: unknown metric 'aurok' .*'auroc'"):
        Experiment(data="digits", hold_out="sketch", evaluate={"select_by": "aurok"})
    with pytest.raises(ExperimentError, match="largest_class_share says how images are"):
        Experiment(data="digits", hold_out="s", evaluate={"select_by": "largest_class_share"})
    pooled = {"select_by": "macro_f1", "select_over": "pooled"}
    with pytest.raises(ExperimentError, match="macro_f1 is not pooled while a run goes on"):
        Experiment(data="digits", hold_out="sketch", evaluate=pooled)
    over = EvaluateSettings.model_fields["select_over"].annotation
    assert set(get_args(over)) == set(AGGREGATES)


def test_a_metric_that_is_not_defined_chooses_nothing_and_says_so(caplog):
    def kept(rows, **chosen):
        models = KeptModels(None, {}, [], EvaluateSettings(**chosen))
        models._choose = lambda *_: None
        models.take_in(None, rows)

    one_class = [row("a", [[3, 1], [0, 0]], 1, "id_val")]
    kept(one_class, select_by="accuracy")
    assert not caplog.messages
    kept(one_class, select_by="auroc")
    assert "auroc is not defined for every domain of id_val" in caplog.text


def test_what_chooses_is_read_from_the_experiment_and_changes_the_id_only_where_it_says_new(
    folder_maker,
):
    assert read_run(folder_maker().write()).evaluations.select_by == "accuracy"
    plain = Experiment(data="digits", hold_out="sketch")
    same = Experiment(data="digits", hold_out="sketch", evaluate={"select_by": "accuracy"})
    other = Experiment(data="digits", hold_out="sketch", evaluate={"select_by": "macro_f1"})
    assert plain.id == same.id != other.id
    worst = Experiment(data="digits", hold_out="sketch", evaluate={"select_over": "worst_domain"})
    assert len({plain.id, other.id, worst.id}) == 3
