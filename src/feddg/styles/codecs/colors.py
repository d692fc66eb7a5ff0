"""The reference that costs nothing: AdaIN on colours, without a network."""

from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from feddg.errors import WeightsError
from feddg.styles.codec import Codec, StyleLayer, register_codec


@register_codec
class ColorsCodec(Codec):
    """The feature map is the image; a style is the mean and deviation of red, green and blue.

    Re-drawing is thus the colour transfer of Reinhard et al. ("Color Transfer between Images",
    IEEE Computer Graphics and Applications, 2001), in RGB. What a method gains from a codec beyond
    it, it gains from texture.
    """

    name = "colors"
    summary = "mean and deviation per RGB channel, no network; the zero-cost reference"
    channels = 3
    stride = 1

    @classmethod
    def load(cls, encoder: Path | None, decoder: Path | None, style_layer: StyleLayer) -> Self:
        """Returns the codec, which takes no files; see :meth:`Codec.load`."""
        for part, file in (("encoder", encoder), ("decoder", decoder)):
            if file is not None:
                raise WeightsError(
                    f"codec 'colors' has no weights: leave out {part}={file}, "
                    "or choose another codec"
                )
        return cls(style_layer)

    def encode(self, images: Tensor) -> Tensor:
        """Returns the images as they are, ``(B, 3, H, W)`` in [0, 1]."""
        return images

    def value_range(self) -> tuple[Tensor, Tensor]:
        """Returns 0 and 1: the map is the image."""
        return torch.zeros(self.channels), torch.ones(self.channels)

    def decode(self, features: Tensor, size: tuple[int, int]) -> Tensor:
        """Returns the features as images, clamped to [0, 1]; see :meth:`Codec.decode`."""
        if tuple(features.shape[-2:]) != size:
            features = functional.interpolate(features, size, mode="bilinear", antialias=True)
        return torch.clamp(features, 0, 1)
