"""Means over rounds against plain loops over the rounds' models."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from feddg.errors import ExperimentError
from feddg.experiment import Experiment
from feddg.federation.averages import (
    EMA,
    MEANS,
    MOMENTUM,
    SQUARES,
    SWA,
    Means,
    ServerOptimizer,
    averaged,
    first_averaged_round,
    initial_extras,
    rounds_in,
    wise_ft,
)
from feddg.methods.base import Round, State, local_names
from feddg.runs.folder import RunFolder
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
    small.add_hook(Means(small.method, small.network, settings, kept))
    small.server.setup()
    models = []
    for _ in range(rounds):
        small.server.round()
        models.append({n: t.clone() for n, t in small.server.state.weights.items()})
    return small, models


def swa_of(models, share):
    """The mean of the last models, one number at a time in the order of the rounds."""
    last = models[first_averaged_round(share, len(models)) - 1 :]
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


@pytest.mark.parametrize(
    ("optimizer", "share", "decay"),
    [("none", 0.5, 0.9), ("fedavgm", 0.2, 0.05), ("none", 1.0, 0.0)],
)
def test_means_are_those_of_a_plain_loop(optimizer, share, decay):
    settings = ServerSettings(swa_fraction=share, ema_decay=decay, optimizer=optimizer)
    small, models = trained(server=settings)
    state = small.server.state
    assert same(averaged(state, "last"), models[-1])
    assert same(averaged(state, SWA), swa_of(models, share))
    assert same(averaged(state, EMA), ema_of(models, decay))
    last = models[first_averaged_round(share, ROUNDS) - 1 :]
    for name, tensor in averaged(state, SWA).items():
        exact = torch.stack([model[name].double() for model in last]).mean(0)
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor.double(), exact, rtol=1e-5, atol=1e-6)
    assert (rounds_in(state, SWA), rounds_in(state, EMA)) == (len(last), ROUNDS)


def test_statistics_are_averaged_and_counters_are_the_last():
    small, models = trained()
    swa = averaged(small.server.state, SWA)
    (mean, counter) = (
        next(n for n in swa if n.endswith(end)) for end in ("running_mean", "batches_tracked")
    )
    assert not torch.equal(swa[mean], models[-1][mean])
    assert torch.equal(swa[counter], models[-1][counter])


@pytest.mark.parametrize("method", ["fedbn", "silobn"])
def test_what_stays_with_the_clients_is_left_alone(method):
    small, models = trained(method)
    local = local_names(small.method, small.network)
    assert local
    for mean in MEANS:
        found = averaged(small.server.state, mean)
        shared = {n for n in found if not torch.equal(found[n], models[-1][n])}
        assert shared
        assert not shared & local
        assert not any(key.endswith(tuple(local)) for key in small.server.state.extras)


def test_a_mean_that_has_not_begun_is_the_last_model():
    settings = ServerSettings(swa_fraction=0.2)
    small = federation(
        train=TrainSettings(rounds=5, batch_size=4, local_steps=1), server_settings=settings
    )
    small.add_hook(Means(small.method, small.network, settings, (SWA,)))
    small.server.round()
    state = small.server.state
    assert rounds_in(state, SWA) == 0
    assert averaged(state, SWA) is state.weights
    assert not any(key.startswith("averages/") for key in state.extras)


def test_a_run_that_goes_on_averages_its_own_last_rounds():
    def after(*parts):
        small = federation(train=TrainSettings(rounds=8, batch_size=4, local_steps=1))
        small.add_hook(Means(small.method, small.network, ServerSettings(), (SWA,)))
        for rounds in parts:
            small.fit(rounds)
        return small.server.state

    whole, in_parts = after(8), after(4, 4)
    assert rounds_in(in_parts, SWA) == 4
    assert same(averaged(in_parts, SWA), averaged(whole, SWA))


def test_the_means_change_nothing_of_what_is_trained():
    with_means, _ = trained()
    without, _ = trained(kept=())
    assert same(with_means.server.state.weights, without.server.state.weights)


@given(st.integers(1, 200), st.floats(0.001, 1))
def test_swa_takes_the_smallest_whole_number_of_rounds_that_fills_its_share(rounds, share):
    length = rounds - first_averaged_round(share, rounds) + 1
    assert 1 <= length <= rounds
    assert length >= share * rounds - 1e-6
    assert length == 1 or length - 1 < share * rounds


def test_a_tenth_of_thirty_rounds_is_three():
    assert first_averaged_round(0.1, 30) == 28
    assert first_averaged_round(0.5, 5) == 3


@given(st.floats(0, 1))
def test_wise_ft_lies_between_its_ends(share):
    start = {"a": torch.tensor([0.0, 1.0]), "n": torch.tensor(1), "own": torch.tensor([3.0])}
    end = {"a": torch.tensor([1.0, -1.0]), "n": torch.tensor(7), "own": torch.tensor([5.0])}
    found = wise_ft(start, end, share, {"own"})
    torch.testing.assert_close(found["a"], torch.tensor([share, 1 - 2 * share]))
    assert (int(found["n"]), float(found["own"])) == (7, 5.0)


# Server optimizers: two steps by hand, what they leave alone, and restarts.


ADAPTIVE = ("fedadam", "fedyogi", "fedadagrad")


def by_hand(settings, start, means):
    """The papers' equations on one number, in double precision."""
    x, m, v = start, 0.0, settings.tau**2
    lr = settings.lr or (1.0 if settings.optimizer == "fedavgm" else 0.01)
    for mean in means:
        d = mean - x
        if settings.optimizer == "fedavgm":
            m = settings.beta1 * m + (x - mean)
            x -= lr * m
            continue
        m = settings.beta1 * m + (1 - settings.beta1) * d
        if settings.optimizer == "fedadagrad":
            v += d**2
        elif settings.optimizer == "fedadam":
            v = settings.beta2 * v + (1 - settings.beta2) * d**2
        else:
            v -= (1 - settings.beta2) * d**2 * math.copysign(1, v - d**2)
        x += lr * m / (math.sqrt(v) + settings.tau)
    return x


@pytest.mark.parametrize("options", [{}, {"lr": 0.3, "beta1": 0.5, "beta2": 0.6, "tau": 0.1}])
@pytest.mark.parametrize("optimizer", ["fedavgm", *ADAPTIVE])
def test_three_steps_by_hand(optimizer, options):
    settings = ServerSettings(optimizer=optimizer, **options)
    means = [1.5, 0.2, -0.7]
    extras = {MOMENTUM + "w": torch.zeros(1)}
    if optimizer != "fedavgm":
        extras[SQUARES + "w"] = torch.full((1,), settings.tau**2)
    state = State({"w": torch.ones(1), "running": torch.ones(1)}, extras)
    hook = ServerOptimizer(settings)
    for mean in means:
        round, state = Round(1, [], state), state.next()
        state.weights = {"w": torch.tensor([mean]), "running": torch.tensor([mean])}
        state = hook.completed(state, round)
    assert float(state.weights["w"]) == pytest.approx(by_hand(settings, 1.0, means), rel=1e-5)
    assert float(state.weights["running"]) == pytest.approx(means[-1])


def run(**server):
    small = federation(server_settings=ServerSettings(**server))
    return small, small.run(2)


def test_none_is_bit_identical_and_momentum_zero_is_fedavg_up_to_rounding():
    small, plain = run()
    assert not any(key.startswith((MOMENTUM, SQUARES)) for key in small.server.state.extras)
    _, still = run(optimizer="fedavgm", beta1=0)
    for name, tensor in plain.items():
        torch.testing.assert_close(still[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("optimizer", ["fedavgm", *ADAPTIVE])
def test_normalisation_buffers_take_the_mean(optimizer):
    small = federation(server_settings=ServerSettings(optimizer=optimizer, lr=0.5))
    first = federation()
    first.server.round()
    small.server.round()
    for name, tensor in first.server.state.weights.items():
        moved = MOMENTUM + name in small.server.state.extras
        assert moved == ("running" not in name and "tracked" not in name)
        assert torch.equal(small.server.state.weights[name], tensor) != moved
    small.server.round()
    for name, tensor in small.server.state.weights.items():
        assert torch.isfinite(tensor).all()
        assert "running_var" not in name or tensor.min() > 0


def test_a_tied_weight_moves_under_all_its_names():
    small = federation(server_settings=ServerSettings(optimizer="fedavgm", lr=0.5))
    twice = nn.ModuleDict({"one": small.network.classifier, "other": small.network.classifier})
    extras = initial_extras(small.settings.server, small.method, twice)
    assert {MOMENTUM + "one.weight", MOMENTUM + "other.weight"} <= extras.keys()


def test_entries_that_stay_with_the_clients_take_the_mean():
    small = federation("fedbn", server_settings=ServerSettings(optimizer="fedavgm"))
    moved = {key.removeprefix(MOMENTUM) for key in small.server.state.extras}
    assert moved
    assert not moved & local_names(small.method, small.network)


@pytest.mark.parametrize("optimizer", ["fedavgm", "fedadam"])
def test_a_restart_goes_on_bit_identically(optimizer, tmp_path):
    settings = ServerSettings(optimizer=optimizer)
    whole = federation(server_settings=settings).run(3)
    first = federation(server_settings=settings)
    first.run(2)
    with RunFolder(tmp_path / "run") as folder:
        folder.save_checkpoint(first.server.state, {}, set())
        checkpoint = folder.load_checkpoint()
    second = federation(server_settings=settings)
    second.resume(checkpoint.state, checkpoint.memories)
    second.server.round()
    assert same(second.server.state.weights, whole)


def test_it_works_behind_other_methods():
    for method in ("fedgma", "scaffold"):
        sgd = TrainSettings(rounds=2, batch_size=4, optimizer="sgd", lr=0.05)
        moved = federation(method, train=sgd, server_settings=ServerSettings(optimizer="fedavgm"))
        assert not same(moved.run(), federation(method, train=sgd).run())


def test_settings_out_of_range_are_refused_by_name():
    with pytest.raises(ExperimentError, match=r"server\.beta1"):
        Experiment(data="digits", hold_out="sketch", server={"optimizer": "fedadam", "beta1": 1})
    with pytest.raises(ExperimentError, match=r"server\.optimizer"):
        Experiment(data="digits", hold_out="sketch", server={"optimizer": "adam"})
