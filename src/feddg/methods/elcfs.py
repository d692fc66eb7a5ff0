"""ELCFS, also called FedDG: clients share low-frequency amplitudes and train by episodes.

The amplitude of an image's spectrum at low frequencies carries its style, the phase its content.
Clients put amplitudes of some images in a common bank; each mixes amplitudes of others into its
own images. Every step is an episode: a trial step on the client's own images must also lower the
loss on the mixed ones.

Liu et al., "FedDG: Federated Domain Generalization on Medical Image Segmentation via Episodic
Learning in Continuous Frequency Space" (CVPR 2021), here for classification.

Equations:
    A' = (1 - M) A + M [(1 - l) A + l A_other],    l ~ U(0, 1) per image,    x' = F^-1(A', phase(x))
    M = 1 on a centred square of half-width b = floor(window min(H, W)), so 2b + 1 coefficients wide
    v = w - meta_step clamp(dL(w; x) / dw, -clip, clip)
    minimised: L(w; x) + L(v; x')

    F is the Fourier transform divided by H W, so that A at frequency 0 is a channel's mean.

Leaves the client:
    Before round 1 the low-frequency amplitudes of 1/8 of its images, 3 (2b + 1)^2 numbers each,
    nothing else of the spectrum. Then the network, as in FedAvg.

Decisions:
    window 0.01 and l ~ U(0, 1) are from memory of the paper (inference); so is clamping each entry
    of the gradient. Below 100 pixels 0.01 selects only the mean colour, of which a run warns; the
    preset of the 32-pixel digits is 0.05 (b = 1). Only other clients' amplitudes are drawn; a
    client that is alone draws from its own. Images are RGB in [0, 1], and x' is clamped to that.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call

from feddg.clients.client import Batch, Client
from feddg.diagnostics import Diagnostic, warning
from feddg.errors import ExperimentError
from feddg.messages import EntrySchema, Message, Weights, joined
from feddg.methods.base import Method, MethodSettings, Presets, Statistics, bank, register
from feddg.models.backbones import use_plain_attention
from feddg.models.network import Network
from feddg.settings import ExperimentSettings, Fraction, NotNegative, Positive


class ElcfsSettings(MethodSettings):
    """Hyper-parameters of ELCFS."""

    window: float = Field(0.01, ge=0, le=0.25, description="half-width by side (paper; code: 0)")
    mixing: Literal["uniform", "full"] = Field("uniform", description="l ~ U(0, 1), or 1 (code)")
    bank_share: Fraction = Field(1 / 8, description="share of images in the bank (paper)")
    meta_step: NotNegative = Field(1e-3, description="size of the trial step (code)")
    clip: Positive = Field(100.0, description="largest entry of the trial step's gradient (code)")
    meta_order: Literal["first", "second"] = Field(
        "second", description="whether the trial step itself is differentiated"
    )


@register
class Elcfs(Method):
    """Mixes other clients' amplitudes in; a trial step must help on the mixed images."""

    name = "elcfs"
    title = "ELCFS (FedDG)"
    aliases = ("feddg",)
    summary = "amplitude bank and episodic steps, FedDG (Liu et al. 2021)"
    any_task = True
    needs_images = True
    settings: ElcfsSettings
    presets: ClassVar[Presets] = {"digits": {"method": {"window": 0.05}}}
    sends: ClassVar[dict[str, EntrySchema]] = Method.sends | {
        "statistics/amplitudes": EntrySchema(
            "once, low-frequency amplitudes of 1/8 of its images",
            lambda method, context: (
                "images" if context.images is None else method.drawn_of(context.images),
                3,
                *method.window_shape(context.image_size),
            ),
            low=0.0,
            high=1.0001,  # no more than the mean of the image, beyond rounding
        )
    }

    def diagnostics(self, experiment: ExperimentSettings) -> Iterable[Diagnostic]:
        """Warns if the window holds nothing but the mean colour."""
        yield from super().diagnostics(experiment)
        size = experiment.data.image_size
        if self.settings.window and not self._half_width(size):
            yield warning(
                "mean-colour-alone",
                f"A window of {self.settings.window:g} on images of {size} pixels holds the mean "
                "colour alone: clients exchange no other amplitudes.",
                f"Set method.window to {math.ceil(300 / size) / 100:g}, or choose larger images.",
            )

    def client_statistics(self, client: Client) -> Message:
        """Returns the low-frequency amplitudes of some of the client's images."""
        count = len(client.examples)
        order = torch.randperm(count, generator=client.stream("elcfs"))
        images = client.examples.images(order[: self.drawn_of(count)]).float() / 255
        half_width = self._half_width(images.shape[-1])
        mine = Message({"amplitudes": low_frequencies(spectrum(images), half_width).abs()})
        return joined(super().client_statistics(client), mine)

    def drawn_of(self, images: int) -> int:
        """Returns the number of images whose amplitudes a client sends."""
        return max(1, math.ceil(self.settings.bank_share * images))

    def network(self, network: Network) -> Network:
        """Makes the network twice differentiable, as the trial step needs, or refuses it."""
        if self.settings.meta_order == "second":
            use_plain_attention(network)
            if any(type(layer).__name__.lower() == "hardsigmoid" for layer in network.modules()):
                raise ExperimentError(
                    "elcfs takes second derivatives, and PyTorch has none of this backbone's "
                    "hard sigmoids; set method.meta_order to first or choose another backbone"
                )
        return super().network(network)

    def _half_width(self, size: int) -> int:
        return math.floor(self.settings.window * size)

    def window_shape(self, size: int) -> tuple[int | str, int | str]:
        """Returns height and width of the amplitudes for images of side ``size``.

        If the size is unknown, both are names instead.
        """
        if not size:
            return "rows", "columns"
        side = 2 * min(self._half_width(size), (size - 1) // 2) + 1
        return side, side

    def aggregate_statistics(self, client_statistics: Statistics) -> Message:
        """Returns the bank: all amplitudes, and the client of each."""
        amplitudes = bank(client_statistics, "amplitudes", "amplitude_owners")
        return joined(super().aggregate_statistics(client_statistics), amplitudes)

    def draws(self, client: Client, positions: Tensor, labels: Tensor) -> Weights:
        """Adds the amplitudes of one random other image for each, and how far to go to them."""
        assert client.context is not None, "the server broadcasts the bank before round 1"
        amplitudes, owners = (client.context.tensors[n] for n in ("amplitudes", "amplitude_owners"))
        others = (owners != client.id).nonzero().squeeze(1)
        if not len(others):
            others = torch.arange(len(owners))
        rng = client.stream("elcfs", client.steps)
        drawn = torch.randint(len(others), (len(labels),), generator=rng)
        shares = torch.rand(len(labels), generator=rng)
        if self.settings.mixing == "full":
            shares = torch.ones_like(shares)
        exchanged = {"elcfs/amplitudes": amplitudes[others[drawn]], "elcfs/shares": shares}
        return super().draws(client, positions, labels) | exchanged

    def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        """Returns the loss of the batch, and the loss of its mixed images after a trial step."""
        plain = super().loss
        terms = plain(client, batch)
        trial = self._trial_step(client.network, torch.stack(list(terms.values())).sum())
        episode = _Episode(client.network, plain)
        mixed_batch = replace(batch, images=self._mixed(client, batch))
        after = functional_call(episode, trial, (client, mixed_batch))
        return terms | {f"episodic_{name}": term for name, term in after.items()}

    def _trial_step(self, network: nn.Module, loss: Tensor) -> dict[str, Tensor]:
        """Returns the network's parameters after a step of gradient descent, differentiable."""
        chosen = self.settings
        named = {n: p for n, p in network.named_parameters() if p.requires_grad}
        second = chosen.meta_order == "second"
        gradients = torch.autograd.grad(
            loss, list(named.values()), retain_graph=True, create_graph=second, allow_unused=True
        )
        return {
            f"network.{name}": parameter
            if gradient is None
            else parameter - chosen.meta_step * gradient.clamp(-chosen.clip, chosen.clip)
            for (name, parameter), gradient in zip(named.items(), gradients)
        }

    def _mixed(self, client: Client, batch: Batch) -> Tensor:
        """Mixes amplitudes of other clients into a batch's images."""
        images, drawn = batch.images, self.drawn(client, batch)
        foreign, shares = (drawn[f"elcfs/{n}"].to(images) for n in ("amplitudes", "shares"))
        return mix_amplitudes(images, foreign, shares)


class _Episode(nn.Module):
    """A loss as a module, so that it can be computed under other parameters of its network."""

    def __init__(self, network: nn.Module, loss: Callable[[Client, Batch], object]) -> None:
        super().__init__()
        self.network, self.loss = network, loss

    def forward(self, client: Client, batch: Batch) -> object:
        return self.loss(client, batch)


def spectrum(images: Tensor) -> Tensor:
    """Returns the Fourier transform of images ``(B, C, H, W)``, divided by H W."""
    return torch.fft.fft2(images.float(), norm="forward")


def low_frequencies(values: Tensor, half_width: int) -> Tensor:
    """Returns a spectrum's square ``(B, C, 2b + 1, 2b + 1)`` around frequency 0, in the middle."""
    return values[_window(values, half_width)]


def _window(values: Tensor, half_width: int) -> tuple[Any, ...]:
    height, width = values.shape[-2:]
    half = min(half_width, (min(height, width) - 1) // 2)
    steps = torch.arange(-half, half + 1, device=values.device)
    return (..., (steps % height)[:, None], (steps % width)[None, :])


def mix_amplitudes(images: Tensor, foreign: Tensor, shares: Tensor) -> Tensor:
    """Moves images' low-frequency amplitudes towards other ones; phases do not change.

    Args:
        images: ``(B, C, H, W)`` RGB in [0, 1].
        foreign: ``(B, C, 2b + 1, 2b + 1)`` amplitudes.
        shares: ``(B,)`` how far, in [0, 1].

    Returns:
        Images clamped to [0, 1].
    """
    values = spectrum(images)
    place = _window(values, (foreign.shape[-1] - 1) // 2)
    chosen = values[place]
    amplitudes = torch.lerp(chosen.abs(), foreign.float(), shares.float()[:, None, None, None])
    values[place] = torch.polar(amplitudes, chosen.angle())
    mixed: Tensor = torch.fft.ifft2(values, norm="forward").real.clamp(0, 1)
    return mixed.to(images).contiguous(memory_format=torch.channels_last)
