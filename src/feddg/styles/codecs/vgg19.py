"""The codec of the papers: AdaIN on VGG-19, of whatever width the user's weight files have."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from feddg.errors import WeightsError
from feddg.styles.codec import register_codec
from feddg.styles.convolutional import Architecture, ConvolutionalCodec, Plan


@register_codec
class Vgg19Codec(ConvolutionalCodec):
    """The normalised VGG-19 to relu4_1 and its mirror image (Huang and Belongie 2017).

    How many channels each layer has is read from the files, so pruned pairs fit as the full one
    does: for example the quarter-width pair of "Collaborative Distillation for Ultra-Resolution
    Universal Style Transfer" (Wang et al., CVPR 2020).
    """

    name = "vgg19"
    summary = "the papers' VGG-19 to relu4_1, full or pruned, from weight files you have"
    architecture = Architecture(
        encoder=(64, 64, "pool", 128, 128, "pool", 256, 256, 256, 256, "pool", 512),
        decoder=(256, "up", 256, 256, 256, 128, "up", 128, 64, "up", 64, 3),
        colour_layer=True,
    )

    @classmethod
    def file(cls, part: Literal["encoder", "decoder"], given: Path | None) -> Path:
        """Returns the given file; this codec has no weights of its own."""
        if given is None:
            raise WeightsError(
                f"codec 'vgg19' needs an encoder and a decoder file; the {part} is not given. They "
                "are commonly distributed as vgg_normalised.pth and decoder.pth with PyTorch "
                "implementations of AdaIN; the codec 'compact' needs no files"
            )
        return given

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
    """The plan with as many output channels as the weights have; as declared where they lack.

    ``module`` is made after the full plan, so its convolutions have the indices of the weights.
    """
    indices = [
        index
        for index, layer in enumerate(module)
        if isinstance(layer, nn.Conv2d) and layer.kernel_size == (3, 3)
    ]
    keys = iter(f"{index}.weight" for index in indices)
    return [
        entry if isinstance(entry, str) else _channels(weights.get(next(keys)), entry)
        for entry in plan
    ]


def _channels(weight: Tensor | None, declared: int) -> int:
    return declared if weight is None or weight.ndim != 4 else weight.shape[0]


def _mirrored(encoder: Plan) -> Plan:
    """The decoder's plan: the encoder's layers in reverse order, each giving what it was given."""
    plan: list[int | Literal["pool", "up"]] = []
    channels = 3
    for entry in encoder:
        plan.append("up" if entry == "pool" else channels)
        channels = entry if isinstance(entry, int) else channels
    return plan[::-1]
