"""Statistics against scipy's own test, pandas, and simulations with a known answer."""

import math

import numpy as np
import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from feddg.comparison.statistics import (
    average_over_columns,
    best_other,
    paired_margin,
    ranks,
    spread,
)

accuracy = st.floats(0, 1)
keys = st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 4))
results = st.dictionaries(keys, accuracy, min_size=1)


@given(st.lists(accuracy, min_size=2))
def test_spread_is_pandas_mean_and_deviation(values):
    found, series = spread(values), pandas.Series(values)
    assert found.mean == pytest.approx(series.mean(), abs=1e-12)
    assert found.deviation == pytest.approx(series.std(), abs=1e-9)


def test_the_spread_of_little():
    assert spread([]) is None
    assert spread([0.5]).deviation is None


@given(results, results)
def test_margin_is_scipy_s_paired_t_interval(ours, theirs):
    margin = paired_margin(ours, theirs)
    shared = sorted(set(ours) & set(theirs))
    if not shared:
        assert margin is None
        return
    a, b = np.array([[r[k] for k in shared] for r in (ours, theirs)])
    assert margin.pairs == len(shared)
    assert margin.mean == pytest.approx((a - b).mean(), abs=1e-12)
    if len(shared) < 3:
        assert margin.low is None
    elif np.ptp(a - b) > 1e-6:
        expected = stats.ttest_rel(a, b).confidence_interval(0.95)
        assert (margin.low, margin.high) == pytest.approx((expected.low, expected.high), abs=1e-9)


@given(results, results)
def test_the_margin_turns_round_with_the_methods(ours, theirs):
    there, back = paired_margin(ours, theirs), paired_margin(theirs, ours)
    if there is not None:
        assert there.mean == pytest.approx(-back.mean, abs=1e-12)
    if there is not None and there.low is not None:
        assert there.low == pytest.approx(-back.high, abs=1e-12)


@given(st.floats(-0.5, 0.5), st.integers(1, 20))
def test_equal_differences_decide_nothing(gain, pairs):
    """They would give an interval of no width, which excludes zero whatever they are."""
    theirs = {("a", seed): 0.5 + 0.01 * seed for seed in range(pairs)}
    margin = paired_margin({key: value + gain for key, value in theirs.items()}, theirs)
    assert margin.mean == pytest.approx(gain)
    assert (margin.low, margin.high, margin.decided) == (None, None, False)
    expected = {1: "one pair only", 2: "only 2 pairs"}.get(pairs, "all differences equal")
    assert margin.why_no_interval == expected


def draws(random, seeds, gain=0.0):
    """A method's made-up accuracies: scenarios differ much, seeds a little."""
    return {
        (scenario, seed): 0.5 + 0.1 * i + gain + 0.02 * random.standard_normal()
        for i, scenario in enumerate("pacs")
        for seed in range(seeds)
    }


def test_a_method_against_itself_is_covered_as_often_as_the_interval_promises():
    random = np.random.default_rng(0)
    margins = [paired_margin(draws(random, 3), draws(random, 3)) for _ in range(1000)]
    covered = np.mean([m.low <= 0 <= m.high for m in margins])
    # 0.95 with a standard error of 0.007
    assert 0.925 < covered < 0.975


def test_a_clear_gain_is_decided_and_no_gain_is_not():
    random = np.random.default_rng(1)
    assert paired_margin(draws(random, 5, gain=0.1), draws(random, 5)).decided
    assert not paired_margin(draws(random, 5), draws(random, 5)).decided


def test_an_average_needs_every_column_of_a_seed():
    found = {("a", 0): 0.2, ("b", 0): 0.4, ("a", 1): 0.6}
    average = average_over_columns(found, ["a", "b"])
    assert (average.mean, average.count) == (pytest.approx(0.3), 1)
    assert average_over_columns(found, ["a", "c"]) is None


def test_the_best_other_method_is_never_oneself_and_is_judged_on_shared_pairs():
    found = {
        "mine": {("a", 0): 0.9, ("b", 0): 0.9},
        "fair": {("a", 0): 0.5, ("b", 0): 0.5},
        "better": {("a", 0): 0.6, ("b", 0): 0.6},
        "lucky": {("a", 0): 0.99},
        "elsewhere": {("c", 0): 1.0},
    }
    assert best_other("mine", found) == "better"
    assert best_other("better", found) == "mine"
    assert best_other("mine", {"mine": found["mine"]}) is None


@given(st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=1, max_size=5))
def test_ranks_agree_with_pandas(rows):
    table = {f"m{i}": {("a", s): v / 5 for s, v in enumerate(r)} for i, r in enumerate(rows)}
    expected = pandas.DataFrame(table).rank(axis=1, ascending=False)
    found = ranks(table)
    for name, column in expected.items():
        assert found[name] == pytest.approx(column.to_dict())
    assert math.fsum(v for r in found.values() for v in r.values()) == pytest.approx(
        4 * len(rows) * (len(rows) + 1) / 2
    )
