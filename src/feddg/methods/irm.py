"""IRM: one classifier that no domain would rescale (Arjovsky et al. 2019).

A classifier that rests on what causes the label is the best one in every domain at once. IRM adds
to the mean loss of a client's domains how much each would gain by scaling the logits.

Arjovsky et al., "Invariant Risk Minimization" (2019), IRMv1, with the unbiased penalty of Appendix
D.

Equations:
    L = mean_g CE_g + w mean_g s_g(even) s_g(odd),    s = d/dt CE(t z, y) at t = 1
    over the domains g in the batch, s on every other image of the domain; w = 1 for the first
    `irm_anneal` steps. A domain of one image has no penalty. All gradients are divided by w where
    it is above 1, as in the authors' code: Adam does not notice, and SGD keeps its step.

Leaves the client:
    The network, as in FedAvg.

Decisions:
    A client compares its own domains; with one it trains plainly. Each image is used once an epoch,
    and every batch holds the domains by their share. Steps are counted as if the client had taken
    part in every round. A weight of 0 leaves plain training over domains, mean_g CE_g.
"""

from pydantic import Field
from torch import Tensor
from torch.nn.functional import one_hot

from feddg.clients.client import Batch, Client
from feddg.messages import Weights
from feddg.methods.base import MethodSettings, register
from feddg.methods.domains import MEMBER, WEIGHT, PenalisedLosses, domain_means, mean_over
from feddg.settings import NotNegative


class IRMSettings(MethodSettings):
    """Hyper-parameters of IRM."""

    irm_weight: NotNegative = Field(100.0, description="w (DomainBed; the benchmark: 1000)")
    irm_anneal: int = Field(100, ge=0, description="steps with a weight of 1 (the benchmark)")


@register
class IRM(PenalisedLosses):
    """Penalises what each domain would gain by scaling the logits."""

    name = "irm"
    summary = "no domain would gain by scaling the logits (Arjovsky et al. 2019)"
    settings: IRMSettings
    weighs, anneals = "irm_weight", "irm_anneal"

    def draws(self, client: Client, positions: Tensor, labels: Tensor) -> Weights:
        """Adds every other image of each domain."""
        drawn = super().draws(client, positions, labels)
        rank = (drawn[MEMBER].cumsum(0) * drawn[MEMBER]).sum(1)
        return drawn | {"irm/even": rank % 2}

    def output_loss(self, client: Client, batch: Batch, outputs: Tensor) -> dict[str, Tensor]:
        """Returns the mean of the domains' losses, and the penalty."""
        terms = super().output_loss(client, batch, outputs)
        if self.domains(client) < 2:
            return terms
        logits = outputs.float()
        losses, weights = self.losses(client, batch, logits)
        present, drawn = self.member(client, batch)[1], self.drawn(client, batch)
        terms[client.worker.task.term] = mean_over(domain_means(losses, weights), present)
        if not self.weight:
            return terms
        even, slopes = drawn["irm/even"], self.slopes(client, batch, logits)
        first, second = (domain_means(slopes, weights * half[:, None]) for half in (even, 1 - even))
        return terms | {"invariance": drawn[WEIGHT] * mean_over(first * second, present)}

    def slopes(self, client: Client, batch: Batch, logits: Tensor) -> Tensor:
        """Returns each image's derivative of the loss by the logits' scale, ``(B,)``."""
        smoothing = client.worker.train.label_smoothing
        targets = one_hot(batch.labels, logits.shape[1]) * (1 - smoothing)
        return ((logits.softmax(1) - targets - smoothing / logits.shape[1]) * logits).sum(1)
