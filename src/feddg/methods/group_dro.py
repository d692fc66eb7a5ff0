"""GroupDRO: the domain with the largest loss counts most (Sagawa et al., ICLR 2020).

A mean over images may leave one domain behind. GroupDRO gives the domains of a client weights that
grow by their losses, step by step, and lowers the weighted loss.

Sagawa et al., "Distributionally Robust Neural Networks for Group Shifts" (ICLR 2020), Algorithm 1.

Equations:
    `dro_weights: client`      q_g <- q_g exp(e CE_g), divided by their sum, at every step;
                               L = sum_g q_g CE_g over the domains of the batch
    `dro_weights: federation`  q_g <- q_g exp(e L_g), divided by their sum, after every round, L_g
                               as in AFL; L = mean_i q_g(i) (n / n_g(i)) CE_i, of the federation's
                               n images n_g are of domain g
    q is uniform at first.

Leaves the client:
    The network, as in FedAvg. If the federation has weights, also what AFL's clients send of their
    domains.

Decisions:
    A client keeps its q over the rounds; with one domain it trains plainly. The paper's one set of
    images is a client's, as in the benchmark, or all clients'. Batches are IRM's.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from feddg.clients.client import Batch, Client
from feddg.messages import Message
from feddg.methods.afl import WeighedByLoss
from feddg.methods.base import MethodSettings, register
from feddg.methods.domains import DomainMethod, domain_means

OWN = "group_dro"


class GroupDROSettings(MethodSettings):
    """Hyper-parameters of GroupDRO."""

    dro_step: float = Field(0.01, ge=0, allow_inf_nan=False, description="e (the benchmark)")
    dro_weights: Literal["client", "federation"] = Field(
        "client", description="where they are: at each client (the benchmark), or at the server"
    )


@register
class GroupDRO(DomainMethod, WeighedByLoss):
    """Weighs the domains by their losses."""

    name = "group_dro"
    aliases = ("groupdro",)
    summary = "domains with a large loss count more (Sagawa et al. 2020)"
    settings: GroupDROSettings

    @property
    def weighs(self) -> str:
        """What has weights at the server."""
        return "domains" if self.settings.dro_weights == "federation" else ""

    @property
    def compares_domains(self) -> bool:
        """Whether the weights are each client's own."""
        return not self.weighs

    def moved(self, weights: Tensor, losses: Tensor) -> Tensor:
        """Returns ``q exp(e loss)`` divided by its sum, ``(G,)``."""
        return torch.softmax(weights.log() + self.settings.dro_step * losses, 0)

    def factors(self, weights: Tensor, images: Tensor) -> Tensor:
        """Returns the weights, each for one image of its domain; equal ones are 1 in the mean."""
        return weights * images.sum() / images.clamp_min(1)

    def begin(self, client: Client) -> None:
        """Loads the client's weights."""
        super().begin(client)
        count, before = self.domains(client), client.memory.get(OWN, torch.empty(0))
        weights = torch.full((count,), 1 / count, device=client.device)
        client.scratch[OWN] = weights.copy_(before) if len(before) == count else weights

    def output_loss(self, client: Client, batch: Batch, outputs: Tensor) -> dict[str, Tensor]:
        """Returns the weighted loss, after a step of the weights if they are the client's."""
        terms = super().output_loss(client, batch, outputs)
        if self.weighs:
            total = self.weighed_loss(client, batch, outputs)
            return terms | {client.worker.task.term: total}
        if self.domains(client) < 2:
            return terms
        losses, counts = self.losses(client, batch, outputs)
        means = domain_means(losses, counts)
        weights = client.scratch[OWN]
        if self.is_first_pass(client, batch, OWN):
            weights = self.moved(weights, means.detach())
            client.scratch[OWN].copy_(weights)
        return terms | {client.worker.task.term: (weights * means).sum()}

    def report(self, client: Client) -> Message:
        """Has the client remember its weights."""
        if self.compares_domains and self.domains(client) > 1:
            client.memory[OWN] = client.scratch[OWN]
        return super().report(client)
