"""VISTA: the groups' styles, versions by hand, the loss, and what it is without its parts."""

import numpy
import pytest
import torch
from scipy.special import log_softmax, rel_entr, softmax

from feddg.clients.client import Batch
from feddg.errors import ExperimentError
from feddg.methods.composition import method_class
from feddg.styles.statistics import finch
from federations import federation, same


def set_up(settings=None, **options):
    small = federation("vista", settings=settings or {}, **options)
    small.server.setup()
    return small, small.server.state.context


def begun(small, id=0):
    client = small.client(id, context=small.server.state.context)
    small.method.begin(client)
    return client


def color_style(images):
    """Mean and deviation of every colour of each image, uint8 (n, 3, H, W)."""
    pixels = images.double().numpy() / 255
    return numpy.stack([pixels.mean((2, 3)), numpy.sqrt(pixels.var((2, 3)) + 1e-5)], axis=1)


def test_a_client_sends_six_numbers_the_mean_of_its_clusters():
    small, _ = set_up(sizes=(12, 9, 7))
    message = small.method.client_statistics(small.client(1))
    own = color_style(small.examples(1).images())
    labels = finch(own.reshape(len(own), -1))[-1]
    pixels = small.examples(1).images().double().numpy() / 255
    clusters = []
    for label in range(labels.max() + 1):
        places = pixels[labels == label].transpose(1, 0, 2, 3).reshape(3, -1)
        clusters.append([places.mean(1), numpy.sqrt(places.var(1) + 1e-5)])
    assert list(message.tensors) == ["style"]
    assert message.tensors["style"].shape == (2, 3)
    numpy.testing.assert_allclose(message.tensors["style"], numpy.mean(clusters, 0), atol=1e-5)


def test_clients_are_sent_the_mean_style_of_each_group_and_no_single_one():
    small, context = set_up(sizes=(8, 8, 8, 8))
    styles = torch.stack(
        [small.method.client_statistics(small.client(id)).tensors["style"] for id in range(4)]
    )
    labels = finch(styles.flatten(1).numpy())[0]
    expected = torch.stack([styles[labels == g].mean(0) for g in range(labels.max() + 1)])
    torch.testing.assert_close(context.tensors["styles"], expected)
    # FINCH joins every client with its nearest: no group has one member.
    assert min(numpy.bincount(labels)) > 1
    assert sorted(id for group in small.setup.groups["style"] for id in group) == [0, 1, 2, 3]


def test_the_median_is_pardons_one_style():
    _, context = set_up({"styles": "median"}, sizes=(8, 8, 8, 8))
    _, pardons = (lambda s: (s.server.setup(), s.server.state.context))(
        federation("pardon", settings={"codec": "colors"}, sizes=(8, 8, 8, 8))
    )
    torch.testing.assert_close(context.tensors["styles"][0], pardons.tensors["style"])


def test_a_restyled_image_lies_between_itself_and_its_groups_colours():
    small, context = set_up({"convolution_probability": 0.0, "style_probability": 1.0})
    client = begun(small)
    images = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(1)) / 4 + 0.4
    batch = Batch(images, torch.zeros(6), torch.arange(6))
    version = small.method._version(client, batch, 0)
    # The same draws, by the documented order: four of the version, a group and a share each.
    rng = client.stream("vista", 0)
    torch.rand(4, generator=rng)
    groups = torch.randint(len(context.tensors["styles"]), (6,), generator=rng)
    shares = torch.rand(6, 1, 1, 1, generator=rng)
    for image, got, group, share in zip(images, version, groups, shares):
        mean, deviation = context.tensors["styles"][group].double().numpy()[..., None, None]
        own = image.double().numpy()
        scaled = (own - own.mean((1, 2), keepdims=True)) / numpy.sqrt(
            own.var((1, 2), keepdims=True) + 1e-5
        )
        restyled = numpy.clip(scaled * deviation + mean, 0, 1)
        expected = own + float(share) * (restyled - own)
        numpy.testing.assert_allclose(got, expected, atol=1e-5)


def test_the_loss_is_the_mean_cross_entropy_and_the_divergence_of_all_versions():
    small, _ = set_up({"versions": 3, "consistency_weight": 7.0}, freeze=True, sizes=(8, 8))
    client = begun(small)
    batch = client.batch(torch.arange(8), client.stream("augment"))
    seen = []
    hook = small.network.featurizer.register_forward_pre_hook(
        lambda _, x: seen.extend(x[0].split(8))
    )
    terms = small.method.loss(client, batch)
    hook.remove()
    assert len(seen) == 3
    assert not torch.equal(seen[0], seen[1])
    with torch.no_grad():
        logits = torch.stack(
            [small.network.classifier(small.network.featurizer(x)) for x in seen]
        ).double()
    picked = log_softmax(logits.numpy(), -1)[:, range(8), batch.labels]
    assert terms["cross_entropy"].item() == pytest.approx(-picked.mean(), rel=1e-4)
    p = softmax(logits.numpy(), axis=-1)
    divergence = numpy.mean([rel_entr(version, p.mean(0)).sum(-1) for version in p])
    assert terms["consistency"].item() == pytest.approx(7 * divergence, rel=1e-3, abs=1e-6)


def test_without_its_parts_it_is_fedavg_bit_for_bit():
    settings = {"versions": 1, "style_probability": 0.0, "convolution_probability": 0.0}
    small = federation("vista", settings=settings)
    assert not small.method.has_setup
    assert same(small.run(1), federation().run(1))


def test_it_serves_an_exponential_mean_unless_told_otherwise():
    from feddg.experiment import Experiment

    fields = {"data": "digits", "hold_out": "sketch", "method": "vista"}
    assert Experiment(**fields).server.averaging == "ema"
    assert Experiment(**fields, server={"averaging": "none"}).server.averaging == "none"


def test_what_it_does_itself_is_not_added_to_it(subtests):
    for other in ["pardon", "ccst", "randconv", "fedig", "fedig-a"]:
        with subtests.test(other=other), pytest.raises(ExperimentError, match="vista"):
            method_class(f"vista+{other}")


def test_an_unknown_codec_is_refused():
    with pytest.raises(ExperimentError, match="unknown codec"):
        federation("vista", settings={"codec": "nothing"})
