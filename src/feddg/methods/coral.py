"""CORAL: the features of a client's domains have one covariance (Sun and Saenko 2016).

A cheap way to make the domains' features similar: for each pair of a client's domains the squared
difference of the covariances is added to the loss, and that of the means if asked for.

Sun and Saenko, "Deep CORAL: Correlation Alignment for Deep Domain Adaptation" (ECCV Workshops
2016), Eq. 1, over pairs as in DomainBed.

Equations:
    L = CE + w mean_{g < h} D(g, h) over the pairs of domains in the batch
    `coral_form: paper`      D = |C_g - C_h|^2 / (4 d^2)
    `coral_form: benchmark`  D = |C_g - C_h|^2 / d^2 + |m_g - m_h|^2 / d
    m_g the mean of the domain's embeddings of d numbers, C_g their covariance, by n_g - 1.

Leaves the client:
    The network, as in FedAvg.

Decisions:
    A client compares its own domains; with one it trains plainly. The paper aligns one domain with
    labels and one without. One image has no covariance: so a domain's images come in pairs. Where a
    client has a single one, only `benchmark` compares it, by its mean. Otherwise batches are IRM's.
"""

from typing import Literal

from pydantic import Field
from torch import Tensor

from feddg.clients.client import Batch, Client
from feddg.methods.base import MethodSettings, register
from feddg.methods.domains import (
    DomainMethod,
    domain_means,
    mean_over,
    pairs_of,
    squared_distances,
)
from feddg.settings import NotNegative


class CORALSettings(MethodSettings):
    """Hyper-parameters of CORAL."""

    coral_weight: NotNegative = Field(1.0, description="w (the benchmark)")
    coral_form: Literal["paper", "benchmark"] = Field(
        "paper", description="covariances, or also means (the benchmark, as DomainBed)"
    )


@register
class CORAL(DomainMethod):
    """Penalises differences of the domains' covariances."""

    name = "coral"
    summary = "the domains' features have one covariance (Sun and Saenko 2016)"
    settings: CORALSettings
    shapes_embeddings = True
    together = 2

    def head_loss(self, client: Client, batch: Batch, embeddings: Tensor) -> dict[str, Tensor]:
        """Adds the mean distance of the pairs of domains."""
        terms = super().head_loss(client, batch, embeddings)
        return terms | self.compared(client, batch, embeddings, "correlation", self._correlation)

    def _correlation(self, points: Tensor, member: Tensor, present: Tensor) -> Tensor:
        several = pairs_of((member.sum(0) > 1).to(member))
        means, covariances = distances(points, member)
        both = several * covariances
        if self.settings.coral_form == "paper":
            return self.settings.coral_weight * mean_over(both / 4, several)
        return self.settings.coral_weight * mean_over(means + both, pairs_of(present))


def distances(points: Tensor, member: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the distances of all domains' means and covariances, ``(G, G)`` both.

    Covariances are compared by inner products of images, so that none is ever formed.

    Args:
        points: ``(B, d)`` float32.
        member: ``(B, G)`` which point is of which domain.
    """
    means = domain_means(points, member)
    centred = points - member @ means
    shares = member / (member.sum(0) - 1).clamp_min(1)
    products = (centred @ centred.T / points.shape[1]).square()
    between = (means[:, None] - means[None, :]).square().mean(2)
    return between, squared_distances(shares.T @ products @ shares)
