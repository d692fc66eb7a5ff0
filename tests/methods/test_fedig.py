"""FedIG: its terms against an independent network, what they reach, what the server averages."""

import pytest
import torch
from torch.nn.functional import batch_norm, cross_entropy

from feddg.errors import ExperimentError
from feddg.experiment import Experiment
from feddg.methods.base import local_names
from feddg.methods.composition import build_method, method_class
from feddg.methods.fedig import GLOBAL, mixed
from feddg.models.backbones import build_network
from feddg.models.normalization import (
    batch_norms,
    map_layers,
    normalised_by,
    statistics_names,
    stored,
)
from feddg.settings import TrainSettings
from federations import federation, same, snapshot

SIZES = (7, 5, 6)
SGD = TrainSettings(rounds=2, batch_size=4, optimizer="sgd", lr=0.005)


def begun(settings=None, **options):
    """A federation, one of its clients after ``begin``, and a batch; local unlike global."""
    small = federation("fedig", settings=settings or {}, **options)
    received = {name: t.clone() for name, t in small.network.state_dict().items()}
    rng = torch.Generator().manual_seed(5)
    for name in received:
        if name.endswith("running_mean"):
            received[name] += 0.3 * torch.randn(received[name].shape, generator=rng)
        if name.endswith("running_var"):
            received[name] *= 0.5 + torch.rand(received[name].shape, generator=rng)
    client = small.client(0, received=received)
    small.method.begin(client)
    return small, client, next(client.batches())


def parameters(module):
    return list(module.parameters())


def embedded_by_hand(network, images, statistics, u):
    """The CNN's embedding under MixIG, written out layer by layer; ``u`` by layer."""
    hidden = network.normalize(images)
    for block, share in zip(network.featurizer.blocks, u):
        convolution, pool, norm, relu = block
        hidden = pool(convolution(hidden))
        mean, variance = statistics[norm]
        own = hidden.mean((2, 3))
        spread = (hidden.var((2, 3), correction=0) + norm.eps).sqrt()
        centre = share * own + (1 - share) * mean
        width = share * spread + (1 - share) * (variance + norm.eps).sqrt()
        hidden = (hidden - centre[..., None, None]) / width[..., None, None]
        hidden = relu(hidden * norm.weight[:, None, None] + norm.bias[:, None, None])
    hidden = network.featurizer.pool(hidden)
    return network.featurizer.linear(hidden.flatten(1)).relu()


@pytest.mark.parametrize("distance", ["mean", "sum"])
def test_the_terms_are_those_of_the_paper(distance):
    small, client, batch = begun({"feature_distance": distance})
    terms = small.method.loss(client, batch)
    rng = client.stream("fedig", 0)
    u = [torch.rand(width, generator=rng) for width in (32, 64, 128)]
    network = client.network
    varied = embedded_by_hand(network, batch.images, client.scratch[GLOBAL], u)
    plain = network.features(batch.images)
    squares = (plain - varied).square()
    whole = squares.mean() if distance == "mean" else squares.sum(1).mean()
    expected = {
        "cross_entropy": cross_entropy(network.classifier(plain), batch.labels),
        "agnostic_classification": 0.1 * cross_entropy(network.classifier(varied), batch.labels),
        "agnostic_features": 4.0 * whole,
    }
    assert terms.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(terms[name], value, rtol=1e-4, atol=1e-5)


def test_the_classification_term_reaches_the_classifier_alone():
    small, client, batch = begun()
    term = small.method.loss(client, batch)["agnostic_classification"]
    network = client.network
    others = parameters(network.featurizer) + parameters(network.embedding)
    found = torch.autograd.grad(term, others, retain_graph=True, allow_unused=True)
    assert all(gradient is None for gradient in found)
    classifier = torch.autograd.grad(term, parameters(network.classifier))
    assert all(gradient.abs().sum() > 0 for gradient in classifier)


def test_the_feature_term_reaches_the_features_through_both_passes():
    small, client, batch = begun()
    network, rng = client.network, client.stream("fedig", 0)
    u = [torch.rand(width, generator=rng) for width in (32, 64, 128)]
    term = small.method.loss(client, batch)["agnostic_features"]
    found = torch.autograd.grad(term, parameters(network.featurizer))
    varied = embedded_by_hand(network, batch.images, client.scratch[GLOBAL], u)
    by_hand = 4 * (network.features(batch.images) - varied).square().mean()
    expected = torch.autograd.grad(by_hand, parameters(network.featurizer))
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def test_the_mixed_pass_leaves_running_statistics_alone():
    small, client, batch = begun()
    names = statistics_names(client.network)
    embeddings = client.network.features(batch.images)
    before = snapshot(client.network, names)
    small.method.head_loss(client, batch, embeddings)
    assert same(snapshot(client.network, names), before)


def test_the_bottleneck_keeps_to_the_global_statistics_in_the_mixed_pass():
    small, client, batch = begun({"mixing": (0, 0)}, embedding="bottleneck")
    network = client.network
    varied = small.method._varied(client, batch)
    hidden = network.normalize(batch.images)
    statistics = client.scratch[GLOBAL]

    def by_global(norm, inputs):
        return batch_norm(inputs, *statistics[norm], norm.weight, norm.bias, False, 0, norm.eps)

    for convolution, pool, norm, relu in network.featurizer.blocks:
        hidden = relu(by_global(norm, pool(convolution(hidden))))
    hidden = network.featurizer.linear(network.featurizer.pool(hidden).flatten(1)).relu()
    linear, norm, relu = network.embedding
    torch.testing.assert_close(varied, relu(by_global(norm, linear(hidden))), rtol=1e-4, atol=1e-5)


def test_u_is_drawn_anew_in_every_step():
    small, client, batch = begun()
    first = small.method._varied(client, batch)
    assert torch.equal(first, small.method._varied(client, batch))
    client.steps += 1
    batch.drawn = {}
    assert not torch.equal(first, small.method._varied(client, batch))


def test_without_its_terms_it_is_silobn_to_the_bit_but_for_how_variances_are_averaged():
    none = {"classification_weight": 0, "feature_weight": 0}
    one = federation("fedig", settings=none, train=SGD).run()
    other = federation("silobn", train=SGD).run()
    variances = {name for name in one if name.endswith("running_var")}
    assert variances
    assert same(*({n: t for n, t in each.items() if n not in variances} for each in (one, other)))
    assert all((one[name] <= other[name] * (1 + 1e-5)).all() for name in variances)


def test_one_term_alone_leaves_the_other_out():
    for weight, name in (("classification_weight", "features"), ("feature_weight", "classifica")):
        small, client, batch = begun({weight: 0})
        terms = small.method.loss(client, batch)
        assert len(terms) == 2
        assert any(name in term for term in terms)


def test_the_server_averages_deviations_and_the_rest_as_it_is():
    weights = federation("fedig", train=SGD).run(1)
    start = federation("fedig").server.state.weights
    trained = []
    for id in range(len(SIZES)):
        small = federation("fedig", train=SGD)
        small.server.sample = lambda round, attempt=0, id=id: [id]
        trained.append(small.run(1))
    assert same(start, federation("silobn").server.state.weights)
    for name, tensor in weights.items():
        parts = [w[name].double() for w in trained]
        power = 0.5 if name.endswith("running_var") else 1.0
        mean = sum(n * part**power for n, part in zip(SIZES, parts)) / sum(SIZES)
        expected = mean ** (1 / power) if tensor.is_floating_point() else parts[0]
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-4, atol=1e-6)


def test_a_failed_round_leaves_the_servers_variances_alone():
    small = federation("fedig")
    before = {name: t.clone() for name, t in small.server.state.weights.items()}

    def broken():
        raise RuntimeError("lost")
        yield

    with pytest.raises(RuntimeError, match="lost"):
        small.method.aggregate(small.server.state, broken())
    assert same(small.server.state.weights, before)


def test_clients_mix_with_the_servers_average_of_the_round_before():
    small = federation("fedig", train=SGD)
    weights = {name: t.clone() for name, t in small.run(1).items()}
    seen = {}
    original = type(small.method).begin

    class Spy(type(small.method)):
        def begin(self, client):
            original(self, client)
            seen[client.id] = {
                name: client.scratch[GLOBAL][layer].mean.clone()
                for name, layer in batch_norms(client.network).items()
            }
            local = dict(client.network.named_buffers())
            name = "featurizer.blocks.0.2"
            assert not torch.equal(local[f"{name}.running_mean"], seen[client.id][name])

    small.method.__class__ = Spy
    small.server.round()
    assert seen.keys() == {0, 1, 2}
    for statistics in seen.values():
        for name, mean in statistics.items():
            assert torch.equal(mean, weights[f"{name}.running_mean"])


def test_statistics_stay_and_everything_else_is_shared():
    network = build_network("resnet18", 7, weights=None, embedding="bottleneck")
    local = local_names(build_method("fedig", {}), network)
    assert local == statistics_names(network)
    assert len(local) == 63


@pytest.mark.parametrize(("backbone", "layers"), [("resnet50", 53), ("densenet121", 121)])
def test_any_backbone_with_batch_normalisation_has_its_maps_mixed(backbone, layers):
    network = build_network(backbone, 2, weights=None).eval()
    statistics = {layer: stored(layer) for layer in map_layers(network).values()}
    assert len(statistics) == layers
    images = torch.rand(2, 3, 64, 64)
    drawn = torch.rand(sum(layer.num_features for layer in statistics))
    with torch.no_grad():
        plain = network.features(images)
        for mixing in ((0.0, 0.0), (0.0, 1.0)):
            rule = mixed(statistics, mixing, drawn)
            with normalised_by(network, rule):
                embedded = network.features(images)
            assert torch.allclose(embedded, plain, rtol=1e-3, atol=1e-4) == (mixing == (0, 0))


def test_a_resnet_trains():
    small = federation("fedig", sizes=(4,), backbone="resnet18", train=SGD)
    small.run(1)
    assert set(small.replies[0].terms) >= {"agnostic_features", "agnostic_classification"}


def test_gates_train_and_stay_between_zero_and_one():
    fast = TrainSettings(rounds=2, batch_size=4, optimizer="sgd", lr=0.05)
    weights = federation("fedig", settings={"instance_gate": 1.0}, train=fast).run()
    gates = [t for name, t in weights.items() if name.endswith(".gate")]
    assert len(gates) == 3
    assert all(((gate >= 0) & (gate <= 1)).all() for gate in gates)
    assert any((gate < 1).any() for gate in gates)


def test_what_it_cannot_run_is_refused_by_name():
    frozen = Experiment(
        data="digits", hold_out="sketch", method="fedig", model={"normalization": "frozen"}
    )
    with pytest.raises(ExperimentError, match=r"fedig needs.*set model\.normalization to train"):
        build_method("fedig", {}).check(frozen)
    assert build_method("fedig", {"mixing": (-0.1, 1.1)}).settings.mixing == (-0.1, 1.1)
    for mixing in ((1, 0), (-0.2, 1), (0, 1.2)):
        with pytest.raises(ExperimentError, match="mixing"):
            build_method("fedig", {"mixing": mixing})
    with pytest.raises(ExperimentError, match="already keeps the statistics"):
        method_class("fedbn+fedig")
    for other in ("csac", "l2d", "randconv", "rsc"):
        with pytest.raises(ExperimentError, match="a second time"):
            method_class(f"fedig+{other}")


@pytest.mark.parametrize("other", ["mixstyle", "fedprox", "jigen"])
def test_it_composes(other):
    small = federation(f"fedig+{other}", train=SGD)
    small.run(2)
    assert all(hasattr(reply, "terms") for reply in small.replies), small.replies
    assert all(torch.isfinite(t).all() for t in small.server.state.weights.values())


def test_the_protocol_presets():
    fields = {"data": {"source": "pacs", "root": "."}, "hold_out": "photo", "method": "fedig"}
    one = Experiment(**fields, preset="fedig")
    assert (one.train.local_steps, one.train.rounds, one.train.momentum) == (200, 40, 0.5)
    assert (one.clients.partition, one.clients.number, one.data.id_val) == ("domain", 3, 0.2)
    silos = Experiment(**fields, preset="fedig_silos", clients={"alpha": 0.1})
    assert (silos.clients.number, silos.clients.per_round, silos.clients.alpha) == (30, 10, 0.1)
    assert (silos.train.local_steps, silos.train.rounds, silos.train.lr) == (20, 120, 0.01)
