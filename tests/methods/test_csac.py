"""CSAC: aggregation and discrepancies by hand and by slow loops, and its limits."""

import math

import pytest
import torch
from torch import nn

from feddg.errors import ExperimentError
from feddg.messages import Update
from feddg.methods.base import State
from feddg.methods.composition import build_method, method_class
from feddg.methods.csac import aggregated, attention, cross_layer_distance, mmd
from feddg.models.network import Network
from federations import federation, same


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_layers_are_weighted_by_their_distance_to_the_mean():
    layers = [torch.tensor([0.0, 0.0]), torch.tensor([3.0, 0.0]), torch.tensor([0.0, 3.0])]
    mean = torch.tensor([1.0, 1.0])
    # Distances sqrt 2, sqrt 5, sqrt 5.
    share = math.sqrt(5) / (math.sqrt(2) + 2 * math.sqrt(5))
    torch.testing.assert_close(aggregated(layers, mean), torch.tensor([3 * share, 3 * share]))


def test_equal_layers_and_integers_are_kept():
    layer = random(3, 2)
    assert torch.equal(aggregated([layer, layer], layer), layer)
    assert aggregated([torch.tensor(3), torch.tensor(9)], torch.tensor(3)) == 3


def test_a_round_is_fused_layer_by_layer_with_clients_alike():
    values = {0: (0.0, 1.0), 1: (0.0, 5.0), 2: (6.0, 3.0)}
    live = {"a": torch.zeros(1), "b": torch.zeros(1)}

    def updates():
        for id, (a, b) in values.items():
            live["a"].fill_(a)
            live["b"].fill_(b)
            yield Update(id, 10**id, live)

    state = build_method("csac", {}).aggregate(State({}), updates())
    # a: mean 2, distances 2, 2, 4; b: mean 3, distances 2, 2, 0.
    assert float(state.weights["a"]) == pytest.approx(6 * 4 / 8)
    assert float(state.weights["b"]) == pytest.approx((1 + 5) / 2)


def slow_mmd(one, other):
    points = [*one.double(), *other.double()]
    squares = [[float((p - q).square().sum()) for q in points] for p in points]
    base = sum(map(sum, squares)) / len(points) ** 2
    n, m = len(one), len(other)

    def mean(rows, columns):
        kernels = [
            math.exp(-squares[i][j] / (2 * width * base))
            for i in rows
            for j in columns
            for width in (3**-3, 3**-2, 3**-1, 1, 3)
        ]
        return sum(kernels) / len(kernels)

    ours, theirs = range(n), range(n, n + m)
    return mean(ours, ours) + mean(theirs, theirs) - 2 * mean(ours, theirs)


def test_mmd_against_a_slow_loop():
    one, other = random(5, 3), random(4, 3, seed=1) + 1
    assert float(mmd(one, other)) == pytest.approx(slow_mmd(one, other), rel=1e-4)
    assert float(mmd(one, one)) == pytest.approx(0, abs=1e-6)
    assert float(mmd(one, one + 3)) > float(mmd(one, one + 0.5)) > 0


@pytest.mark.parametrize("rows", [1, 3])
def test_mmd_of_coinciding_points_is_zero_with_a_finite_gradient(rows):
    points = torch.ones(rows, 4, requires_grad=True)
    distance = mmd(points, torch.ones(rows, 4))
    distance.backward()
    assert float(distance.detach()) == pytest.approx(0, abs=1e-6)
    assert torch.isfinite(points.grad).all()


def test_attention_prefers_the_layer_that_sees_the_batch_alike():
    same_structure = random(6, 8)
    other = random(6, 5, seed=4)
    rotation = torch.linalg.qr(random(8, 8, seed=2))[0]
    weights = attention([same_structure @ rotation], [other, same_structure])
    torch.testing.assert_close(weights.sum(1), torch.ones(1))
    assert weights[0, 1] > weights[0, 0]
    # Turning features leaves similarities as they are: their cosine is 1.
    cosine = torch.nn.functional.normalize(other) @ torch.nn.functional.normalize(other).T
    reference = torch.nn.functional.normalize(same_structure)
    reference = reference @ reference.T
    agreement = float((cosine * reference).sum() / (cosine.norm() * reference.norm()))
    expected = math.exp(1) / (math.exp(1) + math.exp(agreement))
    assert float(weights[0, 1]) == pytest.approx(expected, rel=1e-4)


def test_cross_layer_distance_by_hand():
    features, frozen = [random(4, 2), random(4, 6)], [random(4, 2, seed=1), random(4, 3, seed=2)]
    weights = attention(features, frozen)
    pairs = [  # neighbouring channels averaged to the smaller width
        [
            slow_mmd(features[0], frozen[0]),
            slow_mmd(
                features[0], torch.stack([frozen[1][:, :2].mean(1), frozen[1][:, 1:].mean(1)], 1)
            ),
        ],
        [
            slow_mmd(features[1].view(4, 2, 3).mean(2), frozen[0]),
            slow_mmd(features[1].view(4, 3, 2).mean(2), frozen[1]),
        ],
    ]
    expected = sum(float(weights[i, j]) * pairs[i][j] for i in (0, 1) for j in (0, 1)) / 2
    assert float(cross_layer_distance(features, frozen)) == pytest.approx(expected, rel=1e-4)


def test_the_first_round_is_cross_entropy_only_and_the_second_is_calibrated():
    small = federation("csac")
    small.run(2)
    terms = [reply.terms for reply in small.replies]
    assert all(term.keys() == {"cross_entropy"} for term in terms[:3])
    names = {"cross_entropy", "layer_alignment", "logit_alignment"}
    assert all(term.keys() == names for term in terms[3:])


def test_a_client_remembers_the_model_it_trained():
    small = federation("csac", sizes=(6,))
    small.server.round()
    memory = small.transport.memories[0]
    trained = {name.removeprefix("csac/"): t for name, t in memory.items()}
    assert same(trained, small.server.state.weights)  # one client: aggregated is its own


def test_one_client_without_calibration_is_fedavg_bit_for_bit():
    one = federation("csac", sizes=(9,), settings={"calibration": 0})
    assert same(one.run(), federation(sizes=(9,)).run())


def test_the_private_models_statistics_do_not_move():
    small = federation("csac", sizes=(8,))
    small.server.round()
    client = small.client(
        0, received=small.server.state.weights, memory=dict(small.transport.memories[0])
    )
    small.method.begin(client)
    private = {name: t.clone() for name, t in client.scratch["csac/"].items()}
    counter = int(small.network.state_dict()["featurizer.blocks.0.2.num_batches_tracked"])
    small.method.step(client, next(client.batches()))
    assert same(client.scratch["csac/"], private)
    after = int(small.network.state_dict()["featurizer.blocks.0.2.num_batches_tracked"])
    assert after == counter + 1


class Bare(nn.Module):
    """A featurizer that names no stages."""

    out_features = 4


def test_a_backbone_without_stages_and_a_second_mean_are_refused():
    with pytest.raises(ExperimentError, match="names none"):
        build_method("csac", {}).network(Network(Bare(), 2))
    with pytest.raises(ExperimentError, match="choose one"):
        method_class("csac+fedgma")


def test_looking_with_another_model_leaves_every_layer_as_it_was():
    """As where a step is on one image, and statistics are frozen for it."""
    client = federation("csac").client(0)
    client.set_training()
    layer = next(m for m in client.network.modules() if isinstance(m, torch.nn.BatchNorm2d))
    layer.eval()
    with client.evaluating():
        assert not any(module.training for module in client.network.modules())
    assert client.network.training
    assert not layer.training
