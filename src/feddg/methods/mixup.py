"""Mixup: images of two domains and their labels are mixed (Yan et al. 2020; Zhang et al. 2018).

Between an image of one domain and an image of another lie images of domains that nobody has. Each
image of a batch is mixed with one of another domain of the client, and so is the loss.

Zhang et al., "mixup: Beyond Empirical Risk Minimization" (ICLR 2018), between domains as in
DomainBed and Yan et al., "Improve Unsupervised Domain Adaptation with Mixup Training" (2020).

Equations:
    L = l CE(x_mix, y) + (1 - l) CE(x_mix, y'),    x_mix = l x + (1 - l) x',    l ~ Beta(a, a)
    drawn for a batch; x' is an image of the domain after x's, in a random circle of the batch's.

Leaves the client:
    The network, as in FedAvg.

Decisions:
    A client mixes its own domains; with one, or in a batch of one, it trains plainly. Images are
    mixed after augmentation. Batches are IRM's.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from feddg.clients.client import Batch, Client
from feddg.messages import Weights
from feddg.methods.base import MethodSettings, register
from feddg.methods.domains import DomainMethod, numbers_of
from feddg.settings import Positive


class MixupSettings(MethodSettings):
    """Hyper-parameters of Mixup."""

    mixup_alpha: Positive = Field(0.2, description="a of Beta(a, a) (DomainBed, the benchmark)")


@register
class Mixup(DomainMethod):
    """Trains on mixtures of images of two domains."""

    name = "mixup"
    summary = "images of two domains are mixed, and their labels (Zhang et al. 2018)"
    settings: MixupSettings
    any_task = True
    needs_images = True
    outermost = True  # all that others make of a batch is of mixed images, under both labels
    excludes: ClassVar[dict[str, str]] = dict.fromkeys(
        ("fpl", "l2d", "pardon", "selfreg", "vista"),
        "mixup's images are of two classes, and the other method takes each to be of one; choose "
        "one",
    )

    def draws(self, client: Client, positions: Tensor, labels: Tensor) -> Weights:
        """Adds each image's partner, and how much of the image stays."""
        alpha = self.settings.mixup_alpha
        share = float(client.numpy_stream("mixup", client.steps).beta(alpha, alpha))
        rng = client.stream("mixup", client.steps)
        drawn = {
            "mixup/partners": partners_of(numbers_of(client)[positions], rng),
            "mixup/share": torch.tensor(share),
        }
        return super().draws(client, positions, labels) | drawn

    def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        """Mixes images, and their views in the same way."""
        if self.domains(client) < 2:
            return super().loss(client, batch)
        drawn = self.drawn(client, batch)
        partners, share = drawn["mixup/partners"], drawn["mixup/share"]
        mixed = replace(
            batch,
            images=batch.images[partners].lerp(batch.images, share),
            views={name: view[partners].lerp(view, share) for name, view in batch.views.items()},
            targets=batch.targets | {"mixup": batch.labels[partners]},
        )
        return super().loss(client, mixed)

    def head_loss(self, client: Client, batch: Batch, embeddings: Tensor) -> dict[str, Tensor]:
        """Returns the loss of mixed images under both images' labels."""
        terms = super().head_loss(client, batch, embeddings)
        if "mixup" not in batch.targets:
            return terms
        others = replace(batch, labels=batch.targets["mixup"], host_labels=None)
        partly = super().head_loss(client, others, embeddings)
        share = self.drawn(client, batch)["mixup/share"]
        return {name: partly[name].lerp(term, share.to(term)) for name, term in terms.items()}


def partners_of(numbers: Tensor, rng: torch.Generator) -> Tensor:
    """Returns for each image a random one of the next domain in a random circle, ``(B,)``.

    Args:
        numbers: ``(B,)`` domains of the images; if they are of one, each is its own partner.
        rng: CPU generator.
    """
    partners = torch.arange(len(numbers))
    domains = numbers.unique()
    domains = domains[torch.randperm(len(domains), generator=rng)]
    for domain, other in zip(domains, domains.roll(-1)):
        rows, others = ((numbers == g).nonzero().squeeze(1) for g in (domain, other))
        drawn = others[torch.randperm(len(others), generator=rng)]
        partners[rows] = drawn[torch.arange(len(rows)) % len(drawn)] if domain != other else rows
    return partners
