"""Means over rounds against plain loops over the rounds' models."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feddg.federation.served import (
    EMA,
    MEANS,
    TAIL,
    Means,
    first_of_tail,
    interpolated,
    rounds_in,
    served,
)
from feddg.methods.base import local_names
from feddg.settings import ServerSettings, TrainSettings
from federations import federation, same

ROUNDS = 5


def trained(method="fedavg", rounds=ROUNDS, server=None, kept=MEANS, **options):
    """A federation that kept the means, with a copy of every round's model."""
    settings = server or ServerSettings()
    small = federation(
        method,
        train=TrainSettings(rounds=rounds, batch_size=4, local_steps=2),
        server_settings=settings,
        **options,
    )
    small.server.means = Means(small.method, small.network, settings, kept)
    small.server.setup()
    models = []
    for _ in range(rounds):
        small.server.round()
        models.append({n: t.clone() for n, t in small.server.state.weights.items()})
    return small, models


def tail_of(models, share):
    """The mean of the last models, one number at a time in the order of the rounds."""
    last = models[first_of_tail(share, len(models)) - 1 :]
    mean = {name: tensor.clone() for name, tensor in last[0].items()}
    for count, model in enumerate(last[1:], start=2):
        for name, tensor in model.items():
            if tensor.is_floating_point():
                mean[name] = mean[name] + (tensor - mean[name]) * (1 / count)
            else:
                mean[name] = tensor
    return mean


def ema_of(models, decay):
    mean = {name: tensor.clone() for name, tensor in models[0].items()}
    for before, model in enumerate(models[1:], start=1):
        own = min(decay, before / (before + 9))
        for name, tensor in model.items():
            if tensor.is_floating_point():
                mean[name] = mean[name] + (tensor - mean[name]) * (1 - own)
            else:
                mean[name] = tensor
    return mean


@pytest.mark.parametrize("optimizer", ["none", "fedavgm"])
@pytest.mark.parametrize(("share", "decay"), [(0.5, 0.9), (0.2, 0.05), (1.0, 0.0)])
def test_means_are_those_of_a_plain_loop(optimizer, share, decay):
    settings = ServerSettings(tail=share, ema=decay, optimizer=optimizer)
    small, models = trained(server=settings)
    state = small.server.state
    assert same(served(state, "last"), models[-1])
    assert same(served(state, TAIL), tail_of(models, share))
    assert same(served(state, EMA), ema_of(models, decay))
    last = models[first_of_tail(share, ROUNDS) - 1 :]
    for name, tensor in served(state, TAIL).items():
        exact = torch.stack([model[name].double() for model in last]).mean(0)
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor.double(), exact, rtol=1e-5, atol=1e-6)
    assert (rounds_in(state, TAIL), rounds_in(state, EMA)) == (len(last), ROUNDS)


def test_statistics_are_averaged_and_counters_are_the_last():
    small, models = trained()
    tail = served(small.server.state, TAIL)
    (mean, counter) = (
        next(n for n in tail if n.endswith(end)) for end in ("running_mean", "batches_tracked")
    )
    assert not torch.equal(tail[mean], models[-1][mean])
    assert torch.equal(tail[counter], models[-1][counter])


@pytest.mark.parametrize("method", ["fedbn", "silobn"])
def test_what_stays_with_the_clients_is_left_alone(method):
    small, models = trained(method)
    local = local_names(small.method, small.network)
    assert local
    for mean in MEANS:
        found = served(small.server.state, mean)
        shared = {n for n in found if not torch.equal(found[n], models[-1][n])}
        assert shared
        assert not shared & local
        assert not any(key.endswith(tuple(local)) for key in small.server.state.extras)


def test_a_mean_that_has_not_begun_is_the_last_model():
    settings = ServerSettings(tail=0.2)
    small = federation(
        train=TrainSettings(rounds=5, batch_size=4, local_steps=1), server_settings=settings
    )
    small.server.means = Means(small.method, small.network, settings, (TAIL,))
    small.server.round()
    state = small.server.state
    assert rounds_in(state, TAIL) == 0
    assert served(state, TAIL) is state.weights
    assert not any(key.startswith("served/") for key in state.extras)


def test_the_means_change_nothing_of_what_is_trained():
    with_means, _ = trained()
    without, _ = trained(kept=())
    assert same(with_means.server.state.weights, without.server.state.weights)


@given(st.integers(1, 200), st.floats(0.001, 1))
def test_the_tail_is_the_smallest_whole_number_of_rounds_that_fills_its_share(rounds, share):
    length = rounds - first_of_tail(share, rounds) + 1
    assert 1 <= length <= rounds
    assert length >= share * rounds - 1e-6
    assert length == 1 or length - 1 < share * rounds


def test_a_tenth_of_thirty_rounds_is_three():
    assert first_of_tail(0.1, 30) == 28
    assert first_of_tail(0.5, 5) == 3


@given(st.floats(0, 1))
def test_an_interpolation_lies_between_its_ends(share):
    start = {"a": torch.tensor([0.0, 1.0]), "n": torch.tensor(1), "own": torch.tensor([3.0])}
    end = {"a": torch.tensor([1.0, -1.0]), "n": torch.tensor(7), "own": torch.tensor([5.0])}
    found = interpolated(start, end, share, {"own"})
    torch.testing.assert_close(found["a"], torch.tensor([share, 1 - 2 * share]))
    assert (int(found["n"]), float(found["own"])) == (7, 5.0)
