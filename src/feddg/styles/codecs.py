"""The codecs: encoder and decoder networks that measure styles and transfer them to images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from feddg.errors import WeightsError
from feddg.models.backbones import read_weights
from feddg.models.normalization import instance_moments
from feddg.styles.codec import VARIANCE_FLOOR, Codec, StyleLayer, register_codec

Plan = Sequence[int | Literal["pool", "up"]]
SUMMARY_NUMBERS = 24
"""Number of values that summarise a style for the decoder."""


@dataclass(frozen=True)
class Architecture:
    """The layers of a codec: the output channels of its 3 x 3 convolutions in order.

    Between them, ``"pool"`` halves the map (maximum of 2 x 2, rounding up) and ``"up"`` doubles it
    (nearest neighbour). The decoder's last convolution, to RGB, has no activation.
    """

    encoder: Plan
    decoder: Plan
    colour_layer: bool = False
    """Whether the encoder starts with a 1 x 1 convolution that normalises the colours."""

    @property
    def stride(self) -> int:
        """Input pixels per position of the feature map."""
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

    A subclass gives its architecture and the files with its default weights. Keys in the files are
    layer indices: ``0.weight, 0.bias, 2.weight, ...``.

    Attributes:
        architecture: its layers.
        packaged: names of the files in the package with the weights of its parts.
    """

    style_layers: ClassVar[tuple[StyleLayer, ...]] = ("output", "conv4_1_pre")
    architecture: ClassVar[Architecture]
    packaged: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self, encoder: nn.Sequential, decoder: nn.Module, style_layer: StyleLayer = "output"
    ) -> None:
        super().__init__(style_layer)
        convolutions = [layer for layer in encoder if isinstance(layer, nn.Conv2d)]
        self.channels = convolutions[-1].out_channels
        self.stride = self.architecture.stride
        self.encoder = encoder
        self.decoder = decoder

    @classmethod
    def file(cls, part: Literal["encoder", "decoder"], given: Path | None) -> Path:
        """Returns the file with a part's weights: the given one, or the codec's own.

        Raises:
            WeightsError: none is given and the codec has none.
        """
        if given is not None:
            return given
        if part not in cls.packaged:
            raise WeightsError(
                f"codec {cls.name!r} needs a weights file for its {part}; the codec 'compact' "
                "needs no files"
            )
        return Path(str(resources.files("feddg.styles") / "assets" / cls.packaged[part]))

    @classmethod
    def fitted(cls, encoder: Mapping[str, Tensor], decoder: Mapping[str, Tensor]) -> Architecture:
        """Returns the architecture that fits the weights: the declared one, unless overridden.

        Args:
            encoder: the encoder's weights by key; empty if it is not trained yet.
            decoder: likewise.
        """
        return cls.architecture

    @classmethod
    def parts(cls, architecture: Architecture) -> tuple[nn.Sequential, nn.Module]:
        """Returns encoder and decoder without weights (on the meta device)."""
        return architecture.modules()

    @classmethod
    def load(cls, encoder: Path | None, decoder: Path | None, style_layer: StyleLayer) -> Self:
        """Returns the codec with the weights of two files; see :meth:`Codec.load`."""
        files = cls.file("encoder", encoder), cls.file("decoder", decoder)
        return cls(*cls.filled(*files), style_layer=style_layer)

    @classmethod
    def filled(cls, encoder: Path | None, decoder: Path | None) -> tuple[nn.Sequential, nn.Module]:
        """Returns encoder and decoder with the weights of their files; without a file, no weights.

        Raises:
            WeightsError: a file is missing, unreadable or does not fit.
        """
        weights, others = (read_weights(file) if file else {} for file in (encoder, decoder))
        modules = cls.parts(cls.fitted(weights, others))
        if encoder is not None:
            _fill(modules[0], weights, encoder)
        if decoder is not None:
            _fill(modules[1], others, decoder)
        return modules

    def encode(self, images: Tensor) -> Tensor:
        """Returns ``(B, C, h, w)``, at least 0, with ``h`` at least 2; see :meth:`Codec.encode`."""
        return self.encoder(self._padded(images))

    def style_features(self, images: Tensor) -> Tensor:
        """Returns the maps on which styles are measured; see :meth:`Codec.style_features`."""
        if self.style_layer == "output":
            return self.encode(images)
        return self.encoder[:-1](self._padded(images))

    def drawn(self, features: Tensor, size: tuple[int, int]) -> Tensor:
        """Returns the decoder's output as it is; see :meth:`Codec.drawn`."""
        images: Tensor = self.decoder(features)
        if tuple(features.shape[-2:]) == tuple(max(2, -(-side // self.stride)) for side in size):
            return images[..., : size[0], : size[1]]
        return functional.interpolate(images, size, mode="bilinear", antialias=True)

    def _padded(self, images: Tensor) -> Tensor:
        """Pads images too small for reflection at every scale by their last row and column."""
        smallest = self.stride + 1
        missing = [max(0, smallest - length) for length in images.shape[-2:]]
        if not any(missing):
            return images
        return functional.pad(images, (0, missing[1], 0, missing[0]), mode="replicate")


def _fill(module: nn.Module, weights: Mapping[str, Tensor], source: Path) -> None:
    """Loads a file's weights into a module by layer index; tensors not needed are ignored."""
    needed: dict[str, Tensor] = {}
    for key, parameter in module.state_dict().items():
        tensor, shape = weights.get(key), tuple(parameter.shape)
        if tensor is None or tuple(tensor.shape) != shape:
            fault = "is missing" if tensor is None else f"has shape {tuple(tensor.shape)}"
            raise WeightsError(
                f"{source}: {key} {fault}, expected {shape}; encoder and decoder must be this "
                "codec's, trained together"
            )
        if not (tensor.is_floating_point() and tensor.numel() and tensor.isfinite().all()):
            raise WeightsError(
                f"{source}: {key} holds no finite floating-point numbers; take another copy of it"
            )
        needed[key] = tensor
    module.load_state_dict(needed, assign=True)


def _layers(channels: int, plan: Plan) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for entry in plan:
        if entry == "pool":
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
        elif entry == "up":
            layers.append(nn.Upsample(scale_factor=2, mode="nearest"))
        else:
            layers += [nn.ReflectionPad2d(1), nn.Conv2d(channels, entry, 3), nn.ReLU(inplace=True)]
            channels = entry
    return layers


@register_codec
class ColorsCodec(Codec):
    """The feature map is the image; a style is the mean and deviation of red, green and blue.

    Stylizing is then the colour transfer of Reinhard et al. ("Color Transfer between Images", IEEE
    Computer Graphics and Applications, 2001), in RGB. If a method does better with another codec,
    the gain comes from texture.
    """

    name = "colors"
    channels = 3
    stride = 1

    def encode(self, images: Tensor) -> Tensor:
        """Returns the images unchanged, ``(B, 3, H, W)`` in [0, 1]."""
        return images

    def value_range(self) -> tuple[Tensor, Tensor]:
        """Returns 0 and 1, because the map is the image."""
        return torch.zeros(self.channels), torch.ones(self.channels)

    def drawn(self, features: Tensor, size: tuple[int, int]) -> Tensor:
        """Returns the features as images; see :meth:`Codec.drawn`."""
        if tuple(features.shape[-2:]) != size:
            features = functional.interpolate(features, size, mode="bilinear", antialias=True)
        return features


@register_codec
class CompactCodec(ConvolutionalCodec):
    """Four convolutions and their mirror image; docs/codec.md describes the training data."""

    name = "compact"
    architecture = Architecture(encoder=(32, 32, "pool", 64, 64), decoder=(64, 32, "up", 32, 3))
    packaged: ClassVar = {
        "encoder": "compact_encoder.safetensors",
        "decoder": "compact_decoder.safetensors",
    }


class ModulatedDecoder(nn.Module):
    """A decoder that scales and shifts channels by the moments of its input map.

    A convolution sees a few pixels only. The moments of the whole map (after AdaIN) tell the style,
    so that paper can turn white or areas flat everywhere. Scales and shifts act before each ReLU,
    as in FiLM (Perez et al., AAAI 2018).

    Args:
        architecture: the decoder's layers and the channels of its input.
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
        """Decodes maps ``(B, C, h, w)`` to images ``(B, 3, H, W)``, not clamped."""
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


@register_codec
class ModulatedCodec(CompactCodec):
    """The encoder of ``compact`` with a better decoder; docs/codec.md describes its training."""

    name = "modulated"
    packaged: ClassVar = CompactCodec.packaged | {"decoder": "modulated_decoder.safetensors"}

    @classmethod
    def parts(cls, architecture: Architecture) -> tuple[nn.Sequential, nn.Module]:
        """Returns encoder and decoder without weights (on the meta device)."""
        return architecture.modules()[0], ModulatedDecoder(architecture)


@register_codec
class Vgg19Codec(ConvolutionalCodec):
    """The normalised VGG-19 up to relu4_1 and its mirror image (Huang and Belongie 2017).

    The number of channels of each layer is read from the files, so pruned pairs fit too, for
    example the quarter-width pair of "Collaborative Distillation for Ultra-Resolution Universal
    Style Transfer" (Wang et al., CVPR 2020).
    """

    name = "vgg19"
    architecture = Architecture(
        encoder=(64, 64, "pool", 128, 128, "pool", 256, 256, 256, 256, "pool", 512),
        decoder=(256, "up", 256, 256, 256, 128, "up", 128, 64, "up", 64, 3),
        colour_layer=True,
    )

    @classmethod
    def fitted(cls, encoder: Mapping[str, Tensor], decoder: Mapping[str, Tensor]) -> Architecture:
        """Returns VGG-19 with the widths of the files; an untrained decoder mirrors the encoder."""
        layers, mirror = cls.architecture.modules()
        forward = _widened(cls.architecture.encoder, layers, encoder)
        if not decoder:
            backward = _mirrored(forward)
        else:
            backward = [*_widened(cls.architecture.decoder[:-1], mirror, decoder), 3]
        return replace(cls.architecture, encoder=forward, decoder=backward)


def _widened(plan: Plan, module: nn.Sequential, weights: Mapping[str, Tensor]) -> Plan:
    """Returns the plan with the channels of the weights; as declared where weights are missing.

    ``module`` is built from the full plan, so its convolutions have the indices of the weights.
    """
    given = (
        weights.get(f"{index}.weight")
        for index, layer in enumerate(module)
        if isinstance(layer, nn.Conv2d) and layer.kernel_size == (3, 3)
    )
    return [entry if isinstance(entry, str) else _channels(next(given), entry) for entry in plan]


def _channels(weight: Tensor | None, declared: int) -> int:
    return declared if weight is None or weight.ndim != 4 else weight.shape[0]


def _mirrored(encoder: Plan) -> Plan:
    """Returns the decoder's plan: the encoder's layers in reverse, with inputs as outputs."""
    plan: list[int | Literal["pool", "up"]] = []
    channels = 3
    for entry in encoder:
        plan.append("up" if entry == "pool" else channels)
        channels = entry if isinstance(entry, int) else channels
    return plan[::-1]
