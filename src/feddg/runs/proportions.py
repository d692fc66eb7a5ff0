"""Intervals for shares of counted things: what one run's accuracy leaves open."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

LEVEL: Final = 0.95
_Z: Final = NormalDist().inv_cdf((1 + LEVEL) / 2)


@dataclass(frozen=True, slots=True)
class ShareInterval:
    """A share with the ends of its 95 % confidence interval, all in [0, 1]."""

    share: float
    low: float
    high: float

    def includes(self, share: float) -> bool:
        """Whether a share lies between the ends, both taken in."""
        return self.low <= share <= self.high


def wilson(share: float, examples: int) -> ShareInterval:
    """Returns the interval of Wilson (1927), Journal of the American Statistical Association 22.

    It says how far a share may be from the one that endless examples of the same kind would give.
    It knows nothing of other seeds, clients or domains.

    Args:
        share: the share found, in [0, 1].
        examples: of how many; at least 1.

    Raises:
        ValueError: there are no examples, or the share is none.
    """
    if examples < 1 or not 0 <= share <= 1:
        raise ValueError(f"no share of examples: {share} of {examples}")
    pull = _Z**2 / examples
    middle = (share + pull / 2) / (1 + pull)
    reach = _Z * math.sqrt(share * (1 - share) / examples + pull / (4 * examples)) / (1 + pull)
    # The ends of 0 and 1 are exact; rounding must not push the share itself outside.
    return ShareInterval(
        share, min(share, max(0.0, middle - reach)), max(share, min(1.0, middle + reach))
    )


def mean_of_shares(parts: Sequence[tuple[float, int]]) -> ShareInterval:
    """Returns the mean of independent shares with its interval; for a single one, Wilson's.

    Args:
        parts: the shares, each with the number of its examples; at least one.

    Raises:
        ValueError: a part has no examples, or there is no part.
    """
    return mean_of_intervals([wilson(share, examples) for share, examples in parts])


def mean_of_intervals(parts: Sequence[ShareInterval]) -> ShareInterval:
    """Returns the mean of independent shares, each counted once, with its interval.

    The ends recover the variances from the parts' own ends (Zou and Donner 2008, Statistics in
    Medicine 27, "method of variance estimates recovery").

    Raises:
        ValueError: there is no part.
    """
    if not parts:
        raise ValueError("the mean of no shares")
    mean = math.fsum(part.share for part in parts) / len(parts)
    below = math.hypot(*(part.share - part.low for part in parts)) / len(parts)
    above = math.hypot(*(part.high - part.share for part in parts)) / len(parts)
    return ShareInterval(mean, max(0.0, mean - below), min(1.0, mean + above))
