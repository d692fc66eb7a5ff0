"""How unlike clients are: one number for each kind of skew, beside what chance alone would make."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.special import gammaln


@dataclass(frozen=True)
class Distance:
    """How far clients' shares of something are from those of all clients together.

    Attributes:
        mean: total variation, half the sum of the absolute differences of the shares, in [0, 1);
            mean over the clients with images, each counted once.
        by_chance: the same, on average, where all images are shuffled among clients of these sizes.
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
        _distance(np.asarray(domains)),
        _distance(np.asarray(labels)),
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


def _distance(counts: np.ndarray) -> Distance:
    return Distance(total_variation(counts), _by_chance(counts))


def _by_chance(counts: np.ndarray) -> float:
    """Mean of the total variation over all ways to shuffle the images among the clients.

    A client of n images then holds X of the K of one kind among all N, hypergeometric. Its mean
    deviation is E|X - nK/N| = 2 m (N - K - n + m) / N P(X = m) with m = floor(nK/N) + 1 (Johnson,
    Kemp and Kotz, "Univariate Discrete Distributions"). So a table of counts is enough: no memory
    goes by how many images somebody says that there are.
    """
    sizes, kind = counts.sum(axis=1), counts.sum(axis=0, dtype=np.float64)
    size, total = sizes[sizes > 0, None].astype(np.float64), float(sizes.sum())
    if not total:
        return 0.0
    above = np.floor(size * (kind / total)) + 1
    least = total - kind - size + above
    possible = (above <= size) & (above <= kind) & (least > 0)
    above, least = np.where(possible, above, 0), np.where(possible, least, 0)
    log_chance = (
        _log_ways(kind, above)
        + _log_ways(total - kind, np.where(possible, size - above, 0))
        - _log_ways(total, size)
    )
    away = np.where(possible, 2 * above * (least / total) * np.exp(log_chance), 0)
    return float((away / size).sum(axis=1).mean() / 2)


def _log_ways(of: np.ndarray | float, chosen: np.ndarray) -> np.ndarray:
    """Logarithm of the number of ways to choose so many of so many."""
    ways: np.ndarray = gammaln(of + 1) - gammaln(chosen + 1) - gammaln(of - chosen + 1)
    return ways


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
