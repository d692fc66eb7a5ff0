"""Styles from sums, against numpy on the feature maps themselves."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from feddg.styles.codecs.colors import ColorsCodec
from feddg.styles.statistics import FeatureMoments, image_moments, measure, style_from_averages


def style_by_numpy(maps: Tensor) -> np.ndarray:
    """Mean and standard deviation with every pixel of every map ``(n, C, h, w)`` as a sample."""
    samples = maps.double().numpy().transpose(1, 0, 2, 3).reshape(maps.shape[1], -1)
    deviation = np.sqrt(((samples - samples.mean(1, keepdims=True)) ** 2).mean(1) + 1e-5)
    return np.stack([samples.mean(1), deviation])


def random_maps(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3 + 1


def test_an_images_style_is_that_of_its_map() -> None:
    maps = random_maps(5, 7, 4, 6)
    styles = image_moments(maps).styles()
    assert styles.shape == (5, 2, 7)
    assert styles.dtype == torch.float64
    for style, single in zip(styles, maps):
        np.testing.assert_allclose(style, style_by_numpy(single[None]), rtol=1e-12)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(0, 1000),
)
@settings(max_examples=50, deadline=None)
def test_a_pooled_style_is_that_of_the_concatenated_maps(
    groups: list[int], channels: int, side: int, seed: int
) -> None:
    labels = np.unique(groups, return_inverse=True)[1]
    maps = random_maps(len(labels), channels, side, side, seed=seed)
    pooled = image_moments(maps).pooled(labels).styles()
    assert len(pooled) == labels.max() + 1
    for group, style in enumerate(pooled):
        np.testing.assert_allclose(style, style_by_numpy(maps[labels == group]), rtol=1e-9)


def test_pooling_everything_and_pooling_twice() -> None:
    maps = random_maps(6, 3, 4, 4)
    moments = image_moments(maps)
    whole = moments.pooled()
    assert len(whole) == 1
    np.testing.assert_allclose(whole.styles()[0], style_by_numpy(maps), rtol=1e-12)
    stepwise = moments.pooled(torch.tensor([0, 1, 1, 0, 2, 2])).pooled()
    np.testing.assert_allclose(stepwise.sums, whole.sums, rtol=1e-6)
    np.testing.assert_allclose(stepwise.counts, whole.counts, rtol=1e-6)


def test_larger_maps_weigh_more() -> None:
    small, large = random_maps(1, 2, 2, 2), random_maps(1, 2, 8, 8, seed=1)
    parts = [image_moments(small), image_moments(large)]
    both = FeatureMoments(torch.cat([p.counts for p in parts]), torch.cat([p.sums for p in parts]))
    samples = torch.cat([small.flatten(2), large.flatten(2)], dim=2)[..., None]
    np.testing.assert_allclose(both.pooled().styles()[0], style_by_numpy(samples), rtol=1e-12)


def test_large_means_do_not_swallow_small_deviations() -> None:
    maps = 2000 + 0.01 * random_maps(4, 3, 8, 8)
    style = image_moments(maps).pooled().styles()[0]
    np.testing.assert_allclose(style, style_by_numpy(maps), rtol=1e-6)


def test_flat_maps_have_the_smallest_deviation() -> None:
    flat = torch.full((3, 2, 5, 5), 1234.567)
    deviation = image_moments(flat).pooled().styles()[0, 1]
    np.testing.assert_allclose(deviation, torch.full((2,), 1e-5).double().sqrt(), rtol=1e-6)


def test_a_variance_made_negative_by_rounding_counts_as_zero() -> None:
    style = style_from_averages(torch.tensor([[3.0], [9.0 - 1e-3]]))
    np.testing.assert_allclose(style, torch.tensor([[3.0], [1e-5**0.5]]), rtol=1e-6)


@pytest.mark.parametrize("groups", [[0, 1], [0, 0, 2], []])
def test_groups_that_do_not_fit_are_an_error(groups: list[int]) -> None:
    moments = image_moments(random_maps(3, 2, 2, 2))
    with pytest.raises(ValueError, match="every row needs a group"):
        moments.pooled(torch.tensor(groups, dtype=torch.int64))


class PlainCodec(ColorsCodec):
    """Styles of the pixels themselves, three times as bright."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []

    def style_features(self, images: Tensor) -> Tensor:
        self.batches.append(len(images))
        return images * 3


def test_measuring_encodes_images_in_the_unit_range_by_batches() -> None:
    images = torch.randint(0, 256, (7, 3, 4, 4), dtype=torch.uint8)
    codec = PlainCodec()
    moments = measure(codec, images, batch_size=3)
    assert codec.batches == [3, 3, 1]
    assert len(moments) == 7
    for style, image in zip(moments.styles(), images):
        expected = style_by_numpy(image[None].double() / 255 * 3)
        np.testing.assert_allclose(style, expected, rtol=1e-6)


def test_measured_styles_may_enter_training() -> None:
    images = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    styles = measure(PlainCodec(), images).styles()
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (styles * weight).sum().backward()
    np.testing.assert_allclose(weight.grad, styles.sum((0, 1)), rtol=1e-6)
