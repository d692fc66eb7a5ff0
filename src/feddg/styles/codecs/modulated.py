"""The compact encoder with a decoder that knows the whole style it is to draw in."""

from itertools import pairwise
from pathlib import Path
from typing import Literal, Self

import torch
from torch import Tensor, nn

from feddg.models.backbones import read_weights
from feddg.models.normalization import instance_moments
from feddg.styles.codec import VARIANCE_FLOOR, register_codec
from feddg.styles.codecs.compact import CompactCodec
from feddg.styles.convolutional import Architecture, packaged_weights

SUMMARY_NUMBERS = 24
"""Numbers that a style is summed up in for the decoder."""


class ModulatedDecoder(nn.Module):
    """Convolutions whose channels are scaled and shifted by what the map's moments say.

    A convolution sees a few pixels; the moments of the whole map say which style is asked for
    (that map's own, after AdaIN), so that paper can turn white or areas flat everywhere. Scales
    and shifts act before each ReLU, as in FiLM (Perez et al., AAAI 2018).

    Args:
        architecture: the decoder's plan and the channels that it begins with.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.layers = architecture.modules()[1]
        convolutions = [layer for layer in self.layers if isinstance(layer, nn.Conv2d)]
        self.widths = [layer.out_channels for layer in convolutions[:-1]]
        with torch.device("meta"):
            self.read = nn.Linear(2 * architecture.channels, SUMMARY_NUMBERS)
            self.write = nn.Linear(SUMMARY_NUMBERS, 2 * sum(self.widths))

    def forward(self, maps: Tensor) -> Tensor:
        """Draws maps ``(B, C, h, w)`` as images ``(B, 3, H, W)``, not clamped."""
        style = torch.cat(instance_moments(maps, VARIANCE_FLOOR), 1)
        summary = torch.relu(self.read(style))
        scales, shifts = self.write(summary)[..., None, None].chunk(2, 1)
        modulations = zip(scales.split(self.widths, 1), shifts.split(self.widths, 1), strict=True)
        for layer, following in pairwise([*self.layers, nn.Identity()]):
            maps = layer(maps)
            if isinstance(following, nn.ReLU):
                scale, shift = next(modulations)
                out = None if torch.is_grad_enabled() else maps  # new memory takes most of the time
                maps = torch.addcmul(shift, maps, 1 + scale, out=out)
        return maps

    def begin_as(self, weights: dict[str, Tensor]) -> None:
        """Takes a plain decoder's weights; it draws as that one until it has learned more."""
        self.layers.load_state_dict(weights)
        nn.init.zeros_(self.write.weight)
        nn.init.zeros_(self.write.bias)


@register_codec
class ModulatedCodec(CompactCodec):
    """The styles of ``compact``, drawn by a decoder of its own; docs/codec.md has its training."""

    name = "modulated"
    summary = "compact's styles, drawn by a decoder that reads the whole style"

    @classmethod
    def file(cls, part: Literal["encoder", "decoder"], given: Path | None) -> Path:
        """Returns the given file, or the packaged one; the encoder is that of ``compact``."""
        if part == "encoder":
            return CompactCodec.file(part, given)
        return given or packaged_weights(cls.name, part)

    @classmethod
    def parts(cls, architecture: Architecture) -> tuple[nn.Sequential, nn.Module]:
        """Returns encoder and decoder without weights (on the meta device)."""
        return architecture.modules()[0], ModulatedDecoder(architecture)

    @classmethod
    def untrained(cls, encoder: Path | None, decoder: Path | None, seed: int) -> Self:
        """Returns the codec to begin a training with; without a file it draws as ``compact``."""
        codec = super().untrained(encoder, decoder, seed)
        if decoder is None and isinstance(codec.decoder, ModulatedDecoder):
            codec.decoder.begin_as(read_weights(CompactCodec.file("decoder", None)))
        return codec
