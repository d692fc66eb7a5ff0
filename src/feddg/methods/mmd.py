"""MMD: the features of a client's domains are to be distributed alike (Li et al., CVPR 2018).

Features whose distribution is the same in all training domains should be so in an unseen one. The
maximum mean discrepancy compares two samples by a kernel; its square is added for each pair of a
client's domains.

Li et al., "Domain Generalization with Adversarial Feature Learning" (CVPR 2018), in the form of
DomainBed.

Equations:
    L = CE + w mean_{g < h} MMD^2(z_g, z_h) over the pairs of domains in the batch
    MMD^2(a, b) = mean k(a, a') + mean k(b, b') - 2 mean k(a, b)
    k(x, y) = sum of exp(-c |x - y|^2) over c = 1e-3, 1e-2, ..., 1e3
    `mmd_pairs: repeated` divides by the number P of pairs after each: w sum_i MMD^2_i / P^(P - i),
    i = 0 .. P - 1.

Leaves the client:
    The network, as in FedAvg.

Decisions:
    A client compares its own domains; with one it trains plainly. The paper's autoencoder with an
    adversarial prior is left out, as in DomainBed and the benchmark. Batches are IRM's.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from feddg.clients.client import Batch, Client
from feddg.methods.base import MethodSettings, register
from feddg.methods.domains import DomainMethod, mean_over, pairs_of, squared_distances
from feddg.settings import NotNegative

BANDWIDTHS = (1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3)


class MMDSettings(MethodSettings):
    """Hyper-parameters of MMD."""

    mmd_weight: NotNegative = Field(1.0, description="w (the benchmark)")
    mmd_pairs: Literal["mean", "repeated"] = Field(
        "mean", description="over pairs, or divided by their number after each (the benchmark)"
    )


@register
class MMD(DomainMethod):
    """Penalises the maximum mean discrepancy between the domains' embeddings."""

    name = "mmd"
    summary = "the domains' features are distributed alike, by a kernel (Li et al. 2018)"
    settings: MMDSettings
    shapes_embeddings = True

    def head_loss(self, client: Client, batch: Batch, embeddings: Tensor) -> dict[str, Tensor]:
        """Adds the mean discrepancy of the pairs of domains."""
        terms = super().head_loss(client, batch, embeddings)
        return terms | self.compared(client, batch, embeddings, "discrepancy", self._discrepancy)

    def _discrepancy(self, points: Tensor, member: Tensor, present: Tensor) -> Tensor:
        distances, pairs = discrepancies(points, member), pairs_of(present)
        if self.settings.mmd_pairs == "mean":
            return self.settings.mmd_weight * mean_over(distances, pairs)
        later = pairs.flatten().flip(0).cumsum(0).flip(0).view_as(pairs)  # and this one
        pairs_weight = pairs * pairs.sum().clamp_min(1).pow(-later)
        return self.settings.mmd_weight * (pairs_weight * distances).sum()


def discrepancies(points: Tensor, member: Tensor) -> Tensor:
    """Returns MMD^2 between all domains, ``(G, G)``.

    Args:
        points: ``(B, d)`` float32.
        member: ``(B, G)`` which point is of which domain.
    """
    squares = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist").square()
    kernel = torch.stack([torch.exp(-c * squares) for c in BANDWIDTHS]).sum(0)
    shares = member / member.sum(0).clamp_min(1)
    return squared_distances(shares.T @ kernel @ shares)
