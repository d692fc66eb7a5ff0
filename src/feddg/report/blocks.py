"""The parts of a page (tables, charts, notes, pictures) and their templates."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Template
from PIL import Image, UnidentifiedImageError, features

from feddg.data.decoding import (
    AS_IT_IS,
    Depths,
    Reading,
    Tile,
    UnusableImageError,
    decode_parts,
    quiet_pillow,
)
from feddg.data.images import FORMATS
from feddg.errors import MissingPackage, RunError
from feddg.storage import file_faults, open_file, replace_text
from feddg.text import templates_of

SMALL_ENOUGH = 100_000
WIDEST = 1600
QUALITY = 82


class Block:
    """A part of a page; the template ``blocks.html.j2`` has a branch for each kind."""

    @property
    def kind(self) -> str:
        """The name of the template's branch, such as ``table`` or ``chart``."""
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Cell:
    """A field of a table.

    Attributes:
        text: The text.
        strong: Whether it is emphasised, as the most important number.
        chose: Whether this number decided which round its column shows.
        items: A list that can be unfolded below the text.
    """

    text: str
    strong: bool = False
    chose: bool = False
    items: tuple[str, ...] = ()


@dataclass(frozen=True)
class Column:
    """A column of a table: heading, a line below it, and whether it contains numbers."""

    heading: str
    note: str = ""
    numeric: bool = True


@dataclass(frozen=True)
class Table(Block):
    """Rows of cells under headings.

    Attributes:
        columns: The headings.
        rows: Rows, each with as many cells as there are columns.
        caption: The visible caption.
        grouped: Whether rows with the same first field are grouped under that field.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    grouped: bool = False


@dataclass(frozen=True)
class Chart(Block):
    """An interactive figure: plotly's data and layout."""

    figure: dict[str, Any]
    height: int
    caption: str


@dataclass(frozen=True)
class Gallery(Block):
    """Picture files with their captions; small ones may stand side by side."""

    pictures: Sequence[tuple[Path, str]]
    small: bool = False


@dataclass(frozen=True)
class Facts(Block):
    """Key numbers, side by side; a row has a label, the value, and an explanation."""

    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Answers(Block):
    """Questions with their answers in plain words, one below the other."""

    answers: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Prose(Block):
    """A paragraph; a notice is emphasised, to be read first."""

    text: str
    notice: bool = False


@dataclass(frozen=True)
class Code(Block):
    """Text shown verbatim."""

    text: str


@dataclass(frozen=True)
class Fold(Block):
    """Blocks that are folded until opened."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Section:
    """Blocks under a heading; ``folded`` ones are hidden until opened."""

    title: str
    blocks: Sequence[Block]
    folded: bool = False


def section_of(title: str, *blocks: Block | None, folded: bool = False) -> Section | None:
    """Returns a section of the blocks that are not None; None if there are none."""
    present = [block for block in blocks if block is not None]
    return Section(title, present, folded) if present else None


@dataclass(frozen=True)
class Page:
    """A complete report.

    Attributes:
        title: The page's heading.
        lead: A paragraph below it: the result in plain words.
        tags: Short facts beside the heading, such as the status.
        opening: Blocks before the first section.
        sections: The sections, listed as links at the top.
    """

    title: str
    lead: str
    tags: Sequence[str]
    opening: Sequence[Block]
    sections: Sequence[Section]


@cache
def template_named(name: str, package: str = "feddg.report", folder: str = "templates") -> Template:
    """Returns a template; it escapes all text and raises on unknown names.

    Args:
        name: the file name.
        package: the package with the templates.
        folder: their folder in the package.
    """
    return templates_of(package, folder, escape=True).get_template(name)


def write_file(out: Path, text: str) -> Path:
    """Writes a file of a report; returns its path.

    Raises:
        RunError: it cannot be written.
    """
    with file_faults(RunError, f"Cannot write the report {out}"):
        replace_text(out, text)
    return out


def data_uri(path: Path) -> tuple[str, int, int] | None:
    """Returns a picture file as a ``data:`` address, with width and height in pixels.

    A large file is scaled to ``WIDEST`` pixels and stored as WebP where that is smaller.

    Returns:
        None if the file is not a readable picture, so that a report does not fail because of it.
    """
    try:
        with open_file(path) as file:
            content = file.read()
        with Image.open(io.BytesIO(content), formats=FORMATS) as picture:
            picture.load()
            width, height = picture.size
            kind = Image.MIME.get(picture.format or "", "image/png")
            smaller = _compressed(picture) if len(content) > SMALL_ENOUGH else None
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError, SyntaxError):
        return None
    if smaller is not None and len(smaller) < len(content):
        content, kind = smaller, "image/webp"
    return data_address(kind, content), width, height


def _compressed(picture: Image.Image) -> bytes | None:
    if not features.check("webp"):
        return None
    colours = picture.convert("RGBA" if "A" in picture.getbands() else "RGB")
    colours.thumbnail((WIDEST, 8 * WIDEST), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    colours.save(buffer, "WEBP", quality=QUALITY, method=5)
    return buffer.getvalue()


def picture_of(name: str, side: int, reading: Reading = AS_IT_IS, bits: Depths = 0) -> str | None:
    """Returns an image file, or a tile of one, as the ``data:`` address of a small JPEG.

    Args:
        name: as a prediction names it; see :class:`feddg.data.decoding.Tile`.
        side: of the JPEG in pixels.
        reading: see :func:`feddg.data.decoding.decode_image`; likewise ``bits``.
        bits: the depth that the images use.

    Returns:
        None if the file cannot be read any more.
    """
    tile = Tile.named(name)
    try:
        with quiet_pillow(tiled=tile.box is not None):
            (pixels,) = decode_parts(Path(tile.file), [tile.box], side, "pad", reading, bits)
    except (UnusableImageError, MissingPackage):
        return None
    stored = io.BytesIO()
    Image.fromarray(pixels).save(stored, "JPEG", quality=80)
    return data_address("image/jpeg", stored.getvalue())


def data_address(kind: str, content: bytes) -> str:
    """Returns content of a MIME type as a ``data:`` address."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
