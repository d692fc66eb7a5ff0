"""FedIG-A: alpha, what each of the two steps moves, and predictions without adaptation."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from feddg.clients.optim import kept_moments
from feddg.errors import ExperimentError
from feddg.methods.composition import build_method, method_class
from feddg.methods.fedig import GLOBAL
from feddg.methods.fedig_a import OPTIMIZER, FedIGA
from feddg.models.backbones import build_network
from feddg.models.normalization import (
    Adapted,
    LayerAdapter,
    Moments,
    ZeroShotAdapter,
    adapter_of,
    statistics_names,
)
from feddg.settings import TrainSettings
from federations import federation, same, snapshot
from scripts import load_script

PACS = Path(__file__).resolve().parents[2] / "benchmarks/adaptation/pacs.py"
SGD = TrainSettings(rounds=2, batch_size=4, optimizer="sgd", lr=0.01)


def scattered(network, seed=5):
    """Gives every entry of the adapters a random value, so that alpha differs between images."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter_of(network).parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=rng))
        for layer in adapter_of(network):
            layer.layers[-1].bias.copy_(torch.tensor([0.2, 0.4]))
    return network


def begun(method="fedig-a", **options):
    small = federation(method, train=SGD, **options)
    scattered(small.network)
    received = {name: t.clone() for name, t in small.network.state_dict().items()}
    for name in received:
        if name.endswith("running_mean"):
            received[name] += 0.2
    client = small.client(0, received=received)
    small.method.begin(client)
    return small, client, next(client.batches())


def predicted_by_hand(network, images, statistics, alpha):
    """Logits of the CNN under Eq. 7; ``alpha(number, moments)`` gives ``(B,)``."""
    hidden = network.normalize(images)
    for number, (convolution, pool, norm, relu) in enumerate(network.featurizer.blocks):
        hidden = pool(convolution(hidden))
        mean, variance = statistics[norm]
        deviation = (variance + norm.eps).sqrt()
        own = hidden.mean((2, 3))
        spread = (hidden.var((2, 3), correction=0) + norm.eps).sqrt()
        distance = torch.cat([own - mean, spread - deviation], 1)
        share = alpha(number, distance)[:, None]
        centre = share * own + (1 - share) * mean
        width = share * spread + (1 - share) * deviation
        hidden = (hidden - centre[..., None, None]) / width[..., None, None]
        hidden = relu(hidden * norm.weight[:, None, None] + norm.bias[:, None, None])
    hidden = network.featurizer.pool(hidden).flatten(1)
    return network.classifier(network.featurizer.linear(hidden).relu())


def two_layers(adapter, distance):
    """The adapter's output by plain matrix products: ``(B, 2)``."""
    first, _, last = adapter.layers
    hidden = (distance @ first.weight.T + first.bias).clamp_min(0)
    return hidden @ last.weight.T + last.bias


def test_a_resnet18_of_seven_classes_has_the_papers_parameters():
    network = build_network("resnet18", 7, weights=None, embedding="bottleneck")
    network = build_method("fedig-a", {}).network(network)
    assert len(adapter_of(network)) == 20
    assert sum(p.numel() for p in adapter_of(network).parameters()) == 218_540
    total = sum(p.numel() for p in network.parameters())
    assert total == 11_528_691
    assert round(total / 1e6, 2) == 11.53


def test_the_adapters_loss_is_equation_eight_under_sampled_alpha():
    small, client, batch = begun()
    rng = client.stream("fedig-a", client.steps + 1)
    noise = [torch.randn(len(batch), generator=rng) for _ in range(3)]
    adapter = adapter_of(client.network)

    def alpha(number, distance):
        spread, mean = two_layers(adapter[number], distance).T
        return (spread * noise[number] + mean).clamp(0, 1)

    logits = predicted_by_hand(client.network, batch.images, client.scratch[GLOBAL], alpha)
    expected = cross_entropy(logits, batch.labels)
    found = small.method.adapter_loss(client, batch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    parameters = list(adapter.parameters())
    for one, other in zip(
        torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters)
    ):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def test_prediction_takes_the_mean_of_alpha():
    small, client, batch = begun()
    network = client.network.eval()
    running = {
        norm: (norm.running_mean, norm.running_var) for _, _, norm, _ in network.featurizer.blocks
    }

    def alpha(number, distance):
        return two_layers(adapter_of(network)[number], distance)[:, 1].clamp(0, 1)

    with torch.no_grad():
        expected = predicted_by_hand(network, batch.images, running, alpha)
        found = small.method.predictor(network)(batch.images)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, network(batch.images), atol=1e-3)


def test_alpha_of_zero_is_the_plain_global_model_to_the_bit():
    small = federation("fedig-a", train=SGD, settings={"first_alpha": 0.0}, embedding="bottleneck")
    small.run(2)
    network = small.network.eval()
    with torch.no_grad():
        for layer in adapter_of(network):
            layer.layers[-1].weight.zero_()
            layer.layers[-1].bias.copy_(torch.tensor([0.5, -0.3]))
    images = torch.rand(5, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(Adapted(network)(images), network(images))


def test_alpha_of_one_is_instance_normalisation():
    _, client, batch = begun()
    network = client.network.eval()
    with torch.no_grad():
        for layer in adapter_of(network):
            layer.layers[-1].bias.copy_(torch.tensor([0.0, 9.0]))
        found = Adapted(network)(batch.images)
        hidden = network.normalize(batch.images)
        for convolution, pool, norm, relu in network.featurizer.blocks:
            hidden = pool(convolution(hidden))
            hidden = relu(
                torch.nn.functional.instance_norm(
                    hidden, weight=norm.weight, bias=norm.bias, eps=norm.eps
                )
            )
        hidden = network.featurizer.pool(hidden).flatten(1)
        expected = network.classifier(network.featurizer.linear(hidden).relu())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_two_steps_alternate_and_each_moves_its_own_part():
    small, client, batch = begun()
    method, network = small.method, client.network
    adapters = {id(p) for p in adapter_of(network).parameters()}
    main = [n for n, p in network.named_parameters() if id(p) not in adapters]
    start = {n: t.clone() for n, t in network.state_dict().items()}
    states = []
    original = client.scratch["fedig-a/optimizer"].step

    def recorded():
        states.append({n: t.clone() for n, t in network.state_dict().items()})
        original()
        states.append({n: t.clone() for n, t in network.state_dict().items()})

    client.scratch["fedig-a/optimizer"].step = recorded
    method.step(client, batch)
    between, after = states
    heads = [n for n in start if n.startswith("heads.")]
    assert same({n: start[n] for n in heads}, {n: between[n] for n in heads})
    assert not any(torch.equal(start[n], between[n]) for n in main)
    assert not same({n: between[n] for n in heads}, {n: after[n] for n in heads})
    rest = [n for n in start if n not in heads]
    assert same({n: between[n] for n in rest}, {n: after[n] for n in rest})
    assert all(parameter.grad is None for parameter in adapter_of(network).parameters())
    assert client.mean_terms()[0].keys() >= {"adapter", "cross_entropy", "agnostic_features"}


def test_the_adapters_step_is_of_their_own_loss_alone():
    """FedProx's term is of all that is shared, the adapters among it."""
    small, client, batch = begun("fedig-a+fedprox")
    scattered(client.network, seed=6)  # away from what was received
    adapters = list(adapter_of(client.network).parameters())
    optimizer, found = client.scratch["fedig-a/optimizer"], []
    optimizer.step = lambda: found.extend(parameter.grad.clone() for parameter in adapters)
    small.method.step(client, batch)
    own = torch.autograd.grad(small.method.adapter_loss(client, batch), adapters)
    assert found
    assert all(torch.equal(one, other) for one, other in zip(found, own))


def test_the_adapters_step_is_plain_sgd_with_momentum():
    _, client, _ = begun()
    adapter = adapter_of(client.network)
    optimizer = client.scratch["fedig-a/optimizer"]
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.01, 0.5, 0)
    assert isinstance(optimizer, torch.optim.SGD)
    assert {id(p) for p in group["params"]} == {id(p) for p in adapter.parameters()}


def test_neither_pass_touches_running_statistics():
    small, client, batch = begun()
    names = statistics_names(client.network)
    embeddings = client.network.features(batch.images)
    before = snapshot(client.network, names)
    small.method.head_loss(client, batch, embeddings)
    small.method.adapter_loss(client, batch).backward()
    assert same(snapshot(client.network, names), before)


def test_the_network_trains_as_in_fedig():
    one, other = federation("fedig-a", train=SGD).run(), federation("fedig", train=SGD).run()
    rest = {name: t for name, t in one.items() if not name.startswith("heads.")}
    assert same(rest, other)


def test_adapters_are_averaged_and_learn():
    small = federation("fedig-a", train=SGD)
    start = {name: t.clone() for name, t in small.server.state.weights.items()}
    weights = small.run(2)
    last = "heads.zero_shot_adapter.0.layers.2"
    assert not torch.equal(weights[f"{last}.weight"], start[f"{last}.weight"])
    assert not any(
        name.startswith("heads.") for m in small.transport.memories.values() for name in m
    )


def test_adapters_go_on_with_their_momentum_where_the_network_does(monkeypatch):
    train = SGD.model_copy(update={"keep_optimizer": True, "momentum": 0.5})
    small, begun_with, step = federation("fedig-a", train=train), {}, FedIGA.step

    def first_step(method, client, batch):
        if (client.id, client.round) not in begun_with:
            moments = kept_moments(client.scratch[OPTIMIZER], adapter_of(client.network))
            begun_with[client.id, client.round] = moments
        step(method, client, batch)

    monkeypatch.setattr(FedIGA, "step", first_step)
    small.run(1)
    kept = {id: dict(memory) for id, memory in small.transport.memories.items()}
    small.server.round()
    for id, memory in kept.items():
        assert not begun_with[id, 1]
        assert begun_with[id, 2]
        assert same(begun_with[id, 2], {name: memory[name] for name in begun_with[id, 2]})


def test_the_adapters_gradients_are_clipped_as_the_networks():
    small = federation("fedig-a", train=SGD.model_copy(update={"gradient_clipping": 1e-9}))
    start = {name: t.clone() for name, t in small.server.state.weights.items()}
    heads = [name for name in start if name.startswith("heads.")]
    weights = small.run(1)
    for name in heads:
        torch.testing.assert_close(weights[name], start[name], rtol=1e-6, atol=1e-9)


def test_an_untrained_adapter_answers_as_the_settings_say():
    adapter = LayerAdapter(48, 16, alpha=0.3, spread=0.2)
    assert [p.shape for p in adapter.parameters()] == [(3, 96), (3,), (2, 3), (2,)]
    ours = Moments(torch.zeros(48), torch.ones(48))
    image = Moments(torch.randn(5, 48), torch.rand(5, 48))
    spread, mean = adapter(ours, image)
    torch.testing.assert_close(mean, torch.full((5,), 0.3))
    torch.testing.assert_close(spread, torch.full((5,), 0.2))
    assert len(list(LayerAdapter(8, 16, 0.1, 0.1).parameters())) == 4


def test_alpha_is_clamped_for_every_draw():
    adapter = ZeroShotAdapter([LayerAdapter(4, 2, alpha=0.5, spread=2.0)])
    ours = Moments(torch.zeros(4), torch.ones(4))
    image = Moments(torch.zeros(200, 4), torch.ones(200, 4))
    noise = torch.randn(200, generator=torch.Generator().manual_seed(0))
    alpha = adapter.share(noise[None])(0, None, ours, image)
    torch.testing.assert_close(alpha, (2 * noise + 0.5).clamp(0, 1))
    assert {0.0, 1.0} <= set(alpha.tolist())


def test_shares_of_layers_are_told_by_image():
    small = federation("fedig-a", train=SGD)
    network = scattered(small.network).eval()
    shares_of = load_script(PACS).shares_of
    images = torch.rand(6, 3, 16, 16)
    with torch.no_grad():
        together = shares_of(network, images)
        alone = [shares_of(network, image[None]) for image in images]
    assert list(together) == [f"featurizer.blocks.{i}.2" for i in range(3)]
    for name, alpha in together.items():
        assert alpha.shape == (6,)
        assert ((alpha >= 0) & (alpha <= 1)).all()
        torch.testing.assert_close(alpha, torch.cat([a[name] for a in alone]))
    assert any(alpha.unique().numel() > 1 for alpha in together.values())


@pytest.mark.parametrize("other", ["copa", "fedsr", "scaffold"])
def test_what_it_cannot_be_combined_with(other):
    with pytest.raises(ExperimentError, match="choose one"):
        method_class(f"fedig-a+{other}")


def test_a_backbone_without_normalised_maps_is_refused():
    """The bottleneck's batch normalisation is of vectors, which no adapter mixes."""
    with pytest.raises(ExperimentError, match="batch normalisation of feature maps"):
        federation("fedig-a", backbone="cnn_gn", embedding="bottleneck")
