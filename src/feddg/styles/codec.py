"""Codecs: measure an image's style, and stylize an image in another style (AdaIN).

A codec is an encoder, whose feature map carries both content and style, and a decoder that turns
such a map back into an image. Between the two, adaptive instance normalisation (Huang and
Belongie, "Arbitrary Style Transfer in Real-time with Adaptive Instance Normalization", ICCV 2017,
equation 8) exchanges each channel's mean and standard deviation.

A codec is a registered class. Ours are in :mod:`feddg.styles.codecs`; another package adds one with
:func:`register_codec`, or through an entry point of the group ``feddg.codecs``.
"""

import hashlib
from abc import ABC, abstractmethod
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from feddg.data.pixels import SHARE
from feddg.errors import WeightsError
from feddg.messages import on_device
from feddg.models.network import IMAGENET_MEAN, IMAGENET_STD
from feddg.registry import Registry
from feddg.storage import Stamp, stamp

VARIANCE_FLOOR = 1e-5
"""Added to every variance before the square root, as in the AdaIN paper's code."""

CACHED_PIXELS = 2**15
"""Number of image pixels whose feature maps fit into a CPU's caches: 8 images of 64 x 64."""
LAUNCHED_PIXELS = 2**23
"""The same for an accelerator: 167 images of 224 x 224."""
BYTES_OF_PIXEL = 3 * 64 * 4
"""What the largest maps of a pixel take there: three of VGG-19's first ones."""

StyleLayer = Literal["output", "conv4_1_pre"]


class Codec(nn.Module, ABC):
    """Turns images into feature maps and back; images are RGB in [0, 1].

    A subclass sets its name and the maps it can measure styles on, and defines :meth:`encode`,
    :meth:`drawn` (or :meth:`decode` alone), and :meth:`load` if it has weights.

    Attributes:
        name: the name in settings.
        style_layers: the values of ``style_layer`` it supports.
        channels: C, the channels of the feature map and so of a style ``(2, C)``.
        stride: input pixels per position of the feature map.
        style_layer: the map on which :meth:`style_features` are measured.
    """

    name: ClassVar[str]
    style_layers: ClassVar[tuple[StyleLayer, ...]] = ("output",)
    channels: int
    stride: int
    unit: Tensor

    def __init__(self, style_layer: StyleLayer = "output") -> None:
        super().__init__()
        self.style_layer = style_layer
        self.register_buffer("unit", torch.ones(()), persistent=False)

    @classmethod
    def load(cls, encoder: Path | None, decoder: Path | None, style_layer: StyleLayer) -> "Codec":
        """Returns the codec with the weights of two files, or with its own if they are None.

        By default it has none.

        Raises:
            WeightsError: a file is missing, unreadable, not needed, or does not fit.
        """
        if encoder or decoder:
            raise WeightsError(f"codec {cls.name!r} has no weights: leave out encoder and decoder")
        return cls(style_layer)

    @abstractmethod
    def encode(self, images: Tensor) -> Tensor:
        """Returns the feature maps of images.

        Args:
            images: ``(B, 3, H, W)``, RGB in [0, 1], any size from 1 x 1.

        Returns:
            ``(B, C, h, w)``; ``h`` is ``H / stride`` rounded up.
        """

    def decode(self, features: Tensor, size: tuple[int, int]) -> Tensor:
        """Returns the images that belong to feature maps; by default :meth:`drawn`, clamped.

        Args:
            features: ``(B, C, h, w)``.
            size: height and width of the result. If :meth:`encode` of such an image has this map's
                size, surplus from rounding up is cut off; otherwise the image is resized.

        Returns:
            ``(B, 3, *size)``, RGB clamped to [0, 1].
        """
        return self.drawn(features, size).clamp(0, 1)

    def drawn(self, features: Tensor, size: tuple[int, int]) -> Tensor:
        """Returns what :meth:`decode` gives before it is clamped."""
        raise NotImplementedError

    def style_features(self, images: Tensor) -> Tensor:
        """Returns the maps on which styles are measured, by default those of :meth:`encode`.

        With ``style_layer="conv4_1_pre"`` they are the last convolution's outputs before its ReLU.
        PARDON's released code measures styles there (it stylizes on the output).
        """
        return self.encode(images)

    def value_range(self) -> tuple[Tensor, Tensor] | None:
        """Returns the smallest and largest value of each channel of :meth:`style_features`.

        ``(C,)`` float32 each, for images in [0, 1]. None if they are unknown; then they are
        measured (:mod:`feddg.styles.ranges`).
        """
        return None

    def prepared(self, images: Tensor) -> Tensor:
        """Returns images as :meth:`encode` takes them: in [0, 1], on its device.

        Args:
            images: ``(B, 3, H, W)`` uint8, or floating-point numbers in [0, 1] already.
        """
        values = on_device({"images": images}, self.unit.device)["images"].to(self.unit)
        return values if images.is_floating_point() else values / 255

    def fingerprint(self) -> str:
        """Returns a stable hash of the weights and of the style layer."""
        digest = hashlib.sha256(f"{self.name} {self.style_layer}".encode())
        for key, weight in sorted(self.state_dict().items()):
            digest.update(f"{key} {weight.dtype} {tuple(weight.shape)}".encode())
            digest.update(weight.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def frozen(self) -> "Codec":
        """Puts the codec into evaluation mode without gradients, and returns it."""
        return self.eval().requires_grad_(False).to(memory_format=torch.channels_last)


class NormalizedCodec(Codec):
    """A codec that is given images normalised for the classifier, as in PARDON's released code.

    What its decoder draws counts as such an image again: it is neither clamped nor normalised
    again on its way into the network. Images are RGB here, as everywhere, in and out, with values
    outside [0, 1] among those that come out. Mean and deviation are ImageNet's.

    Args:
        codec: encoder and decoder.
    """

    name = "normalized"
    mean: Tensor
    deviation: Tensor

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec.style_layer)
        self.codec, self.channels, self.stride = codec, codec.channels, codec.stride
        for name, values in (("mean", IMAGENET_MEAN), ("deviation", IMAGENET_STD)):
            self.register_buffer(name, torch.tensor(values).view(3, 1, 1), persistent=False)

    def encode(self, images: Tensor) -> Tensor:
        """Returns the feature maps of the normalised images; see :meth:`Codec.encode`."""
        return self.codec.encode((images - self.mean) / self.deviation)

    def style_features(self, images: Tensor) -> Tensor:
        """Returns the maps on which styles are measured; see :meth:`Codec.style_features`."""
        return self.codec.style_features((images - self.mean) / self.deviation)

    def decode(self, features: Tensor, size: tuple[int, int]) -> Tensor:
        """Returns RGB images ``(B, 3, *size)``, not clamped; see :meth:`Codec.decode`."""
        return self.codec.drawn(features, size) * self.deviation + self.mean


CODECS: Registry[type[Codec]] = Registry(
    "codec", "feddg.styles.codecs", group="feddg.codecs", error=WeightsError
)
"""All codecs by name."""


register_codec = CODECS.register
"""Class decorator that adds a codec under its name."""


def load_codec(
    name: str = "compact",
    *,
    encoder: Path | None = None,
    decoder: Path | None = None,
    style_layer: StyleLayer = "output",
) -> Codec:
    """Returns a codec, frozen and in evaluation mode; the same files give the same object.

    Args:
        name: one of :data:`CODECS`: ``"compact"`` or ``"modulated"`` (weights inside the package),
            ``"vgg19"`` (both files needed), ``"colors"`` (no weights), or another package's.
        encoder: weights file, ``.safetensors`` or a PyTorch state dict of tensors, whose keys
            are the layer indices ``0.weight, 0.bias, 2.weight, ...``; later layers than the
            codec uses may follow.
        decoder: likewise for the decoder, for example one trained by
            ``benchmarks/codec/train.py``.
        style_layer: the map on which styles are measured, see :meth:`Codec.style_features`.

    Raises:
        WeightsError: the name is unknown, the codec has no such layer, or a file is missing,
            unreadable, not needed or does not fit.
    """
    stamps = tuple(None if file is None else stamp(file) for file in (encoder, decoder))
    return _loaded(name, encoder, decoder, style_layer, stamps)


@lru_cache(maxsize=8)
def _loaded(
    name: str,
    encoder: Path | None,
    decoder: Path | None,
    style_layer: StyleLayer,
    stamps: tuple[Stamp | None, ...],
) -> Codec:
    definition = CODECS.find(name)
    if style_layer not in definition.style_layers:
        raise WeightsError(
            f"codec {name!r} cannot measure styles on {style_layer!r}; style_layer can be: "
            f"{', '.join(definition.style_layers)}"
        )
    return definition.load(encoder, decoder, style_layer).frozen()


def adain(features: Tensor, style: Tensor, strength: float = 1.0, *, correction: int = 0) -> Tensor:
    """Gives feature maps the channel means and standard deviations of a style (AdaIN).

    Adaptive instance normalisation (Huang and Belongie 2017, equation 8) with the blend of their
    section 7.2: ``strength * AdaIN(F) + (1 - strength) * F``. The content's moments are taken per
    image and channel, the variance over n - correction places plus :data:`VARIANCE_FLOOR`.

    Args:
        features: ``(B, C, h, w)``.
        style: ``(2, C)`` for all images or ``(B, 2, C)``, one each: means, standard deviations.
        strength: 0 does not change the features, 1 exchanges the moments entirely.
        correction: 0 divides by the number of places n; 1 by n - 1, as the papers' code does. Then
            a map of one place has variance 0.

    Returns:
        ``(B, C, h, w)``.
    """
    correction = min(correction, features.shape[-2:].numel() - 1)
    variance, mean = torch.var_mean(features, dim=(-2, -1), correction=correction, keepdim=True)
    style_mean, style_deviation = style.to(features)[..., None, None].unbind(-4)
    restyled = (features - mean) / (variance + VARIANCE_FLOOR).sqrt() * style_deviation
    return strength * (restyled + style_mean) + (1 - strength) * features


def images_at_once(side: int, device: torch.device) -> int:
    """Returns how many images to pass through a fixed network together on a device.

    On a CPU few enough that the largest maps fit into its caches; a third faster than 64. On an
    accelerator so many that its kernels last longer than their launches, if a quarter of its memory
    holds their maps.

    Args:
        side: of the images, pixels.
        device: where the network is.
    """
    if device.type == "cpu":
        return max(1, CACHED_PIXELS // side**2)
    pixels, memory = LAUNCHED_PIXELS, getattr(torch.get_device_module(device), "mem_get_info", None)
    if memory is not None:
        pixels = min(pixels, int(SHARE * memory(device)[1]) // BYTES_OF_PIXEL)
    return min(256, max(1, pixels // side**2))


def restyled(
    codec: Codec, images: Tensor, style: Tensor, strength: float = 1.0, *, correction: int = 0
) -> Tensor:
    """Returns images ``(B, 3, H, W)``, on the codec's device, in a style; see :func:`adain`."""
    maps = adain(codec.encode(images), style, strength, correction=correction)
    return codec.decode(maps, (images.shape[-2], images.shape[-1]))


def transfer(
    codec: Codec,
    images: Tensor,
    style: Tensor,
    strength: float = 1.0,
    batch_size: int | None = None,
    *,
    correction: int = 0,
) -> Tensor:
    """Stylizes images in a style, on the codec's device.

    Args:
        codec: encoder and decoder.
        images: ``(N, 3, H, W)``, uint8 RGB.
        style: ``(2, C)`` for all images or ``(N, 2, C)``, one each.
        strength: 0 only encodes and decodes, 1 exchanges the moments entirely.
        batch_size: images per pass; :func:`images_at_once` by default.
        correction: see :func:`adain`.

    Returns:
        ``(N, 3, H, W)``, uint8 RGB, on the device of ``images``.
    """
    batch_size = batch_size or images_at_once(images.shape[-1], codec.unit.device)
    # All stay there until the end: the host waits for the device once, not for every part.
    stylized = torch.empty(images.shape, dtype=images.dtype, device=codec.unit.device)
    style = on_device({"style": style}, codec.unit.device)["style"]
    with torch.inference_mode():
        for start in range(0, len(images), batch_size):
            part = slice(start, start + batch_size)
            wanted, given = style[part] if style.ndim == 3 else style, codec.prepared(images[part])
            drawn = restyled(codec, given, wanted, strength, correction=correction)
            stylized[part] = (drawn.clamp(0, 1) * 255).round().to(torch.uint8)
    return stylized.to(images.device)
