"""Coordinate-wise median: every weight takes the middle of the clients' values.

Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates" (ICML 2018),
Option I of Algorithm 1.

Equation: ``w_j = median_k w_kj``; of an even number the mean of the middle two.

Break-down point: ``ceil(n / 2) - 1`` of n clients, 4 of 10: as long as fewer than half are bad,
every weight stays between two honest clients' values. Memory: one model per client of the round.

Decision: clients count alike, since what they say of their images is not checked.
"""

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from feddg.guards.compatibility import FUSION
from feddg.guards.fusing import fused, kept, lower_median
from feddg.guards.guard import Guard, Passage, register
from feddg.messages import Update


@register
class Median(Guard):
    """The coordinate-wise median in place of the mean."""

    name = "median"
    summary = "coordinate-wise median; withstands fewer than half (Yin et al. 2018)"
    breaks: ClassVar[dict[str, str]] = {FUSION: "and a median leaves one"}
    fuses = True

    def collect(self, updates: Iterator[Update], passage: Passage) -> Iterator[Update]:
        """Yields one update: the median."""
        yield fused(kept(self, updates), middle)


def middle(ranked: Tensor) -> Tensor:
    """Returns the median of ``(clients, places)`` in ascending order, ``(places,)``."""
    upper = ranked[len(ranked) // 2]
    return lower_median(ranked).lerp(upper, 0.5)
