"""Dropout and stochastic depth that draw from a client's own random stream.

PyTorch's layers draw from the global generator, which all threads share, so the same experiment
would give different weights each time. Layers are found by type; a network without dropout is not
changed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from feddg.models.convolutions import mixed
from feddg.rng import Ahead

_WHOLE = -1
_AXES: Mapping[type[nn.Module], tuple[int, int]] = {
    nn.Dropout: (_WHOLE, _WHOLE),
    nn.Dropout1d: (2, 3),
    nn.Dropout2d: (2, 4),
    nn.Dropout3d: (2, 5),
}
"""By layer type: how many leading axes get their own draws, and how many axes a batch has."""
_PATHS = ("StochasticDepth", "DropPath")
"""Layers of torchvision and timm that drop whole residual branches, by name, because neither
package must be installed.
"""


class Drawn(nn.Module):
    """Mixed in before a layer's own class; makes it draw from ``ahead``."""

    ahead: Ahead

    def forward(self, input: Tensor) -> Tensor:
        """Sets random parts of the input to zero and scales the others, in training."""
        rate, axes = _rate(self), _drawn_axes(self, input)
        if not self.training or axes is None or not 0 < rate < 1:
            return super().forward(input)  # type: ignore[misc]
        mask: Tensor = _Mask.apply(input.detach(), self.ahead, 1 - rate, axes)  # type: ignore[no-untyped-call]
        if getattr(self, "scale_by_keep", True):
            mask = mask / (1 - rate)
        return input * mask


class _Mask(torch.autograd.Function):
    """A mask of zeros and ones for the first axes of a tensor; under ``vmap`` one per image."""

    @staticmethod
    def forward(like: Tensor, ahead: Ahead, keep: float, axes: int) -> Tensor:
        shape = [*like.shape[:axes], *[1] * (like.dim() - axes)]
        (drawn,) = ahead.take(like.device, shape, keep)
        return drawn.to(like)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        like: Tensor,
        ahead: Ahead,
        keep: float,
        axes: int,
    ) -> tuple[Tensor, int]:
        assert in_dims[0] is not None
        images = like.movedim(in_dims[0], 0)
        return _Mask.apply(images, ahead, keep, axes + 1), 0  # type: ignore[no-untyped-call]


def draw_dropout_from(network: nn.Module, generator: torch.Generator) -> None:
    """Makes a network's dropout draw from a CPU generator from now on, in place.

    Layers with rate 0 are not changed, and neither are calls of the dropout function.
    """
    layers, ahead = [*network.modules()], None
    before = next((layer.ahead for layer in layers if isinstance(layer, Drawn)), None)
    for layer in layers:
        if (type(layer) in _AXES or type(layer).__name__ in _PATHS) and _rate(layer) > 0:
            layer.__class__ = mixed(Drawn, type(layer))
        if isinstance(layer, Drawn):
            layer.ahead = ahead = ahead or Ahead(generator, _mask, before)


def _mask(generator: torch.Generator, shape: Sequence[int], keep: float) -> list[Tensor]:
    return [torch.empty(shape).bernoulli_(keep, generator=generator)]


def _rate(layer: nn.Module) -> float:
    """Returns a layer's drop rate: ``p`` in PyTorch and torchvision, ``drop_prob`` in timm."""
    return float(getattr(layer, "p", None) or getattr(layer, "drop_prob", None) or 0.0)


def _drawn_axes(layer: nn.Module, input: Tensor) -> int | None:
    """Returns how many leading axes get their own draws; None for an input without batch axis."""
    kind = type(layer).__mro__[2]
    axes, batched = _AXES.get(kind, (int(getattr(layer, "mode", "row") == "row"), _WHOLE))
    if axes == _WHOLE:
        return input.dim()
    return axes if batched in (_WHOLE, input.dim()) else None
