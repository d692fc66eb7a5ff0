"""Intervals for shares of counted things; p values corrected for their number."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from feddg.evaluation.groups import Z


class ShareInterval(NamedTuple):
    """A share with its 95 % confidence interval, all in [0, 1]."""

    share: float
    low: float
    high: float


def wilson(share: float, examples: float) -> ShareInterval:
    """Returns the interval of Wilson (1927), Journal of the American Statistical Association 22.

    It tells how far a share may be from that of infinitely many examples of the same kind. It does
    not cover other seeds, clients or domains.

    Args:
        share: the share found, in [0, 1].
        examples: number of examples, at least 1; as many as tell as much if they are not
            independent, see :func:`feddg.evaluation.groups.effective_number`.

    Raises:
        ValueError: there are no examples, or the share is not in [0, 1].
    """
    if examples < 1 or not 0 <= share <= 1:
        raise ValueError(f"no share of examples: {share} of {examples}")
    pull = Z**2 / examples
    middle = (share + pull / 2) / (1 + pull)
    reach = Z * math.sqrt(share * (1 - share) / examples + pull / (4 * examples)) / (1 + pull)
    # The ends of 0 and 1 are exact; rounding must not push the share itself outside.
    return ShareInterval(
        share, min(share, max(0.0, middle - reach)), max(share, min(1.0, middle + reach))
    )


def mean_of_shares(parts: Sequence[tuple[float, float]]) -> ShareInterval:
    """Returns the mean of independent shares with its interval; Wilson's for a single one.

    Args:
        parts: the shares, each with the number of its examples; at least one.

    Raises:
        ValueError: a part has no examples.
    """
    return mean_of_intervals([wilson(share, examples) for share, examples in parts])


def mean_of_intervals(parts: Sequence[ShareInterval]) -> ShareInterval:
    """Returns the mean of independent shares, equally weighted, with its interval.

    The ends recover the variances from the parts' own ends (Zou and Donner 2008, Statistics in
    Medicine 27, "method of variance estimates recovery").

    Args:
        parts: the shares; at least one.
    """
    mean = math.fsum(part.share for part in parts) / len(parts)
    below = math.hypot(*(part.share - part.low for part in parts)) / len(parts)
    above = math.hypot(*(part.high - part.share for part in parts)) / len(parts)
    return ShareInterval(mean, max(0.0, mean - below), min(1.0, mean + above))


def holm(values: Sequence[float]) -> list[float]:
    """Returns p values corrected for their number (Holm 1979, Scandinavian J. of Statistics 6)."""
    order = sorted(range(len(values)), key=lambda place: values[place])
    corrected, largest = [0.0] * len(values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - rank) * values[place]))
        corrected[place] = largest
    return corrected
