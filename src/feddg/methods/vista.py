"""VISTA: views in the styles of all clients' groups and under random convolutions, then averaged.

Taken one by one, what the field's methods gain comes from three things: images in styles that a
client has not seen, textures that nobody has seen, and a model that is a mean over rounds. VISTA is
these three and nothing else. Every client sends one colour style, six numbers. The server groups
them and sends the groups' styles back. In training each step shows a few versions of its images:
each image moved towards the style of a random group, all of them partly through a convolution with
random weights. The versions must be classified right, and alike. The resulting model is an
exponential moving average over the rounds.

Ours. The parts: styles and their groups, PARDON (Nguyen et al. 2025, Eq. 1 to 4); random
convolutions and consistency, RandConv (Xu et al. 2021); the mean, SWAD and others
(docs/use_a_model.md).

Equations:
    S_k = (1/n) sum_j (mu(C_j), sigma(C_j)) over the FINCH clusters of client k's images     (1)
    G_1, ..., G_M = FINCH(S_1, ..., S_N);    T_m = mean_(k in G_m) S_k                       (2)
    v = (1 - u) x + u [sigma(T_m) (x - mu(x)) / sigma(x) + mu(T_m)],  u ~ U(0, strength)     (3)
    x_j = (1 - a) v + a (v * w),    w ~ N(0, 1 / (3 k^2)),  k in {1, 3, 5, 7},  a ~ U(0, 1)   (4)
    L = mean_j CE(g(f(x_j)), y) + weight * mean_j KL(p_j || mean p),   j = 1, ..., versions    (5)

    with the moments of the image itself where the codec is ``colors``, whose re-colouring is
    clamped to [0, 1] before it is mixed in; (4) convolves v, normalised as the network's input
    is, and is not clamped. FINCH's partition is the coarsest in (1), the finest in (2). m and u
    are drawn for every image and version, k, w and a for every version, and (3) and (4) are each
    left out of a version with a probability.

Leaves the client:
    Before round 1 one style, 2 x 3 numbers with the codec ``colors``. Then the network, as in
    FedAvg.

Published code:
    None; it is ours.

Decisions:
    The groups' styles are several, so a client meets what others' images look like, and no single
    client's style leaves the server where a group has several. A group of one is that client's
    style: with ``median`` the one style of PARDON is sent instead. Its parts were chosen on digits,
    where it leads. On photographs it does not, and milder settings are no better than plain
    averaging there (docs/benchmarks.md).
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from feddg.clients.client import Batch, Client
from feddg.messages import Weights
from feddg.methods.base import Presets, register
from feddg.methods.randconv import KERNELS, convolved, random_kernel
from feddg.methods.style_exchange import OneStyleEach, StyleSettings
from feddg.settings import Fraction, NotNegative
from feddg.styles.codec import restyled
from feddg.styles.statistics import interpolation_style


class VistaSettings(StyleSettings):
    """Hyper-parameters of VISTA."""

    codec: str = Field("colors", description="what measures styles and stylizes")
    strength: Fraction = Field(1.0, description="largest u, of Eq. 3")
    stylized: Literal["on_the_fly"] = Field("on_the_fly", description="drawn anew in every step")
    styles: Literal["groups", "median"] = Field(
        "groups", description="what the server sends: the groups' styles, or PARDON's one"
    )
    versions: int = Field(3, ge=1, description="versions of each image per step (RandConv: 3)")
    style_probability: Fraction = Field(0.5, description="of Eq. 3, per version")
    convolution_probability: Fraction = Field(1.0, description="of Eq. 4, per version")
    consistency_weight: NotNegative = Field(10.0, description="weight of the divergence, Eq. 5")


@register
class Vista(OneStyleEach):
    """Versions in the groups' styles and under random convolutions must be classified alike."""

    name = "vista"
    title = "VISTA"
    summary = "views in all groups' styles under random convolutions, consistent (ours)"
    any_task = True
    needs_images = True
    settings: VistaSettings
    presets: ClassVar[Presets] = {"*": {"server": {"averaging": "ema"}}}
    excludes: ClassVar[dict[str, str]] = {
        "pardon": "pardon and vista each exchange styles and stylize images; choose one",
        "ccst": "ccst and vista each exchange styles and stylize images; choose one",
        "randconv": "vista has random convolutions of its own",
    } | dict.fromkeys(
        ("group_dro", "irm", "jigen", "sfa", "vrex"),
        "vista's loss is the mean over versions, and the other method's is of one; choose one",
    )

    @property
    def exchanges(self) -> bool:
        """Whether styles are used, and so exchanged."""
        return self.settings.style_probability > 0

    def common(self, styles: Tensor) -> tuple[Weights, Tensor | None]:
        """Returns the groups' styles, ``(M, 2, C)`` (Eq. 2), or their median, and the groups."""
        median, groups = interpolation_style(styles)
        sent = [styles[groups == group].mean(0) for group in groups.unique()]
        if self.settings.styles == "median":
            sent = [median]
        return {"styles": torch.stack(sent).float()}, groups

    def draws(self, client: Client, positions: Tensor, labels: Tensor) -> Weights:
        """Adds what makes each version: styles, how far to go to them, a kernel, its share."""
        new: Weights = {}
        chosen = self.settings
        rng = client.stream("vista", client.steps)
        for version in range(chosen.versions):
            name = f"vista/{version}/"
            styled, filtered, share, size = torch.rand(4, generator=rng)
            count, is_styled = len(labels), bool(styled < chosen.style_probability)
            if client.context is not None and (is_styled or client.records_steps):
                styles = client.context.tensors["styles"]
                drawn, far = torch.zeros(count, dtype=torch.int64), torch.zeros(count, 1, 1, 1)
                if is_styled:  # otherwise the version stays as it is
                    drawn = torch.randint(len(styles), (count,), generator=rng)
                    far = torch.rand(count, 1, 1, 1, generator=rng)
                new |= {name + "styles": styles[drawn], name + "far": far}
            if filtered < chosen.convolution_probability:
                new[name + "kernel"] = random_kernel(KERNELS[int(size * len(KERNELS))], rng, client)
                new[name + "share"] = share
        return super().draws(client, positions, labels) | new

    def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        """Returns the cross-entropy of all versions and their divergence (Eq. 5)."""
        network, chosen, task = client.network, self.settings, client.worker.task
        embeddings = network.features_of(
            [self._version(client, batch, version) for version in range(chosen.versions)]
        )
        terms = self.head_loss(client, batch, embeddings[0])
        if len(embeddings) == 1:
            return terms
        logits = torch.stack([network.classifier(each) for each in embeddings])
        losses = [client.task_loss(each, batch.labels) for each in logits[1:]]
        terms[task.term] = torch.stack([terms[task.term], *losses]).mean()
        if chosen.consistency_weight:
            terms["consistency"] = chosen.consistency_weight * task.divergence(logits)
        return terms

    def _version(self, client: Client, batch: Batch, version: int) -> Tensor:
        images, drawn = batch.images, self.drawn(client, batch)
        parts = {n: drawn.get(f"vista/{version}/{n}") for n in ("styles", "far", "kernel", "share")}
        if parts["styles"] is not None and parts["far"] is not None:
            images = self._restyled(images, parts["styles"], parts["far"])
        if parts["kernel"] is not None and parts["share"] is not None:
            images = convolved(client.network, images, parts["kernel"], parts["share"])
        return images

    def _restyled(self, images: Tensor, styles: Tensor, far: Tensor) -> Tensor:
        """Moves each image some way towards a style of its own (Eq. 3)."""
        codec, share = self.codec(images.device), far * self.settings.strength
        with torch.no_grad():
            stylized = restyled(codec, images, styles, correction=self.settings.correction)
            return images.lerp(stylized.to(images), share.to(images))
