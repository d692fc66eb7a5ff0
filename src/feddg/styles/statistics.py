"""Styles of images, clients and groups: measuring, clustering, interpolating, adding noise."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional

from feddg.rng import add_noise, stream
from feddg.styles.codec import VARIANCE_FLOOR, Codec, images_at_once

_SIMILARITIES_AT_ONCE = 2**22
LEVELS = {"finest": 0, "coarsest": -1}
"""The index of these among the partitions."""
SMALLEST_DEVIATION = 1e-5
"""Smallest standard deviation of a perturbed style; smaller ones are raised to it."""
TEXTURES, SIDE = 256, 32
"""Number of textures that are measured, and their side in pixels."""
_SHARE = 0.9
_LEAST_SPREAD = 1e-3


@dataclass(frozen=True)
class FeatureMoments:
    """Sums over the feature maps of n images, or of n groups of images.

    Attributes:
        counts: ``(n,)`` float64, number of feature-map positions.
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
        """Sums rows by group.

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
    """Returns the sums of a batch's feature maps.

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
    """Returns the sums of the feature maps of images, measured on the codec's device.

    Args:
        codec: the encoder; styles are measured on its ``style_features``.
        images: ``(N, 3, H, W)`` RGB, uint8 or in [0, 1], N at least 1.
        batch_size: images per pass; :func:`feddg.styles.codec.images_at_once` by default.

    Returns:
        One row per image, on the CPU.
    """
    batch_size = batch_size or images_at_once(images.shape[-1], codec.unit.device)
    with torch.inference_mode():
        parts = [
            image_moments(codec.style_features(codec.prepared(part)))
            for part in torch.split(images, batch_size)
        ]
    # Outside inference mode: what is made inside may not enter a training step.
    counts = torch.cat([part.counts for part in parts]).cpu()
    sums = torch.cat([part.sums for part in parts]).cpu()
    return FeatureMoments(counts, sums)


# FINCH: clustering without parameters, by first neighbours.
#
# Sarfraz, Sharma and Stiefelhagen, "Efficient Parameter-free Clustering Using First Neighbor
# Relations" (CVPR 2019). Each point is linked to its nearest neighbour by cosine; connected points
# are a cluster; the means of the clusters are clustered likewise, until one cluster would be left.


def finch(vectors: np.ndarray) -> list[np.ndarray]:
    """Clusters vectors by cosine similarity, exactly, in float64.

    The result depends only on the set of vectors: reordering the rows reorders the labels but
    changes no cluster, because ties between neighbours are broken by their values. Equal rows
    always share a cluster. The similarity to a zero vector is 0.

    A level with a single cluster is dropped, unless it is the first. (The authors' other stopping
    rules never apply: every further level at least halves the number of clusters.)

    Args:
        vectors: ``(n, d)`` finite numbers, n at least 1. Memory: a float64 copy, and otherwise
            linear in n.

    Returns:
        One or more partitions, from the finest to the coarsest, which has two clusters or more
        unless it is also the finest. Each is ``(n,)`` int64 labels, counted from 0 in the order in
        which the clusters first appear, and its clusters are unions of the clusters before.

    Raises:
        ValueError: there are no vectors, or they are not finite.
    """
    from scipy.sparse import csr_array  # most runs have no styles

    points = np.array(vectors, dtype=np.float64, order="C")
    if points.ndim != 2 or points.size == 0 or not np.isfinite(points).all():
        raise ValueError("FINCH needs at least one vector, all of them finite")
    order, of_row, copies = _distinct(points)
    sums = points[order]
    sums *= copies[:, None]
    labels = _linked(_first_neighbors(sums, alone=copies == 1))
    partitions: list[np.ndarray] = []
    while not partitions or labels.max() > 0:
        of_row = labels[of_row]
        partitions.append(_in_order_of_appearance(of_row))
        members = csr_array((np.ones(len(labels)), (labels, np.arange(len(labels)))))
        sums = members @ sums
        labels = _linked(_first_neighbors(sums))
    return partitions


def _distinct(points: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the distinct rows, in an order (of their bytes) that depends on values only.

    Returns:
        The position of each distinct row, the distinct row of each row, and their counts.
    """
    points += 0.0  # -0.0 equals 0.0, but its bytes differ
    rows = points.view(np.dtype((np.void, points.shape[1] * points.itemsize))).ravel()
    _, order, of_row, copies = np.unique(
        rows, return_index=True, return_inverse=True, return_counts=True
    )
    return order, of_row, copies


def _first_neighbors(vectors: np.ndarray, alone: np.ndarray | None = None) -> np.ndarray:
    """Returns the most similar other vector of each; a vector with a copy is its own neighbour."""
    count = len(vectors)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.where(lengths > 0, lengths, 1)
    neighbors = np.arange(count)
    step = max(1, _SIMILARITIES_AT_ONCE // count)
    for start in range(0, count, step):
        block = np.arange(start, min(start + step, count))
        similarity = unit[block] @ unit.T
        similarity[block - start, block] = -np.inf
        neighbors[block] = similarity.argmax(axis=1)
    return neighbors if alone is None else np.where(alone, neighbors, np.arange(count))


def _linked(neighbors: np.ndarray) -> np.ndarray:
    """Labels the connected components of the graph that links each point to its neighbour."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    count = len(neighbors)
    links = csr_array((np.ones(count), (np.arange(count), neighbors)), shape=(count, count))
    _, labels = connected_components(links, directed=False)
    return np.asarray(labels, np.int64)


def _in_order_of_appearance(labels: np.ndarray) -> np.ndarray:
    _, first, compact = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[compact]


# From the images of a client to its one style, and from all clients' styles to a common one.
#
# PARDON, also published as FISC: Nguyen et al., "PARDON: Privacy-Aware and Robust Federated Domain
# Generalization" (ICDCS 2025), Eq. 1 to 5.


def client_style(
    moments: FeatureMoments,
    labels: Tensor | np.ndarray,
    combine: Literal["mean", "mixture"] = "mean",
) -> Tensor:
    """Returns the style of a client whose images are clustered (Eq. 1 and 2).

    All clusters have the same weight, whatever their size.

    Args:
        moments: one row per image.
        labels: ``(n,)`` int, the cluster of each image, counted from 0; all 0 gives the client's
            pooled style.
        combine: ``mean`` averages the clusters' means and standard deviations, as in the paper;
            ``mixture`` takes the standard deviation of the mixture of clusters, which includes the
            spread between them, as the released code does.

    Returns:
        ``(2, C)`` float64.
    """
    clusters = moments.pooled(labels)
    if combine == "mixture":
        return style_from_averages(clusters.averages.mean(0))
    return clusters.styles().mean(0)


def interpolation_style(
    styles: Tensor,
    clustering: bool = True,
    partition: Literal["finest", "coarsest"] = "finest",
    median: Literal["average", "lower"] = "average",
) -> tuple[Tensor, Tensor]:
    """Returns the interpolation style of all clients' styles (Eq. 3 to 5), and their groups.

    FINCH groups the clients by their concatenated means and standard deviations; the result is
    the element-wise median of the groups' mean styles.

    Args:
        styles: ``(N, 2, C)``, one per client.
        clustering: False takes the plain mean of all styles instead (ablation v2).
        partition: which of FINCH's partitions gives the groups.
        median: for an even number of groups: the mean of the middle two, or the lower one (the
            released code).

    Returns:
        ``(2, C)`` in the type of ``styles``, and the group of each client, ``(N,)`` int64.
    """
    if not clustering:
        return styles.mean(0), torch.zeros(len(styles), dtype=torch.int64)
    partitions = finch(styles.flatten(1).cpu().numpy())
    chosen = partitions[LEVELS[partition]]
    groups = torch.from_numpy(chosen)
    means = torch.stack([styles[groups == group].mean(0) for group in range(chosen.max() + 1)])
    if median == "lower":
        return means.median(dim=0).values, groups
    return means.quantile(0.5, dim=0, interpolation="midpoint"), groups


def perturb(style: Tensor, scale: float, coefficient: float, generator: Generator) -> Tensor:
    """Returns a style with noise added before it leaves the client (FISC, Table 10).

    v' = (1 - p) v + N(0, s^2), element by element, as FedPCL defines it. This tests robustness and
    gives no differential privacy: the contribution of one image is not bounded.

    Args:
        style: ``(2, C)``.
        scale: s, the standard deviation of the noise.
        coefficient: p in [0, 1], the share of the style that is removed.
        generator: a CPU generator for the noise.
    """
    noise = torch.randn(style.shape, generator=generator, dtype=style.dtype)
    mean, deviation = (1 - coefficient) * style + scale * noise.to(style.device)
    return torch.stack([mean, deviation.clamp(min=SMALLEST_DEVIATION)])


def texture(images: Tensor, generator: torch.Generator) -> Tensor:
    """Returns random blobs or stripes of one scale, over faint traces of the images.

    Args:
        images: ``(B, 3, H, W)`` float RGB in [0, 1].
        generator: the random generator.
    """
    height, width = images.shape[-2:]
    rows = max(1, height // 2 ** int(between(0, 6, generator)))
    columns = max(1, width // 2 ** int(between(0, 6, generator)))
    noise = torch.rand(len(images), 1, rows, columns, generator=generator)
    blobs = functional.interpolate(noise, (height, width), mode="bilinear")
    mask = torch.sigmoid((blobs - 0.5) * between(4, 60, generator))
    colours = torch.rand(2, len(images), 3, 1, 1, generator=generator)
    return 0.85 * (colours[0] * mask + colours[1] * (1 - mask)) + 0.15 * images


def between(low: float, high: float, generator: torch.Generator) -> float:
    """Returns a random number between two."""
    return low + (high - low) * torch.rand((), generator=generator).item()


# A style that says little about any one image, or client: moments clipped and noised.
#
# What is released are first and second moments, never deviations: one of n images moves a pooled
# mean of channels in [0, B] by at most B / n, but their deviation by up to about B / sqrt(n). The
# deviation is computed afterwards, from what was noised. Neither is a mean over clusters released:
# one image can change the clusters.
#
# Equations, with the moments ``v_i = (E[F], E[F^2])`` of image i, n images, a public centre m and
# spread s, and a radius R::
#
#     u_i = (v_i - m) / s;   u_i <- u_i min(1, R / |u_i|);   u = (1/n) sum_i u_i
#     released: m + s (u + N(0, (z Delta)^2)),   z the noise multiplier, and the sensitivity is
#     Delta = 2 R / n   an image is replaced by any other (n is no secret)
#     Delta = 2 R       all images of a client are replaced by any others
#
# Centre, spread and radius come from textures that anybody can draw (:func:`public_reference`):
# they say nothing about anybody's images. The noise is :mod:`feddg.rng`'s.


@dataclass(frozen=True)
class StyleNoise:
    """How a client's style is noised before it is sent.

    Attributes:
        multiplier: z, standard deviation over sensitivity.
        unit: what is protected: one image, or all images of a client.
        norm: the clipping radius, as a multiple of the reference radius.
    """

    multiplier: float
    unit: Literal["image", "client"] = "image"
    norm: float = 1.0


@dataclass(frozen=True)
class PublicReference:
    """The public reference for clipping: moments of drawn textures.

    Attributes:
        centre: ``(2, C)`` float64, m, their mean.
        spread: ``(2, C)`` float64, s, their standard deviation.
        radius: the distance within which nine in ten textures lie.
    """

    centre: Tensor
    spread: Tensor
    radius: float


@lru_cache(maxsize=8)
def public_reference(codec: Codec) -> PublicReference:
    """Returns the moments of drawn textures under a codec; no real image is used."""
    rng = stream(0, "public textures")
    drawn = [
        texture(torch.rand(8, 3, SIDE, SIDE, generator=rng), rng) for _ in range(TEXTURES // 8)
    ]
    images = (torch.cat(drawn).clamp(0, 1) * 255).to(torch.uint8)
    averages = measure(codec, images).averages
    centre = averages.mean(0)
    spread = averages.std(0).clamp_min(_LEAST_SPREAD)
    lengths = ((averages - centre) / spread).flatten(1).norm(dim=1)
    return PublicReference(centre, spread, float(lengths.quantile(_SHARE)))


def clipped_mean(averages: Tensor, reference: PublicReference, radius: float) -> Tensor:
    """Returns u, the mean of the clipped, whitened moments.

    Args:
        averages: ``(n, 2, C)``, E[F] and E[F^2] of each image; rows that are not finite are
            replaced by the centre.
        reference: centre and spread for whitening.
        radius: R.

    Returns:
        ``(2, C)`` float64 with norm at most R.
    """
    whitened = (averages.double() - reference.centre) / reference.spread
    rows = whitened.flatten(1).nan_to_num(0.0, 0.0, 0.0)
    lengths = rows.norm(dim=1, keepdim=True)
    # A length that overflows is infinite: its direction is lost, and it counts as the centre.
    mean: Tensor = (rows * (radius / lengths.clamp_min(radius))).mean(0)
    return mean.reshape(averages.shape[1:])


def sensitivity(noise: StyleNoise, images: int, radius: float) -> float:
    """Returns the largest distance between the means of neighbouring data sets.

    Args:
        noise: tells what is protected.
        images: n.
        radius: R.
    """
    return 2 * radius / (images if noise.unit == "image" else 1)


def private_style(moments: FeatureMoments, codec: Codec, noise: StyleNoise) -> Tensor:
    """Returns a client's style with noise.

    Args:
        moments: one row per image.
        codec: the codec that measured them.
        noise: how it is noised.

    Returns:
        ``(2, C)`` float64: a mean and a deviation per channel.
    """
    reference = public_reference(codec)
    radius = noise.norm * reference.radius
    mean = clipped_mean(moments.averages, reference, radius)
    deviation = noise.multiplier * sensitivity(noise, len(moments), radius)
    noised = add_noise(mean, deviation) if deviation else mean
    return style_from_averages(reference.centre + reference.spread * noised)
