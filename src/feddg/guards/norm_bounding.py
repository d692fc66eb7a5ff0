"""Norm bounding: the server shortens changes that are longer than a norm.

Sun et al., "Can You Really Backdoor Federated Learning?" (2019), section 4.

Equation: ``D_k <- D_k min(1, C / |D_k|)`` at the server, with a given C, or the median of the
round's lengths.

Break-down point: it bounds harm instead of undoing it: f bad clients of n move the mean by at most
``f C / n`` beyond what the others' changes do. With the median as C, f must be less than half.
Memory: with a given norm one model; with the median one per client of the round.

Decision: clients count alike, or one that claims many images would be bounded by nothing.
"""

import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from feddg.guards.compatibility import EXTRAS
from feddg.guards.distances import distance, shrunk
from feddg.guards.fusing import kept
from feddg.guards.guard import Guard, Passage, register
from feddg.messages import Update
from feddg.settings import Positive, Settings


class NormBoundingSettings(Settings):
    """Settings of norm bounding."""

    norm: Positive | None = Field(
        None, description="longest change of the weights; none for the median of the round's"
    )


@register
class NormBounding(Guard):
    """Long changes are shortened at the server."""

    name = "norm_bounding"
    summary = "the server shortens long changes (Sun et al. 2019)"
    Settings = NormBoundingSettings
    looks = True
    breaks: ClassVar[dict[str, str]] = {EXTRAS: "which a bound on the weights does not bound"}

    def collect(self, updates: Iterator[Update], passage: Passage) -> Iterator[Update]:
        """Yields every update, shortened if it is too long."""
        sent, fused = passage.sent, sorted(passage.facts.fused)
        norm = self.settings.norm
        if norm is None:
            copies = kept(self, updates)
            norm = statistics.median(distance(copy.weights, sent, fused) for copy in copies)
            updates = iter(copies)
        for update in updates:
            weights = shrunk(update.weights, sent, fused, norm)
            yield replace(update, weights=weights or update.weights, examples=1)
