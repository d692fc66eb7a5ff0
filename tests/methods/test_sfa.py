"""SFA: the noise's distribution, the loss, and its limits."""

import numpy
import pytest
import torch

from feddg.errors import ExperimentError
from feddg.methods.composition import build_method
from feddg.methods.sfa import class_noise
from federations import federation, same


def head_terms(settings, z):
    small = federation("sfa", sizes=(8,), settings=settings)
    client = small.client()
    batch = client.batch(torch.arange(8), client.stream("augment"))
    return small, client, batch, small.method.head_loss(client, batch, z)


def test_the_loss_is_half_clean_and_half_scaled_and_shifted():
    z = torch.randn(8, 128, generator=torch.Generator().manual_seed(3))
    settings = {"scale_noise": 0.2, "shift_noise": 0.7}
    small, client, batch, terms = head_terms(settings, z)
    a, b = torch.randn(2, 8, 128, generator=client.stream("sfa", 0)).double().numpy()
    noisy = z.double().numpy() * (1 + 0.2 * a) + 0.7 * b
    w, c = (p.detach().double().numpy() for p in small.network.classifier.parameters())

    def cross_entropy(rows):
        logits = rows @ w.T + c
        losses = numpy.log(numpy.exp(logits).sum(1)) - logits[numpy.arange(8), batch.labels]
        return losses.mean()

    assert terms["cross_entropy"].item() == pytest.approx(cross_entropy(z.numpy()) / 2, rel=1e-5)
    assert terms["noisy_cross_entropy"].item() == pytest.approx(cross_entropy(noisy) / 2, rel=1e-5)


def test_adaptive_noise_has_the_shrunk_covariance_of_its_class():
    rng = torch.Generator().manual_seed(0)
    mixing = torch.randn(3, 3, generator=rng)
    seen = torch.cat([torch.randn(40, 3, generator=rng) @ mixing + 5, torch.randn(30, 3)])
    classes = torch.tensor([1] * 40 + [0] * 30)
    noise, known = class_noise(torch.full((20_000,), 1), seen, classes, 0.1, rng)
    assert known.all()
    own = seen[:40].double().numpy()
    covariance = numpy.cov(own.T, bias=True)
    expected = 0.9 * covariance + 0.1 * numpy.trace(covariance) / 3 * numpy.eye(3)
    scale = numpy.abs(expected).max()
    numpy.testing.assert_allclose(numpy.cov(noise.numpy().T), expected, atol=0.05 * scale)
    numpy.testing.assert_allclose(noise.mean(0), 0, atol=0.05 * scale**0.5)


def test_without_shrinkage_noise_stays_in_the_plane_of_the_class():
    rng = torch.Generator().manual_seed(0)
    seen = torch.tensor([[0.0, 1.0, 0.0], [0.0, 3.0, 0.0], [9.0, 0.0, 4.0]])
    noise, known = class_noise(torch.tensor([0, 0, 1]), seen, torch.tensor([0, 0, 1]), 0.0, rng)
    assert known.tolist() == [True, True, False]
    assert (noise[:2, [0, 2]] == 0).all()
    assert (noise[:2, 1] != 0).all()
    assert (noise[2] == 0).all()  # one embedding: no direction, so the caller shifts it simply


def test_a_class_with_one_embedding_gets_the_simple_shift():
    z = torch.zeros(8, 128)
    settings = {"noise": "adaptive", "scale_noise": 0.0}
    small, _, batch, _ = head_terms(settings, z)
    single = batch.labels == 2
    assert int(single.sum()) == 2  # the fixture's eight images: 3, 3 and 2 of a class
    keep = torch.tensor([0, 1, 2, 3, 4])  # classes 0, 1, 2, 0, 1: class 2 once
    fresh = small.client()
    shifted = small.method._perturbed(fresh, batch.rows(keep, keep), z[keep])
    _, b = torch.randn(2, 5, 128, generator=fresh.stream("sfa", 0))
    torch.testing.assert_close(shifted[2], 0.5 * b[2])
    assert (shifted[[0, 1, 3, 4]] == 0).all()  # equal embeddings have no covariance


def test_covariances_see_the_last_batches_only():
    settings = {"noise": "adaptive", "recent_batches": 2}
    small = federation("sfa", sizes=(8,), settings=settings)
    client = small.client()
    for value in (0.0, 1.0, 2.0, 3.0):
        batch = client.batch(torch.arange(8), client.stream("augment"))
        for passed in (value, 9.0):  # the second time, of other images
            small.method._perturbed(client, batch, torch.full((8, 128), passed))
    assert [float(seen[0, 0]) for seen, _ in client.scratch["sfa"]] == [2.0, 3.0]


def test_no_noise_is_fedavg_bit_for_bit():
    silent = {"scale_noise": 0.0, "shift_noise": 0.0}
    assert same(federation("sfa", settings=silent).run(1), federation().run(1))
    assert not same(federation("sfa").run(1), federation().run(1))


def test_bad_settings_are_refused_by_name():
    with pytest.raises(ExperimentError, match="scale_noise"):
        build_method("sfa", {"scale_noise": -1})
