"""Every adaptation against an independent calculation; single images, resets, refusals."""

import copy
import math
from dataclasses import replace

import numpy
import pytest
import torch
from torch import nn

from feddg.data.pixels import ArrayPixels
from feddg.errors import AdaptationError
from feddg.evaluation.accuracy import Evaluation, sees_batches
from feddg.methods.base import local_names
from feddg.methods.composition import build_method
from feddg.models.backbones import build_network
from feddg.models.network import Network
from feddg.models.normalization import adapter_of, batch_norms, map_layers
from feddg.prediction.adaptation import ADAPTATIONS, Parts, Predictor, adapt, register_adaptation
from federations import colored_images, federation, same

ONE_IMAGE = [name for name, kind in ADAPTATIONS.items() if kind.needs == "one image"]
STREAMS = [name for name, kind in ADAPTATIONS.items() if kind.needs != "one image"]
ANY_MODEL = [name for name in ADAPTATIONS if name not in ("adapter", "bin", "ensemble")]


def scrambled(network, seed=2):
    """Statistics, scales, shifts and adapters unlike those of a new network."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in batch_norms(network).values():
            for tensor in (layer.running_var, layer.weight):
                tensor.copy_(0.5 + torch.rand(tensor.shape, generator=rng))
            for tensor in (layer.running_mean, layer.bias):
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=rng))
        adapter = adapter_of(network)
        for parameter in () if adapter is None else adapter.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=rng) + 0.05)
        for name, parameter in network.named_parameters():
            if name.endswith("gate"):
                parameter.copy_(torch.rand(parameter.shape, generator=rng))
    return network.eval()


def model(method="fedig", embedding="none", **settings):
    network = build_network("cnn", 3, weights=None, embedding=embedding)
    return scrambled(build_method(method, settings).network(network))


def suited(name):
    """A model and parts that the adaptation accepts."""
    if name == "adapter":
        chosen = build_method("fedig-a", {}).predictor(model("fedig-a", "bottleneck")).eval()
    else:
        chosen = model("fedig", "bottleneck", instance_gate=0.5 if name == "bin" else None)
    own = chosen.state_dict()
    names = [n for n in own if n.rpartition(".")[2] in ("running_mean", "running_var")]
    clients = {k: {n.removeprefix("network."): own[n] * (1 + k / 9) for n in names} for k in (3, 5)}
    return chosen, Parts(clients, seed=1)


def images(count=9, seed=4):
    return torch.rand(count, 3, 32, 32, generator=torch.manual_seed(seed))


def predicted(predictor, batch):
    with torch.inference_mode():
        return predictor(batch).clone()


# --- what every adaptation promises -------------------------------------------------------------


def test_single_images_and_batches_agree(subtests):
    for name in ONE_IMAGE:
        with subtests.test(name=name):
            predictor = adapt(*_spelled(name))
            batch = images()
            together = predicted(predictor, batch)
            predictor.reset()
            alone = torch.cat([predicted(predictor, image[None]) for image in batch])
            torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-5)


def _spelled(name):
    chosen, parts = suited(name)
    return chosen, name, parts


def test_the_model_stays_as_it_is_to_the_bit(subtests):
    for name in ADAPTATIONS:
        with subtests.test(name=name):
            chosen, parts = suited(name)
            before = {n: t.clone() for n, t in chosen.state_dict().items()}
            grads = [parameter.requires_grad for parameter in chosen.parameters()]
            plain = predicted(chosen, images())
            predictor = adapt(chosen, name, parts)
            for seed in range(3):
                predicted(predictor, images(seed=seed))
            assert same(chosen.state_dict(), before)
            assert [parameter.requires_grad for parameter in chosen.parameters()] == grads
            assert torch.equal(predicted(chosen, images()), plain)


def test_a_reset_forgets_what_was_seen(subtests):
    for name in ADAPTATIONS:
        with subtests.test(name=name):
            predictor = adapt(*_spelled(name))
            first = predicted(predictor, images())
            predicted(predictor, images(seed=8))
            predictor.reset()
            assert torch.equal(predicted(predictor, images()), first)


@pytest.mark.parametrize("name", [*STREAMS, "random"])
def test_what_is_seen_changes_predictions_where_it_is_said_to(name):
    chosen, parts = suited("global")
    predictor = adapt(chosen, name, parts)
    first = predicted(predictor, images())
    assert not torch.equal(predicted(predictor, images()), first)


def test_everything_is_documented(subtests):
    for name in ADAPTATIONS:
        with subtests.test(name=name):
            kind = ADAPTATIONS[name]
            assert kind.summary
            assert kind.changes
            assert kind.cost
            assert kind.__doc__


# --- each by an independent calculation ---------------------------------------------------------


def slow(network, batch, moments):
    """The network one image at a time; ``moments(layer number, maps)`` give mean and deviation."""
    logits = []
    for image in batch.double():
        hidden = network.normalize(image[None].float()).double()
        for number, (convolution, pool, norm, _) in enumerate(network.featurizer.blocks):
            hidden = pool(convolution(hidden.float())).double()
            out = torch.empty_like(hidden)
            for c, (mean, deviation) in enumerate(moments(number, norm, hidden[0])):
                scale, shift = float(norm.weight[c].detach()), float(norm.bias[c].detach())
                out[0, c] = (hidden[0, c] - mean) / deviation * scale + shift
            hidden = out.clamp_min(0)
        flat = hidden.flatten(1).float()
        logits.append(network.classifier(network.embedding(network.featurizer.linear(flat).relu())))
    return torch.cat(logits)


def kept(norm, c):
    return float(norm.running_mean[c]), float(norm.running_var[c])


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_a_fixed_share(alpha):
    network = model(embedding="bottleneck")

    def moments(number, norm, maps):
        for c, plane in enumerate(maps.numpy()):
            mean, variance = kept(norm, c)
            own = (plane.mean(), math.sqrt(plane.var() + norm.eps))
            ours = (mean, math.sqrt(variance + norm.eps))
            yield tuple(alpha * a + (1 - alpha) * b for a, b in zip(own, ours))

    batch = images(3)
    with torch.no_grad():
        expected = slow(network, batch, moments)
    found = predicted(adapt(network, f"fixed:alpha={alpha}"), batch)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_a_fixed_share_of_zero_and_global_are_the_plain_model_to_the_bit():
    network, batch = model(embedding="bottleneck"), images()
    plain = predicted(network, batch)
    assert torch.equal(predicted(adapt(network, "fixed:alpha=0"), batch), plain)
    assert torch.equal(predicted(adapt(network, "global"), batch), plain)


def test_global_switches_adapters_and_gates_off():
    batch = images()
    network = model("fedig-a")
    with_adapter = build_method("fedig-a", {}).predictor(network).eval()
    assert torch.equal(predicted(adapt(with_adapter, "global"), batch), predicted(network, batch))
    assert not torch.equal(predicted(with_adapter, batch), predicted(network, batch))
    gated = model(instance_gate=0.5)
    plain = build_network("cnn", 3, weights=None).eval()
    plain.load_state_dict({n: t for n, t in gated.state_dict().items() if not n.endswith("gate")})
    assert torch.equal(predicted(adapt(gated, "global"), batch), predicted(plain, batch))
    assert torch.equal(predicted(adapt(gated, "bin"), batch), predicted(gated, batch))


def test_an_activation_inside_a_gated_layer_acts_once():
    class BatchNormAct2d(nn.BatchNorm2d):  # as timm's
        def __init__(self, channels):
            super().__init__(channels)
            self.drop, self.act = nn.Identity(), nn.SiLU()

    network = build_network("cnn", 3, weights=None)
    for block in network.featurizer.blocks:
        block[2] = BatchNormAct2d(block[2].num_features)
    network = scrambled(build_method("fedig", {"instance_gate": 0.5}).network(network))
    torch.testing.assert_close(
        predicted(adapt(network, "bin"), images()), predicted(network, images())
    )


def test_the_adapter_is_fedig_as_own_prediction():
    network = model("fedig-a", "bottleneck")
    own = build_method("fedig-a", {}).predictor(network).eval()
    for chosen in (network, own):
        found = predicted(adapt(chosen, "adapter"), images())
        assert torch.equal(found, predicted(own, images()))


@pytest.mark.parametrize("k", [0, 1, 4])
def test_instance_aware_normalisation(k):
    network = model(embedding="bottleneck")

    def moments(number, norm, maps):
        for c, plane in enumerate(maps.numpy()):
            mean, variance = kept(norm, c)
            n, spread = plane.size, variance + norm.eps
            limit = k * math.sqrt(spread / n)
            away = plane.mean() - mean
            mean += math.copysign(max(abs(away) - limit, 0), away)
            limit = k * spread * math.sqrt(2 / (n - 1))
            away = plane.var(ddof=1) - variance
            variance = max(variance + math.copysign(max(abs(away) - limit, 0), away), 0)
            yield mean, math.sqrt(variance + norm.eps)

    batch = images(3)
    with torch.no_grad():
        expected = slow(network, batch, moments)
    found = predicted(adapt(network, f"iabn:k={k}"), batch)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_random_shares_belong_to_an_images_place():
    network, batch = model(), images(4)
    predictor = adapt(network, "random", Parts(seed=7))
    first = predicted(predictor, batch)
    assert not torch.equal(predicted(predictor, batch), first)
    predictor.reset()
    halves = torch.cat([predicted(predictor, part) for part in batch.split(2)])
    torch.testing.assert_close(halves, first, rtol=1e-4, atol=1e-5)
    other = adapt(network, "random", Parts(seed=8))
    assert not torch.equal(predicted(other, batch), first)
    repeated = batch[:1].repeat(4, 1, 1, 1)
    predictor.reset()
    assert len(predicted(predictor, repeated)[:, 0].unique()) == 4


def test_the_ensemble_is_the_mean_over_copies_with_each_clients_normalisation():
    chosen, parts = suited("ensemble")
    probabilities = []
    for part in parts.clients.values():
        one = copy.deepcopy(chosen)
        one.load_state_dict(chosen.state_dict() | part)
        probabilities.append(predicted(one, images()).softmax(-1))
    expected = torch.stack(probabilities).mean(0)
    found = predicted(adapt(chosen, "ensemble", parts), images()).exp()
    torch.testing.assert_close(found, expected)


def test_the_ensemble_of_the_models_own_statistics_is_the_model_with_its_gates():
    network = model("fedig", "bottleneck", instance_gate=0.5)
    own = {name: t for name, t in network.state_dict().items() if ".running_" in name}
    found = predicted(adapt(network, "ensemble", Parts({0: own})), images())
    torch.testing.assert_close(found, predicted(network, images()).log_softmax(-1))


def test_mixnorm_pools_five_views_of_each_image():
    network, share = model(), 0.2
    predictor = adapt(network, f"mixnorm:share={share}", Parts(seed=1))
    batch = images(2)
    views = predictor.views(batch)
    assert views.shape == (10, 3, 32, 32)
    assert torch.equal(views[:2], batch)
    assert torch.equal(views[2:4], batch.flip(-1))
    assert len(views.flatten(1).unique(dim=0)) == 10
    for number in range(2):
        hidden = network.normalize(views[number::2])
        for convolution, pool, norm, relu in network.featurizer.blocks:
            hidden = pool(convolution(hidden))
            pixels = hidden.transpose(0, 1).flatten(1)
            mean = norm.running_mean + share * (pixels.mean(1) - norm.running_mean)
            variance = norm.running_var + share * (pixels.var(1, correction=0) - norm.running_var)
            hidden = (hidden - mean[:, None, None]) / (variance[:, None, None] + norm.eps).sqrt()
            hidden = relu(hidden * norm.weight[:, None, None] + norm.bias[:, None, None])
        logits = network.classifier(network.featurizer.linear(hidden[:1].flatten(1)).relu())
        found = predicted(predictor, batch)[number]
        torch.testing.assert_close(found, logits[0].detach(), rtol=1e-3, atol=1e-4)


def test_mixnorm_without_a_share_is_the_plain_model():
    network = model(embedding="bottleneck")
    found = predicted(adapt(network, "mixnorm:share=0"), images())
    torch.testing.assert_close(found, predicted(network, images()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("tau", "keeps"), [("0.7", (0.7, 0.7)), ("none", (0.0, 0.5))])
def test_tsmobn_is_torchs_own_moving_average(tau, keeps):
    network = model(embedding="bottleneck")
    predictor = adapt(network, f"tsmobn:tau={tau}")
    theirs = copy.deepcopy(network)
    for seed, keep in enumerate(keeps):
        batch = images(12, seed)
        found = predicted(predictor, batch)
        expected = by_moving_average(theirs, batch, keep)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def by_moving_average(network, batch, keep):
    """Moves each layer's running statistics by a batch as torch does, then predicts by them."""

    def move(layer, inputs):
        layer.train()
        layer.momentum = 1 - keep
        type(layer).forward(layer, inputs[0])
        layer.eval()

    hooks = [layer.register_forward_pre_hook(move) for layer in batch_norms(network).values()]
    with torch.no_grad():
        logits = network(batch)
    for hook in hooks:
        hook.remove()
    return logits


def test_what_tsmobn_keeps_is_part_of_no_graph():
    predictor = adapt(model().requires_grad_(True), "tsmobn")
    for seed in range(3):
        predictor(images(9, seed)).sum().backward()  # a second pass through a freed graph fails
    kept = [part for pair in predictor._kept.values() for part in pair]
    assert not any(part.requires_grad for part in kept)


def test_small_batches_do_not_move_tsmobn():
    network = model()
    predictor = adapt(network, "tsmobn")
    assert torch.equal(predicted(predictor, images(7)), predicted(network, images(7)))


def by_tent(network, batches, lr):
    """Tent as its authors' code sets a model up: no running statistics in any map's layer."""
    network = copy.deepcopy(network).requires_grad_(False)
    trained = []
    for layer in map_layers(network).values():
        layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None
        trained += [layer.weight.requires_grad_(True), layer.bias.requires_grad_(True)]
    optimizer = torch.optim.Adam(trained, lr)
    for batch in batches:
        logits = network(batch)
        loss = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield logits.detach()


def test_tent_is_the_authors_recipe():
    network = model(embedding="bottleneck")
    batches = [images(8, seed) for seed in range(3)]
    predictor = adapt(network, "tent:lr=0.01")
    for batch, expected in zip(batches, by_tent(network, batches, 0.01)):
        torch.testing.assert_close(predicted(predictor, batch), expected, rtol=1e-3, atol=1e-4)


def test_tent_with_several_steps_returns_the_last_ones_logits():
    batch, network = images(8), model(embedding="bottleneck")
    once, thrice = adapt(network, "tent:lr=0.05"), adapt(network, "tent:lr=0.05,steps=3")
    for _ in range(2):
        once(batch)
    torch.testing.assert_close(thrice(batch), once(batch))


def test_tent_leaves_a_single_image_to_the_running_statistics():
    network = model()
    predictor = adapt(network, "tent")
    assert torch.equal(predicted(predictor, images(1)), predicted(network, images(1)))
    assert torch.equal(predicted(predictor, images(1)), predicted(network, images(1)))


# --- any trained model, and what is refused -----------------------------------------------------


def test_models_of_other_methods_are_served(subtests):
    for method in ["fedavg", "fedbn", "fedbn+fedsr", "copa", "l2d", "jigen+mixstyle"]:
        with subtests.test(method=method):
            small = federation(method, sizes=(6, 6))
            small.run(1)
            local = local_names(small.method, small.network)
            clients = {
                id: {n: t for n, t in memory.items() if n in local}
                for id, memory in small.transport.memories.items()
            }
            parts = Parts({id: part for id, part in clients.items() if part})
            chosen = small.method.predictor(small.network).eval()
            batch = torch.rand(8, 3, 16, 16)
            for name in [*ANY_MODEL, *(["ensemble"] if "fedbn" in method else [])]:
                logits = predicted(adapt(chosen, name, parts), batch)
                assert logits.shape == (8, 3)
                assert torch.isfinite(logits).all()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("adapter", r"trained without adapters.*--method fedig-a"),
        ("bin", r"without batch-instance normalisation.*instance_gate"),
        ("ensemble", r"clients keep no normalisation.*fedbn, silobn, fedig"),
    ],
)
def test_what_needs_training_refuses_other_models_with_the_reason(name, reason):
    network = build_network("cnn", 3, weights=None).eval()
    with pytest.raises(AdaptationError, match=f"{name} cannot serve this model: .*{reason}"):
        adapt(network, name)


class Plain(nn.Module):
    """A featurizer without normalisation."""

    out_features = 3 * 32 * 32

    def forward(self, inputs):
        return inputs.flatten(1)


def test_a_backbone_without_normalisation_is_refused(subtests):
    for name in [name for name in ANY_MODEL if name != "global"]:
        with subtests.test(name=name):
            network = Network(Plain(), 2).eval()
            with pytest.raises(AdaptationError, match="this backbone has none"):
                adapt(network, name)
            assert torch.equal(
                predicted(adapt(network, "global"), images()), predicted(network, images())
            )


def test_mistakes_are_named(subtests):
    for spelling, message in [
        ("tend", r"unknown adaptation 'tend' \(did you mean 'tent'\?\)"),
        ("fixed:beta=1", "'beta'.*there are: alpha"),
        ("fixed:alpha=2", "alpha: .*less than or equal to 1"),
        ("global:alpha=1", "'alpha'; there are: none"),
        ("tent:lr=fast", "lr: .*valid number"),
    ]:
        with subtests.test(message=message), pytest.raises(AdaptationError, match=message):
            adapt(model(), spelling)


# --- evaluation ---------------------------------------------------------------------------------


def evaluation(batch_size=8):
    pixels, labels = colored_images(40)
    domains = numpy.repeat([0, 1], 20)
    splits = {"test": numpy.arange(40)}
    names = ("one", "other")
    return Evaluation(
        ArrayPixels(pixels), splits, labels, domains, names, 3, batch_size, torch.device("cpu")
    )


def test_evaluation_forgets_between_domains():
    measured = evaluation()
    network = model()
    forward = measured.scores(adapt(network, "tent:lr=0.1"))
    alone = replace(measured, splits={"test": numpy.arange(20, 40)})
    again = alone.scores(adapt(network, "tent:lr=0.1"))
    assert [score.domain for score in forward] == ["one", "other"]
    assert forward[1].loss == again[0].loss


def test_images_that_stand_alone_are_evaluated_without_regard_to_their_parts():
    """Those of several parts may be one batch: they need no reset, and see nothing but an image."""
    alone = {name for name in ADAPTATIONS if not sees_batches(adapt(*_spelled(name)))}
    assert alone == {"global", "fixed", "adapter", "bin", "ensemble", "iabn", "mixnorm"}


# --- by name ------------------------------------------------------------------------------------


def test_tables_have_a_fixed_order():
    assert list(ADAPTATIONS) == [
        *("global", "fixed", "random", "adapter", "bin"),
        *("ensemble", "iabn", "mixnorm", "tsmobn", "tent"),
    ]


class Halved(Predictor):
    """The logits, halved."""

    name = "halved"
    summary = "half of every logit"

    def forward(self, batch):
        return self.model(batch) / 2


def test_an_adaptation_is_one_definition(monkeypatch):
    monkeypatch.setattr(ADAPTATIONS, "_found", dict(ADAPTATIONS._found))
    register_adaptation(Halved)
    assert list(ADAPTATIONS)[-1] == "halved"
    network = model()
    found = predicted(adapt(network, "halved"), images())
    assert torch.equal(found, predicted(network, images()) / 2)

    class Other(Predictor):
        name = "halved"
        summary = "another"

    with pytest.raises(AdaptationError, match="two adaptations are called 'halved'"):
        register_adaptation(Other)
