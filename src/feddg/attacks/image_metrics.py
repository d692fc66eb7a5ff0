"""How like the true images reconstructions are: pair by pair, as collections, and by retrieval.

PSNR, SSIM, Frechet and kernel distance and the class score come from torchmetrics, which is given
our networks: see :mod:`feddg.attacks.extractors` for the names.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy
import torch
from scipy import stats
from torch import Tensor, nn

from feddg.attacks.extractors import (
    AT_ONCE,
    Extractor,
    compact_extractor,
    perceptual_distances,
)
from feddg.errors import ExperimentError
from feddg.rng import derive_seed, stream

FEWEST_OF_COLLECTION = 8
"""Images on each side below which a distance between collections says nothing."""
SUBSETS, SUBSET = 50, 100
"""Kernel distance: how many subsets, and of how many images at most."""


@dataclass(frozen=True)
class Judges:
    """Who judges reconstructions.

    Attributes:
        extractor: of the distances between collections, and of the class score.
        eye: of the perceptual distance, and of retrieval.
        lpips: the published perceptual distance, where its weights were given.
    """

    extractor: Extractor = field(default_factory=compact_extractor)
    eye: Extractor = field(default_factory=compact_extractor)
    lpips: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def perceptual_name(self) -> str:
        """What the perceptual distance is called."""
        return "LPIPS" if self.lpips else self._looker.named("PD", "PD")

    @property
    def _looker(self) -> Extractor:
        return self.extractor if self.extractor.maps is not None else self.eye

    def perceptual(self, one: Tensor, other: Tensor) -> Tensor:
        """Returns perceptual distances pair by pair, ``(n,)``."""
        with torch.inference_mode():
            pairs = zip(one.split(AT_ONCE), other.split(AT_ONCE))
            work = self.lpips or (lambda a, b: perceptual_distances(self._looker, a, b))
            return torch.cat([work(a, b) for a, b in pairs]).clone()


def psnr(one: Tensor, other: Tensor) -> Tensor:
    """Returns PSNR pair by pair, dB, ``(n,)``; images ``(n, 3, H, W)`` in [0, 1]."""
    from torchmetrics.functional.image import peak_signal_noise_ratio

    found: Tensor = peak_signal_noise_ratio(
        one, other, data_range=1.0, reduction="none", dim=(1, 2, 3)
    )
    return found.clamp(max=100.0)


def ssim(one: Tensor, other: Tensor) -> Tensor:
    """Returns SSIM pair by pair, ``(n,)``; images ``(n, 3, H, W)`` in [0, 1], 12 pixels or more."""
    from torchmetrics.functional.image import structural_similarity_index_measure

    found = structural_similarity_index_measure(one, other, data_range=1.0, reduction="none")
    assert isinstance(found, Tensor)
    return found.reshape(-1)


@dataclass(frozen=True)
class Collection:
    """What an extractor makes of images.

    Attributes:
        vectors: ``(n, d)``.
        logits: ``(n, classes)``, or None.
    """

    vectors: Tensor
    logits: Tensor | None = None

    @classmethod
    def of(cls, images: Tensor, extractor: Extractor) -> "Collection":
        """Returns that of images ``(n, 3, H, W)`` in [0, 1]."""
        vectors = _over_parts(extractor.vectors, images)
        head = extractor.head
        return cls(vectors, None if head is None else _over_parts(head, vectors))

    def take(self, positions: Tensor) -> "Collection":
        """Returns that of some of the images."""
        logits = None if self.logits is None else self.logits[positions]
        return Collection(self.vectors[positions], logits)


def collection_scores(
    drawn: Collection, true: Collection, extractor: Extractor, seed: int
) -> dict[str, float]:
    """Returns distances between two collections of as many images, and the class score of one.

    Frechet distance needs more images than dimensions: vectors are projected at random to at most
    half as many dimensions as there are images, alike on both sides.

    Args:
        drawn: of the reconstructions.
        true: of the true images; as many.
        extractor: whose they are.
        seed: of projection and subsets.

    Raises:
        ValueError: the collections differ in size.
    """
    vectors = [drawn.vectors, true.vectors]
    if len(vectors[0]) != len(vectors[1]):
        sizes = " against ".join(str(len(part)) for part in vectors)
        raise ValueError(f"{sizes} images: give both sides as many")
    if len(vectors[0]) < FEWEST_OF_COLLECTION:
        return {}
    scores = {
        extractor.named("FD", "FID"): frechet_distance(*_projected(vectors, seed)),
        extractor.named("KD", "KID"): kernel_distance(vectors[0], vectors[1], seed),
    }
    if drawn.logits is not None:
        scores[extractor.named("score", "IS")] = class_score(drawn.logits)
    return scores


def frechet_distance(one: Tensor, other: Tensor) -> float:
    """Returns the Frechet distance between Gaussians fitted to two sets of vectors ``(n, d)``."""
    from torchmetrics.image.fid import FrechetInceptionDistance

    with _quiet():
        metric = FrechetInceptionDistance(feature=_Given(one.shape[1]))
        metric.update(_as_images(other), real=True)
        metric.update(_as_images(one), real=False)
        return float(metric.compute())


def kernel_distance(one: Tensor, other: Tensor, seed: int) -> float:
    """Returns the unbiased squared kernel distance of two sets ``(n, d)``; it may be negative."""
    from torchmetrics.image.kid import KernelInceptionDistance

    subset = min(SUBSET, len(one) - 1)
    with _quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "subsets"))
        metric = KernelInceptionDistance(
            feature=_Given(one.shape[1]), subsets=SUBSETS, subset_size=subset
        )
        metric.update(_as_images(other), real=True)
        metric.update(_as_images(one), real=False)
        return float(metric.compute()[0])


def class_score(logits: Tensor) -> float:
    """Returns exp of the mean divergence of class probabilities from their mean; at least 1.

    Salimans et al., "Improved Techniques for Training GANs" (NeurIPS 2016), over all images at
    once: torchmetrics' mean over ten parts says little of so few.

    Args:
        logits: ``(n, classes)``.
    """
    log_shares = logits.double().log_softmax(1)
    mean = log_shares.exp().mean(0, keepdim=True).log()
    return float((log_shares.exp() * (log_shares - mean)).sum(1).mean().exp())


@dataclass(frozen=True)
class Retrieval:
    """Whether reconstructions find their true images among others.

    Attributes:
        ranks: ``(n,)`` share of the other candidates that are nearer than the true one, in [0, 1];
            0.5 is chance. NaN where there is no other.
        first: share found first of all.
        first_chance: what chance would give.
    """

    ranks: Tensor
    first: float
    first_chance: float


def retrieval(drawn: Tensor, true: Tensor, groups: Tensor) -> Retrieval:
    """Looks for the true image of each reconstruction among the true images of its group.

    Args:
        drawn: ``(n, k)`` points of the reconstructions: see ``perceptual_points``.
        true: points of the true image of each.
        groups: ``(n,)`` the group of each, such as its domain.
    """
    distances = torch.cdist(drawn, true)
    own = distances.diagonal()[:, None]
    others = (groups[:, None] == groups[None, :]).fill_diagonal_(False)
    nearer = ((distances < own).double() + 0.5 * (distances == own).double()) * others
    counts = others.sum(1)
    ranks = torch.where(counts > 0, nearer.sum(1) / counts.clamp(min=1), torch.nan)
    known = counts > 0
    if not known.any():
        return Retrieval(ranks, math.nan, math.nan)
    # With k others no nearer, the true one is first with a chance of 1 / (1 + ties).
    ties = (others & (distances == own)).sum(1)
    firsts = ((nearer.sum(1) - 0.5 * ties) == 0).double() / (1 + ties)
    chance = (1.0 / (1 + counts))[known].mean()
    return Retrieval(ranks, float(firsts[known].mean()), float(chance))


@dataclass(frozen=True)
class MeanInterval:
    """A mean with its 95 % interval; NaN where there is nothing to say."""

    mean: float
    low: float
    high: float

    def within(self, least: float, most: float) -> "MeanInterval":
        """Returns the part of the interval that the quantity can reach."""
        return MeanInterval(self.mean, max(self.low, least), min(self.high, most))


def clustered_mean(values: Tensor, clusters: Tensor) -> MeanInterval:
    """Returns the mean over clusters of their means, with Student's interval over clusters.

    Args:
        values: ``(n,)``; NaN is left out.
        clusters: ``(n,)`` ids, such as clients: values of one cluster depend on each other.
    """
    known = ~values.isnan()
    values, clusters = values[known].double(), clusters[known]
    means = numpy.array([float(values[clusters == c].mean()) for c in clusters.unique().tolist()])
    if not len(means):
        return MeanInterval(math.nan, math.nan, math.nan)
    mean = float(means.mean())
    if len(means) < 2:
        return MeanInterval(mean, math.nan, math.nan)
    half = float(means.std(ddof=1) / len(means) ** 0.5 * stats.t.ppf(0.975, len(means) - 1))
    return MeanInterval(mean, mean - half, mean + half)


def require_torchmetrics() -> None:
    """Raises ExperimentError where torchmetrics is not installed."""
    try:
        import torchmetrics  # noqa: F401
    except ImportError:
        raise ExperimentError(
            "attacks are measured with torchmetrics: pip install feddg[attacks]"
        ) from None


class _Given(nn.Module):
    """Hands on vectors that were computed already, in the shape of images."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.num_features = length

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1)


def _as_images(vectors: Tensor) -> Tensor:
    return vectors.double()[:, :, None, None]


def _projected(vectors: list[Tensor], seed: int) -> list[Tensor]:
    most = max(1, len(vectors[0]) // 2)
    length = vectors[0].shape[1]
    if length <= most:
        return vectors
    chance = stream(seed, "projection", length, most)
    directions = torch.linalg.qr(torch.randn(length, most, generator=chance))[0]
    return [part.float() @ directions for part in vectors]


def _over_parts(work: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.cat([work(part).float().cpu() for part in images.split(AT_ONCE)]).clone()


class _quiet(warnings.catch_warnings):
    """torchmetrics warns of the memory it takes; of hundreds of vectors that is nothing."""

    def __enter__(self) -> None:  # type: ignore[override]
        super().__enter__()
        warnings.simplefilter("ignore")
