"""How unlike clients are: one number for each kind of skew, beside what chance alone would make."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from feddg.randomness import numpy_stream


@dataclass(frozen=True)
class Distance:
    """How far clients' shares of something are from those of all clients together.

    Attributes:
        mean: total variation, half the sum of the absolute differences of the shares, in [0, 1);
            mean over the clients with images, each counted once.
        by_chance: the same after all images were shuffled among clients of these sizes.
    """

    mean: float
    by_chance: float


@dataclass(frozen=True)
class Skew:
    """How unlike clients are.

    Attributes:
        domains: feature skew: how far clients' domains are from all clients' together.
        labels: label skew: the same of their classes.
        sizes: quantity skew: the Gini coefficient of the numbers of images, 0 for equal clients, to
            1 - 1 / C where one of C clients holds everything.
        smallest: images of the smallest client.
        largest: images of the largest client.
    """

    domains: Distance
    labels: Distance
    sizes: float
    smallest: int
    largest: int


def skew_of(domains: np.ndarray, labels: np.ndarray) -> Skew:
    """Measures how unlike clients are.

    Args:
        domains: ``(C, D)`` images per client and domain.
        labels: ``(C, K)`` images per client and class.
    """
    sizes = np.asarray(domains).sum(axis=1)
    return Skew(
        _distance(np.asarray(domains), "domains"),
        _distance(np.asarray(labels), "labels"),
        gini(sizes),
        int(sizes.min()) if len(sizes) else 0,
        int(sizes.max(initial=0)),
    )


def total_variation(counts: np.ndarray) -> float:
    """Mean over the rows with images of half the sum of |share - pooled share|.

    Args:
        counts: ``(C, K)`` images per client and kind.
    """
    sizes = counts.sum(axis=1)
    held = counts[sizes > 0] / sizes[sizes > 0, None]
    if not len(held):
        return 0.0
    pooled = counts.sum(axis=0) / counts.sum()
    return float(np.abs(held - pooled).sum(axis=1).mean() / 2)


def gini(sizes: np.ndarray) -> float:
    """Half the mean absolute difference of two sizes, over the mean size (Gini 1912)."""
    ordered, count = np.sort(sizes).astype(np.float64), len(sizes)
    if not ordered.sum():
        return 0.0
    ranks = np.arange(1, count + 1)
    return float(2 * (ranks * ordered).sum() / (count * ordered.sum()) - (count + 1) / count)


def _distance(counts: np.ndarray, what: str) -> Distance:
    sizes, kinds = counts.sum(axis=1), counts.shape[1]
    everything = np.repeat(np.arange(kinds), counts.sum(axis=0))
    shuffled = numpy_stream(0, "skew by chance", what).permutation(everything)
    owners = np.repeat(np.arange(len(sizes)), sizes)
    cells = np.bincount(owners * kinds + shuffled, minlength=counts.size)
    chance = cells.reshape(counts.shape)
    return Distance(total_variation(counts), total_variation(chance))


def in_words(skew: Skew) -> Iterator[str]:
    """Yields a line for each kind of skew: its number, and how to read it."""
    for kind, found, of in (
        ("Feature skew", skew.domains, "domains"),
        ("Label skew", skew.labels, "classes"),
    ):
        yield (
            f"{kind}: {found.mean:.2f} (by chance alone {found.by_chance:.2f}): mean distance of a "
            f"client's {of} from all clients', 0 for none, below 1."
        )
    yield (
        f"Quantity skew: {skew.sizes:.2f} (Gini coefficient; 0 for equal clients, below 1): "
        f"{skew.smallest:,} images the smallest, {skew.largest:,} the largest."
    )
