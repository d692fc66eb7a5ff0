"""GroupDRO: the domain with the largest loss counts most (Sagawa et al., ICLR 2020).

A mean over images may leave one domain behind. GroupDRO gives the domains of a client weights that
grow by their losses, step by step, and lowers the weighted loss.

Sagawa et al., "Distributionally Robust Neural Networks for Group Shifts" (ICLR 2020), Algorithm 1.

Equations:
    q_g <- q_g exp(e CE_g), divided by their sum, at every step; uniform at first
    L = sum_g q_g CE_g over the domains of the batch

Leaves the client:
    The network, as in FedAvg.

Decisions:
    The paper's one set of images is a client's, as in the benchmark. A client keeps its q over the
    rounds; with one domain it trains plainly. Batches are IRM's. For weights of the whole
    federation's domains see AFL (`afl_over: domains`).
"""

import torch
from pydantic import Field
from torch import Tensor

from feddg.clients.client import Batch, Client
from feddg.messages import Message
from feddg.methods.base import MethodSettings, register
from feddg.methods.domains import DomainMethod, domain_means

OWN = "group_dro"


class GroupDROSettings(MethodSettings):
    """Hyper-parameters of GroupDRO."""

    dro_step: float = Field(0.01, ge=0, allow_inf_nan=False, description="e (the benchmark)")


@register
class GroupDRO(DomainMethod):
    """Weighs the domains by their losses."""

    name = "group_dro"
    aliases = ("groupdro",)
    summary = "domains with a large loss count more (Sagawa et al. 2020)"
    settings: GroupDROSettings

    def begin(self, client: Client) -> None:
        """Loads the client's weights."""
        super().begin(client)
        count, before = self.domains(client), client.memory.get(OWN, torch.empty(0))
        weights = torch.full((count,), 1 / count, device=client.device)
        client.scratch[OWN] = weights.copy_(before) if len(before) == count else weights

    def output_loss(self, client: Client, batch: Batch, outputs: Tensor) -> dict[str, Tensor]:
        """Returns the weighted loss, after a step of the weights."""
        terms = super().output_loss(client, batch, outputs)
        if self.domains(client) < 2:
            return terms
        losses, counts = self.losses(client, batch, outputs)
        means = domain_means(losses, counts)
        weights = client.scratch[OWN]
        if self.is_first_pass(client, batch, OWN):
            weights = torch.softmax(weights.log() + self.settings.dro_step * means.detach(), 0)
            client.scratch[OWN].copy_(weights)
        return terms | {client.worker.task.term: (weights * means).sum()}

    def report(self, client: Client) -> Message:
        """Has the client remember its weights."""
        if self.domains(client) > 1:
            client.memory[OWN] = client.scratch[OWN]
        return super().report(client)
