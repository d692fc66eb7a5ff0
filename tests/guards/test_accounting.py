"""Epsilon: against published values, against the accountant, and from the one to the other."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from feddg.clients.sampling import Schedule, drawn_clients, secret_clients
from feddg.guards.accounting import (
    accountants_epsilon,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_noise,
    rounded_up,
    sampled_epsilon,
    sampled_noise,
    together,
)

# dp-accounting's own test table (pld_privacy_accountant_test.py): three releases at epsilon 1.
COMPOSED = (math.sqrt(3), 0.126936)
SAMPLED = (0.5, 0.2, 0.15594)
# Balle and Wang's calibration (2018), delta 1e-5: noise by epsilon.
CALIBRATED = {0.5: 7.03, 1.0: 3.73, 2.0: 1.99, 4.0: 1.081, 8.0: 0.600, 16.0: 0.344}


def test_three_releases_cost_what_the_accountants_own_table_says():
    noise, delta = COMPOSED
    assert gaussian_epsilon(together([noise] * 3), delta) == pytest.approx(1, rel=0.01)
    assert accountants_epsilon(together([noise] * 3), delta) == pytest.approx(1, rel=0.01)


def test_three_secret_draws_cost_what_the_accountants_own_table_says():
    noise, rate, delta = SAMPLED
    assert sampled_epsilon(((noise, rate),) * 3, delta) == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("epsilon", CALIBRATED)
def test_the_noise_for_an_epsilon_is_the_published_one(epsilon):
    assert gaussian_noise(epsilon, 1e-5) == pytest.approx(CALIBRATED[epsilon], rel=0.01)
    assert gaussian_epsilon(CALIBRATED[epsilon], 1e-5) == pytest.approx(epsilon, rel=0.01)


@pytest.mark.parametrize("noise", [0.4, 1.0, 5.0, 50.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-7])
def test_the_accountant_and_the_closed_form_agree(noise, delta):
    exact, reported = gaussian_epsilon(noise, delta), accountants_epsilon(noise, delta)
    assert exact <= reported * (1 + 1e-6)
    assert reported == pytest.approx(exact, rel=1e-3)


def test_the_closed_form_is_the_gaussians_own_trade_off():
    # delta(epsilon) = P(loss > epsilon) - e^epsilon P'(loss > epsilon), by integration.
    noise, epsilon = 0.8, 1.3
    edge = epsilon * noise**2 + 0.5  # where the privacy loss is epsilon
    expected = stats.norm.sf(edge, 1, noise) - math.exp(epsilon) * stats.norm.sf(edge, 0, noise)
    assert gaussian_delta(epsilon, noise) == pytest.approx(expected, rel=1e-9)


@given(st.floats(0.01, 40), st.floats(1e-9, 0.1))
def test_noise_and_epsilon_are_each_others_inverse(epsilon, delta):
    assert gaussian_epsilon(gaussian_noise(epsilon, delta), delta) == pytest.approx(
        epsilon, rel=1e-6
    )


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=20))
def test_more_releases_never_cost_less(noises):
    assert together([*noises, 3.0]) <= together(noises)


def test_no_noise_costs_everything_and_no_release_nothing():
    assert gaussian_epsilon(0.0, 1e-5) == accountants_epsilon(0.0, 1e-5) == math.inf
    assert together([1.0, 0.0]) == 0.0
    assert sampled_epsilon(((0.0, 0.5),), 1e-5) == math.inf
    assert accountants_epsilon(together([]), 1e-5) == sampled_epsilon((), 1e-5) == 0.0


def test_an_epsilon_too_large_to_be_counted_is_that_of_the_closed_form():
    assert accountants_epsilon(1e-3, 1e-5) == gaussian_epsilon(1e-3, 1e-5) > 5e5
    drawn = sampled_epsilon(((1e-3, 0.5),) * 4, 1e-5)
    assert drawn == gaussian_epsilon(0.5e-3, 1e-5)


def test_secret_draws_cost_less_than_known_ones():
    noise = sampled_noise(2.0, 1e-5, 0.25, 4)
    assert 0.97 * 2 < sampled_epsilon(((noise, 0.25),) * 4, 1e-5) <= 2
    assert noise < gaussian_noise(2.0, 1e-5) * math.sqrt(4)


@given(st.floats(1e-3, 1e4))
def test_rounding_a_noise_never_makes_it_smaller(noise):
    assert noise < rounded_up(noise) < noise * 1.002


def test_a_schedule_knows_who_takes_part_most_often():
    plan = Schedule(10, 3, seed=5, rounds=20)
    counts = [0] * 10
    for round in range(1, 21):
        for id in drawn_clients(range(10), 3, 5, round):
            counts[id] += 1
    assert sum(counts) == 60
    assert plan.most == max(counts)
    assert plan.rate == 0.3
    assert Schedule(4, None, rounds=7).most == 7


def test_a_secret_draw_has_its_probability_and_no_seed():
    taken = [len(secret_clients(range(1000), 0.3)) for _ in range(20)]
    low, high = stats.binom.ppf([5e-10, 1 - 5e-10], 20_000, 0.3)
    assert low < sum(taken) < high
    assert len(set(taken)) > 1
