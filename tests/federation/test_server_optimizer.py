"""Server optimizers: two steps by hand, what they leave alone, and restarts."""

import math

import pytest
import torch

from feddg.errors import ExperimentError
from feddg.experiment import Experiment
from feddg.federation.server_optimizer import MOMENTUM, SQUARES, step
from feddg.methods.base import State, local_names
from feddg.runs.folder import RunFolder
from feddg.settings import ServerSettings, TrainSettings
from federations import federation, same

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
    before = {"w": torch.ones(1), "running": torch.ones(1)}
    state = State(dict(before), extras)
    for mean in means:
        state.weights = {"w": torch.tensor([mean]), "running": torch.tensor([mean])}
        state = step(settings, before, state)
        before = state.weights
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
