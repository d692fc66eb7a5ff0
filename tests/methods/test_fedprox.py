"""FedProx: the proximal term and its gradient by hand, and mu = 0."""

import pytest
import torch

from feddg.errors import ExperimentError
from feddg.federation.local_training import load_weights
from feddg.methods.composition import build_method
from feddg.models.normalization import affine_names
from feddg.settings import TrainSettings
from federations import federation, same

SGD = TrainSettings(rounds=2, batch_size=4, optimizer="sgd", lr=0.1)


def moved_client(mu):
    """A client that has moved away from what it received, and a batch."""
    small = federation("fedprox", settings={"mu": mu}, train=SGD, freeze=True)
    received = {name: t.clone() for name, t in small.server.state.weights.items()}
    client = small.client(0, received=received)
    small.method.begin(client)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in small.network.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=noise)
    return small, client, next(client.batches())


def test_the_term_is_half_mu_times_the_squared_distance():
    small, client, batch = moved_client(0.6)
    term = small.method.loss(client, batch)["proximal"]
    squares = [
        (parameter.detach().double() - client.received[name].double()).square().sum()
        for name, parameter in small.network.named_parameters()
    ]
    assert float(term.detach()) == pytest.approx(0.3 * float(sum(squares)), rel=1e-5)


def test_a_step_adds_mu_times_the_displacement_to_the_gradient():
    small, client, batch = moved_client(0.6)
    parameters = dict(small.network.named_parameters())
    loss = torch.nn.functional.cross_entropy(small.network(batch.images), batch.labels)
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    expected = {
        name: p.detach() - 0.1 * (g + 0.6 * (p.detach() - client.received[name]))
        for (name, p), g in zip(parameters.items(), gradients)
    }
    small.method.step(client, batch)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-4, atol=1e-6)


def test_mu_zero_is_fedavg_bit_for_bit():
    zero = federation("fedprox", settings={"mu": 0})
    assert same(zero.run(), federation().run())
    assert not same(federation("fedprox").run(), zero.server.state.weights)


def test_a_larger_mu_keeps_clients_nearer():
    start = federation().server.state.weights

    def distance(mu):
        weights = federation("fedprox", settings={"mu": mu}, train=SGD).run(1)
        return sum(
            float((weights[name] - start[name]).square().sum())
            for name in weights
            if name.endswith("weight")
        )

    assert distance(0.0) > distance(0.5) > distance(5.0) > 0


def test_what_stays_local_is_not_held():
    small = federation("fedbn+fedprox")
    weights = small.server.state.weights
    client = small.client(0, received={name: t + 1 for name, t in weights.items()})
    load_weights(small.network, weights)
    small.method.begin(client)
    displacements = [received - p.detach() for p, received in client.scratch["fedprox"]]
    parameters = {name for name, _ in small.network.named_parameters()}
    assert len(displacements) == len(parameters - affine_names(small.network)) < len(parameters)
    assert all(torch.allclose(d, torch.tensor(1.0)) for d in displacements)


@pytest.mark.parametrize("mu", [-0.1, float("inf"), float("nan")])
def test_a_weight_out_of_range_is_refused(mu):
    with pytest.raises(ExperimentError, match="fedprox, setting 'mu'"):
        build_method("fedprox", {"mu": mu})


def test_an_unknown_setting_is_refused_with_the_nearest():
    with pytest.raises(ExperimentError, match="did you mean 'mu'"):
        build_method("fedprox", {"nu": 1})
