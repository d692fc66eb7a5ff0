"""Fish: steps on one domain after the other agree on a direction (Shi et al., ICLR 2022).

A step down each domain in turn, and then a small part of the way that they went together: to first
order this raises the inner products of the domains' gradients. So the weights move where all
domains agree.

Shi et al., "Gradient Matching for Domain Generalization" (ICLR 2022), Algorithm 1.

Equations:
    v = w;  for each domain g in the batch, in random order:  v <- v - step(dCE_g(v) / dv)
    w <- w + e (v - w)

Leaves the client:
    The network, as in FedAvg.

Decisions:
    A client steps over its own domains; with one it trains plainly. The parts of a batch together
    are one pass over its images. One optimizer goes on over all steps of a client's round;
    normalisation statistics are those of v, and kept in a step on one image. Batches are IRM's.
    Clients of several domains move about e times as far as plain training does, those of one
    domain as far.
"""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from feddg.clients.client import Batch, Client
from feddg.messages import Weights, copied
from feddg.methods.base import MethodSettings, register
from feddg.methods.domains import DomainMethod, numbers_of
from feddg.models.normalization import freeze_statistics
from feddg.settings import Fraction

PART = "fish/"


class FishSettings(MethodSettings):
    """Hyper-parameters of Fish."""

    meta_rate: Fraction = Field(0.1, description="e (the benchmark)")


@register
class Fish(DomainMethod):
    """Goes a part of the way that steps on one domain after the other went."""

    name = "fish"
    summary = "steps on each domain in turn, then a part of the way (Shi et al. 2022)"
    settings: FishSettings
    excludes: ClassVar[dict[str, str]] = {
        "scaffold": "scaffold reads a client's gradients off how far it went, and fish goes most "
        "of the way back; choose one"
    } | dict.fromkeys(
        ("coral", "irm", "mixup", "mmd", "vrex"),
        "fish steps on one domain at a time, and the other method compares those of a batch; "
        "choose one",
    )

    def draws(self, client: Client, positions: Tensor, labels: Tensor) -> Weights:
        """Adds the rows of each domain in the batch, in the order of their steps."""
        numbers = numbers_of(client)[positions]
        order = torch.randperm(self.domains(client), generator=client.stream("fish", client.steps))
        rows = [part for g in order if len(part := (numbers == g).nonzero().squeeze(1))]
        client.scratch["fish"] = rows  # where the step finds them without asking the device
        parts = {f"{PART}{place}": part for place, part in enumerate(rows)}
        return super().draws(client, positions, labels) | parts

    def step(self, client: Client, batch: Batch) -> None:
        """Takes a step on each domain, and goes back most of the way."""
        if self.domains(client) < 2:
            super().step(client, batch)
            return
        drawn = self.drawn(client, batch)
        named = client.network.named_parameters()
        trained = {name: p.detach() for name, p in named if p.requires_grad}
        before = copied(trained)
        for place, here in enumerate(client.scratch["fish"]):
            alone = len(here) == 1  # and has no variance
            if alone:
                freeze_statistics(client.network)
            super().step(client, batch.rows(drawn[f"{PART}{place}"], here))
            if alone:
                client.set_training()
        back = 1 - self.settings.meta_rate
        torch._foreach_lerp_([*trained.values()], [*before.values()], back)
