"""Decisions: intervals by simulation, predictive values; against scikit-learn. Subgroups: what is
shown to be worse is, and many small ones give no false alarm.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from sklearn.metrics import average_precision_score, roc_auc_score

from feddg.evaluation.decision import Decision, Part, decision_metrics, threshold_for
from feddg.runs.details import (
    auroc_interval,
    average_precision_interval,
    decide,
    decision_row,
    predictive_values,
    reliability,
    subgroup_rows,
    worst,
)
from feddg.runs.intervals import wilson
from rankings import rankings


@given(rankings())
def test_areas_are_scikit_learns_whatever_the_groups(ranking):
    positive, scores = ranking
    groups = np.arange(len(scores)) // 2
    for own in (None, groups):
        area, precision = auroc_interval(*ranking, own), average_precision_interval(*ranking, own)
        assert area.share == pytest.approx(roc_auc_score(positive, scores))
        assert precision.share == pytest.approx(average_precision_score(positive, scores))
        assert 0 <= area.low <= area.share <= area.high <= 1
        assert 0 <= precision.low <= precision.share <= precision.high <= 1


def test_delongs_variance_by_its_definition():
    random = np.random.default_rng(0)
    positive = random.random(60) < 0.4
    scores = (random.normal(size=60) + positive).round(1)
    pairs = (scores[positive][:, None] > scores[~positive]) + 0.5 * (
        scores[positive][:, None] == scores[~positive]
    )
    sizes = np.array([positive.sum(), (~positive).sum()])
    parts = np.array([pairs.mean(1).var(ddof=1), pairs.mean(0).var(ddof=1)]) / sizes
    found = auroc_interval(positive, scores)
    width = math.log(found.high / (1 - found.high)) - math.log(found.low / (1 - found.low))
    from scipy.stats import t

    freedom = parts.sum() ** 2 / (parts**2 / (sizes - 1)).sum()
    area = found.share
    expected = 2 * t.ppf(0.975, freedom) * math.sqrt(parts.sum()) / (area * (1 - area))
    assert width == pytest.approx(expected)


@pytest.mark.parametrize("grouped", [False, True])
def test_intervals_of_auroc_hold_the_truth_in_95_of_100_cases(grouped):
    random, held, ignored, cases = np.random.default_rng(3), 0, 0, 400
    shift, share = 1.2, 0.6 if grouped else 0.0
    truth = 0.5 * math.erfc(-shift / 2)
    for _ in range(cases):
        patients, each = (40, 5) if grouped else (200, 1)
        positive = np.repeat(random.random(patients) < 0.4, each)
        groups = np.repeat(np.arange(patients), each)
        noise = math.sqrt(share) * np.repeat(random.normal(size=patients), each)
        noise = noise + math.sqrt(1 - share) * random.normal(size=len(groups))
        found = auroc_interval(positive, shift * positive + noise, groups)
        held += found.low <= truth <= found.high
        apart = auroc_interval(positive, shift * positive + noise)
        ignored += apart.low <= truth <= apart.high
    assert held / cases == pytest.approx(0.95, abs=0.035)
    if grouped:  # as if each image were a patient: far too narrow
        assert ignored / cases < 0.85


def test_one_patient_with_many_images_does_not_make_an_area_sure():
    random, held, sizes = np.random.default_rng(4), np.zeros(2), [200, *[10] * 20]
    groups = np.repeat(np.arange(21), sizes)

    def draw():
        positive = (random.random(21) < 0.4)[groups]
        noise = random.normal(size=21)[groups] + random.normal(size=len(groups))
        return positive, positive + noise / math.sqrt(2)

    parts = [draw() for _ in range(600)]
    whole = [np.concatenate(part) for part in zip(*parts)]
    truths = 0.5 * math.erfc(-0.5), average_precision_score(*whole)
    drawn = [part for part in parts if 0 < part[0].sum() < len(groups)][:150]
    for positive, scores in drawn:
        for place, interval in enumerate((auroc_interval, average_precision_interval)):
            found = interval(positive, scores, groups)
            held[place] += found.low <= truths[place] <= found.high
    assert (held / len(drawn) > 0.9).all()  # the area's was .80


def test_images_of_equal_scores_are_one_point_of_the_reliability_curve():
    positive = np.arange(447) < 46
    ((score, share, images),) = reliability(positive, np.full(447, 0.088))
    assert (round(score, 3), images) == (0.088, 447)
    assert share.share == pytest.approx(46 / 447)
    scores = np.random.default_rng(0).permutation(103) / 103
    points = reliability(positive[:103], scores)
    assert [count for *_, count in points] == [11] * 3 + [10] * 7
    assert not reliability(positive[:0], scores[:0])
    tied = reliability(positive[:20], np.repeat([0.1, 0.2, 0.3], [3, 12, 5]))
    assert [(round(score, 1), count) for score, _, count in tied] == [(0.1, 3), (0.2, 12), (0.3, 5)]


def test_all_ranked_rightly_is_no_certainty():
    positive = np.array([False] * 10 + [True] * 8)
    found = auroc_interval(positive, positive.astype(float))
    assert (found.share, found.high) == (1, 1)
    assert found.low == wilson(1, 8).low < 0.7
    assert average_precision_interval(positive, positive.astype(float)) == found


def test_groups_whose_parts_cancel_are_no_certainty():
    patients = np.repeat(np.arange(20), 2)
    scores = np.arange(40) / 2  # of each patient, the image with the class is ranked a step higher
    found = auroc_interval(np.arange(40) % 2 == 1, scores, patients)
    assert found.share == pytest.approx(0.525)
    assert found == wilson(found.share, 20)


@pytest.mark.parametrize("each", [1, 5])
def test_intervals_of_average_precision_hold_the_truth(each):
    random, held, cases = np.random.default_rng(5), 0, 120

    def draw(patients):
        positive = np.repeat(random.random(patients) < 0.3, each)
        noise = np.repeat(random.normal(size=patients), each) + random.normal(size=len(positive))
        return positive, 1.5 * positive + noise / math.sqrt(2), np.repeat(np.arange(patients), each)

    positive, scores, _ = draw(40_000)
    truth = average_precision_score(positive, scores)
    for _ in range(cases):
        found = average_precision_interval(*draw(60))
        held += found.low <= truth <= found.high
    assert held / cases == pytest.approx(0.94, abs=0.05)


def test_the_interval_of_nearly_perfect_ranks_is_not_too_narrow():
    random, held, cases = np.random.default_rng(7), 0, 60

    def draw(positives, negatives):
        positive = np.arange(positives + negatives) < positives
        return positive, 3.2 * positive + random.normal(size=len(positive))

    truth = average_precision_score(*draw(200_000, 300_000))
    for _ in range(cases):
        found = average_precision_interval(*draw(40, 60))
        held += found.low <= truth <= found.high
        assert found.high > found.share or found.share == 1
    assert held / cases > 0.9


def test_the_interval_of_a_rare_class_ranked_at_chance_has_a_width():
    random, held, cases = np.random.default_rng(6), 0, 30

    def draw(images):
        positive = random.random(images) < 0.01
        return positive, 0.5 * positive + random.normal(size=images)

    truth = average_precision_score(*draw(400_000))
    for _ in range(cases):
        found = average_precision_interval(*draw(1000))
        held += found.low <= truth <= found.high
    assert held / cases > 0.85  # 0.95, less three deviations of chance


def test_predictive_values_are_bayes_rule_and_their_ends_hold():
    sens, spec, prevalence = wilson(0.9, 100), wilson(0.95, 400), 0.02
    ppv, npv = predictive_values(sens, spec, prevalence)
    assert ppv.share == pytest.approx(0.9 * 0.02 / (0.9 * 0.02 + 0.05 * 0.98))
    assert npv.share == pytest.approx(0.95 * 0.98 / (0.95 * 0.98 + 0.1 * 0.02))
    random, held = np.random.default_rng(0), 0
    for _ in range(300):
        found = predictive_values(
            wilson(random.binomial(100, 0.9) / 100, 100),
            wilson(random.binomial(400, 0.95) / 400, 400),
            prevalence,
        )[0]
        held += found.low <= ppv.share <= found.high
    assert held / 300 == pytest.approx(0.95, abs=0.04)
    perfect, _ = predictive_values(wilson(1, 50), wilson(1, 50), 0.1)
    assert perfect.share == 1
    assert 0.4 < perfect.low < 1


def test_the_threshold_comes_from_validation_alone():
    random = np.random.default_rng(0)
    positive = random.random(400) < 0.5
    inside = np.clip(0.3 * positive + 0.6 * random.random(400), 0, 1)
    parts = [
        Part("id_val", "a", positive, inside, None),
        Part("test", "b", positive, inside / 2, None),
    ]
    found = decide(parts, Decision(1, "sick", "specificity", 0.9))
    assert found.threshold == threshold_for(positive, inside, specificity=0.9)
    assert found.rows[0].specificity[0] == pytest.approx(0.9, abs=0.01)
    assert found.rows[1].sensitivity[0] < found.rows[0].sensitivity[0]
    assert found.rows[1].auroc == found.rows[0].auroc
    alone = [Part("id_val", "a", np.ones(5, bool), np.ones(5), None), parts[1]]
    without = decide(alone, Decision(1, "sick"))
    assert without.threshold is None
    assert without.rows[1].sensitivity is None
    assert without.rows[1].auroc is not None


def test_rounds_get_the_values_of_a_decision():
    random = np.random.default_rng(1)
    positive = random.random(90) < 0.4
    scores = np.round(np.clip(0.3 * positive + 0.6 * random.random(90), 0, 1), 2)  # some are equal
    parts = [Part("id_val", "a", positive, scores, np.arange(90) // 3)]
    parts += [
        Part("test", "b", positive, 1 - scores, None),
        Part("test", "c", ~positive & False, scores, None),
    ]
    table = decide(parts, Decision(1, "sick"))
    for part, row in zip(parts, table.rows):
        named = {"decision_auroc": row.auroc, "decision_ap": row.average_precision}
        named |= {"sensitivity": row.sensitivity, "specificity": row.specificity}
        expected = {name: ends[0] for name, ends in named.items() if ends is not None}
        assert decision_metrics(part, table.threshold) == expected


def test_of_nobody_called_positive_no_share_is_right():
    positive, scores = np.array([True, False] * 10), np.linspace(0, 0.5, 20)
    nobody, everybody = (
        decision_row(Part("test", "a", positive, scores, None), threshold)
        for threshold in (0.9, 0.0)
    )
    assert nobody.ppv is None
    assert nobody.npv[0] == pytest.approx(0.5)
    assert everybody.npv is None
    assert everybody.ppv[0] == pytest.approx(0.5)


def test_many_small_subgroups_give_few_false_alarms():
    random, alarms = np.random.default_rng(0), 0
    for _ in range(200):
        patients = random.integers(60, size=600)
        skill = random.beta(8, 2, size=60)
        correct = (random.random(600) < skill[patients]).astype(float)
        columns = {
            "scanner": random.integers(20, size=60).astype(str)[patients],
            "sex": np.array(["f", "m"])[random.integers(2, size=60)][patients],
        }
        rows = subgroup_rows("test", columns, correct, patients)
        alarms += any(row.p is not None and row.p < 0.05 for row in rows)
    assert alarms / 200 <= 0.07


def test_two_halves_are_one_comparison():
    random = np.random.default_rng(2)
    sex = np.array(["f", "m"])[random.integers(2, size=300)]
    correct = (random.random(300) < np.where(sex == "m", 0.65, 0.85)).astype(float)
    alone = [row.p for row in subgroup_rows("test", {"sex": sex}, correct)]
    thirds = np.array(["a", "b", "c"])[np.arange(300) % 3]
    among = subgroup_rows("test", {"sex": sex, "scanner": thirds}, correct)
    assert alone[0] == alone[1] < 0.05
    assert [row.p for row in among[:2]] == [pytest.approx(4 * alone[0])] * 2


def test_a_scanner_that_fails_is_named():
    random = np.random.default_rng(1)
    scanner = np.array(["a", "b", "c"])[np.arange(600) % 3]
    correct = (random.random(600) < np.where(scanner == "c", 0.6, 0.9)).astype(float)
    rows = subgroup_rows("test", {"scanner": scanner}, correct)
    assert worst(rows).value == "c"
    row = next(row for row in rows if row.value == "c")
    assert row.accuracy[0] == pytest.approx(correct[scanner == "c"].mean())
    assert row.difference == pytest.approx(
        correct[scanner == "c"].mean() - correct[scanner != "c"].mean()
    )
    assert worst(subgroup_rows("test", {"scanner": np.full(600, "a")}, correct)) is None


def test_one_group_with_a_class_leaves_its_average_precision_open():
    """No resample of groups varies the positives, so none says how far they may be off."""
    positive = np.array([True] * 3 + [False] * 20)
    groups = np.r_[[0] * 3, 1 + np.arange(20) // 2]
    scores = np.r_[[0.9, 0.8, 0.3], [0.5], np.linspace(0.29, 0.01, 19)]
    found = average_precision_interval(positive, scores, groups)
    assert found.share == pytest.approx(11 / 12)
    assert found.low < 0.3
    assert found.high > 0.99
