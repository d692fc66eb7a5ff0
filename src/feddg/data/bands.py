"""From the numbers in a file to 8-bit colours: which bands, and which values are black and white.

Pillow keeps the upper byte of 16-bit colours, so that sensors of 11 or 12 bits come out black, and
takes a fourth band for transparency. Here the samples are read as they are.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from PIL import Image

from feddg.data.image_formats import ImageSource, open_source
from feddg.data.tiles import MOST_TILED_PIXELS
from feddg.settings import DataSettings

ValueRange = Literal["auto", "full", "percentile"]
"""Which values become black and white.

``auto``: 8-bit images as they are; others from 0 to the largest value of the bit depth that the
domain's images use. ``full``: from 0 to the largest value that the file could hold. ``percentile``:
in each image and band from the 1st to the 99th percentile.
"""

DEPTHS = (8, 10, 11, 12, 14, 16, 24, 32)
"""Bits that sensors have."""
PERCENTILES = (1, 99)

_BITS, _SAMPLES, _EXTRA = 258, 277, 338
_ALPHA = (1, 2)
_PLAIN_MODES = frozenset(
    ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
)


@dataclass(frozen=True)
class Reading:
    """How files become colours.

    Attributes:
        range: see :data:`ValueRange`.
        bands: which bands are red, green and blue, or the one that is grey; from 1. Empty for the
            first three, or the only one.
        tile: side of the tiles that larger images are cut into, in pixels; None leaves them whole.
    """

    range: ValueRange = "auto"
    bands: tuple[int, ...] = ()
    tile: int | None = None

    @classmethod
    def of(cls, data: DataSettings) -> "Reading":
        """Returns what an experiment says."""
        return cls(data.range, data.bands, data.tile)


class UnusableImageError(Exception):
    """A file that cannot become pixels; the message is the reason, without the file's name."""


class OversizedImageError(UnusableImageError):
    """An image of more pixels than are taken."""


class UnknownFormatError(UnusableImageError):
    """A file that is no image, or of no format that is taken."""


@dataclass(frozen=True)
class Samples:
    """The numbers of a file.

    Attributes:
        values: ``(height, width, bands)``, of any number type.
        alpha: whether the last band is transparency.
    """

    values: np.ndarray
    alpha: bool = False


def is_deep(image: Image.Image) -> bool:
    """Whether an opened file holds more than 8 bits, or more bands, than Pillow would hand out."""
    if image.format == "TIFF":
        tags = image.tag_v2  # type: ignore[attr-defined]
        return bool(max(tags.get(_BITS, (1,))) > 8 or tags.get(_SAMPLES, 1) > 4)
    if image.mode not in _PLAIN_MODES:
        return True
    return any(
        "16B" in str(part) for tile in getattr(image, "tile", ()) for part in _parts(tile[3])
    )


def read_samples(path: ImageSource, image: Image.Image) -> Samples:
    """Reads a file's numbers as they are.

    Args:
        path: the file.
        image: the same, opened by Pillow and not yet loaded.

    Raises:
        UnusableImageError: it is damaged, or compressed in an unknown way.
    """
    if image.format == "TIFF" and is_deep(image):
        extra = image.tag_v2.get(_EXTRA, ())  # type: ignore[attr-defined]
        return replace(read_tiff(path), alpha=bool(extra) and extra[-1] in _ALPHA)
    if image.format == "PNG" and is_deep(image) and image.mode in ("RGB", "RGBA"):
        return Samples(_read_deep_png(path), image.mode == "RGBA")
    if image.mode in ("P", "PA", "1", "YCbCr", "CMYK", "LAB", "HSV"):
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
    values = np.asarray(image)
    if values.dtype.kind == "b":
        values = values.astype(np.uint8) * 255
    return Samples(np.atleast_3d(values), image.mode in ("LA", "RGBA"))


def read_tiff(path: ImageSource, most: int = MOST_TILED_PIXELS) -> Samples:
    """Reads the numbers of a TIFF's first page, however many bands it has.

    Args:
        path: the file.
        most: pixels of the largest one that is read; a small file can claim to be enormous.

    Raises:
        OversizedImageError: it has more pixels, or more than four times as many numbers.
        UnusableImageError: it is damaged, holds no image, or is compressed in an unknown way.
    """
    import tifffile

    try:
        with open_source(path) as stored, tifffile.TiffFile(stored, name=path.name) as file:
            page = file.pages.first
            pixels = int(page.imagewidth) * int(page.imagelength)
            if pixels > most or int(page.size) > 4 * max(pixels, most):
                raise OversizedImageError(
                    f"{page.imagewidth} x {page.imagelength} pixels, more than {most:,}"
                )
            values = page.asarray()
            planar = int(getattr(page, "planarconfig", 1) or 1) == 2 and values.ndim == 3
    except UnusableImageError:
        raise
    except Exception as error:  # tifffile raises many kinds on a damaged file
        text = " ".join(str(error).split())
        raise UnusableImageError(f"cannot be decoded: {text}") from error
    if planar:
        values = np.moveaxis(values, 0, 2)
    if values.ndim not in (2, 3) or values.dtype.kind not in "uif":
        raise UnusableImageError(f"a TIFF of shape {values.shape} and type {values.dtype}")
    return Samples(np.atleast_3d(values))


def is_tiff(path: ImageSource) -> bool:
    """Whether a file says of itself that it is a TIFF, whatever Pillow makes of it."""
    with open_source(path) as file:
        return file.read(4) in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


def bits_used(values: np.ndarray) -> int:
    """Returns the smallest usual bit depth that holds all values; 0 for floating-point numbers."""
    if values.dtype.kind == "f":
        return 0
    needed = int(values.max(initial=0)).bit_length()
    return next(depth for depth in DEPTHS if depth >= needed)


def to_image(samples: Samples, reading: Reading, bits: int = 0) -> Image.Image:
    """Returns the colours of a file.

    Args:
        samples: its numbers.
        reading: which bands, and which values are black and white.
        bits: the depth that the images of its domain use, with ``auto``; more if it uses more.

    Returns:
        An image of mode RGB.

    Raises:
        UnusableImageError: a band that is asked for is missing, there are too many to guess, or the
            range of floating-point numbers is not known.
    """
    chosen, alpha = _choose(samples, reading.bands)
    pixels = _to_bytes(chosen, reading.range, bits)
    if pixels.shape[2] == 1:
        pixels = np.repeat(pixels, 3, axis=2)
    if alpha is None:
        return Image.fromarray(pixels)
    cover = _to_bytes(alpha, "full", 0)
    layered = Image.fromarray(np.concatenate([pixels, cover], axis=2), "RGBA")
    return Image.alpha_composite(Image.new("RGBA", layered.size, "white"), layered).convert("RGB")


def _choose(samples: Samples, bands: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray | None]:
    values, count = samples.values, samples.values.shape[2]
    if bands:
        if max(bands) > count:
            raise UnusableImageError(f"it has {count} bands, and data.bands asks for {max(bands)}")
        return values[:, :, [band - 1 for band in bands]], None
    colours = count - 1 if samples.alpha else count
    if colours > 4 or colours == 2:
        raise UnusableImageError(f"it has {colours} bands: choose three with data.bands: [3, 2, 1]")
    return values[:, :, : min(colours, 3)], values[:, :, -1:] if samples.alpha else None


def _to_bytes(values: np.ndarray, range: ValueRange, bits: int) -> np.ndarray:
    if range == "percentile":
        return _stretch(values)
    if values.dtype.kind == "f":
        raise UnusableImageError(
            "floating-point pixels without a known range: set data.range: percentile"
        )
    if values.dtype == np.uint8:
        return np.ascontiguousarray(values)
    if range == "auto":
        most = 2 ** max(bits, bits_used(values)) - 1
    elif values.dtype.itemsize == 2 or int(values.max(initial=0)) < 2**16:
        most = 2**16 - 1  # Pillow hands 16 bits out in 32, too
    else:
        most = 2**32 - 1
    numbers = values.astype(np.int64).clip(0, most)
    pixels: np.ndarray = ((numbers * 255 + most // 2) // most).astype(np.uint8)
    return pixels


def _stretch(values: np.ndarray) -> np.ndarray:
    numbers = values.astype(np.float64)
    numbers[~np.isfinite(numbers)] = np.nan  # no data
    if np.isnan(numbers).all():
        raise UnusableImageError("it holds no numbers")
    filled = np.where(np.isnan(numbers).all(axis=(0, 1)), 0.0, numbers)
    low, high = np.nanpercentile(filled, PERCENTILES, axis=(0, 1))
    width = np.where(high > low, high - low, 1.0)
    stretched = np.nan_to_num((filled - low) / width).clip(0, 1) * 255
    pixels: np.ndarray = stretched.round().astype(np.uint8)
    return pixels


def _read_deep_png(path: ImageSource) -> np.ndarray:
    from imagecodecs import png_decode

    with open_source(path) as file:
        values: np.ndarray = png_decode(file.read())
    return values


def _parts(arguments: object) -> tuple[object, ...]:
    return arguments if isinstance(arguments, tuple) else (arguments,)
