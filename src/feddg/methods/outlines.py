"""Outlines: the classifier is solved for, and trained, on images and on drawings of their edges.

At an unseen site colour and texture change most, while shapes stay the same. So a share of each
batch is shown as an outline: how much each colour changes from pixel to pixel, dark on white. With
``train.head: ridge``, its default on folders, Office-Home and under the preset ``pacs``, the
classifier that training starts from is solved from both versions of every image, so that it rests
on shape from the start.

Ours. The classifier in closed form is Fed3R's, as in ``ridge``.

Equations:
    e_c = sqrt((K * x_c)^2 + (K^T * x_c)^2),   K = [-1 0 1; -2 0 2; -1 0 1],   c = R, G, B      (1)
    o(x) = 1 - e / max e,   the maximum over an image's pixels and colours                      (2)
    x' = o(x) with probability p, x otherwise, drawn for every image of every step              (3)
    L = CE(g(f(x')), y)                                                                         (4)

    with x in [0, 1], its border repeated by one pixel before (1). The sums of ``train.head: ridge``
    are over x and o(x) of every image.

Leaves the client:
    The network, as in FedAvg; with ``train.head: ridge``, before round 1, the sums of its features.

Published code:
    None; it is ours.

Decisions:
    Several second versions of every image in the sums were compared, by accuracy on training
    domains that were left out. Outlines by colour did best, followed by grey outlines, white on
    black, grey images and none; more contrast and random convolutions did worse than none.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Generator, Tensor, nn

from feddg.clients.client import Batch, Client
from feddg.messages import Weights
from feddg.methods.base import Method, MethodSettings, Presets, register
from feddg.settings import Fraction

FAINTEST = 1e-3
"""The least that the strongest edge counts as: an image of one colour has no edges."""


class OutlinesSettings(MethodSettings):
    """Hyper-parameters of Outlines."""

    outline_probability: Fraction = Field(0.5, description="p, per image and step")


@register
class Outlines(Method):
    """A share of the images is shown as drawings of their edges."""

    name = "outlines"
    summary = "images and drawings of their edges, from a classifier solved on both (ours)"
    any_task = True
    needs_images = True
    settings: OutlinesSettings
    presets: ClassVar[Presets] = {
        "*": {"server": {"averaging": "ema"}},
        "pacs": {"train": {"head": "ridge"}},
        "office_home": {"train": {"head": "ridge"}},
    }

    def head_images(self, images: Tensor) -> tuple[Tensor, ...]:
        """Images as they are, and their outlines."""
        return images, outlines(images)

    def draws(self, client: Client, positions: Tensor, labels: Tensor) -> Weights:
        """Adds which images become outlines."""
        rng, share = client.stream("outlines", client.steps), self.settings.outline_probability
        drawn = {"outlines": some(len(labels), share, rng)}
        return super().draws(client, positions, labels) | drawn

    def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        """The loss of a batch of which some images are outlines."""
        images = partly(batch.images, self.drawn(client, batch)["outlines"], outlines)
        shown = replace(batch, images=images)
        return self.head_loss(client, shown, client.network.features(images))


def some(count: int, share: float, rng: Generator) -> Tensor:
    """Returns ``(count,)`` bool: which images are chosen, each with probability ``share``."""
    return torch.rand(count, generator=rng) < share


def partly(images: Tensor, chosen: Tensor, changed: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns a copy of images ``(B, 3, H, W)`` in which the ``chosen`` ones are changed.

    On a device all are changed and the others put back: it would have to be asked how many are
    chosen.
    """
    if chosen.device.type != "cpu":
        mixed = torch.where(chosen[:, None, None, None], changed(images).to(images), images)
        return mixed.contiguous(memory_format=torch.channels_last)
    images, chosen = images.clone(), chosen.nonzero().squeeze(1)
    images[chosen] = changed(images[chosen]).to(images)
    return images


def outlines(images: Tensor) -> Tensor:
    """Returns drawings of the edges of images (Eq. 1 and 2).

    Args:
        images: ``(B, 3, H, W)`` RGB in [0, 1].

    Returns:
        The same shape in [0, 1]: white where nothing changes, dark at the strongest edge.
    """
    padded = nn.functional.pad(images, (1, 1, 1, 1), mode="replicate")
    along_x, along_y = padded[..., 2:] - padded[..., :-2], padded[..., 2:, :] - padded[..., :-2, :]
    across = along_x[..., :-2, :] + 2 * along_x[..., 1:-1, :] + along_x[..., 2:, :]
    down = along_y[..., :-2] + 2 * along_y[..., 1:-1] + along_y[..., 2:]
    edges = (across.square() + down.square()).sqrt()
    return 1 - edges / edges.amax((1, 2, 3), keepdim=True).clamp_min(FAINTEST)
