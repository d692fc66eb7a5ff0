"""Styles of images and of any group of images, from sums that are taken once per image.

A style is ``(2, C)``: the mean and the standard deviation of each channel of an encoder's feature
map, every position of every map being one sample (PARDON, Eq. 2). Sums and sums of squares add up,
so the style of a cluster or a client is exact without keeping a single feature map.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from feddg.styles.codec import VARIANCE_FLOOR, Codec, images_at_once


@dataclass(frozen=True)
class FeatureMoments:
    """What is remembered of the feature maps of n images, or of n groups of images.

    Attributes:
        counts: ``(n,)`` float64, feature-map positions that were summed.
        sums: ``(n, 2, C)`` float64, per channel the sum of the values and of their squares.
    """

    counts: Tensor
    sums: Tensor

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def averages(self) -> Tensor:
        """E[F] and E[F^2] of each row, ``(n, 2, C)`` float64."""
        return self.sums / self.counts[:, None, None]

    def styles(self) -> Tensor:
        """Returns the style of each row, ``(n, 2, C)`` float64."""
        return style_from_averages(self.averages)

    def pooled(self, groups: Tensor | np.ndarray | None = None) -> "FeatureMoments":
        """Adds rows up into groups.

        Args:
            groups: ``(n,)`` int, the group of each row, counted from 0; None pools all rows.

        Returns:
            One row per group. Its style equals that of the group's concatenated feature maps.

        Raises:
            ValueError: a row has no group or a group has no row.
        """
        if groups is None:
            groups = np.zeros(len(self), np.int64)
        labels = torch.as_tensor(groups, dtype=torch.int64)
        if len(labels) != len(self) or len(self) == 0 or not labels.bincount().all():
            raise ValueError("every row needs a group, and every group from 0 up a row")
        number = int(labels.max()) + 1
        counts = self.counts.new_zeros(number).index_add_(0, labels, self.counts)
        sums = self.sums.new_zeros(number, *self.sums.shape[1:])
        return FeatureMoments(counts, sums.index_add_(0, labels, self.sums))


def image_moments(features: Tensor) -> FeatureMoments:
    """Sums up the feature maps of a batch.

    Args:
        features: ``(B, C, h, w)``.

    Returns:
        One row per image, on the device of ``features``.
    """
    values = features.double()
    sums = torch.stack([values.sum((2, 3)), values.square_().sum((2, 3))], dim=1)
    positions = features.shape[2] * features.shape[3]
    return FeatureMoments(sums.new_full((len(features),), positions), sums)


def style_from_averages(averages: Tensor) -> Tensor:
    """Returns the style with given first and second raw moments (PARDON, Eq. 2).

    Args:
        averages: ``(..., 2, C)``, E[F] and E[F^2].

    Returns:
        ``(..., 2, C)``: E[F] and sqrt(E[F^2] - E[F]^2 + 1e-5). A variance that rounding made
        negative counts as zero.
    """
    mean, square = averages.unbind(-2)
    variance = (square - mean.square()).clamp(min=0)
    return torch.stack([mean, (variance + VARIANCE_FLOOR).sqrt()], dim=-2)


def measure(codec: Codec, images: Tensor, batch_size: int | None = None) -> FeatureMoments:
    """Sums up the feature maps of images, on the codec's device.

    Args:
        codec: the encoder; styles are measured on its ``style_features``.
        images: ``(N, 3, H, W)`` uint8 RGB, N at least 1.
        batch_size: images in memory as feature maps at a time;
            :func:`feddg.styles.codec.images_at_once` by default.

    Returns:
        One row per image, on the CPU.
    """
    batch_size = batch_size or images_at_once(images, codec.unit.device)
    with torch.inference_mode():
        parts = [
            image_moments(codec.style_features(codec.prepared(part)))
            for part in torch.split(images, batch_size)
        ]
    # Outside inference mode: what is made inside may not enter a training step.
    counts = torch.cat([part.counts for part in parts]).cpu()
    sums = torch.cat([part.sums for part in parts]).cpu()
    return FeatureMoments(counts, sums)
