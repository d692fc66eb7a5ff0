"""Intervals of shares, by scipy and by simulation; several p values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from feddg.evaluation.groups import effective_number, variance_of_sum
from feddg.runs.intervals import holm, mean_of_shares, wilson


@given(st.integers(1, 5000), st.data())
def test_wilson_is_scipys(examples, data):
    correct = data.draw(st.integers(0, examples))
    theirs = stats.binomtest(correct, examples).proportion_ci(method="wilson")
    ours = wilson(correct / examples, examples)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_no_share_has_no_interval():
    with pytest.raises(ValueError, match="no share"):
        wilson(0.5, 0)


def test_the_mean_of_two_domains_is_covered_as_often_as_promised():
    random = np.random.default_rng(3)
    true, sizes = (0.9, 0.4), (60, 150)
    covered = 0
    for _ in range(2000):
        parts = [(random.binomial(n, p) / n, n) for p, n in zip(true, sizes)]
        found = mean_of_shares(parts)
        covered += found.low <= sum(true) / 2 <= found.high
    # a standard error of 0.005
    assert 0.93 < covered / 2000 < 0.97


def test_images_of_a_patient_count_as_what_they_tell():
    values = np.repeat([1.0, 0.0] * 20, 10)
    groups = np.repeat(np.arange(40), 10)
    assert effective_number(values, groups) == pytest.approx(38, abs=3)  # 400 images, 40 patients
    assert effective_number(values, None) == 400
    assert effective_number(np.ones(50), np.arange(50) // 5) < 10
    assert effective_number(np.ones(5), np.zeros(5)) == 1
    random = np.random.default_rng(0)
    held = 0
    for _ in range(300):
        rate = random.beta(4, 1, size=30)
        hits = random.random((30, 8)) < rate[:, None]
        groups = np.repeat(np.arange(30), 8)
        number = effective_number(hits.ravel().astype(float), groups)
        found = wilson(float(hits.mean()), number)
        held += found.low <= 0.8 <= found.high
    assert held / 300 == pytest.approx(0.95, abs=0.04)


def test_the_variance_over_groups_of_unequal_size_is_cr2():
    """Beside the definition by matrices (Bell and McCaffrey 2002); of equal groups, Cochran's."""
    values = np.random.default_rng(2).random(12)
    for sizes in ([5, 4, 2, 1], [3, 3, 3, 3]):
        groups = np.repeat(np.arange(4), sizes)
        member = (groups == np.arange(4)[:, None]).astype(float)
        off = np.eye(12) - 1 / 12
        widened = (member @ off) / np.sqrt(1 - np.array(sizes) / 12)[:, None]
        among = widened @ widened.T
        variance, freedom = variance_of_sum(values, groups)
        assert variance == pytest.approx(((widened @ values) ** 2).sum())
        assert freedom == pytest.approx(np.trace(among) ** 2 / (among**2).sum())
    assert freedom == pytest.approx(3)
    sums = member @ (values - values.mean())
    assert variance == pytest.approx(4 / 3 * (sums**2).sum())


@pytest.mark.parametrize("sizes", [[200, *[10] * 20], [900, *[1] * 99]])
def test_one_patient_with_most_images_is_one_patient(sizes):
    random, held = np.random.default_rng(1), 0
    groups = np.repeat(np.arange(len(sizes)), sizes)
    for _ in range(400):
        hits = random.random(len(groups)) < random.beta(6.3, 2.7, len(sizes))[groups]
        found = wilson(float(hits.mean()), effective_number(hits.astype(float), groups))
        held += found.low <= 0.7 <= found.high
    assert held / 400 > 0.91  # by the number of groups it was .77 and .15


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []
