"""SCAFFOLD: control variates against gradients, and the invariant of their mean."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import feddg
from feddg.errors import ExperimentError, NotEnoughUpdates
from feddg.experiment import Experiment
from feddg.messages import Message
from feddg.methods.composition import build_method
from feddg.methods.scaffold import CONTROL
from feddg.settings import TrainSettings
from federations import federation, same

SGD = TrainSettings(rounds=2, batch_size=4, optimizer="sgd", lr=0.05)


def controls(tensors):
    """Control variates by parameter name."""
    return {n.removeprefix(CONTROL): t for n, t in tensors.items() if n.startswith(CONTROL)}


def test_the_servers_control_is_the_mean_of_all_clients_at_all_times():
    small = federation("scaffold", sizes=(5, 4, 6, 3, 4), train=SGD, per_round=2)
    for _ in range(4):
        small.server.round()
        remembered = [controls(memory) for memory in small.transport.memories.values()]
        for name, c in controls(small.server.state.extras).items():
            # Clients that never took part hold zero, and count.
            mean = sum(memory[name].double() for memory in remembered) / 5
            torch.testing.assert_close(c.double(), mean, rtol=1e-4, atol=1e-6)
    assert len(remembered) > 2
    assert any(c.abs().max() > 0.01 for c in controls(small.server.state.extras).values())


def test_controls_are_checked_by_the_learning_rates_of_the_rounds_that_are_asked_for():
    generator = torch.Generator().manual_seed(0)
    site = TensorDataset(torch.rand(6, 3, 8, 8, generator=generator), torch.arange(6) % 3)
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    cosine = {"schedule": "cosine", "rounds": 2, "lr": 0.1}
    fed = feddg.Federation([site, site], net, "scaffold", batch_size=3, train=cosine)
    assert fed.fit(6).server.state.round == 6


def gradients(network, small, rows):
    images = small.pixels.gather(rows).float() / 255
    loss = torch.nn.functional.cross_entropy(network(images), small.labels[rows])
    names, parameters = zip(*network.named_parameters())
    return dict(zip(names, torch.autograd.grad(loss, parameters)))


def test_one_client_one_step_remembers_the_gradient():
    one_step = SGD.model_copy(update={"batch_size": 16})
    small = federation("scaffold", sizes=(9,), train=one_step, freeze=True)
    twin = federation(sizes=(9,), train=one_step).network.eval()
    expected = gradients(twin, small, torch.arange(9))
    small.server.round()
    for name, gradient in expected.items():
        own = small.transport.memories[0][CONTROL + name]
        torch.testing.assert_close(own, gradient, rtol=1e-2, atol=1e-5)


def test_after_several_steps_it_is_the_mean_of_the_gradients():
    small = federation("scaffold", train=SGD, freeze=True)
    noise = torch.Generator().manual_seed(3)
    weights = small.server.state.weights
    zeros = controls(small.server.state.extras)
    sent = {CONTROL + n: 0.1 * torch.randn(t.shape, generator=noise) for n, t in zeros.items()}
    own = {n: 0.1 * torch.randn(t.shape, generator=noise) for n, t in sent.items()}
    client = small.client(0, received=weights, memory=dict(own), extras=Message(sent))
    seen = []
    for batch in client.batches():
        before = {n: p.detach().clone() for n, p in small.network.named_parameters()}
        seen.append(gradients(small.network, small, batch.positions))
        small.method.step(client, batch)
        for name, parameter in small.network.named_parameters():
            step = seen[-1][name] - own[CONTROL + name] + sent[CONTROL + name]
            expected = before[name] - 0.05 * step
            torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=1e-6)
    message = small.method.report(client)
    assert len(seen) == 2
    for name, _ in small.network.named_parameters():
        mean = torch.stack([step[name] for step in seen]).mean(0)
        new = client.memory[CONTROL + name]
        torch.testing.assert_close(new, mean, rtol=1e-2, atol=1e-4)
        torch.testing.assert_close(
            message.tensors[CONTROL + name], new - own[CONTROL + name], rtol=1e-3, atol=1e-5
        )


def test_round_one_weighted_by_examples_is_fedavg():
    weighted = federation("scaffold", settings={"weighting": "examples"}, train=SGD)
    uniform = federation("scaffold", train=SGD)
    fedavg = federation(train=SGD)
    assert same(weighted.run(1), fedavg.run(1))
    assert not same(uniform.run(1), fedavg.server.state.weights)
    assert not same(weighted.run(1), fedavg.run(1))


def test_updates_count_alike():
    small = federation("scaffold", train=SGD)
    small.server.round()
    equal = federation(train=SGD)
    equal.method.share = lambda state, update: 1.0
    equal.server.round()
    assert same(small.server.state.weights, equal.server.state.weights)


@pytest.mark.parametrize(
    ("train", "remedy"),
    [
        ({"optimizer": "adam"}, r"set train\.optimizer to sgd"),
        ({"momentum": 0.9}, r"set train\.momentum to 0"),
        ({"schedule_by": "step"}, r"set train\.schedule_by to round"),
    ],
)
def test_other_optimizers_are_refused_with_the_remedy(train, remedy):
    preset = Experiment(data="digits", hold_out="sketch", method="scaffold")
    build_method("scaffold", {}).check(preset)
    wrong = Experiment(data="digits", hold_out="sketch", method="scaffold", train=train)
    with pytest.raises(ExperimentError, match=remedy):
        build_method("scaffold", {}).check(wrong)


def test_a_choice_among_a_clients_models_is_refused():
    choosing = Experiment(
        data="digits", hold_out="sketch", method="scaffold", train={"select_every": 5}
    )
    with pytest.raises(ExperimentError, match=r"set train\.select_every to none"):
        build_method("scaffold", {}).check(choosing)


def test_a_client_that_diverges_keeps_its_old_control():
    hot = SGD.model_copy(update={"lr": 1e30})
    small = federation("scaffold", train=SGD)
    small.server.round()
    before = {n: t.clone() for n, t in small.transport.memories[0].items()}
    small.worker.train = hot
    with pytest.raises(NotEnoughUpdates, match="client 0: loss term"):
        small.server.round()
    assert same(small.transport.memories[0], before)


def test_gates_of_another_learning_rate_are_refused():
    method = build_method("scaffold+fedig", {"instance_gate": 1})
    named = {"name": "scaffold+fedig", "settings": {"instance_gate": 1}}
    chosen = Experiment(method=named, train={"optimizer": "sgd", "momentum": 0})
    with pytest.raises(ExperimentError, match=r"set method\.instance_gate to none"):
        method.check(chosen)
