"""What a page is made of: tables, charts, notes, pictures; and the templates that show them."""

import base64
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from PIL import Image, UnidentifiedImageError, features

from feddg.data.images import FORMATS
from feddg.errors import RunError
from feddg.storage import open_file, replace_text, why
from feddg.text import number


class Block:
    """One part of a page; the template ``blocks.html.j2`` has a branch for each kind."""

    @property
    def kind(self) -> str:
        """The name of the template's branch: ``table``, ``chart``, ..."""
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Cell:
    """One field of a table.

    Attributes:
        text: What it says.
        strong: Whether it stands out, as the number a reader looks for.
        chose: Whether this number decided which round its column shows.
        items: A list to unfold below the text.
    """

    text: str
    strong: bool = False
    chose: bool = False
    items: tuple[str, ...] = ()


@dataclass(frozen=True)
class Column:
    """One column of a table: its heading, a line below it, and whether it holds numbers."""

    heading: str
    note: str = ""
    numeric: bool = True


@dataclass(frozen=True)
class Table(Block):
    """Rows of cells under headings.

    Attributes:
        columns: The headings.
        rows: As many cells each as there are columns.
        caption: What the reader sees.
        grouped: Whether rows with the same first field stand together under that field.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    grouped: bool = False


T = TypeVar("T")
MadeColumn = tuple[Column, Callable[[T], Cell | str | float | None]]
"""A column, and what stands in it for the thing that a row is about."""


def column(
    heading: str, cell: Callable[[T], Cell | str | float | None], note: str = ""
) -> MadeColumn[T]:
    """Returns a column of numbers; a cell that is no text yet becomes one by ``number``."""
    return Column(heading, note), cell


def text_column(
    heading: str, cell: Callable[[T], Cell | str | float | None], note: str = ""
) -> MadeColumn[T]:
    """Returns a column of words."""
    return Column(heading, note, numeric=False), cell


def table_of(
    things: Iterable[T],
    columns: Sequence[MadeColumn[T]],
    caption: str = "",
    *,
    grouped: bool = False,
) -> Table:
    """Returns a table with a row for each thing, made column by column."""
    rows = [[_cell(made(thing)) for _, made in columns] for thing in things]
    return Table([heading for heading, _ in columns], rows, caption, grouped)


def _cell(content: Cell | str | float | None) -> Cell:
    if isinstance(content, Cell):
        return content
    return Cell(content if isinstance(content, str) else number(content))


@dataclass(frozen=True)
class Chart(Block):
    """An interactive figure: plotly's data and layout."""

    figure: dict[str, Any]
    height: int
    caption: str


@dataclass(frozen=True)
class Pair(Block):
    """Two charts beside each other where there is room."""

    left: Chart
    right: Chart


@dataclass(frozen=True)
class Gallery(Block):
    """Picture files with their captions."""

    pictures: Sequence[tuple[Path, str]]


@dataclass(frozen=True)
class Fact:
    """One key number: what it is, its value, how to read it, and whether it stands out."""

    label: str
    value: str
    note: str = ""
    accent: bool = False


@dataclass(frozen=True)
class Facts(Block):
    """Key numbers, side by side."""

    facts: Sequence[Fact]


@dataclass(frozen=True)
class Answers(Block):
    """Questions with their answers in plain words, one below the other."""

    answers: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Shares(Block):
    """Parts of a whole as one divided bar: label, share in [0, 1], text of the amount."""

    parts: Sequence[tuple[str, float, str]]
    caption: str


@dataclass(frozen=True)
class Prose(Block):
    """A paragraph; a notice stands out as something to know before reading on."""

    text: str
    notice: bool = False


@dataclass(frozen=True)
class Code(Block):
    """Text shown as it is in the file."""

    text: str


@dataclass(frozen=True)
class Fold(Block):
    """Blocks that stay closed until asked for."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Section:
    """Blocks under a heading; ``folded`` ones stay closed until asked for."""

    title: str
    blocks: Sequence[Block]
    folded: bool = False


def section_of(title: str, *blocks: Block | None, folded: bool = False) -> Section | None:
    """Returns the blocks that there are under a heading; None without any."""
    found = [block for block in blocks if block is not None]
    return Section(title, found, folded) if found else None


@dataclass(frozen=True)
class Page:
    """A whole report.

    Attributes:
        title: The page's heading.
        lead: One paragraph below it: the result in plain words.
        tags: Short facts beside the heading, such as the status.
        opening: Blocks before the first section.
        sections: The sections, listed as links at the top.
    """

    title: str
    lead: str
    tags: Sequence[str]
    opening: Sequence[Block]
    sections: Sequence[Section]


def template_named(name: str, package: str = "feddg.report", folder: str = "templates") -> Template:
    """Returns a template; it escapes every text, and a name it does not know raises.

    Args:
        name: the file's name.
        package: whose templates.
        folder: where in the package they are.
    """
    templates = Environment(
        loader=PackageLoader(package, folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return templates.get_template(name)


def write_file(out: Path, text: str) -> Path:
    """Writes a part of a report; returns ``out``.

    Raises:
        RunError: it cannot be written.
    """
    try:
        replace_text(out, text)
    except OSError as error:
        raise RunError(f"Cannot write the report {out}: {why(error)}.") from None
    return out


# Pictures as part of the page, small enough to travel with it.


SMALL_ENOUGH = 100_000
WIDEST = 1600
QUALITY = 82


def data_uri(path: Path) -> tuple[str, int, int] | None:
    """A picture file as a ``data:`` address with its width and height in pixels.

    A large file is scaled to ``WIDEST`` pixels and stored as WebP where that is smaller.

    Returns:
        None when the file is not a readable picture: a report is not the place to fail for it.
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


def thumbnail(pixels: numpy.ndarray) -> str:
    """``(height, width, 3)`` pixels of 0 to 255 as the ``data:`` address of a JPEG."""
    stored = io.BytesIO()
    Image.fromarray(pixels).save(stored, "JPEG", quality=80)
    return data_address("image/jpeg", stored.getvalue())


def data_address(kind: str, content: bytes) -> str:
    """Content of a MIME type as a ``data:`` address."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
