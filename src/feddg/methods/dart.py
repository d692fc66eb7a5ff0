"""DART, federated: every client shows half of its images in one form, drawn anew each round.

DART trains models apart, each under an augmentation of its own, and averages them again and again.
A federation trains apart and averages anyway, so here each client of a round gets a form of its
own. The average has seen all forms, although no client trains on more than one at a time.

After Jain, Addepalli, Sahu, Dey and Babu, "DART: Diversify-Aggregate-Repeat Training Improves
Generalization of Neural Networks" (CVPR 2023), which has no clients. The forms are ours.

Equations:
    t ~ U(forms), for every client and round                                                    (1)
    x' = t(x) with probability p, x otherwise, drawn for every image of every step              (2)
    L = CE(g(f(x')), y)                                                                         (3)

    with x in [0, 1] and t one of
        plain     x
        outlines  Eq. 1 and 2 of Outlines
        convolved (1 - a) x + a (x * w),  w ~ N(0, 1 / (3 k^2)),  k in {1, 3, 5, 7},  a ~ U(0, 1),
                  drawn for every step, as RandConv has it
        grey      the mean of the three colours
        contrast  m + 2 (x - m) within [0, 1],  m the image's mean

Leaves the client:
    The network, as in FedAvg.

Published code:
    The authors' trainer for domain generalization (val-iisc/DART) has four models, each with SWAD,
    that differ by the domains in a batch: half of it of one domain and a quarter of each other, or
    all alike; they are replaced by their mean every so often. Here forms differ, not domains.

Decisions:
    A client keeps its form for the whole round, so that the clients of a round diverge; in every
    batch some images stay as they are (p). Models are averaged every round, whereas DART lets many
    epochs pass. This form was chosen among others on validation domains, at 15 thousand images
    (docs/benchmarks.md).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Literal, get_args

import torch
from pydantic import Field
from torch import Tensor

from feddg.clients.client import Batch, Client
from feddg.messages import Weights
from feddg.methods.base import Method, MethodSettings, Presets, register
from feddg.methods.outlines import outlines, partly, some
from feddg.methods.randconv import KERNELS, convolved, random_kernel
from feddg.models.network import Network
from feddg.settings import Fraction

Form = Literal["plain", "outlines", "convolved", "grey", "contrast"]


FORM = "dart/form/"
"""Before the form, in the name of which images have it."""


class DartSettings(MethodSettings):
    """Hyper-parameters of DART."""

    forms: tuple[Form, ...] = Field(
        get_args(Form), min_length=1, description="what a client draws one of each round"
    )
    form_probability: Fraction = Field(0.5, description="p, per image and step")


@register
class Dart(Method):
    """Each client of a round trains under one augmentation."""

    name = "dart"
    title = "DART"
    summary = "one augmentation a client and round (after Jain et al. 2023)"
    any_task = True
    needs_images = True
    settings: DartSettings
    presets: ClassVar[Presets] = {"*": {"server": {"averaging": "ema"}}}

    def draws(self, client: Client, positions: Tensor, labels: Tensor) -> Weights:
        """Adds which images take the client's form, and what the form draws."""
        rng = client.stream("half", client.steps)
        form = self.form(client)
        drawn = {FORM + form: some(len(labels), self.settings.form_probability, rng)}
        if form == "convolved":
            size = KERNELS[int(torch.randint(len(KERNELS), (), generator=rng))]
            share = torch.rand((), generator=rng)
            drawn |= {"dart/share": share, "dart/kernel": random_kernel(size, rng, client)}
        return super().draws(client, positions, labels) | drawn

    def form(self, client: Client) -> Form:
        """Returns the form of a client's turn."""
        forms = self.settings.forms
        return forms[int(torch.randint(len(forms), (), generator=client.stream("form")))]

    def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        """The loss of a batch of which some images are in the client's form."""
        drawn = self.drawn(client, batch)
        (name,) = (name for name in drawn if name.startswith(FORM))
        form = FORMS[name.removeprefix(FORM)]  # type: ignore[index]
        images = partly(batch.images, drawn[name], lambda part: form(part, client.network, drawn))
        shown = replace(batch, images=images)
        return self.head_loss(client, shown, client.network.features(images))


def convolved_at_random(images: Tensor, network: Network, drawn: Weights) -> Tensor:
    """Returns images ``(B, 3, H, W)`` in [0, 1] mixed with one random convolution of them."""
    return convolved(network, images, drawn["dart/kernel"], drawn["dart/share"])


def grey(images: Tensor) -> Tensor:
    """Returns images ``(B, 3, H, W)`` without colour."""
    return images.mean(1, keepdim=True).expand_as(images)


def contrasted(images: Tensor) -> Tensor:
    """Returns images ``(B, 3, H, W)`` in [0, 1] with twice their contrast."""
    middle = images.mean((1, 2, 3), keepdim=True)
    return (middle + 2 * (images - middle)).clamp(0, 1)


FORMS: dict[Form, Callable[[Tensor, Network, Weights], Tensor]] = {
    "plain": lambda images, network, drawn: images,
    "outlines": lambda images, network, drawn: outlines(images),
    "convolved": convolved_at_random,
    "grey": lambda images, network, drawn: grey(images),
    "contrast": lambda images, network, drawn: contrasted(images),
}
