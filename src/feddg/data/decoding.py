"""Decodes an image file of any kind to a square RGB array."""

import errno
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import ceil
from threading import Lock
from typing import IO, Any, Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from feddg.data.images import (
    IMAGE_SUFFIXES,
    REMEDIES,
    ImageSource,
    ImageTable,
    is_printable,
    open_image,
    open_source,
)
from feddg.errors import DataError, MissingPackage, need
from feddg.settings import DataSettings

MOST_TILED_PIXELS = 2**30
"""Images larger than this are refused even if they are cut into tiles: 3 GB as RGB."""

_NAME = re.compile(r"(.+)#x(\d+)y(\d+)w(\d+)h(\d+)")
Box = tuple[int, int, int, int]
DEPTHS = (8, 10, 11, 12, 14, 16, 24, 32)
"""Bit depths of common sensors."""
PERCENTILES = (1, 99)
_BITS, _SAMPLES, _EXTRA = 258, 277, 338
_ALPHA = (1, 2)
_WHITE_IS_ZERO, _CMYK = 0, 5
_PLAIN_MODES = frozenset(
    ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
)
MOST_PIXELS = 89_478_485
"""Larger images (Pillow's own limit, 268 MB as RGB) are refused as decompression bombs."""
_PILLOW = logging.getLogger("PIL")
ONE_HUGE_IMAGE = Lock()
"""Large images that are cut into tiles are decoded one at a time."""
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
_LASTING = (
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR),
    *(errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.ENXIO),
)
"""Errors that are the file's own; after any other, it may be read another time."""


@dataclass(frozen=True)
class Tile:
    """A part of an image file.

    Attributes:
        file: path of the file.
        box: left, top, right and bottom, in pixels; None for the whole image.
    """

    file: str
    box: Box | None = None

    @classmethod
    def named(cls, path: str) -> "Tile":
        """Parses a row's path: ``field/corn/7.tif#x512y0w512h512``, or the path of a whole file."""
        match = _NAME.fullmatch(path)
        if match is None:
            return cls(path)
        left, top, width, height = map(int, match.groups()[1:])
        return cls(match[1], (left, top, left + width, top + height))


def tile_names(path: str, width: int, height: int, side: int) -> list[str]:
    """Returns the names of an image's tiles, row by row; its own path if it fits into one tile.

    All tiles have one size; the last of a row or column is moved inwards and overlaps its
    neighbour.
    """
    if width <= side and height <= side:
        return [path]
    return [
        f"{path}#x{left}y{top}w{min(side, width)}h{min(side, height)}"
        for top in _starts(height, side)
        for left in _starts(width, side)
    ]


def cut(table: ImageTable, side: int) -> ImageTable:
    """Returns a table with a row for every tile; a file that cannot be opened stays one row.

    Args:
        table: images in files.
        side: side of a tile in pixels.
    """
    root = table.root
    assert root is not None
    with ThreadPoolExecutor() as pool:
        names = list(pool.map(lambda path: names_in(root / path, path, side), table.paths))
    rows = np.repeat(np.arange(len(table)), [len(tiles) for tiles in names])
    return replace(table.take(rows), paths=tuple(name for tiles in names for name in tiles))


def names_in(file: ImageSource, path: str, side: int) -> list[str]:
    """Returns the names of a file's tiles; its own path if it fits into one or cannot be opened.

    Args:
        file: where the file is.
        path: the row's path.
        side: side of a tile in pixels.
    """
    try:
        with open_image(file) as image:  # as stored: a turned photograph is cut before it is turned
            size = _tiff_size(file) if image is None else image.size
            return tile_names(path, *size, side)
    except Exception:  # decoding says what is wrong with it
        return [path]


def whole_images(table: ImageTable) -> tuple[ImageTable, np.ndarray]:
    """Returns a table of one row per file, and for each row of ``table`` the row of its file.

    So a decision about a file, such as its split, holds for all its tiles.

    Raises:
        DataError: the table gives tiles of one file two roles.
    """
    files = list(zip(table.domains.tolist(), (Tile.named(path).file for path in table.paths)))
    places = {file: place for place, file in enumerate(dict.fromkeys(files))}
    image_of = np.array([places[file] for file in files], dtype=np.int64)
    _, first = np.unique(image_of, return_index=True)
    whole = replace(table.take(first), paths=tuple(file for _, file in places))
    if whole.split is not None and table.split is not None:
        odd = np.flatnonzero(table.split != whole.split[image_of])
        if len(odd):
            raise DataError(
                f"{table.paths[odd[0]]!r} is for {table.split[odd[0]]}, and another tile of the "
                f"same image for {whole.split[image_of[odd[0]]]}: give all its tiles the same role."
            )
    return whole, image_of


def require_own_names(table: ImageTable, source: str) -> ImageTable:
    """Returns a table in which every path is of one row, and every file of one domain.

    Args:
        table: the table.
        source: what lists its images, for the message.

    Raises:
        DataError: a path or file is of two, so that a row would be taken for another's, or for a
            tile of its image; or a name cannot be printed.
    """
    for what in ("class_names", "domain_names", "paths"):
        if odd := next((name for name in getattr(table, what) if not is_printable(name)), None):
            raise DataError(
                f"{source} has {odd[:80]!r} among its {what.replace('_', ' ')}, with a character "
                "that cannot be printed; take it out."
            )
    rows: dict[str, int] = {}
    files: dict[str, int] = {}
    for row, path in enumerate(table.paths):
        file = Tile.named(path).file if "#" in path else path
        same, sibling = rows.setdefault(path, row), files.setdefault(file, row)
        other = sibling if same == row else same
        if same != row or table.domains[sibling] != table.domains[row]:
            number = range(1, len(table) + 1) if table.listed_rows is None else table.listed_rows
            before, domain = (table.domain_names[table.domains[index]] for index in (other, row))
            raise DataError(
                f"{source}: row {number[other]} (domain {before!r}) and row {number[row]} (domain "
                f"{domain!r}) have the same path {path if same != row else file!r}. Give every row "
                f"a path of its own, such as {domain}/{file}; only tiles of one image share it, "
                "called FILE#x0y0w256h256 by their place and size."
            )
    return table


def _starts(length: int, side: int) -> Sequence[int]:
    last = max(length - side, 0)
    return [min(number * side, last) for number in range(ceil(length / side))]


# From the numbers in a file to 8-bit colours: which bands, and which values are black and white.
#
# Pillow keeps the upper byte of 16-bit colours, so that sensors of 11 or 12 bits come out black,
# and takes a fourth band for transparency. Here the samples are read as they are.


ValueRange = Literal["auto", "full", "percentile"]
"""Which values become black and white in 8 bits.

``auto``: 8-bit images as they are; others from 0 to the largest value of the bit depth that the
domain's images use. ``full``: from 0 to the largest value that the file could hold. ``percentile``:
in each image and band from the 1st to the 99th percentile.
"""


@dataclass(frozen=True)
class Reading:
    """How the values of files become colours.

    Attributes:
        range: see :data:`ValueRange`.
        bands: the numbers (from 1) of the red, green and blue bands, or of the one grey band. Empty
            for the first three bands, or the only one.
        tile: side of the tiles that larger images are cut into, in pixels; None leaves them whole.
    """

    range: ValueRange = "auto"
    bands: tuple[int, ...] = ()
    tile: int | None = None

    @classmethod
    def of(cls, data: DataSettings) -> "Reading":
        """Returns the reading that an experiment's data settings ask for."""
        return cls(data.range, data.bands, data.tile)


class UnusableImageError(Exception):
    """Raised for a file that cannot be decoded; the message is the reason, without its name.

    Attributes:
        reason: the same, without the setting that would help if one were to train on it.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(f"{reason}{remedy}")
        self.reason = reason


CUT = "; cut it into tiles with data.tile: 512"


class UnreadImageError(UnusableImageError):
    """Raised if a disk, network or memory failed: the file itself may well be in order."""


class OversizedImageError(UnusableImageError):
    """Raised for an image with more pixels than allowed."""


class UnknownFormatError(UnusableImageError):
    """Raised for a file that is no image, or of an unsupported format."""


@dataclass(frozen=True)
class Samples:
    """The raw values of an image file.

    Attributes:
        values: ``(height, width, bands)``, of any number type.
        alpha: whether the last band is transparency.
        inverted: whether 0 is white, in an image of one grey band.
        premultiplied: whether colours are multiplied with their opacity already.
    """

    values: np.ndarray
    alpha: bool = False
    inverted: bool = False
    premultiplied: bool = False

    @property
    def colours(self) -> np.ndarray:
        """The values without the transparency band."""
        return self.values[:, :, :-1] if self.alpha else self.values


def is_deep(image: Image.Image) -> bool:
    """Returns whether a file has more than 8 bits or more bands than Pillow would decode."""
    if image.format == "TIFF":
        tags = image.tag_v2  # type: ignore[attr-defined]
        return bool(max(tags.get(_BITS, (1,))) > 8 or tags.get(_SAMPLES, 1) > 4)
    if image.mode not in _PLAIN_MODES:
        return True
    if image.format == "JPEG2000":
        return _jpeg2000_bits(image.fp) > 8  # type: ignore[attr-defined]
    return any("16B" in str(tile[3]) for tile in getattr(image, "tile", ()))


def _jpeg2000_bits(file: IO[bytes]) -> int:
    """Returns the bits of a value, which Pillow does not tell: those of the marker SIZ."""
    place = file.tell()
    file.seek(0)
    head = file.read(2**20)
    file.seek(place)
    start = head.find(b"\xff\x4f\xff\x51")
    return (head[start + 42] & 127) + 1 if 0 <= start < len(head) - 42 else 0


def read_samples(path: ImageSource, image: Image.Image) -> Samples:
    """Reads a file's raw values.

    Args:
        path: the file.
        image: the same file, opened by Pillow but not loaded.

    Raises:
        UnusableImageError: it is damaged, or compressed in an unknown way.
        MissingPackage: the extra ``tiff`` is not installed.
    """
    if image.format == "TIFF" and is_deep(image):
        extra = image.tag_v2.get(_EXTRA, ())  # type: ignore[attr-defined]
        last = extra[-1] if extra else 0
        return replace(read_tiff(path), alpha=last in _ALPHA, premultiplied=last == _ALPHA[0])
    if image.format == "PNG" and is_deep(image) and image.mode in ("RGB", "RGBA"):
        need("tiff", f"{path.name}, a PNG of 16 bits in colour,", ["imagecodecs"])
        from imagecodecs import png_decode

        with open_source(path) as file:
            return Samples(png_decode(file.read()), image.mode == "RGBA")
    if image.format == "JPEG2000" and is_deep(image) and image.mode in _PLAIN_MODES:
        need("tiff", f"{path.name}, a JPEG 2000 of more than 8 bits in colour,", ["imagecodecs"])
        from imagecodecs import jpeg2k_decode

        with open_source(path) as file:
            values = jpeg2k_decode(file.read())
            # As Pillow does with grey ones: the file's own depth becomes 16 bits.
            values = values << max(0, 16 - _jpeg2000_bits(file))
        return Samples(values, image.mode in ("LA", "RGBA"))
    if image.mode in ("P", "PA", "1", "YCbCr", "CMYK", "LAB", "HSV"):
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
    values = np.asarray(image)
    if values.dtype.kind == "b":
        values = values.astype(np.uint8) * 255
    return Samples(np.atleast_3d(values), image.mode in ("LA", "RGBA"))


def read_tiff(path: ImageSource, most: int = MOST_TILED_PIXELS) -> Samples:
    """Reads the raw values of a TIFF's first page, with any number of bands.

    Args:
        path: the file.
        most: the largest number of pixels allowed; a small file can claim to be enormous.

    Raises:
        OversizedImageError: it has more pixels, or more than four times as many values.
        UnusableImageError: it is damaged, holds no image, or is compressed in an unknown way.
        MissingPackage: the extra ``tiff`` is not installed.
    """
    try:
        with _tiff_page(path) as page:
            pixels = int(page.imagewidth) * int(page.imagelength)
            if (page.imagedepth, page.tiledepth) != (1, 1):  # ``size`` does not count them
                raise UnusableImageError("a TIFF of a volume")
            if pixels > most or int(page.size) > 4 * max(pixels, most):
                raise OversizedImageError(
                    f"{page.imagewidth} x {page.imagelength} pixels, more than {most:,}"
                )
            values = page.asarray()
            planar = int(getattr(page, "planarconfig", 1) or 1) == 2 and values.ndim == 3
            bands, photometric = page.samplesperpixel, page.photometric
    except (UnusableImageError, MissingPackage, OSError, MemoryError):
        raise
    except Exception as error:  # tifffile raises many kinds on a damaged file
        text = " ".join(str(error).split())
        raise UnusableImageError(f"cannot be decoded: {text}") from error
    if photometric == _CMYK and bands == 4:
        raise UnusableImageError("CMYK of more than 8 bits", ": convert it to RGB")
    if planar:
        values = np.moveaxis(values, 0, 2)
    if values.ndim not in (2, 3) or values.dtype.kind not in "uif":
        raise UnusableImageError(f"a TIFF of shape {values.shape} and type {values.dtype}")
    if values.dtype.kind != "f" and values.max(initial=0) >= 2 ** DEPTHS[-1]:
        raise UnusableImageError("has values of more than 32 bits", ": write them in 32 bits")
    inverted = photometric == _WHITE_IS_ZERO and bands <= 2  # of many bands, nobody means it
    return Samples(np.atleast_3d(values), inverted=inverted)


@contextmanager
def _tiff_page(path: ImageSource) -> Iterator[Any]:
    need("tiff", f"{path.name}, a TIFF of more than 8 bits or 4 bands,")
    import tifffile

    with open_source(path) as stored, tifffile.TiffFile(stored, name=path.name) as file:
        yield file.pages.first


def _tiff_size(path: ImageSource) -> tuple[int, int]:
    """Returns width and height of a TIFF of more bands than Pillow supports."""
    with _tiff_page(path) as page:
        return int(page.imagewidth), int(page.imagelength)


def bits_used(values: np.ndarray) -> int:
    """Returns the smallest usual bit depth that holds all values; 0 for floating-point numbers."""
    if values.dtype.kind == "f":
        return 0
    needed = int(values.max(initial=0)).bit_length()
    return next(depth for depth in DEPTHS if depth >= needed)


Depths = int | tuple[int, ...]


def depth_of_white(used: int, known: Depths) -> int:
    """Returns the bit depth whose largest value is white.

    Args:
        used: the depth that some images use; 0 for 8 bits.
        known: the depth of their domain, raised if they use more; or those of several domains, of
            which the least counts that holds them, so that a few dark images do not become bright.
    """
    depths = (known,) if isinstance(known, int) else known
    return min((depth for depth in depths if depth >= used), default=used)


def to_image(samples: Samples, reading: Reading, bits: Depths = 0) -> Image.Image:
    """Converts a file's raw values to an RGB image.

    Args:
        samples: its raw values.
        reading: which bands to use, and which values are black and white.
        bits: with ``auto``, see :func:`depth_of_white`.

    Returns:
        An image of mode RGB.

    Raises:
        UnusableImageError: a band that is asked for is missing, there are too many to guess, or the
            range of floating-point or negative numbers is not known.
    """
    chosen, alpha = _choose(samples, reading.bands)
    pixels = _to_bytes(chosen, reading.range, bits)
    if samples.inverted:
        pixels = 255 - pixels
    if pixels.shape[2] == 1:
        pixels = np.repeat(pixels, 3, axis=2)
    if alpha is None:
        return Image.fromarray(pixels)
    cover = _to_bytes(alpha, "auto" if reading.range == "auto" else "full", bits)
    if samples.premultiplied:
        white = pixels.astype(np.uint16) + (255 - cover)
        return Image.fromarray(np.minimum(white, 255).astype(np.uint8))
    layered = Image.fromarray(np.concatenate([pixels, cover], axis=2), "RGBA")
    return Image.alpha_composite(Image.new("RGBA", layered.size, "white"), layered).convert("RGB")


def _choose(samples: Samples, bands: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray | None]:
    values, colours = samples.values, samples.colours
    if bands:
        if max(bands) > values.shape[2]:
            raise UnusableImageError(
                f"it has {values.shape[2]} bands, but data.bands asks for {max(bands)}"
            )
        return values[:, :, [band - 1 for band in bands]], None
    count = colours.shape[2]
    if count > 4 or count == 2:
        raise UnusableImageError(
            f"it has {count} bands", ": choose three with data.bands: [3, 2, 1]"
        )
    return colours[:, :, :3], values[:, :, -1:] if samples.alpha else None


def _to_bytes(values: np.ndarray, range: ValueRange, bits: Depths) -> np.ndarray:
    if range == "percentile":
        return _stretch(values)
    if values.dtype.kind == "f":
        raise UnusableImageError(
            "floating-point pixels without a known range", ": set data.range: percentile"
        )
    if values.dtype == np.uint8:
        return np.ascontiguousarray(values)
    if values.min(initial=0) < 0:
        raise UnusableImageError("has negative values", ": set data.range: percentile")
    if values.max(initial=0) < 2**16:
        values = values.astype(np.uint16, copy=False)  # Pillow hands 16 bits out in 32, too
    whole = 16 if values.dtype == np.uint16 else 32
    most = 2 ** (depth_of_white(bits_used(values), bits) if range == "auto" else whole) - 1
    return by_number(values, lambda n: (n.astype(np.int64).clip(0, most) * 255 + most // 2) // most)


def _stretch(values: np.ndarray) -> np.ndarray:
    spoiled = np.count_nonzero(~np.isfinite(values).all(axis=2))
    if spoiled:
        raise UnusableImageError(
            f"{spoiled:,} of its {values[:, :, 0].size:,} pixels are NaN or infinite: write a "
            "number there, where nothing was measured the smallest one"
        )
    return np.stack([_stretch_band(band) for band in np.moveaxis(values, 2, 0)], axis=2)


def _stretch_band(band: np.ndarray) -> np.ndarray:
    wide: np.ndarray = band.astype(np.int32 if is_short(band) else np.float64)
    low, high = np.percentile(wide, PERCENTILES, overwrite_input=True)
    width = high - low if high > low else 1.0
    return by_number(band, lambda n: (((n.astype(float) - low) / width).clip(0, 1) * 255).round())


def is_short(values: np.ndarray) -> bool:
    """Returns whether values are whole numbers of at most 16 bits."""
    return values.dtype.kind in "iu" and values.dtype.itemsize <= 2


def by_number(values: np.ndarray, shade: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Returns ``shade(values)`` as uint8; of many short values it is computed once for a number.

    A small file can be an image of 50 megapixels, for which each step in 64 bits takes a gigabyte.

    Args:
        values: numbers of any shape.
        shade: maps each number by itself to [0, 255], whatever the shape.
    """
    if not is_short(values) or values.size < 2**18:
        return shade(values).astype(np.uint8)
    places = values.view(values.dtype.str.replace("i", "u"))
    table = np.zeros(256**values.dtype.itemsize, np.uint8)
    table[places] = 1
    found = np.flatnonzero(table).astype(places.dtype)
    table[found] = shade(found.view(values.dtype))
    return table[places]


Resize = Literal["squash", "crop", "pad"]
"""How an image becomes square.

``squash`` stretches both sides, as torchvision's ``Resize((size, size))`` does; ``crop`` scales the
short side and cuts the centre out; ``pad`` scales the long side and adds black bars.
"""


AS_IT_IS = Reading()


def decode_image(
    path: ImageSource,
    size: int,
    resize: Resize = "squash",
    reading: Reading = AS_IT_IS,
    bits: Depths = 0,
    most: int | None = None,
) -> np.ndarray:
    """Decodes an image file to RGB at ``size`` x ``size``.

    Grey, palette, CMYK and deeper images become 8-bit RGB, transparent ones are laid over white,
    the camera's orientation tag is obeyed, and the first frame of an animation is taken.

    Pillow may warn about odd files that it can still read, see :func:`quiet_pillow`.

    Args:
        path: the file.
        size: the side of the result in pixels.
        resize: how the image becomes square.
        reading: which bands become colours, and which values black and white.
        bits: the depth that images of its domain use, see :func:`depth_of_white`.
        most: the largest number of pixels allowed; by default and at most ``MOST_PIXELS``.

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
    bits: Depths = 0,
    most: int | None = None,
) -> list[np.ndarray]:
    """Decodes an image file once and returns parts of it, each at ``size`` x ``size``.

    Args:
        path: the file.
        boxes: left, top, right and bottom of each part in pixels; None for the whole image.
        size: see :func:`decode_image`, also for the other arguments.
        resize: how a part becomes square.
        reading: which bands become colours, and which values black and white.
        bits: the depth that images of its domain use.
        most: the largest number of pixels of an image taken whole; by default ``MOST_PIXELS``.

    Raises:
        UnusableImageError: see :func:`decode_image`; an UnreadImageError if it may be read another
            time.
        MissingPackage: the extra ``tiff`` is not installed, and this image needs it.
    """
    most = (most or MOST_PIXELS) if None in boxes else MOST_TILED_PIXELS
    try:
        with open_image(path) as image:
            width, height = _tiff_size(path) if image is None else image.size
            if width * height > most:
                remedy = CUT if most == MOST_PIXELS else ""
                size_found = f"{width} x {height} pixels"
                raise OversizedImageError(f"{size_found}, more than {most:,}", remedy)
            with nullcontext() if width * height <= MOST_PIXELS else ONE_HUGE_IMAGE:
                if image is None:
                    colours = to_image(read_tiff(path, most), reading, bits)
                    return [make_square(_part(colours, box), size, resize) for box in boxes]
                if None in boxes:
                    # A JPEG far larger than needed is decoded at 1/2, 1/4 or 1/8, never below
                    # three times the wanted size: several times faster, and hardly
                    # distinguishable after resizing.
                    image.draft(None, (3 * size, 3 * size))
                colours = _to_rgb(path, image, reading, bits)
                turn = _ORIENTATIONS.get(_orientation(image))
                if turn is not None and colours.size != (width, height):
                    # Pillow says a turned TIFF's size, and deep values come as they are stored.
                    colours, turn = colours.transpose(turn), None
                parts = [_part(colours, box) for box in boxes]
                upright = parts if turn is None else [part.transpose(turn) for part in parts]
                return [make_square(part, size, resize) for part in upright]
    except (UnusableImageError, MissingPackage):
        raise
    except Exception as error:  # Pillow's decoders raise many kinds on a broken file
        raise _unusable(path, error) from error


def _part(image: Image.Image, box: Box | None) -> Image.Image:
    return image if box is None else image.crop(box)


@contextmanager
def quiet_pillow(*, tiled: bool = False) -> Iterator[None]:
    """Silences Pillow's warnings about odd files; an oversized image raises.

    Enter it around a whole pool of decoding threads, never inside one: warning filters belong to
    the process, and so does Pillow's limit. Of several blocks in threads the first changes them,
    and the last one puts them back.

    Args:
        tiled: whether images are cut into tiles, so that larger ones are allowed.
    """
    with _quiet_lock:
        if not _quiet_blocks:
            _afterwards.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", module=r"PIL\.")
            warnings.filterwarnings("error", category=Image.DecompressionBombWarning)
            _afterwards.callback(_PILLOW.setLevel, _PILLOW.level)
            _PILLOW.setLevel(logging.CRITICAL)
            _afterwards.callback(setattr, Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
        _quiet_blocks.append(tiled)
        if tiled:
            Image.MAX_IMAGE_PIXELS = MOST_TILED_PIXELS
    try:
        yield
    finally:
        with _quiet_lock:
            _quiet_blocks.remove(tiled)
            if not _quiet_blocks:
                _afterwards.close()


_quiet_lock, _quiet_blocks, _afterwards = Lock(), list[bool](), ExitStack()


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


def _to_rgb(path: ImageSource, image: Image.Image, reading: Reading, bits: Depths) -> Image.Image:
    if image.format == "DICOM":  # what is black and what is white, its window has said
        reading = replace(reading, range="auto")
    if reading.bands or reading.range == "percentile" or is_deep(image):
        return to_image(read_samples(path, image), reading, bits)
    return as_rgb(image)


def as_rgb(image: Image.Image) -> Image.Image:
    """Returns an image of 8 bits a colour as RGB, what is transparent being white.

    Raises:
        UnusableImageError: it has more bits, of which Pillow would keep those below 256.
    """
    if image.mode not in _PLAIN_MODES:
        raise UnusableImageError(f"has more than 8 bits a colour (Pillow's mode {image.mode})")
    if image.mode == "RGB" and "transparency" not in image.info:
        return image.copy()
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def _orientation(source: Image.Image) -> int:
    try:
        orientation: int = source.getexif().get(_ORIENTATION_TAG, 1)
    except Exception:  # a damaged tag block says nothing about the pixels
        return 1
    return orientation


def _unusable(path: ImageSource, error: Exception) -> UnusableImageError:
    if isinstance(error, FileNotFoundError):
        return UnusableImageError("file not found")
    if isinstance(error, OSError) and error.errno is not None:
        kind = UnusableImageError if error.errno in _LASTING else UnreadImageError
        return kind(f"cannot be read: {error.strerror}")
    if isinstance(error, MemoryError):
        return UnreadImageError("cannot be read: out of memory")
    if isinstance(error, UnidentifiedImageError):
        with open_source(path) as file:
            if not file.read(1):
                return UnusableImageError("empty file")
        ending = path.suffix.lower()
        if ending in REMEDIES and ending not in IMAGE_SUFFIXES:
            return UnknownFormatError(f"not a known format; {ending}: {REMEDIES[ending]}")
        return UnknownFormatError("not an image in a known format")
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return OversizedImageError(f"more than {MOST_PIXELS:,} pixels", CUT)
    text = " ".join(str(error).split()) or type(error).__name__
    return UnusableImageError(f"cannot be decoded: {text}")
