"""Trimmed mean: of every weight, the f lowest and f highest values are left out.

Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates" (ICML 2018),
Option II of Algorithm 1, with f in place of a share, so that what is withstood is what is said.

Equation: ``w_j`` = mean of the ``n - 2 f`` values of ``w_kj`` that are left, in float64.

Break-down point: f of n clients, with ``n >= 2 f + 1``: up to 4 of 10. Memory: one model per client
of the round.

Decision: clients count alike, since what they say of their images is not checked.
"""

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from feddg.guards.compatibility import FUSION
from feddg.guards.fusing import fused, kept
from feddg.guards.guard import Guard, Passage, register
from feddg.messages import Update
from feddg.settings import Settings


class TrimmedMeanSettings(Settings):
    """Settings of the trimmed mean."""

    bad_clients: int = Field(1, ge=1, description="f: values left out at either end")


@register
class TrimmedMean(Guard):
    """The mean of each weight's middle values."""

    name = "trimmed_mean"
    summary = "mean without the f lowest and highest values (Yin et al. 2018)"
    Settings = TrimmedMeanSettings
    breaks: ClassVar[dict[str, str]] = {FUSION: "and a trimmed mean leaves one"}
    fuses = True

    @property
    def least(self) -> int:
        """2 f + 1."""
        return int(2 * self.settings.bad_clients + 1)

    def collect(self, updates: Iterator[Update], passage: Passage) -> Iterator[Update]:
        """Yields one update: the trimmed mean."""
        yield fused(kept(self, updates), self._trimmed)

    def _trimmed(self, ranked: Tensor) -> Tensor:
        f = self.settings.bad_clients
        return ranked[f : len(ranked) - f].double().mean(0)
