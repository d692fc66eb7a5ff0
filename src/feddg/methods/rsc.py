"""RSC: the features that a decision leans on most are muted, so that others have to learn.

At each step the features with the largest gradient of the true class's logit are set to zero, for
those images of the batch whose confidence suffers most, and the network is trained on what is left.
So the decision cannot rest only on features of one domain. Each client does so on its own.

Huang et al., "Self-Challenging Improves Cross-Domain Generalization" (ECCV 2020), Eq. 3 to 6.

Equations:
    g = d (h(z) . y) / dz,    m_i = 0 where g_i is among the largest share of g, else 1
    c = softmax(h(z)) . y - softmax(h(z * m)) . y
    L = CE(h(z * m), y) where c is among the largest share of the batch, CE(h(z), y) elsewhere

    z is the embedding (``vector``) or the last stage's feature map (``spatial``), h all that
    follows it, y the true class as a one-hot vector.

Leaves the client:
    The network, as in FedAvg.

Decisions:
    ``spatial`` is the authors' form: with probability one half each, 1/3 of the places (by
    channel-weighted activation) or 1/3.2 of the channels (by mean gradient), for images that lose
    at least 0.0001 confidence. The authors' epochs are the federation's rounds. Shares of entries
    are rounded up, as both codes do; the number of images is rounded up (``vector``, as DomainBed)
    or to the nearest (``spatial``, as the authors). ``spatial`` masks the map of the training pass
    itself, and probes what follows in eval mode, with two further passes, of which a backbone that
    is cut in two could save most.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from feddg.clients.client import Batch, Client
from feddg.errors import ExperimentError
from feddg.methods.base import Method, MethodSettings, register
from feddg.models.network import Network
from feddg.settings import Fraction

Head = Callable[[Tensor], Tensor]
"""Maps features to logits."""

SMALLEST_DROP = 1e-4
"""Smallest loss of confidence for which an image is muted in the spatial form (authors' code)."""


class RscSettings(MethodSettings):
    """Hyper-parameters of RSC."""

    muting: Literal["vector", "spatial"] = Field(
        "vector", description="embedding entries (DomainBed), or places and channels (authors)"
    )
    muted_features: Fraction = Field(1 / 3, description="share of entries or places to mute (both)")
    muted_channels: Fraction = Field(1 / 3.2, description="share of channels, spatial form (code)")
    muted_images: Fraction = Field(1 / 3, description="share of the batch (code, spatial: 0.3)")
    images_growth: Fraction = Field(0.0, description="growth of that share (code, spatial: 0.2)")
    growth_rounds: int = Field(10, ge=1, description="rounds between growths (code: 10 epochs)")


@register
class Rsc(Method):
    """Mutes the features that a decision relies on most."""

    name = "rsc"
    title = "RSC"
    summary = "mutes the features that matter most (Huang et al. 2020)"
    settings: RscSettings

    def network(self, network: Network) -> Network:
        """Refuses the spatial form for backbones without feature maps."""
        network = super().network(network)
        if self.settings.muting == "spatial" and not network.stages:
            raise ExperimentError("rsc: this backbone names no stages; set method.muting to vector")
        return network

    def image_share(self, round: int) -> float:
        """Returns the share of the batch that is muted in a round, from 1."""
        grown = (round - 1) // self.settings.growth_rounds * self.settings.images_growth
        return min(1.0, float(self.settings.muted_images + grown))

    def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        """Returns the loss with part of the last feature map muted (spatial form)."""
        plain = super().loss
        if self.settings.muting == "vector":
            return plain(client, batch)
        probing = False

        def muted(layer: nn.Module, inputs: object, maps: Tensor) -> Tensor | None:
            nonlocal probing
            if probing:  # what finds the mask is not masked itself
                return None
            probing = True
            mask = self._map_mask(client, batch, maps)
            probing = False
            return maps * mask.to(maps)

        with client.network.stages[-1].register_forward_hook(muted):
            return plain(client, batch)

    def _map_mask(self, client: Client, batch: Batch, maps: Tensor) -> Tensor:
        """Returns the mask for a training map, found by passing the map on in eval mode."""
        network, stage = client.network, client.network.stages[-1]

        def head(probe: Tensor) -> Tensor:
            with stage.register_forward_hook(lambda *_: probe):
                logits: Tensor = network(batch.images)
            return logits

        with client.evaluating():
            return self._mask(client, batch, maps, head)

    def head_loss(self, client: Client, batch: Batch, embeddings: Tensor) -> dict[str, Tensor]:
        """Returns the loss of embeddings with muted entries (vector form)."""
        if self.settings.muting == "vector":
            head = client.network.classifier
            embeddings = embeddings * self._mask(client, batch, embeddings, head).to(embeddings)
        return super().head_loss(client, batch, embeddings)

    def _mask(self, client: Client, batch: Batch, features: Tensor, head: Head) -> Tensor:
        """Returns 0 where ``features`` are muted, else 1; calls ``head`` twice to find out."""
        probe = features.detach().requires_grad_()
        with torch.enable_grad():
            logits = head(probe)
            true_logits = logits.gather(1, batch.labels[:, None])
            gradient = torch.autograd.grad(true_logits.sum(), probe)[0]
        keep = self._keep(client, probe.detach(), gradient)
        with torch.no_grad():
            muted_logits = head(probe * keep.to(probe))
        before, after = (part.detach().float().softmax(1) for part in (logits, muted_logits))
        drop = (before - after).gather(1, batch.labels[:, None]).squeeze(1)
        share = self.image_share(client.round)
        if features.ndim == 4:
            return spared(keep, drop, round(share * len(drop)), SMALLEST_DROP)
        return spared(keep, drop, _part(share, len(drop)))

    def _keep(self, client: Client, features: Tensor, gradient: Tensor) -> Tensor:
        if features.ndim == 2:
            return keep_mask(gradient, self.settings.muted_features)
        weight = gradient.mean((2, 3), keepdim=True)
        if torch.rand((), generator=client.stream("rsc", client.steps)) < 0.5:
            places = (features * weight).sum(1, keepdim=True)
            return keep_mask(places, self.settings.muted_features)
        return keep_mask(weight, self.settings.muted_channels)


def keep_mask(importance: Tensor, share: float) -> Tensor:
    """Returns 0 for each row's most important entries, a ``share`` of them, else 1.

    Args:
        importance: ``(B, ...)``.
        share: in [0, 1]; the number of entries is rounded up.
    """
    flat = importance.flatten(1)
    top = flat.topk(_part(share, flat.shape[1]), dim=1).indices
    return torch.ones_like(flat).scatter_(1, top, 0.0).view_as(importance)


def spared(keep: Tensor, drop: Tensor, number: int, smallest: float = -math.inf) -> Tensor:
    """Returns the mask, set to 1 for all images except those that lose most confidence.

    Args:
        keep: ``(B, ...)`` mask.
        drop: ``(B,)`` confidence lost under the mask.
        number: how many images stay muted.
        smallest: images that lose no more than this are never muted.
    """
    muted = torch.zeros_like(drop, dtype=torch.bool)
    muted[drop.topk(number).indices] = True
    muted &= drop > smallest
    return torch.where(muted.view(-1, *[1] * (keep.ndim - 1)), keep, torch.ones_like(keep))


def _part(share: float, count: int) -> int:
    return math.ceil(share * count - 1e-9)  # 0.1 of 30 is 3, whatever the last bit says
