"""V-REx: the domains' losses are to be equal (Krueger et al., ICML 2021).

Training that lowers all domains' losses alike is expected to do so in an unseen domain. V-REx adds
the variance of the losses of a client's domains.

Krueger et al., "Out-of-Distribution Generalization via Risk Extrapolation" (ICML 2021), Eq. 8.

Equations:
    L = mean_g CE_g + w V over the domains g in the batch; w = 1 for the first `vrex_anneal` steps.
    `vrex_variance: between`  V = mean_g (CE_g - mean_h CE_h)^2
    `vrex_variance: within`   V = mean_g of the variance of the losses of g's images

Leaves the client:
    The network, as in FedAvg.

Decisions:
    A client compares its own domains; with one it trains plainly. Variances divide by the number.
    Batches and steps are IRM's.
"""

from typing import Literal

from pydantic import Field
from torch import Tensor

from feddg.clients.client import Batch, Client
from feddg.methods.base import MethodSettings, register
from feddg.methods.domains import WEIGHT, PenalisedLosses, domain_means, mean_over
from feddg.settings import NotNegative


class VRExSettings(MethodSettings):
    """Hyper-parameters of V-REx."""

    vrex_weight: NotNegative = Field(10.0, description="w (DomainBed)")
    vrex_anneal: int = Field(100, ge=0, description="steps with a weight of 1 (our choice)")
    vrex_variance: Literal["between", "within"] = Field(
        "between", description="of the domains' losses (paper), or inside each (the benchmark)"
    )


@register
class VREx(PenalisedLosses):
    """Penalises the variance of the domains' losses."""

    name = "vrex"
    title = "V-REx"
    summary = "the variance of the domains' losses is penalised (Krueger et al. 2021)"
    settings: VRExSettings
    weighs, anneals = "vrex_weight", "vrex_anneal"

    def output_loss(self, client: Client, batch: Batch, outputs: Tensor) -> dict[str, Tensor]:
        """Returns the mean of the domains' losses, and the variance."""
        terms = super().output_loss(client, batch, outputs)
        if self.domains(client) < 2:
            return terms
        losses, weights = self.losses(client, batch, outputs)
        member, present = self.member(client, batch)
        means = domain_means(losses, weights)
        mean = mean_over(means, present)
        if self.settings.vrex_variance == "between":
            variances = (means - mean).square()
        else:
            variances = domain_means((losses - (member * means).sum(1)).square(), weights)
        weight = self.drawn(client, batch)[WEIGHT]
        variance = weight * mean_over(variances, present)
        return terms | {client.worker.task.term: mean, "variance": variance}
