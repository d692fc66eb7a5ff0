"""L2D: its losses against slow or standard ones, its two steps, and its limits."""

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import cdist
from torch.distributions import Normal

from feddg.methods.l2d import (
    Augmenter,
    class_discrepancy,
    convolution,
    discrepancy,
    log_density,
    supervised_contrast,
    transposed_convolution,
)
from federations import federation, same


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_supervised_contrast_is_the_sum_over_positive_pairs():
    z, stylized, labels = drawn(4, 6), drawn(4, 6, seed=1), torch.tensor([0, 1, 0, 2])
    points = torch.cat([z, stylized]).double().numpy()
    points /= numpy.linalg.norm(points, axis=1, keepdims=True)
    classes, losses = [0, 1, 0, 2] * 2, []
    for i in range(8):
        others = [j for j in range(8) if j != i]
        total = sum(numpy.exp(points[i] @ points[j] / 0.1) for j in others)
        positive = [j for j in others if classes[j] == classes[i]]
        chances = [numpy.exp(points[i] @ points[j] / 0.1) / total for j in positive]
        losses.append(-numpy.log(chances).mean())
    result = supervised_contrast(z, stylized, labels, 0.1).item()
    assert result == pytest.approx(numpy.mean(losses), rel=1e-5)


def test_a_batch_of_one_has_no_contrast():
    assert supervised_contrast(drawn(1, 6), drawn(1, 6), torch.tensor([0]), 0.07).item() == 0


def test_log_density_is_twice_a_gaussians_without_its_constant():
    mean, spread, values = drawn(3, 5), drawn(3, 5, seed=1), drawn(3, 5, seed=2)
    exact = Normal(mean, (spread / 2).exp()).log_prob(values)
    torch.testing.assert_close(
        log_density(values, mean, spread), 2 * exact + numpy.log(2 * numpy.pi)
    )


def test_discrepancy_is_the_kernel_two_sample_statistic():
    one, other = drawn(3, 4), drawn(5, 4, seed=1) + 1
    points = torch.cat([one, other]).double().numpy()
    width = cdist(points, points, "sqeuclidean").sum() / (8 * 7)

    def kernel(a, b):
        squares = cdist(a.double(), b.double(), "sqeuclidean")
        return sum(numpy.exp(-squares / (width * scale)) for scale in (0.25, 0.5, 1, 2, 4)).mean()

    expected = kernel(one, one) + kernel(other, other) - 2 * kernel(one, other)
    assert discrepancy(one, other).item() == pytest.approx(expected, rel=1e-4)


def test_equal_views_have_no_discrepancy_and_its_gradient_is_finite():
    z = drawn(4, 3).requires_grad_()
    rows = [torch.tensor(own) for own in ([0, 1], [2], [3])]
    result = class_discrepancy(z, z.detach(), rows)
    result.backward()
    assert result.item() == pytest.approx(0, abs=1e-6)
    assert z.grad.isfinite().all()
    far = class_discrepancy(drawn(4, 3), drawn(4, 3) + 3, rows)
    assert far.item() > 0.5


@pytest.mark.parametrize("size", [8, 16, 40])
def test_the_augmenter_keeps_the_size_and_leaves_out_what_does_not_fit(size):
    augmenter = Augmenter(size, torch.Generator().manual_seed(0))
    assert [int(k) for k in augmenter.scales] == [k for k in (5, 9, 13, 17) if k < size]
    for side in (size, size - 2):  # a method in front may crop
        images = drawn(2, 3, side, side)
        one, again, other = (
            augmenter(images, augmenter.draws(2, side, rng, random_mixture=True))
            for rng in (torch.Generator().manual_seed(s) for s in (1, 1, 2))
        )
        assert one.shape == images.shape
        assert torch.equal(one, again)
        assert not torch.equal(one, other)


def client_and_batch(small, **state):
    client = small.client(**state)
    small.method.begin(client)
    return client, client.batch(torch.arange(len(client.examples)), client.stream("augment"))


def test_the_loss_has_every_term_of_both_versions():
    small = federation("l2d", sizes=(8,), freeze=True)
    client, batch = client_and_batch(small)
    seen = []
    hook = small.network.featurizer.register_forward_hook(lambda _, x, y: seen.append((x[0], y)))
    terms = small.method.loss(client, batch)
    hook.remove()
    images, features = seen[0]
    assert len(seen) == 1
    torch.testing.assert_close(images[:8], small.network.normalize(batch.images))
    head = small.network.embedding
    mean = torch.nn.functional.leaky_relu(features @ head.mean.weight.T + head.mean.bias)
    spread = torch.relu(features @ head.spread.weight.T + head.spread.bias)
    rng = client.stream("l2d", 0)
    client.scratch["l2d"].draws(8, 16, rng, random_mixture=True)
    noise = torch.randn(mean.shape, generator=rng)
    z = mean + 0.2 * spread.exp().sqrt() * noise
    logits = small.network.classifier(z)
    losses = torch.nn.functional.cross_entropy(logits, batch.labels.repeat(2), reduction="none")
    torch.testing.assert_close(terms["cross_entropy"], losses[:8].mean() / 2)
    torch.testing.assert_close(terms["augmented_cross_entropy"], losses[8:].mean() / 2)
    contrast = supervised_contrast(z[:8], z[8:], batch.labels, 0.07)
    torch.testing.assert_close(terms["contrast"], contrast)
    normal = (mean[8:] - z[:8]) ** 2 / spread[8:].exp() + spread[8:]
    torch.testing.assert_close(terms["likelihood"], normal.mean())
    assert terms.keys() == {
        "cross_entropy",
        "augmented_cross_entropy",
        "contrast",
        "likelihood",
    }


def test_the_augmented_image_is_the_blend_and_share_zero_the_image():
    small = federation("l2d", sizes=(8,), settings={"augmented_share": 0.25})
    client, batch = client_and_batch(small)
    normal = small.network.normalize(batch.images)
    rng = torch.Generator().manual_seed(3)
    own = client.scratch["l2d"].draws(8, 16, rng, random_mixture=False)
    raw = client.scratch["l2d"](normal, own)
    varied = small.method._varied(client, batch.images, own)
    torch.testing.assert_close(varied, 0.25 / (1 + (-raw).exp()) + 0.75 * batch.images)
    same_image = federation("l2d", settings={"augmented_share": 0.0})
    client, batch = client_and_batch(same_image)
    own = client.scratch["l2d"].draws(len(batch), 16, rng, random_mixture=True)
    still = same_image.method._varied(client, batch.images, own)
    assert torch.equal(still, batch.images)


def test_the_augmenters_step_goes_down_its_objective_and_moves_nothing_else():
    small = federation("l2d", sizes=(8,), settings={"augmenter_lr": 10.0}, freeze=True)
    client, batch = client_and_batch(small)
    for group in client.optimizer.param_groups:
        group["lr"] = 0.0
    network = {n: t.clone() for n, t in small.network.state_dict().items()}
    before = {n: t.detach().clone() for n, t in client.scratch["l2d"].named_parameters()}

    def objective():
        """The augmenter's objective under the first step's draws."""
        rng = client.stream("l2d", "augmenter", 1)
        fixed = client.lasting_stream("l2d", "convolutions")
        own = client.scratch["l2d"].draws(8, 16, fixed, random_mixture=False)
        varied = small.method._varied(client, batch.images, own)
        noise = torch.randn(16, client.network.features_dimension, generator=rng)
        (z, stylized), _, (mean, spread) = small.method._embedded(
            client.network, batch.images, varied, noise
        )
        others = torch.randperm(8, generator=rng)
        distance = (mean - z[others]).square() - (mean - z).square()
        club = (distance / spread.exp()).sum(1).mean() / 2
        rows = [(batch.labels == c).nonzero().squeeze(1) for c in batch.labels.unique()]
        return class_discrepancy(z, stylized, rows) + 0.1 * club

    at_start = objective()
    gradients = torch.autograd.grad(at_start, list(client.scratch["l2d"].parameters()))
    small.method.step(client, batch)
    assert same(network, small.network.state_dict())
    assert objective().item() < at_start.item()
    for (name, parameter), gradient in zip(
        client.scratch["l2d"].named_parameters(), gradients, strict=True
    ):
        torch.testing.assert_close(parameter.detach(), before[name] - 10 * gradient)


def test_the_augmenter_is_kept_between_rounds():
    small = federation("l2d")
    small.run(1)
    memory = small.transport.memories[0]
    client, _ = client_and_batch(small, memory=dict(memory))
    first, _ = client_and_batch(small)
    kept, new = (c.scratch["l2d"].state_dict() for c in (client, first))
    assert same({f"l2d/{n}": t for n, t in kept.items()}, memory)
    assert not same(kept, new)


def test_it_predicts_with_the_mean_of_the_embedding():
    network = federation("l2d").network.eval()
    images = torch.rand(4, 3, 16, 16)
    assert torch.equal(network(images), network(images))


@given(kernel=st.integers(1, 6), more=st.integers(0, 14), seed=st.integers(0, 2**16))
def test_convolutions_by_fourier_are_torchs_with_their_gradients(kernel, more, seed):
    rng, kind = torch.Generator().manual_seed(seed), torch.float64
    shape = (2, 3, kernel + more, kernel + more)
    images = torch.randn(shape, generator=rng, dtype=kind, requires_grad=True)
    weights = torch.randn(3, 3, kernel, kernel, generator=rng, dtype=kind)
    for ours, torchs in (
        (convolution, torch.nn.functional.conv2d),
        (transposed_convolution, torch.nn.functional.conv_transpose2d),
    ):
        mine, wanted = ours(images, weights), torchs(images, weights)
        torch.testing.assert_close(mine, wanted)
        goal = torch.randn(wanted.shape, generator=rng, dtype=kind)
        slopes = [torch.autograd.grad((out * goal).sum(), images) for out in (mine, wanted)]
        torch.testing.assert_close(*slopes)
