"""The compact codec's shape with a decoder that knows the whole style it draws in."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from feddg.randomness import stream
from feddg.styles.codec import VARIANCE_FLOOR, register_codec
from feddg.styles.codecs.compact import CompactCodec
from feddg.styles.convolutional import Architecture

HIDDEN = 24
"""Numbers through which the style of a map steers the decoder."""


class SteeredDecoder(nn.Module):
    """A decoder that reads the style off its map: a style is of the whole, a layer sees a part.

    The map's channel means and deviations, which AdaIN has made the style's, scale and shift every
    channel before each ReLU (after Perez et al., "FiLM", AAAI 2018), but for the last one: at the
    image's full size that would cost a tenth of the time.

    Args:
        layers: convolutions with ReLU after all but the last.
        channels: of the map.
    """

    def __init__(self, layers: nn.Sequential, channels: int) -> None:
        super().__init__()
        widths = [layer.out_channels for layer in layers if isinstance(layer, nn.Conv2d)][:-2]
        self.layers = layers
        with torch.device("meta"):
            self.read = nn.Linear(2 * channels, HIDDEN)
            self.steer = nn.Linear(HIDDEN, 2 * sum(widths))
        self._splits = [2 * width for width in widths]

    def forward(self, features: Tensor) -> Tensor:
        """Maps ``(B, C, h, w)`` to images ``(B, 3, H, W)``, not clamped."""
        variance, mean = torch.var_mean(features, dim=(-2, -1), correction=0)
        style = torch.cat([mean, (variance + VARIANCE_FLOOR).sqrt()], dim=1)
        steering = self.steer(self.read(style).relu())[..., None, None]
        turns = iter(steering.split(self._splits, dim=1))
        for layer in self.layers:
            turn = next(turns, None) if isinstance(layer, nn.ReLU) else None
            if turn is not None:
                scale, shift = turn.chunk(2, dim=1)
                features = torch.addcmul(shift, features, 1 + scale)
            features = layer(features)
        return features


@register_codec
class SteeredCodec(CompactCodec):
    """As fast and nearly as small as ``compact``; how it was trained is in docs/codec.md."""

    name = "steered"
    summary = "compact's successor, inside the package: its decoder knows the whole style"

    @classmethod
    def parts(cls, architecture: Architecture) -> tuple[nn.Sequential, nn.Module]:
        """Returns encoder and steered decoder without weights (on the meta device)."""
        encoder, decoder = architecture.modules()
        return encoder, SteeredDecoder(decoder, architecture.channels)

    @classmethod
    def completed(cls, decoder: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns a decoder's weights; those of ``compact``'s get a steering that does nothing."""
        if not decoder or "read.weight" in decoder:
            return dict(decoder)
        _, module = cls.parts(cls.architecture)
        given = {f"layers.{key}": weight for key, weight in decoder.items()}
        blank = {
            key: torch.zeros(weight.shape)
            for key, weight in module.state_dict().items()
            if not key.startswith("layers.")
        }
        reading = blank["read.weight"]
        blank["read.weight"] = torch.randn(reading.shape, generator=stream(0, "steering"))
        blank["read.weight"] *= (2 / reading.shape[1]) ** 0.5
        return given | blank
