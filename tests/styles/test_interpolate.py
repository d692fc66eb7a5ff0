"""Client and interpolation styles, against numpy on feature maps and cases by hand."""

import numpy as np
import pytest
import torch
from torch import Tensor

from feddg.styles.interpolate import client_style, interpolation_style, perturb
from feddg.styles.statistics import image_moments


def some_maps(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    offsets = torch.randn((count, 5, 1, 1), generator=generator)
    return torch.randn((count, 5, 3, 3), generator=generator) + 4 * offsets


def samples_of(maps: Tensor) -> np.ndarray:
    return maps.double().numpy().transpose(1, 0, 2, 3).reshape(maps.shape[1], -1)


def test_every_cluster_counts_the_same() -> None:
    maps, labels = some_maps(6), np.array([0, 1, 1, 0, 1, 2])
    clusters = [samples_of(maps[labels == label]) for label in range(3)]
    means = np.mean([cluster.mean(1) for cluster in clusters], axis=0)
    deviations = np.mean([np.sqrt(cluster.var(1) + 1e-5) for cluster in clusters], axis=0)
    style = client_style(image_moments(maps), labels)
    np.testing.assert_allclose(style, [means, deviations], rtol=1e-12)


def test_mixture_includes_the_spread_between_clusters() -> None:
    maps, labels = some_maps(6), torch.tensor([0, 1, 1, 0, 1, 2])
    clusters = [samples_of(maps[labels == label]) for label in range(3)]
    # By the law of total variance, with a weight of 1/3 for each cluster.
    means = np.array([cluster.mean(1) for cluster in clusters])
    variance = np.mean([cluster.var(1) for cluster in clusters], axis=0) + means.var(0)
    style = client_style(image_moments(maps), labels, combine="mixture")
    np.testing.assert_allclose(style, [means.mean(0), np.sqrt(variance + 1e-5)], rtol=1e-12)


@pytest.mark.parametrize("combine", ["mean", "mixture"])
def test_one_cluster_is_the_pooled_style(combine) -> None:
    moments = image_moments(some_maps(4))
    style = client_style(moments, torch.zeros(4, dtype=torch.int64), combine)
    np.testing.assert_allclose(style, moments.pooled().styles()[0], rtol=1e-6)


def styles_near(directions: list[int], generator: torch.Generator) -> Tensor:
    """Styles of 8 channels, each close to a unit vector, so that FINCH sees those groups."""
    styles = torch.eye(16)[directions].view(-1, 2, 8) * 5 + 1
    return styles + 0.01 * torch.rand(styles.shape, generator=generator)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("directions", [[0, 3, 0, 3, 9, 9], [0, 0, 3, 3, 9, 9, 12, 12]])
def test_interpolation_is_the_median_of_group_means(
    directions: list[int], generator: torch.Generator
) -> None:
    styles = styles_near(directions, generator)
    expected_groups = np.array([list(dict.fromkeys(directions)).index(d) for d in directions])
    means = np.array([styles.numpy()[expected_groups == g].mean(0) for g in set(expected_groups)])
    style, groups = interpolation_style(styles)
    assert groups.tolist() == expected_groups.tolist()
    assert style.dtype == torch.float32
    np.testing.assert_allclose(style, np.median(means, axis=0), rtol=1e-6)
    lower, _ = interpolation_style(styles, median="lower")
    np.testing.assert_allclose(lower, np.sort(means, axis=0)[(len(means) - 1) // 2], rtol=1e-6)


def test_groups_have_one_voice_whatever_their_size(generator: torch.Generator) -> None:
    few = styles_near([0, 0, 9, 9], generator)
    many = torch.cat([few, few[:1].expand(10, 2, 8)])
    style, groups = interpolation_style(many)
    assert groups.max() == 1
    means = torch.stack([many[groups == 0].mean(0), many[groups == 1].mean(0)])
    np.testing.assert_allclose(style, means.mean(0), rtol=1e-6)


def test_coarsest_partition() -> None:
    degrees = torch.tensor([0.0, 1, 90, 91, 5, 6, 95, 96]).deg2rad()
    styles = torch.stack([degrees.cos(), degrees.sin()], dim=1).view(8, 2, 1)
    _, groups = interpolation_style(styles, partition="coarsest")
    assert groups.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    _, groups = interpolation_style(styles, partition="finest")
    assert groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_without_clustering_the_plain_mean(generator: torch.Generator) -> None:
    styles = styles_near([0, 0, 0, 9], generator)
    style, groups = interpolation_style(styles, clustering=False)
    np.testing.assert_allclose(style, styles.sum(0) / 4, rtol=1e-6)
    assert groups.tolist() == [0] * 4


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_clients_form_one_group(count: int, generator: torch.Generator) -> None:
    styles = styles_near(list(range(count)), generator)
    style, groups = interpolation_style(styles)
    np.testing.assert_allclose(style, styles.mean(0), rtol=1e-6)
    assert groups.tolist() == [0] * count


def test_perturbation_shrinks_and_adds_noise(generator: torch.Generator) -> None:
    style = torch.stack([torch.full((50_000,), -2.0), torch.full((50_000,), 3.0)])
    noise = perturb(style, 0.05, 0.1, generator) - 0.9 * style
    # 100,000 draws: the standard error of their mean is 0.00016, of their deviation 0.00011.
    assert abs(noise.mean().item()) < 0.001
    assert noise.std().item() == pytest.approx(0.05, abs=0.001)


def test_perturbation_depends_on_the_generator_alone() -> None:
    style = torch.ones(2, 4, dtype=torch.float64)
    first, again, other = (
        perturb(style, 0.5, 0.0, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.dtype == torch.float64


def test_no_perturbation_is_none() -> None:
    style = torch.tensor([[-1.0, 2.0], [0.5, 0.25]])
    assert torch.equal(perturb(style, 0.0, 0.0, torch.Generator()), style)


def test_deviations_stay_positive_and_means_may_be_negative() -> None:
    style = torch.zeros(2, 1000)
    mean, deviation = perturb(style, 1.0, 0.5, torch.Generator().manual_seed(0))
    assert mean.min() < 0
    assert deviation.min() == pytest.approx(1e-5)
