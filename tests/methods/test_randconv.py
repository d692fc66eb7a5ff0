"""RandConv against an explicit convolution, and its limits."""

import numpy
import pytest
import torch
from scipy.signal import correlate2d
from scipy.special import rel_entr, softmax

from feddg.methods.randconv import convolved, random_kernel
from feddg.models.task import divergence_from_mean
from federations import federation, same

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def images(count=2, side=6):
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("size", [1, 3, 5])
def test_images_are_convolved_after_normalisation_and_mixed(size):
    network = federation().network
    kernel = random_kernel(size, torch.Generator().manual_seed(1))
    result = convolved(network, images(), kernel, 0.3)
    for image, got in zip(images().double().numpy(), result):
        normal = (image - numpy.reshape(MEAN, (3, 1, 1))) / numpy.reshape(STD, (3, 1, 1))
        for out in range(3):
            filtered = sum(
                correlate2d(normal[c], kernel[out, c].double().numpy(), "same") for c in range(3)
            )
            expected = 0.7 * normal[out] + 0.3 * filtered
            numpy.testing.assert_allclose(
                network.normalize(got)[out], expected, rtol=1e-4, atol=1e-4
            )


def test_share_zero_returns_the_images():
    kernel = random_kernel(3, torch.Generator())
    assert torch.equal(convolved(federation().network, images(), kernel, 0.0), images())


def test_kernels_keep_the_variance_of_white_noise():
    rng = torch.Generator().manual_seed(0)
    for size in (1, 3, 5, 7):
        drawn = torch.stack([random_kernel(size, rng) for _ in range(2000)])
        total = drawn.square().sum((2, 3, 4)).mean()  # out variance / in variance
        assert float(total) == pytest.approx(1.0, abs=0.05)


def test_divergence_is_the_mean_kl_to_the_mean_of_the_versions():
    logits = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(2)) * 3
    p = softmax(logits.double().numpy(), axis=-1)
    expected = numpy.mean([rel_entr(version, p.mean(0)).sum(-1) for version in p])
    assert divergence_from_mean(logits).item() == pytest.approx(expected, rel=1e-5)
    assert divergence_from_mean(logits[:1].expand(3, 4, 5)).item() == pytest.approx(0, abs=1e-6)
    apart = torch.tensor([[[90.0, -90.0]], [[-90.0, 90.0]]])
    assert divergence_from_mean(apart).item() == pytest.approx(numpy.log(2))


def recorded_versions(settings, steps=200):
    small = federation("randconv", sizes=(8,), settings=settings, freeze=True)
    client = small.client()
    x = images(1)
    draws = []
    for step in range(steps):
        client.steps = step
        drawn = small.method.draws(client, torch.arange(8), torch.zeros(8))
        own = drawn["randconv/0"], drawn["randconv/0/share"]
        draws.append(convolved(small.network, x, *own))
    return x, draws


def test_rc_img_leaves_half_of_the_versions_alone_and_rc_mix_none():
    x, draws = recorded_versions({"convolution": "image"})
    still = sum(torch.equal(x, version) for version in draws)
    assert 70 < still < 130  # 100 +- 4 standard deviations
    x, draws = recorded_versions({"convolution": "mix"}, 20)
    assert not any(torch.equal(x, version) for version in draws)


def test_the_loss_classifies_the_first_of_three_different_versions():
    small = federation("randconv", sizes=(8,), freeze=True)
    client = small.client()
    batch = client.batch(torch.arange(8), client.stream("augment"))
    seen = []
    hook = small.network.featurizer.register_forward_pre_hook(
        lambda _, x: seen.extend(x[0].split(8))
    )
    terms = small.method.loss(client, batch)
    hook.remove()
    assert len(seen) == 3
    assert not torch.equal(seen[0], seen[1])
    logits = torch.stack([small.network.classifier(small.network.featurizer(x)) for x in seen])
    expected = torch.nn.functional.cross_entropy(logits[0], batch.labels)
    torch.testing.assert_close(terms["cross_entropy"], expected)
    torch.testing.assert_close(terms["consistency"], 10 * divergence_from_mean(logits))


def test_identity_versions_without_consistency_are_fedavg_bit_for_bit():
    settings = {"convolution": "image", "identity_probability": 1.0, "consistency_weight": 0.0}
    assert same(federation("randconv", settings=settings).run(1), federation().run(1))
