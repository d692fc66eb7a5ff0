"""One image file becomes a square RGB array, whatever odd kind of image it is."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from feddg.files import open_file

Resize = Literal["squash", "crop", "pad"]
"""How an image becomes square.

``squash`` stretches both sides, as torchvision's ``Resize((size, size))`` does; ``crop`` scales the
short side and cuts the centre out; ``pad`` scales the long side and adds black bars.
"""

MOST_PIXELS = 89_478_485
"""Larger images (Pillow's own limit, 268 MB as RGB) are refused as decompression bombs."""

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP")
"""What a file's content may be, whatever its name: Pillow knows dozens of formats, and for some of
them it starts other programs (Ghostscript for EPS)."""

_ORIENTATIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION_TAG = 0x0112


class UnusableImageError(Exception):
    """A file that cannot become pixels; the message is the reason, without the file's name."""


def decode_image(path: Path, size: int, resize: Resize = "squash") -> np.ndarray:
    """Decodes an image file to RGB at ``size`` x ``size``.

    Grey, palette, CMYK and 16-bit images become 8-bit RGB, transparent ones are laid over white,
    the camera's orientation tag is obeyed, and of an animation the first frame is taken.

    Pillow may warn about odd files that it can read all the same, see :func:`quiet_pillow`.

    Args:
        path: the file.
        size: the side of the result in pixels.
        resize: how the image becomes square.

    Returns:
        ``(size, size, 3)`` uint8.

    Raises:
        UnusableImageError: for an empty, truncated, unknown or oversized file.
    """
    try:
        with open_file(path) as file, Image.open(file, formats=FORMATS) as image:
            _refuse_oversized(image)
            # A JPEG far larger than needed is decoded at 1/2, 1/4 or 1/8, never below three times
            # the wanted size: several times faster, and hardly distinguishable after resizing.
            image.draft(None, (3 * size, 3 * size))
            return make_square(_upright(_to_rgb(image), image), size, resize)
    except UnusableImageError:
        raise
    except Exception as error:  # Pillow's decoders raise many kinds on a broken file
        raise UnusableImageError(_reason(path, error)) from error


@contextmanager
def quiet_pillow() -> Iterator[None]:
    """Silences Pillow's remarks on odd files; an oversized one raises.

    Enter it around a whole pool of decoding threads, never inside one: warning filters belong to
    the process.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        warnings.filterwarnings("error", category=Image.DecompressionBombWarning)
        yield


def make_square(image: Image.Image, size: int, resize: Resize = "squash") -> np.ndarray:
    """Resizes an RGB image with Pillow's antialiased bilinear filter.

    Args:
        image: any size, mode RGB.
        size: the side of the result in pixels.
        resize: how the image becomes square.

    Returns:
        ``(size, size, 3)`` uint8.
    """
    square = (size, size)
    if resize == "squash":
        return np.array(image.resize(square, Image.Resampling.BILINEAR))
    if resize == "crop":
        return np.array(ImageOps.fit(image, square, Image.Resampling.BILINEAR))
    scale = size / max(image.size)
    width, height = (max(1, round(side * scale)) for side in image.size)
    canvas = Image.new("RGB", square)
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    canvas.paste(resized, ((size - width) // 2, (size - height) // 2))
    return np.array(canvas)


def _refuse_oversized(image: Image.Image) -> None:
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise UnusableImageError(f"{width} x {height} pixels, more than {MOST_PIXELS:,}")


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image.copy()
    if image.mode == "F":
        raise UnusableImageError("floating-point pixels without a known range")
    if image.mode.startswith("I"):
        return _from_16_bit(image).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def _from_16_bit(image: Image.Image) -> Image.Image:
    """Scales 0..65535 to 0..255 (Pillow would clip a mode "I" image instead)."""
    values = np.asarray(image).astype(np.int64).clip(0, 65535)
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))


def _upright(pixels: Image.Image, source: Image.Image) -> Image.Image:
    try:
        orientation = source.getexif().get(_ORIENTATION_TAG, 1)
    except Exception:  # a damaged tag block says nothing about the pixels
        return pixels
    transpose = _ORIENTATIONS.get(orientation)
    return pixels if transpose is None else pixels.transpose(transpose)


def _reason(path: Path, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "file not found"
    if isinstance(error, OSError) and error.errno is not None:
        return f"cannot be read: {error.strerror}"
    if isinstance(error, UnidentifiedImageError):
        empty = path.is_file() and path.stat().st_size == 0
        return "empty file" if empty else "not an image in a known format"
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return f"more than {MOST_PIXELS:,} pixels"
    text = " ".join(str(error).split()) or type(error).__name__
    return f"cannot be decoded: {text}"
