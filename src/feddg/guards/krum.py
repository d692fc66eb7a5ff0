"""Krum and multi-Krum: only the updates that lie closest together are used.

Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent" (NeurIPS
2017), sections 4 and 5.

Equation: of n updates, f of them bad, ``score_i`` = sum of the squared distances to the
``n - f - 2`` nearest others; the ``selected`` lowest scores are averaged (1 is Krum, more are
multi-Krum).

Break-down point: f of n clients, with ``n >= 2 f + 3`` and ``selected <= n - f - 2``: 3 of 10.
Memory: one model per client of the round, and pieces of at most 64 MiB.

Decisions: chosen clients count alike. Ties go to the lower client. Distances are of what is fused,
normalisation statistics among it, in float64.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from feddg.guards.compatibility import FUSION
from feddg.guards.fusing import kept
from feddg.guards.guard import Guard, Passage, register
from feddg.messages import Update, Weights
from feddg.settings import Settings

log = logging.getLogger("feddg")
_PIECE = 1 << 23


class KrumSettings(Settings):
    """Settings of Krum."""

    bad_clients: int = Field(1, ge=1, description="f: how many may be bad")
    selected: int = Field(1, ge=1, description="updates that are averaged; more than 1: multi-Krum")


@register
class Krum(Guard):
    """The mean of the updates that lie closest together."""

    name = "krum"
    summary = "uses only updates that lie close together; multi-Krum too (Blanchard et al. 2017)"
    Settings = KrumSettings
    breaks: ClassVar[dict[str, str]] = {FUSION: "and Krum leaves some out"}
    fuses = True

    @property
    def least(self) -> int:
        """2 f + 3, and enough to select from."""
        f = self.settings.bad_clients
        return int(max(2 * f + 3, self.settings.selected + f + 2))

    def collect(self, updates: Iterator[Update], passage: Passage) -> Iterator[Update]:
        """Yields the chosen updates, in client order."""
        copies = kept(self, updates)
        found = squared_distances(copies, passage.sent, sorted(passage.facts.fused))
        order = torch.argsort(scores(found, self.settings.bad_clients), stable=True)
        chosen = [copies[k] for k in sorted(order[: self.settings.selected].tolist())]
        log.info("krum uses the updates of clients %s", [update.client for update in chosen])
        for update in chosen:
            yield replace(update, examples=1)


def scores(squares: Tensor, bad: int) -> Tensor:
    """Returns Krum's scores ``(n,)`` from squared distances ``(n, n)``; lower is better."""
    n = len(squares)
    others = squares.masked_fill(torch.eye(n, dtype=torch.bool), torch.inf)
    return others.sort(dim=1).values[:, : n - bad - 2].sum(1)


def squared_distances(updates: Sequence[Update], sent: Weights, names: Sequence[str]) -> Tensor:
    """Returns the squared distances of the updates' named entries, ``(n, n)`` float64 on the CPU.

    Products are taken of the changes from ``sent``, not of the weights, which nearly cancel.
    """
    n = len(updates)
    products = torch.zeros(n, n, dtype=torch.float64)
    for name in names:
        start = sent[name].reshape(-1)
        rows = [update.weights[name].reshape(-1) for update in updates]
        width = max(1, _PIECE // n)
        for at in range(0, len(start), width):
            piece = torch.stack([row[at : at + width] for row in rows]).double()
            changes = piece - start[at : at + width].to(piece)
            products += (changes @ changes.T).cpu()
    own = products.diagonal()
    return (own[:, None] + own[None, :] - 2 * products).clamp_min(0)
