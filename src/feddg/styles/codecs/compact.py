"""The codec inside this package: small, for 32 to 224 pixels on a laptop."""

from pathlib import Path
from typing import Literal

from feddg.styles.codec import register_codec
from feddg.styles.convolutional import Architecture, ConvolutionalCodec, packaged_weights


@register_codec
class CompactCodec(ConvolutionalCodec):
    """Four convolutions and their mirror image; what it was trained on is in docs/codec.md."""

    name = "compact"
    summary = "small, inside the package, for images of 32 to 224 pixels"
    architecture = Architecture(
        encoder=(32, 32, "pool", 64, 64),
        decoder=(64, 32, "up", 32, 3),
    )

    @classmethod
    def file(cls, part: Literal["encoder", "decoder"], given: Path | None) -> Path:
        """Returns the given file, or the packaged one."""
        return given or packaged_weights(cls.name, part)
