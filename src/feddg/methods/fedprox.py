"""FedProx: a proximal term holds clients near the weights they received (Li et al., MLSys 2020).

Clients whose images differ pull the weights in different directions, and with many local steps
their mean suits none of them. FedProx adds to every client's loss a spring to the weights it
received, so that local training strays less. With weight 0 it is FedAvg, bit for bit.

Equations:
    L_k(w) = CE(w) + mu/2 ||w - w_t||^2, with w_t the weights that the round's broadcast held.

Leaves the client:
    Its weights and its number of images, as in FedAvg.

Decisions:
    The paper tunes mu in {0.001, 0.01, 0.1, 1}; the default 0.01 is that of the code published with
    CCST and FedBN, while FedIG compares with 0.1. Entries that stay with the client (FedBN) are not
    held: they did not come from the server.
"""

import torch
from pydantic import Field
from torch import Tensor

from feddg.clients.client import Batch, Client
from feddg.methods.base import Method, MethodSettings, shared_parameters
from feddg.methods.catalogue import register
from feddg.methods.reference import CodeDifference, Reference


class FedProxSettings(MethodSettings):
    """Hyper-parameters of FedProx."""

    mu: float = Field(
        0.01,
        ge=0,
        allow_inf_nan=False,
        description="weight of the proximal term (code of CCST and FedBN: 0.01; FedIG: 0.1)",
    )


@register
class FedProx(Method):
    """A proximal term holds clients near the weights they received."""

    name = "fedprox"
    title = "FedProx"
    summary = "FedAvg with a proximal term (Li et al. 2020)"
    reference = Reference(
        "re-implementations in FedBN's, CCST's and inouye-lab/FedDG_Benchmark's code; the "
        "authors' TensorFlow code was not compared",
        (
            CodeDifference(
                "the benchmark sums the norms of the tensors",
                "the squared norm",
                "the paper's equation",
            ),
            CodeDifference(
                "FedBN's code leaves the term out of round 1 and of every round's first step",
                "it is always there",
                "its gradient is 0 in the first step anyway",
            ),
        ),
    )
    settings: FedProxSettings

    def begin(self, client: Client) -> None:
        """Pairs every shared parameter with its received value."""
        super().begin(client)
        shared = shared_parameters(self, client.network)
        client.scratch["fedprox"] = [(p, client.received[n].to(p)) for n, p in shared.items()]

    def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        """Adds mu/2 times the squared distance to the received weights."""
        terms = super().loss(client, batch)
        if self.settings.mu == 0:
            return terms
        pairs = client.scratch["fedprox"]
        distance = torch.stack([(p - received).square().sum() for p, received in pairs]).sum()
        return terms | {"proximal": self.settings.mu / 2 * distance}
