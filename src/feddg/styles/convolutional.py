"""The shape that VGG-like codecs share: 3 x 3 convolutions, and their mirror image."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import ClassVar, Literal, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from feddg.errors import WeightsError
from feddg.models.backbones import read_weights
from feddg.rng import stream
from feddg.storage import is_file
from feddg.styles.codec import Codec, StyleLayer

M = TypeVar("M", bound=nn.Module)
Plan = Sequence[int | Literal["pool", "up"]]


@dataclass(frozen=True)
class Architecture:
    """The shape of a codec, as the output channels of its 3 x 3 convolutions in order.

    Between them, ``"pool"`` halves the map (maximum of 2 x 2, rounding up) and ``"up"`` doubles it
    (nearest neighbour). The decoder's last convolution, to RGB, has no activation.
    """

    encoder: Plan
    decoder: Plan
    colour_layer: bool = False
    """Whether the encoder starts with a 1 x 1 convolution that normalises the colours."""

    @property
    def stride(self) -> int:
        """Input pixels per step of the feature map."""
        return int(2 ** self.encoder.count("pool"))

    @property
    def channels(self) -> int:
        """Channels of the feature map."""
        return int(self.encoder[-1])

    def modules(self) -> tuple[nn.Sequential, nn.Sequential]:
        """Returns encoder and decoder without weights (on the meta device)."""
        with torch.device("meta"):
            colour = [nn.Conv2d(3, 3, 1)] if self.colour_layer else []
            encoder = nn.Sequential(*colour, *_layers(3, self.encoder))
            decoder = _layers(self.channels, self.decoder)
        return encoder, nn.Sequential(*decoder[:-1])


class ConvolutionalCodec(Codec):
    """An encoder of convolutions and the decoder that inverts it.

    A subclass says its architecture and which files hold weights where a user names none. Keys in
    the files are layer indices: ``0.weight, 0.bias, 2.weight, ...``.
    """

    style_layers: ClassVar[tuple[StyleLayer, ...]] = ("output", "conv4_1_pre")
    architecture: ClassVar[Architecture]

    def __init__(
        self,
        encoder: nn.Sequential,
        decoder: nn.Module,
        style_layer: StyleLayer = "output",
    ) -> None:
        super().__init__(style_layer)
        convolutions = [layer for layer in encoder if isinstance(layer, nn.Conv2d)]
        self.channels = convolutions[-1].out_channels
        self.stride = self.architecture.stride
        self.encoder = encoder
        self.decoder = decoder

    @classmethod
    def file(cls, part: Literal["encoder", "decoder"], given: Path | None) -> Path:
        """Returns the file that holds a part's weights: the given one, or the codec's own.

        Raises:
            WeightsError: none is given and the codec has none.
        """
        if given is None:
            raise WeightsError(f"codec {cls.name!r} needs a weights file for its {part}")
        return given

    @classmethod
    def fitted(cls, encoder: Mapping[str, Tensor], decoder: Mapping[str, Tensor]) -> Architecture:
        """Returns the architecture that weights are of: the declared one, unless overridden.

        Args:
            encoder: the encoder's weights by key; none if it is yet to be trained.
            decoder: likewise.
        """
        return cls.architecture

    @classmethod
    def parts(cls, architecture: Architecture) -> tuple[nn.Sequential, nn.Module]:
        """Returns encoder and decoder without weights (on the meta device)."""
        return architecture.modules()

    @classmethod
    def load(cls, encoder: Path | None, decoder: Path | None, style_layer: StyleLayer) -> Self:
        """Returns the codec with the weights in two files; see :meth:`Codec.load`."""
        files = cls.file("encoder", encoder), cls.file("decoder", decoder)
        return cls(*cls._filled(*files), style_layer=style_layer)

    @classmethod
    def untrained(cls, encoder: Path | None, decoder: Path | None, seed: int) -> Self:
        """Returns the codec to begin a training with; a part without a file gets random weights.

        Raises:
            WeightsError: a file is missing, unreadable or does not fit.
        """
        parts = cls._filled(encoder, decoder)
        for part, module, file in zip(("encoder", "decoder"), parts, (encoder, decoder)):
            if file is None:
                initialised(module, seed, part)
        return cls(*parts).to(memory_format=torch.channels_last)

    @classmethod
    def _filled(cls, encoder: Path | None, decoder: Path | None) -> tuple[nn.Sequential, nn.Module]:
        """Both modules with the weights in their files; one without a file has none."""
        weights = _read(encoder, cls.name)
        others = _read(decoder, cls.name)
        modules = cls.parts(cls.fitted(weights, others))
        if encoder is not None:
            _fill(modules[0], weights, encoder)
        if decoder is not None:
            _fill(modules[1], others, decoder, partner=encoder)
        return modules

    def encode(self, images: Tensor) -> Tensor:
        """Returns ``(B, C, h, w)``, not negative; ``h`` is at least 2; see :meth:`Codec.encode`."""
        features: Tensor = self.encoder(self._padded(images))
        return features

    def style_features(self, images: Tensor) -> Tensor:
        """Returns the maps on which styles are measured; see :meth:`Codec.style_features`."""
        if self.style_layer == "output":
            return self.encode(images)
        features: Tensor = self.encoder[:-1](self._padded(images))
        return features

    def decode(self, features: Tensor, size: tuple[int, int]) -> Tensor:
        """Returns the images that feature maps describe; see :meth:`Codec.decode`."""
        images: Tensor = self.decoder(features)
        if tuple(features.shape[-2:]) == tuple(self._steps(length) for length in size):
            return images[..., : size[0], : size[1]].clamp(0, 1)
        return functional.interpolate(images, size, mode="bilinear", antialias=True).clamp(0, 1)

    def _steps(self, length: int) -> int:
        """Length of the feature map's side for an image side."""
        return max(2, -(-length // self.stride))

    def _padded(self, images: Tensor) -> Tensor:
        """Repeats the last row and column of images too small for reflection at every scale."""
        smallest = self.stride + 1
        missing = [max(0, smallest - length) for length in images.shape[-2:]]
        if not any(missing):
            return images
        return functional.pad(images, (0, missing[1], 0, missing[0]), mode="replicate")


class Reflect(nn.Module):
    """``nn.ReflectionPad2d(1)``, several times as fast on a CPU in channels-last order."""

    def forward(self, maps: Tensor) -> Tensor:
        """Maps ``(B, C, H, W)`` to ``(B, C, H + 2, W + 2)``."""
        count, channels, height, width = maps.shape
        size = (count, channels, height + 2, width + 2)
        padded = torch.empty(
            size, dtype=maps.dtype, device=maps.device, memory_format=torch.channels_last
        )
        padded[:, :, 1:-1, 1:-1] = maps
        padded[:, :, 0, 1:-1], padded[:, :, -1, 1:-1] = maps[:, :, 1], maps[:, :, -2]
        padded[..., 0], padded[..., -1] = padded[..., 2], padded[..., -3]
        return padded


def packaged_weights(codec: str, part: Literal["encoder", "decoder"]) -> Path:
    """Returns the file inside this package that holds the weights of a codec's part."""
    return Path(str(resources.files("feddg.styles") / "assets" / f"{codec}_{part}.safetensors"))


def initialised(module: M, seed: int, part: str) -> M:
    """Gives a part of a codec random weights that suit ReLU (He et al. 2015)."""
    module.to_empty(device="cpu")
    generator = stream(seed, "codec", part)
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
            nn.init.zeros_(cast(Tensor, layer.bias))
    return module


def _fill(
    module: nn.Module,
    weights: Mapping[str, Tensor],
    source: Path,
    partner: Path | None = None,
) -> None:
    """Gives a module the weights of a file by layer index; tensors it does not need are ignored.

    ``partner`` is the file of the encoder that a decoder must fit.
    """
    needed: dict[str, Tensor] = {}
    for key, parameter in module.state_dict().items():
        found = weights.get(key)
        if found is None or found.shape != parameter.shape:
            raise WeightsError(_misfit(key, parameter, found, source, None if needed else partner))
        if not (found.is_floating_point() and found.numel() and found.isfinite().all()):
            raise WeightsError(f"{source}: {_unusable(key, found)}; take another copy of the file")
        needed[key] = found
    module.load_state_dict(needed, assign=True)


def _unusable(key: str, found: Tensor) -> str:
    """Why a tensor of the right shape is no weight."""
    if not found.numel():
        return f"{key} is empty"
    if not found.is_floating_point():
        return f"{key} holds {str(found.dtype).removeprefix('torch.')}, not floating-point numbers"
    return f"{key} holds values that are not finite"


def _misfit(
    key: str, wanted: Tensor, found: Tensor | None, source: Path, partner: Path | None
) -> str:
    """What is wrong with a tensor; ``partner`` where it is the first one of a decoder."""
    shape = tuple(wanted.shape)
    if partner and found is not None and found.ndim == 4 and found.shape[2:] == wanted.shape[2:]:
        return (
            f"{source}: {key} takes maps of {found.shape[1]} channels, but the encoder {partner} "
            f"gives {shape[1]}; use an encoder and a decoder that were trained together"
        )
    fault = "is missing" if found is None else f"has shape {tuple(found.shape)}"
    return (
        f"{source}: {key} {fault}, expected {shape}; is this the file for this part of this codec?"
    )


def _read(path: Path | None, name: str) -> dict[str, Tensor]:
    if path is None:
        return {}
    if not is_file(path, WeightsError):
        raise WeightsError(
            f"{path}: no such weights file for codec {name!r}; the codec 'compact' needs no files"
        )
    return read_weights(path)


def _layers(channels: int, plan: Plan) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for entry in plan:
        if entry == "pool":
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
        elif entry == "up":
            layers.append(nn.Upsample(scale_factor=2, mode="nearest"))
        else:
            layers += [Reflect(), nn.Conv2d(channels, entry, 3), nn.ReLU(inplace=True)]
            channels = entry
    return layers
