"""One image file becomes a square RGB array, whatever odd kind of image it is."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from threading import Lock
from typing import Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from feddg.data.bands import (
    OversizedImageError,
    Reading,
    UnknownFormatError,
    is_deep,
    is_tiff,
    read_samples,
    read_tiff,
    to_image,
)
from feddg.data.bands import UnusableImageError as UnusableImageError
from feddg.data.image_formats import ImageBytes, ImageSource, open_image
from feddg.data.tiles import MOST_TILED_PIXELS, Box

Resize = Literal["squash", "crop", "pad"]
"""How an image becomes square.

``squash`` stretches both sides, as torchvision's ``Resize((size, size))`` does; ``crop`` scales the
short side and cuts the centre out; ``pad`` scales the long side and adds black bars.
"""

MOST_PIXELS = 89_478_485
"""Larger images (Pillow's own limit, 268 MB as RGB) are refused as decompression bombs."""

_PILLOW = logging.getLogger("PIL")
AS_IT_IS = Reading()
_ONE_HUGE_IMAGE = Lock()
"""Of images that only tiles are cut from, one at a time is in memory."""
_ORIENTATIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION_TAG, _LYING = 0x0112, (5, 6, 7, 8)


def decode_image(
    path: ImageSource,
    size: int,
    resize: Resize = "squash",
    reading: Reading = AS_IT_IS,
    bits: int = 0,
    most: int | None = None,
) -> np.ndarray:
    """Decodes an image file to RGB at ``size`` x ``size``.

    Grey, palette, CMYK and deeper images become 8-bit RGB, transparent ones are laid over white,
    the camera's orientation tag is obeyed, and of an animation the first frame is taken.

    Pillow may warn about odd files that it can read all the same, see :func:`quiet_pillow`.

    Args:
        path: the file.
        size: the side of the result in pixels.
        resize: how the image becomes square.
        reading: which bands become colours, and which values black and white.
        bits: the depth that images of its domain use, see :func:`feddg.data.bands.to_image`.
        most: pixels of the largest image that is taken; ``MOST_PIXELS``, and at most that.

    Returns:
        ``(size, size, 3)`` uint8.

    Raises:
        UnusableImageError: for an empty, truncated, unknown or oversized file.
    """
    return decode_parts(path, [None], size, resize, reading, bits, most)[0]


def decode_parts(
    path: ImageSource,
    boxes: Sequence[Box | None],
    size: int,
    resize: Resize = "squash",
    reading: Reading = AS_IT_IS,
    bits: int = 0,
    most: int | None = None,
) -> list[np.ndarray]:
    """Decodes an image file once and returns parts of it, each at ``size`` x ``size``.

    Args:
        path: the file.
        boxes: left, top, right and bottom of each part; None for the whole image.
        size: see :func:`decode_image`, as the other arguments.
        resize: how a part becomes square.
        reading: which bands become colours, and which values black and white.
        bits: the depth that images of its domain use.
        most: pixels of the largest image that is taken whole; ``MOST_PIXELS``.

    Raises:
        UnusableImageError: see :func:`decode_image`.
    """
    most = (most or MOST_PIXELS) if None in boxes else MOST_TILED_PIXELS
    try:
        with _opened(path) as image:
            if image is None:
                colours = to_image(read_tiff(path, most), reading, bits)
                return [make_square(_part(colours, box), size, resize) for box in boxes]
            pixels = _refuse_oversized(image, most)
            with nullcontext() if pixels <= MOST_PIXELS else _ONE_HUGE_IMAGE:
                if None in boxes:
                    # A JPEG far larger than needed is decoded at 1/2, 1/4 or 1/8, never below
                    # three times the wanted size: several times faster, and hardly
                    # distinguishable after resizing.
                    image.draft(None, (3 * size, 3 * size))
                colours = _to_rgb(path, image, reading, bits)
                return [
                    make_square(_upright(_part(colours, box), image), size, resize) for box in boxes
                ]
    except UnusableImageError:
        raise
    except Exception as error:  # Pillow's decoders raise many kinds on a broken file
        raise _unusable(path, error) from error


def upright_size(path: ImageSource) -> tuple[int, int]:
    """Returns width and height of an image once it obeys the camera's orientation tag.

    Raises:
        UnusableImageError: for a file that no image can be read from.
    """
    try:
        with _opened(path) as image:
            if image is None:
                height, width, _ = read_tiff(path).values.shape
                return width, height
            width, height = image.size
            return (height, width) if _orientation(image) in _LYING else (width, height)
    except UnusableImageError:
        raise
    except Exception as error:  # Pillow's readers raise many kinds on a broken file
        raise _unusable(path, error) from error


@contextmanager
def _opened(path: ImageSource) -> Iterator[Image.Image | None]:
    """Opens a file with Pillow; None for a TIFF of more bands than Pillow knows."""
    with ExitStack() as opened:
        image = None
        try:
            image = opened.enter_context(open_image(path))
        except UnidentifiedImageError:
            if not is_tiff(path):
                raise
        yield image


def _part(image: Image.Image, box: Box | None) -> Image.Image:
    return image if box is None else image.crop(box)


@contextmanager
def quiet_pillow(*, tiled: bool = False) -> Iterator[None]:
    """Silences Pillow's remarks on odd files; an oversized one raises.

    Enter it around a whole pool of decoding threads, never inside one: warning filters belong to
    the process, and so does Pillow's limit.

    Args:
        tiled: whether images are cut into tiles, and may be larger.
    """
    before, level = Image.MAX_IMAGE_PIXELS, _PILLOW.level
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        warnings.filterwarnings("error", category=Image.DecompressionBombWarning)
        try:
            _PILLOW.setLevel(logging.CRITICAL)
            if tiled:
                Image.MAX_IMAGE_PIXELS = MOST_TILED_PIXELS
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = before
            _PILLOW.setLevel(level)


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


def _refuse_oversized(image: Image.Image, most: int) -> int:
    width, height = image.size
    if width * height > most:
        remedy = "; cut it into tiles with data.tile: 512" if most == MOST_PIXELS else ""
        raise OversizedImageError(f"{width} x {height} pixels, more than {most:,}{remedy}")
    return width * height


def _to_rgb(path: ImageSource, image: Image.Image, reading: Reading, bits: int) -> Image.Image:
    if reading.bands or reading.range == "percentile" or is_deep(image):
        return to_image(read_samples(path, image), reading, bits)
    if image.mode == "RGB" and "transparency" not in image.info:
        return image.copy()
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def _upright(pixels: Image.Image, source: Image.Image) -> Image.Image:
    transpose = _ORIENTATIONS.get(_orientation(source))
    return pixels if transpose is None else pixels.transpose(transpose)


def _orientation(source: Image.Image) -> int:
    try:
        found: int = source.getexif().get(_ORIENTATION_TAG, 1)
    except Exception:  # a damaged tag block says nothing about the pixels
        return 1
    return found


def _unusable(path: ImageSource, error: Exception) -> UnusableImageError:
    if isinstance(error, FileNotFoundError):
        return UnusableImageError("file not found")
    if isinstance(error, OSError) and error.errno is not None:
        return UnusableImageError(f"cannot be read: {error.strerror}")
    if isinstance(error, UnidentifiedImageError):
        if _is_empty(path):
            return UnusableImageError("empty file")
        return UnknownFormatError("not an image in a known format")
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return OversizedImageError(
            f"more than {MOST_PIXELS:,} pixels; cut it into tiles with data.tile: 512"
        )
    text = " ".join(str(error).split()) or type(error).__name__
    return UnusableImageError(f"cannot be decoded: {text}")


def _is_empty(path: ImageSource) -> bool:
    if isinstance(path, ImageBytes):
        return not path.content
    return path.is_file() and path.stat().st_size == 0
