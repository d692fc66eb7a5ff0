"""Dropout draws from the client's stream: what it drops, and that a run's weights never change."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torchvision.ops import StochasticDepth

import feddg
from feddg.federation import federation
from feddg.models.dropout import draw_dropout_from

KINDS = [
    (partial(nn.Dropout, 0.3), (4, 6, 5, 5), (4, 6, 5, 5)),
    (partial(nn.Dropout1d, 0.3), (4, 6, 5), (4, 6, 1)),
    (partial(nn.Dropout2d, 0.3), (4, 6, 5, 5), (4, 6, 1, 1)),
    (partial(nn.Dropout3d, 0.3), (4, 6, 2, 3, 3), (4, 6, 1, 1, 1)),
    (partial(StochasticDepth, 0.3, "row"), (4, 6, 5, 5), (4, 1, 1, 1)),
    (partial(StochasticDepth, 0.3, "batch"), (4, 6, 5, 5), (1, 1, 1, 1)),
]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_what_is_dropped_comes_from_the_generator_alone(subtests):
    for layer, shape, drawn in KINDS:
        with subtests.test(layer=layer, shape=shape, drawn=drawn):
            network = nn.Sequential(layer())
            draw_dropout_from(network, seeded())
            before = torch.get_rng_state()
            found = network(torch.ones(shape))
            assert torch.equal(torch.get_rng_state(), before)
            expected = torch.empty(drawn).bernoulli_(0.7, generator=seeded()) / 0.7
            assert torch.equal(found, expected.expand(shape))
            assert torch.equal(network.eval()(torch.ones(shape)), torch.ones(shape))


def test_layers_that_drop_nothing_stay_as_they_are():
    network = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0), nn.BatchNorm1d(3))
    draw_dropout_from(network, seeded())
    assert [type(layer) for layer in network] == [nn.Linear, nn.Dropout, nn.BatchNorm1d]


def test_a_copy_goes_on_where_its_original_is():
    network = nn.Sequential(nn.Dropout(0.5))
    draw_dropout_from(network, seeded())
    twin = copy.deepcopy(network)
    generator = seeded()
    for one in (network, twin, network):
        expected = torch.empty(8, 3).bernoulli_(0.5, generator=generator) / 0.5
        assert torch.equal(one(torch.ones(8, 3)), expected)


def test_every_image_has_its_own_draw_where_gradients_are_taken_one_by_one():
    network = nn.Sequential(nn.Dropout(0.5), nn.Linear(40, 1, bias=False))
    draw_dropout_from(network, seeded())

    def loss(weights, image):
        return functional_call(network, weights, (image[None],)).sum()

    weights = {name: value.detach() for name, value in network.named_parameters()}
    per_image = vmap(grad(loss), in_dims=(None, 0), randomness="different")
    found = per_image(weights, torch.ones(16, 40))["1.weight"]
    expected = torch.empty(16, 1, 40).bernoulli_(0.5, generator=seeded()) / 0.5
    assert torch.equal(found, expected)


def trained(clients, workers=1, monkeypatch=None):
    """The weights after a round of mobilenet_v3_small on four clients' noise."""
    if workers > 1:
        monkeypatch.setattr(federation, "large_clients_at_once", lambda *_: workers)
    from torchvision.models import mobilenet_v3_small

    torch.manual_seed(1)
    model = mobilenet_v3_small(num_classes=2)
    torch.manual_seed(torch.seed())  # what the global generator holds must not matter
    fed = feddg.Federation(clients=clients, model=model, lr=0.01, batch_size=4)
    assert len(fed.transport.workers) == workers
    fed.fit(rounds=1)
    return fed.server.state.weights


@pytest.fixture(scope="module")
def clients():
    pixels = np.random.default_rng(0).random((4, 8, 3, 32, 32), dtype=np.float32)
    return [[(torch.from_numpy(image), k % 2) for k, image in enumerate(own)] for own in pixels]


def test_the_same_experiment_trains_the_same_weights_under_dropout(clients, monkeypatch):
    first, again = trained(clients), trained(clients)
    together = trained(clients, workers=2, monkeypatch=monkeypatch)
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
        assert torch.equal(tensor, together[name]), name
