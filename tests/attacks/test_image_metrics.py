"""Metrics against independent calculations."""

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from extras import needs
from feddg.attacks.image_metrics import (
    clustered_mean,
    perceptual_distances,
    perceptual_points,
    psnr,
    retrieval,
    ssim,
)
from feddg.rng import stream

pytestmark = needs("torchmetrics")


def found_by(one, other, groups):
    return retrieval(perceptual_points(one), perceptual_points(other), groups)


def noise(*shape, name="images"):
    return torch.rand(*shape, generator=stream(0, name))


def test_psnr_and_ssim_of_pairs():
    one, other = noise(3, 3, 16, 16), noise(3, 3, 16, 16, name="others")
    expected = -10 * torch.log10((one - other).square().flatten(1).mean(1))
    assert torch.allclose(psnr(one, other), expected, atol=1e-4)
    assert torch.allclose(psnr(one, one), torch.full((3,), 100.0))
    assert torch.allclose(ssim(one, one), torch.ones(3))
    assert (ssim(one, other) < 0.2).all()


def test_perceptual_points_are_as_far_apart_as_the_images():
    one, other = noise(3, 3, 16, 16), noise(3, 3, 16, 16, name="others")
    with torch.inference_mode():
        expected = perceptual_distances(one, other)
    points = [perceptual_points(part) for part in (one, other)]
    assert torch.allclose((points[0] - points[1]).square().sum(1), expected, rtol=1e-4)


def test_retrieval_of_the_images_themselves_of_others_and_of_ties():
    images = noise(20, 3, 16, 16)
    groups = torch.arange(20) // 10
    found = found_by(images, images, groups)
    assert found.ranks.max() == 0
    assert found.first == 1
    assert found.first_chance == pytest.approx(0.1)
    same = images[:1].expand(20, -1, -1, -1)
    tied = found_by(same, same, groups)
    assert tied.ranks.tolist() == [0.5] * 20
    assert tied.first == pytest.approx(0.1), "what cannot be told apart is found by chance"
    alone = found_by(images[:1], images[:1], groups[:1])
    assert alone.ranks.isnan().all()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-5, 5, width=32)), min_size=2, max_size=30))
def test_clustered_means_are_means_of_cluster_means(pairs):
    clusters, values = (torch.tensor(part) for part in zip(*pairs))
    found = clustered_mean(values, clusters)
    means = [values[clusters == c].double().mean().item() for c in clusters.unique()]
    assert found.mean == pytest.approx(numpy.mean(means), abs=1e-5)
    if len(means) > 1 and numpy.std(means) > 1e-6:
        low, high = stats.t.interval(0.95, len(means) - 1, numpy.mean(means), stats.sem(means))
        assert (found.low, found.high) == (
            pytest.approx(low, abs=1e-4),
            pytest.approx(high, abs=1e-4),
        )
