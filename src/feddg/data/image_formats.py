"""Which files are taken for images, and what is said of those that are not."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import IO

from PIL import Image, features

from feddg.storage import open_file

_ALWAYS = {
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".jfif": "JPEG",
    ".png": "PNG",
    ".bmp": "BMP",
    ".gif": "GIF",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".webp": "WEBP",
}
_JPEG2000 = {".jp2": "JPEG2000", ".j2k": "JPEG2000"}
_AVIF = {".avif": "AVIF"}
_HEIF = {".heic": "HEIF", ".heif": "HEIF"}
"""Photos of phones: decoded by the optional package pillow-heif."""

_SLIDES = "whole-slide images: cut them into tiles first, for example with OpenSlide"
_MEDICAL = "convert them to PNG or TIFF first"
_NUMBERS = "arrays: write them as PNG or TIFF first"
_PACKED = "archives: unpack them"
_FILMS = "films: write their frames as images first"
_RAW = "raw photos: develop them to JPEG or TIFF first"
REMEDIES: Mapping[str, str] = MappingProxyType(
    {suffix: "needs `pip install 'feddg[heic]'`" for suffix in _HEIF}
    | {suffix: "this Pillow was built without JPEG 2000" for suffix in _JPEG2000}
    | {suffix: "this Pillow was built without AVIF" for suffix in _AVIF}
    | dict.fromkeys((".svs", ".ndpi", ".mrxs", ".scn", ".vms", ".bif"), _SLIDES)
    | dict.fromkeys((".dcm", ".nii", ".mha", ".mhd", ".nrrd"), _MEDICAL)
    | dict.fromkeys((".npy", ".npz", ".mat", ".h5", ".hdf5", ".nc"), _NUMBERS)
    | dict.fromkeys((".zip", ".tar", ".gz", ".tgz", ".7z", ".rar"), _PACKED)
    | dict.fromkeys((".mp4", ".avi", ".mov", ".mkv", ".webm"), _FILMS)
    | dict.fromkeys((".cr2", ".cr3", ".nef", ".arw", ".dng", ".orf", ".raf"), _RAW)
    | dict.fromkeys((".svg", ".eps", ".pdf", ".ai"), "drawings: write them as PNG first")
    | dict.fromkeys((".ecw", ".sid", ".img", ".vrt"), "convert them to TIFF first")
)
"""Suffixes of files that hold images all the same, and what to do about them."""


def heif_is_known() -> bool:
    """Whether photos in HEIF can be decoded here."""
    return find_spec("pillow_heif") is not None


def usable_formats() -> dict[str, str]:
    """Returns Pillow's names of the formats that can be decoded here, by suffix."""
    found = dict(_ALWAYS)
    known = features.get_supported()
    if "jpg_2000" in known:
        found |= _JPEG2000
    if "avif" in known:
        found |= _AVIF
    return found | _HEIF if heif_is_known() else found


FORMATS = tuple(dict.fromkeys(name for name in usable_formats().values() if name != "HEIF"))
"""What a file's content may be, whatever its name: Pillow knows dozens of formats, and for some of
them it starts other programs (Ghostscript for EPS). HEIF must be named so, too."""


@dataclass(frozen=True)
class ImageBytes:
    """An image file that lies in memory and on no disk.

    Attributes:
        name: what it is called; only its ending counts.
        content: the file.
    """

    name: str
    content: bytes = field(repr=False)

    @property
    def suffix(self) -> str:
        """The ending of its name."""
        return PurePosixPath(self.name).suffix


ImageSource = Path | ImageBytes
"""Where an image file is."""


def open_source(source: ImageSource) -> IO[bytes]:
    """Opens an image file to read its bytes.

    Raises:
        OSError: it cannot be opened, or is no plain file.
    """
    return BytesIO(source.content) if isinstance(source, ImageBytes) else open_file(source)


@contextmanager
def open_image(path: ImageSource) -> Iterator[Image.Image]:
    """Opens an image file of a usable format with Pillow; nothing is decoded yet.

    Raises:
        PIL.UnidentifiedImageError: its content is of none of these formats.
        OSError: it cannot be opened, or is no plain file.
    """
    formats = FORMATS
    if path.suffix.lower() in _HEIF and heif_is_known():
        register_heif()
        formats = (*FORMATS, "HEIF")
    with open_source(path) as file, Image.open(file, formats=formats) as image:
        yield image


@cache
def register_heif() -> None:
    """Has Pillow decode HEIF, where the optional package is there; may be called again."""
    if heif_is_known():
        from pillow_heif import register_heif_opener

        register_heif_opener()
