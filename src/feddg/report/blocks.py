"""What a page is made of: tables, charts, notes, pictures, and the templates that show them."""

import base64
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from PIL import Image, UnidentifiedImageError, features

from feddg.data.images import FORMATS
from feddg.storage import open_file


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: its heading, a line below it, and whether it holds numbers."""

    heading: str
    note: str = ""
    numeric: bool = True


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under headings.

    Attributes:
        columns: The headings.
        rows: As many cells each as there are columns.
        caption: What the reader sees.
        grouped: Whether rows with the same first field stand together under that field.
    """

    kind: ClassVar = "table"
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    grouped: bool = False


T = TypeVar("T")
MadeColumn = tuple[Column, Callable[[T], Cell | str]]
"""A column, and what stands in it for the thing that a row is about."""


def text_column(heading: str, note: str = "") -> Column:
    """Returns a column of words."""
    return Column(heading, note, numeric=False)


def table_of(
    things: Iterable[T],
    columns: Sequence[MadeColumn[T]],
    caption: str = "",
    *,
    grouped: bool = False,
) -> Table:
    """Returns a table with a row for each thing, made column by column."""
    made = [[cell(thing) for _, cell in columns] for thing in things]
    rows = [[one if isinstance(one, Cell) else Cell(one) for one in row] for row in made]
    return Table([column for column, _ in columns], rows, caption, grouped)


@dataclass(frozen=True, slots=True)
class Chart:
    """An interactive figure: plotly's data and layout."""

    kind: ClassVar = "chart"
    figure: dict[str, Any]
    height: int
    caption: str


@dataclass(frozen=True, slots=True)
class Pair:
    """Two charts beside each other where there is room."""

    kind: ClassVar = "pair"
    left: Chart
    right: Chart


@dataclass(frozen=True, slots=True)
class Gallery:
    """Picture files with their captions."""

    kind: ClassVar = "gallery"
    pictures: Sequence[tuple[Path, str]]


@dataclass(frozen=True, slots=True)
class Fact:
    """One key number: what it is, its value, how to read it, and whether it stands out."""

    label: str
    value: str
    note: str = ""
    accent: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """Key numbers, side by side."""

    kind: ClassVar = "facts"
    facts: Sequence[Fact]


@dataclass(frozen=True, slots=True)
class Shares:
    """Parts of a whole as one divided bar: label, share in [0, 1], text of the amount."""

    kind: ClassVar = "shares"
    parts: Sequence[tuple[str, float, str]]
    caption: str


@dataclass(frozen=True, slots=True)
class Prose:
    """A paragraph; a notice stands out as something to know before reading on."""

    kind: ClassVar = "prose"
    text: str
    notice: bool = False


@dataclass(frozen=True, slots=True)
class Code:
    """Text shown as it is in the file."""

    kind: ClassVar = "code"
    text: str


@dataclass(frozen=True, slots=True)
class Fold:
    """Blocks that stay closed until asked for."""

    kind: ClassVar = "fold"
    title: str
    blocks: "Sequence[Block]"


@dataclass(frozen=True, slots=True)
class Section:
    """Blocks under a heading. A section may stand inside a fold, for one run among several."""

    kind: ClassVar = "section"
    title: str
    blocks: "Sequence[Block]"


Block = Table | Chart | Pair | Gallery | Facts | Shares | Prose | Code | Fold | Section


@dataclass(frozen=True, slots=True)
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


# Templates of pages: found in a package, every text escaped.


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
    return f"data:{kind};base64,{base64.b64encode(content).decode()}", width, height


def _compressed(picture: Image.Image) -> bytes | None:
    if not features.check("webp"):
        return None
    colours = picture.convert("RGBA" if "A" in picture.getbands() else "RGB")
    colours.thumbnail((WIDEST, 8 * WIDEST), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    colours.save(buffer, "WEBP", quality=QUALITY, method=5)
    return buffer.getvalue()


# The words of the pages, explained.


WORDS = {
    "Accuracy": "The share of images that the model names correctly.",
    "Balanced accuracy": "The mean, over the classes, of the share of a class's images that are "
    "recognised. A model that always gives the same answer has one over the number of classes.",
    "Client": "A site, or a simulated one, that trains on images of its own.",
    "Domain": "Images of one kind or source, such as photographs or one hospital's microscope.",
    "Held-out": "A domain that no client trains on. The test domain stands for the unseen one; a "
    "validation domain may choose the round, the test domain never does.",
    "In-domain": "Images of the domains that clients train on, kept out of the training.",
    "Interval (95 %)": "A run's: how far its accuracy may be from that on endless images of the "
    "same kind (Wilson). A margin's: how far it may be from that over endless seeds and scenarios "
    "(Student's t). Neither speaks for other data.",
    "Largest class": "The share of the commonest class among the images: what a constant model, "
    "which always names that class, reaches.",
    "Margin": "A difference of two methods' accuracies, in percentage points.",
    "Precision": "Of the images that got a class's name, the share that are of it.",
    "Recall": "Of a class's images, the share that got its name.",
    "Round": "Clients train for a while, the server makes one model of theirs. Round 0 is before "
    "any training.",
    "Seed": "The number from which all chance in a run is drawn. Other seeds show how much of a "
    "result is chance.",
}
"""Plain explanations, by word."""


def glossary() -> Section:
    """A section with every word, closed until asked for."""
    table = table_of(
        WORDS, [(text_column("Word"), str), (text_column("Meaning"), lambda w: WORDS[w])]
    )
    return Section("Words", [Fold("What the words on this page mean", [table])])
