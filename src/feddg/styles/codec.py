"""Codecs: measure an image's style, and re-draw an image in another style (AdaIN).

A codec is a frozen encoder, whose feature map carries both content and style, and a decoder that
turns such a map back into an image. Between the two, adaptive instance normalisation (Huang and
Belongie, "Arbitrary Style Transfer in Real-time with Adaptive Instance Normalization", ICCV 2017,
equation 8) exchanges each channel's mean and standard deviation.

Two codecs share one shape, VGG convolutions and their mirror image:

- ``compact``: small, inside this package, for 32 to 224 pixels on a laptop;
- ``vgg19``: the paper's normalised VGG-19 to relu4_1, from weight files the user has.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from feddg.errors import WeightsError
from feddg.files import is_file
from feddg.models.backbones import read_weights
from feddg.randomness import stream

VARIANCE_FLOOR = 1e-5
"""Added to every variance before its root is taken, as in the AdaIN paper's code."""

CACHED_PIXELS = 2**15
"""Pixels of the images whose maps fit into a CPU's caches: 8 images of 64 x 64."""

VGG19_FILES = (
    "The files of 'vgg19' are commonly distributed as vgg_normalised.pth and decoder.pth with "
    "PyTorch implementations of AdaIN; the codec 'compact' needs no files."
)

Plan = Sequence[int | Literal["pool", "up"]]
StyleLayer = Literal["output", "conv4_1_pre"]


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


ARCHITECTURES = {
    "compact": Architecture(
        encoder=(32, 32, "pool", 64, 64),
        decoder=(64, 32, "up", 32, 3),
    ),
    "vgg19": Architecture(
        encoder=(64, 64, "pool", 128, 128, "pool", 256, 256, 256, 256, "pool", 512),
        decoder=(256, "up", 256, 256, 256, 128, "up", 128, 64, "up", 64, 3),
        colour_layer=True,
    ),
}


class Codec(nn.Module):
    """An encoder and the decoder that inverts it; both see RGB in [0, 1].

    Attributes:
        name: the architecture, ``"compact"`` or ``"vgg19"``.
        channels: C, the channels of the feature map and so of a style ``(2, C)``.
        stride: input pixels per step of the feature map.
        style_layer: the map on which :meth:`style_features` measures styles.
    """

    def __init__(
        self,
        name: str,
        encoder: nn.Sequential,
        decoder: nn.Sequential,
        style_layer: StyleLayer = "output",
    ) -> None:
        super().__init__()
        architecture = ARCHITECTURES[name]
        self.name = name
        self.channels = architecture.channels
        self.stride = architecture.stride
        self.style_layer = style_layer
        self.encoder = encoder
        self.decoder = decoder

    def encode(self, images: Tensor) -> Tensor:
        """Returns the feature maps of images.

        Args:
            images: ``(B, 3, H, W)``, RGB in [0, 1], any size from 1 x 1.

        Returns:
            ``(B, C, h, w)``, not negative; ``h`` is ``H / stride`` rounded up, and at least 2.
        """
        features: Tensor = self.encoder(self._padded(images))
        return features

    def style_features(self, images: Tensor) -> Tensor:
        """Returns the maps on which styles are measured: :meth:`encode`'s, unless said otherwise.

        With ``style_layer="conv4_1_pre"`` they are the last convolution's outputs before its
        ReLU, on which PARDON's released code measures styles (it re-draws on the output).
        """
        if self.style_layer == "output":
            return self.encode(images)
        features: Tensor = self.encoder[:-1](self._padded(images))
        return features

    def decode(self, features: Tensor, size: tuple[int, int]) -> Tensor:
        """Returns the images that feature maps describe.

        Args:
            features: ``(B, C, h, w)``.
            size: height and width of the result. Where :meth:`encode` would give this map for
                such an image, the surplus of rounding up is cut off; otherwise it is resized.

        Returns:
            ``(B, 3, *size)``, RGB clamped to [0, 1].
        """
        images: Tensor = self.decoder(features)
        if tuple(features.shape[-2:]) == tuple(self._steps(length) for length in size):
            return images[..., : size[0], : size[1]].clamp(0, 1)
        return functional.interpolate(images, size, mode="bilinear", antialias=True).clamp(0, 1)

    def fingerprint(self) -> str:
        """Returns a stable hash of the weights and of the layer styles are measured on."""
        digest = hashlib.sha256(f"{self.name} {self.style_layer}".encode())
        for key, weight in sorted(self.state_dict().items()):
            digest.update(f"{key} {weight.dtype} {tuple(weight.shape)}".encode())
            digest.update(weight.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def frozen(self) -> "Codec":
        """Puts the codec into evaluation mode without gradients, and returns it."""
        return self.eval().requires_grad_(False).to(memory_format=torch.channels_last)

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


def adain(features: Tensor, style: Tensor, strength: float = 1.0) -> Tensor:
    """Gives feature maps the channel means and standard deviations of a style.

    Adaptive instance normalisation (Huang and Belongie 2017, equation 8) with the blend of their
    section 7.2: ``strength * AdaIN(F) + (1 - strength) * F``. The content's moments are taken per
    image and channel, with biased variance plus :data:`VARIANCE_FLOOR`.

    Args:
        features: ``(B, C, h, w)``.
        style: ``(2, C)`` for all images or ``(B, 2, C)``, one each: means, standard deviations.
        strength: 0 leaves the features as they are, 1 exchanges the moments entirely.

    Returns:
        ``(B, C, h, w)``.
    """
    variance, mean = torch.var_mean(features, dim=(-2, -1), correction=0, keepdim=True)
    style_mean, style_deviation = style.to(features)[..., None, None].unbind(-4)
    restyled = (features - mean) / (variance + VARIANCE_FLOOR).sqrt() * style_deviation
    return strength * (restyled + style_mean) + (1 - strength) * features


def images_at_once(images: Tensor, device: torch.device) -> int:
    """Returns how many of these images go through a codec together on a device.

    On a CPU as few as keep the largest maps in its caches, which is a third faster than 64.
    """
    if device.type != "cpu":
        return 64
    return max(1, CACHED_PIXELS // images.shape[-2:].numel())


def transfer(
    codec: Codec,
    images: Tensor,
    style: Tensor,
    strength: float = 1.0,
    batch_size: int | None = None,
) -> Tensor:
    """Re-draws images in a style, on the codec's device.

    Args:
        codec: encoder and decoder.
        images: ``(N, 3, H, W)``, uint8 RGB.
        style: ``(2, C)`` for all images or ``(N, 2, C)``, one each.
        strength: 0 only encodes and decodes, 1 exchanges the moments entirely.
        batch_size: images in memory as feature maps at a time; :func:`images_at_once` by default.

    Returns:
        ``(N, 3, H, W)``, uint8 RGB, on the device of ``images``.
    """
    parameter = next(codec.parameters())
    size = (images.shape[-2], images.shape[-1])
    batch_size = batch_size or images_at_once(images, parameter.device)
    redrawn = torch.empty_like(images, memory_format=torch.contiguous_format)
    with torch.inference_mode():
        for start in range(0, len(images), batch_size):
            part = slice(start, start + batch_size)
            features = codec.encode(images[part].to(parameter) / 255)
            restyled = adain(features, style[part] if style.ndim == 3 else style, strength)
            redrawn[part] = (codec.decode(restyled, size) * 255).round().to(torch.uint8)
    return redrawn


@lru_cache(maxsize=8)
def load_codec(
    name: str = "compact",
    *,
    encoder: Path | None = None,
    decoder: Path | None = None,
    style_layer: StyleLayer = "output",
) -> Codec:
    """Returns a codec, frozen and in evaluation mode; the same arguments give the same object.

    Args:
        name: ``"compact"`` (weights inside the package) or ``"vgg19"`` (both files needed).
        encoder: weights file, ``.safetensors`` or a PyTorch state dict of tensors, whose keys
            are the layer indices ``0.weight, 0.bias, 2.weight, ...``; later layers than the
            codec uses may follow.
        decoder: likewise for the decoder, for example one trained by
            :func:`feddg.styles.decoder_training.train_decoder`.
        style_layer: the map on which styles are measured, see :meth:`Codec.style_features`.

    Raises:
        WeightsError: the name is unknown, or a file is missing, unreadable or does not fit.
    """
    if name == "vgg19" and (encoder is None or decoder is None):
        raise WeightsError(f"codec 'vgg19' needs an encoder and a decoder file. {VGG19_FILES}")
    parts = codec_modules(name)
    for part, module, path in zip(("encoder", "decoder"), parts, (encoder, decoder)):
        load_weights(module, path or packaged(part))
    return Codec(name, *parts, style_layer=style_layer).frozen()


def vgg19_modules(seed: int = 0) -> tuple[nn.Sequential, nn.Sequential]:
    """Returns the paper's encoder (to relu4_1) and decoder with random weights."""
    encoder, decoder = codec_modules("vgg19")
    return initialised(encoder, seed), initialised(decoder, seed)


def codec_modules(name: str) -> tuple[nn.Sequential, nn.Sequential]:
    """Returns encoder and decoder without weights (on the meta device).

    Raises:
        WeightsError: there is no codec of this name.
    """
    if name not in ARCHITECTURES:
        raise WeightsError(f"there is no codec {name!r}; choose one of {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[name]
    with torch.device("meta"):
        colour = [nn.Conv2d(3, 3, 1)] if architecture.colour_layer else []
        encoder = nn.Sequential(*colour, *_layers(3, architecture.encoder))
        decoder = _layers(architecture.channels, architecture.decoder)
    return encoder, nn.Sequential(*decoder[:-1])


def initialised(module: nn.Sequential, seed: int) -> nn.Sequential:
    """Gives a module without weights random ones that suit ReLU (He et al. 2015)."""
    module.to_empty(device="cpu")
    generator = stream(seed, "codec")
    for layer in module:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
            nn.init.zeros_(cast(Tensor, layer.bias))
    return module


def load_weights(module: nn.Sequential, path: Path) -> None:
    """Gives a module the weights in a file, as float32; tensors it does not need are ignored.

    Raises:
        WeightsError: the file is missing, unreadable or does not fit.
    """
    if not is_file(path, WeightsError):
        raise WeightsError(f"{path}: no such weights file. {VGG19_FILES}")
    weights = read_weights(path)
    needed = {}
    for key, parameter in module.state_dict().items():
        found = weights.get(key)
        if found is None or found.shape != parameter.shape:
            fault = "is missing" if found is None else f"has shape {tuple(found.shape)}"
            raise WeightsError(
                f"{path}: {key} {fault}, expected {tuple(parameter.shape)}; "
                "is this the file for this part of this codec?"
            )
        needed[key] = found
    module.load_state_dict(needed, assign=True)


def packaged(part: str) -> Path:
    """Returns the path of the compact codec's ``"encoder"`` or ``"decoder"`` in this package."""
    return Path(str(resources.files("feddg.styles") / "assets" / f"compact_{part}.safetensors"))


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
