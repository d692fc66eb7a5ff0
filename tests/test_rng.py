"""Named random streams."""

import math
import os
import threading

import numpy
import pytest
import torch
from scipy import stats

from feddg import rng
from feddg.models.backbones import build_network
from feddg.rng import DrawnFrom, add_noise, derive_seed, discrete_gaussian, numpy_stream, stream
from federations import same
from odd_inputs import NOT_FINITE


def test_seeds_never_change_between_versions_or_machines():
    assert derive_seed(0, "a", 1) == 4332523998341121174
    assert derive_seed(0) != derive_seed(1)


def test_streams_with_different_names_differ_and_ids_are_not_glued_together():
    names = [("client", 1, 23), ("client", 12, 3), ("client", 123), ("sample", 1, 23)]
    assert len({derive_seed(7, *name) for name in names}) == len(names)


def test_a_stream_repeats_itself_and_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    draws = [torch.rand(3, generator=stream(5, "x")) for _ in range(2)]
    assert torch.equal(*draws)
    assert torch.equal(torch.get_rng_state(), before)
    assert numpy.array_equal(numpy_stream(5, "x").random(3), numpy_stream(5, "x").random(3))


def draws():
    layer = torch.nn.Linear(2, 3)
    drawn = [torch.rand(2), torch.randn(2), torch.randint(9, (2,)), torch.randint(3, 9, (2,))]
    drawn += [
        torch.randperm(5),
        torch.bernoulli(torch.full((3,), 0.5)),
        torch.normal(0.0, 1.0, (2,)),
    ]
    return [layer.weight, *drawn, torch.nn.init.trunc_normal_(torch.empty(4))]


def test_a_block_draws_what_the_global_generator_would_and_leaves_it_alone():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        expected = draws()
    before = torch.get_rng_state()
    with DrawnFrom(5):
        found = draws()
        with DrawnFrom(6):
            other = torch.rand(2)
        with torch.device("meta"):
            assert torch.rand(2).is_meta
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, found, expected))
    assert not torch.equal(other, expected[1])


def test_initial_weights_are_the_same_whatever_other_threads_draw():
    alone = build_network("cnn", 3, weights=None, seed=1).state_dict()
    done = threading.Event()

    def disturb():
        while not done.is_set():
            torch.rand(1)
            torch.manual_seed(0)

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    try:
        found = [build_network("cnn", 3, weights=None, seed=1).state_dict() for _ in range(20)]
    finally:
        done.set()
        disturbing.join()
    assert all(same(one, alone) for one in found)


# Noise that cannot be taken off: its distribution, its grid, and the attack on a small key.


KEYS = 2**10
"""The key space of the attack's test; the old scheme's had 2**32, 159 CPU seconds."""


def crack(observed, draw):
    """The attack: tries every key, and returns the one whose noise is what was observed."""
    for key in range(KEYS):  # a float32 sum has kept six decimals of its noise
        if torch.allclose(draw(key)[:64].double(), observed[:64], atol=1e-6):
            return key
    return None


def seeded(key):
    return torch.randn(4096, generator=torch.Generator().manual_seed(key))


def test_the_attack_takes_noise_of_a_seeded_generator_off_again():
    secret = int.from_bytes(os.urandom(8), "big") % KEYS
    values = torch.linspace(-1, 1, 4096)
    released = values + seeded(secret)
    found = crack((released - values).double(), seeded)
    assert found == secret
    torch.testing.assert_close(released - seeded(found), values)


def noise(shape, deviation):
    """Noise alone."""
    return add_noise(torch.zeros(shape), deviation)


def weak_noise(monkeypatch, key):
    with monkeypatch.context() as patch:
        patch.setattr(rng.os, "urandom", numpy.random.default_rng(key).bytes)
        return noise((256,), 1.0)


def test_the_attack_finds_a_key_of_ours_only_if_the_system_had_a_small_one(monkeypatch):
    observed = weak_noise(monkeypatch, 321)
    assert crack(observed, lambda key: weak_noise(monkeypatch, key)) == 321
    observed = noise((256,), 1.0)
    assert crack(observed, seeded) is None
    assert crack(observed, lambda key: weak_noise(monkeypatch, key)) is None


def test_every_number_takes_its_own_entropy(monkeypatch):
    taken = []
    original = os.urandom
    monkeypatch.setattr(rng.os, "urandom", lambda size: taken.append(size) or original(size))
    noise((10_000,), 1.0)
    assert sum(taken) >= 10_000 * 20


def test_draws_never_repeat():
    rows = discrete_gaussian(400_000).reshape(-1, 4)
    assert len(numpy.unique(rows, axis=0)) == len(rows)
    assert not torch.equal(noise((100,), 1.0), noise((100,), 1.0))


def test_no_seed_moves_it():
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        numpy.random.seed(0)  # noqa: NPY002
        drawn.append(noise((100,), 1.0))
    assert not torch.equal(*drawn)


NEVER = 1e-9
"""A right implementation fails a test with this probability."""


@pytest.mark.parametrize("deviation", [1e-6, 0.5, 300.0])
def test_variance_and_shape_are_a_gaussians(deviation):
    count = 400_000
    drawn = noise((400, 1000), deviation).flatten().numpy() / deviation
    assert drawn.dtype == numpy.float64
    sum_of_squares = float((drawn**2).sum())
    low, high = stats.chi2.ppf([NEVER / 2, 1 - NEVER / 2], count)
    assert low < sum_of_squares < high
    assert abs(drawn.mean()) < stats.norm.isf(NEVER / 2) / math.sqrt(count)
    assert stats.kstest(drawn, "norm").pvalue > NEVER
    assert abs(stats.kurtosis(drawn)) < 6 * math.sqrt(24 / count)
    neighbours = numpy.corrcoef(drawn[:-1], drawn[1:])[0, 1]
    assert abs(neighbours) < 6 / math.sqrt(count)


@pytest.mark.parametrize("fineness", [2, 3, 5])
def test_a_coarse_grid_has_exactly_the_probabilities_of_the_discrete_gaussian(fineness):
    count, deviation = 600_000, 2**fineness
    drawn = discrete_gaussian(count, fineness)
    edge = 4 * deviation
    values = numpy.arange(-12 * deviation, 12 * deviation + 1)
    likely = numpy.exp(-(values**2) / (2 * deviation**2))
    likely /= likely.sum()
    inside = numpy.abs(values) <= edge
    expected = count * numpy.append(likely[inside], likely[~inside].sum())
    found = [int((drawn == value).sum()) for value in values[inside]]
    found.append(count - sum(found))
    assert stats.chisquare(found, expected).pvalue > NEVER


def test_tails_reach_as_far_as_they_should():
    drawn = numpy.abs(discrete_gaussian(2_000_000)) / 2**24
    for far in (3, 4):
        expected = 2_000_000 * 2 * stats.norm.sf(far)
        assert abs((drawn > far).sum() - expected) < 7 * math.sqrt(expected)
    assert 4.5 < drawn.max() < 8


def test_a_value_is_on_the_grid_before_the_noise_is_added():
    deviation = 3e-5
    step = deviation / 2**24
    values = torch.randn(2000, dtype=torch.float64) * 1e-3
    steps = add_noise(values, deviation) / step
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-3)
    # Two neighbours reach the same set of outcomes: nothing tells them apart by their digits.
    assert (steps.round() % 2).mean().item() == pytest.approx(0.5, abs=0.1)


def test_noise_lies_around_the_value():
    values = torch.full((200, 1000), 7.0, dtype=torch.float32)
    noised = add_noise(values, 0.1)
    assert noised.dtype == torch.float64
    assert noised.shape == values.shape
    assert noised.mean().item() == pytest.approx(7.0, abs=0.1 * 6 / math.sqrt(200_000))


def test_a_deviation_that_is_none_is_refused(subtests):
    for deviation in [0.0, -1.0, *NOT_FINITE]:
        with subtests.test(deviation=deviation), pytest.raises(ValueError, match="above 0"):
            noise((3,), deviation)
