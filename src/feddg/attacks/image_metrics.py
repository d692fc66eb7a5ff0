"""Measures how similar reconstructions are to the true images."""

import math
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor
from torch.nn.functional import normalize

from feddg.evaluation.metrics import student
from feddg.styles.codec import load_codec

PERCEPTUAL = "PD[compact]"
"""The perceptual distance's name: that of the network which judges, the encoder of this package."""
AT_ONCE = 64

Images = Tensor
"""``(n, 3, H, W)``, RGB in [0, 1]."""


def perceptual_distances(one: Images, other: Images) -> Tensor:
    """Returns perceptual distances pair by pair, ``(n,)``, with gradients.

    Zhang et al., "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric" (CVPR
    2018), Eq. 1 with all weights 1: squared distance between feature vectors of unit length, mean
    over places.
    """
    a, b = (normalize(load_codec("compact").encode(images), dim=1) for images in (one, other))
    return (a - b).square().sum(1).mean((1, 2))


def perceptual_points(images: Images) -> Tensor:
    """Returns points ``(n, k)`` whose squared distances are the perceptual ones."""
    codec = load_codec("compact")
    with torch.inference_mode():
        units = (normalize(codec.encode(part), dim=1) for part in images.split(AT_ONCE))
        return torch.cat([u.flatten(1) / math.sqrt(u[0, 0].numel()) for u in units]).clone()


def psnr(one: Tensor, other: Tensor) -> Tensor:
    """Returns PSNR in dB, pair by pair, ``(n,)``; images ``(n, 3, H, W)`` in [0, 1]."""
    from torchmetrics.functional.image import peak_signal_noise_ratio

    ratios: Tensor = peak_signal_noise_ratio(
        one, other, data_range=1.0, reduction="none", dim=(1, 2, 3)
    )
    return ratios.clamp(max=100.0)


def ssim(one: Tensor, other: Tensor) -> Tensor:
    """Returns SSIM pair by pair, ``(n,)``; images ``(n, 3, H, W)`` in [0, 1], 12 pixels or more."""
    from torchmetrics.functional.image import structural_similarity_index_measure

    similarity = structural_similarity_index_measure(one, other, data_range=1.0, reduction="none")
    assert isinstance(similarity, Tensor)
    return similarity.reshape(-1)


@dataclass(frozen=True)
class Retrieval:
    """Whether the true image of a reconstruction can be found among others.

    Attributes:
        ranks: ``(n,)`` share of the other candidates that are nearer than the true image, in [0,
            1]; 0.5 is chance. NaN if there is no other.
        first: share of reconstructions whose true image is nearest.
        first_chance: that share by chance.
    """

    ranks: Tensor
    first: float
    first_chance: float


def retrieval(drawn: Tensor, true: Tensor, groups: Tensor) -> Retrieval:
    """Ranks the true image of each reconstruction among the true images of its group.

    Args:
        drawn: ``(n, k)`` points of the reconstructions, see ``perceptual_points``.
        true: points of their true images.
        groups: ``(n,)`` the group of each, for example its domain.
    """
    distances = torch.cdist(drawn, true)
    matched = distances.diagonal()[:, None]
    others = (groups[:, None] == groups[None, :]).fill_diagonal_(False)
    nearer = ((distances < matched).double() + 0.5 * (distances == matched).double()) * others
    counts = others.sum(1)
    ranks = torch.where(counts > 0, nearer.sum(1) / counts.clamp(min=1), torch.nan)
    comparable = counts > 0
    if not comparable.any():
        return Retrieval(ranks, math.nan, math.nan)
    # With k others no nearer, the true one is first with a chance of 1 / (1 + ties).
    ties = (others & (distances == matched)).sum(1)
    firsts = ((nearer.sum(1) - 0.5 * ties) == 0).double() / (1 + ties)
    chance = (1.0 / (1 + counts))[comparable].mean()
    return Retrieval(ranks, float(firsts[comparable].mean()), float(chance))


@dataclass(frozen=True)
class MeanInterval:
    """A mean with its 95 % interval; NaN if undefined."""

    mean: float
    low: float
    high: float

    def within(self, least: float, most: float) -> "MeanInterval":
        """Returns the interval clipped to the quantity's range."""
        return MeanInterval(self.mean, max(self.low, least), min(self.high, most))


def clustered_mean(values: Tensor, clusters: Tensor) -> MeanInterval:
    """Returns the mean of cluster means, with Student's interval over clusters.

    Args:
        values: ``(n,)``; NaN is ignored.
        clusters: ``(n,)`` ids, such as clients; values of one cluster are not independent.
    """
    clustered = ~values.isnan()
    values, clusters = values[clustered].double(), clusters[clustered]
    means = numpy.array([float(values[clusters == c].mean()) for c in clusters.unique().tolist()])
    mean = float(means.mean()) if len(means) else math.nan
    if len(means) < 2:
        return MeanInterval(mean, math.nan, math.nan)
    half = float(means.std(ddof=1) / len(means) ** 0.5) * student(len(means) - 1)
    return MeanInterval(mean, mean - half, mean + half)
