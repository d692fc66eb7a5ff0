"""What a page is made of.

Sections and their blocks hold text and numbers, no HTML: the templates turn them into a page, and
the same tables can be written in other formats.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar


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
