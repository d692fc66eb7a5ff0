"""Reads columns of a CSV file as texts, and lists of images."""

import csv
import io
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from feddg.data.images import is_printable
from feddg.errors import DataError, nearest
from feddg.records import from_cell
from feddg.storage import read_text

FIRST = 2
"""Number of the first row, below the header line."""


@dataclass(frozen=True, eq=False)
class Columns:
    """Columns of a table, each a list of texts of the same length.

    Attributes:
        file: the file they were read from.
        values: the cells of each column, by the name that was asked for.
    """

    file: Path
    values: Mapping[str, Sequence[str]]

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))

    def __getitem__(self, name: str) -> Sequence[str]:
        return self.values[name]

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def row(self, index: int) -> str:
        """Returns the name of a row for messages, such as ``row 3 of patients.csv``."""
        return f"row {index + FIRST} of {self.file.name}"

    def check(self, name: str, allowed: Collection[str]) -> Sequence[str]:
        """Returns a column after checking that it holds allowed values only.

        Raises:
            DataError: a cell holds another value.
        """
        allowed = [*allowed]  # a text would hold parts of itself
        for index, text in enumerate(self[name]):
            if text not in allowed:
                raise DataError(
                    f"{self.row(index)} has {text!r} as {name}; expected one of "
                    f"{', '.join(allowed)}."
                )
        return self[name]

    def numbers(self, name: str, below: int | None = None) -> list[int]:
        """Returns a column of whole numbers from 0.

        Args:
            name: of the column.
            below: every number must be less than this; None for no limit.

        Raises:
            DataError: a cell does not hold such a number.
        """
        for index, text in enumerate(self[name]):
            if not text.isdecimal() or (below is not None and int(text) >= below):
                limit = "" if below is None else f" to {below - 1}"
                raise DataError(
                    f"{self.row(index)} has {text!r} as {name}; expected a whole number from 0"
                    f"{limit}."
                )
        return [int(text) for text in self[name]]


def read_columns(
    file: Path, wanted: Collection[str], optional: Collection[str] = (), remedy: str = ""
) -> Columns:
    """Reads columns of a CSV file; empty and missing cells are empty texts.

    Cells are separated by commas, semicolons or tabs; the first row decides.

    Args:
        file: the file.
        wanted: columns that must be there.
        optional: columns that are read if they exist.
        remedy: a sentence for the error message: what to do if a column is missing.

    Raises:
        DataError: the file cannot be read, lacks a column, or has no rows.
    """
    names, columns = _csv(file, {*wanted, *optional})
    for name in wanted:
        if name not in columns:
            raise DataError(
                f"{file} has no column {name!r}{nearest(name, names)}; it has: "
                f"{', '.join(names) or 'none'}.{' ' if remedy else ''}{remedy}"
            )
    table = Columns(file, columns)
    if not len(table):
        raise DataError(f"{file} has no rows.")
    return table


def check_cells(name: str, cells: Sequence[str], row_at: Callable[[int], str]) -> None:
    """Checks that a column has a text in every row, which no line of a file or log would break.

    Args:
        name: the column, for messages.
        cells: its cells.
        row_at: returns what a row is called in messages.

    Raises:
        DataError: a cell is empty, or cannot be printed.
    """
    for place, text in enumerate(cells):
        if not text:
            raise DataError(f"{row_at(place)} has no {name}; fill it in.")
        if not is_printable(text):
            raise DataError(
                f"{row_at(place)} has {text[:80]!r} as {name}, with a character that cannot be "
                "printed; take it out."
            )


def _csv(file: Path, wanted: set[str]) -> tuple[list[str], dict[str, list[str]]]:
    text = read_text(file, DataError, errors="strict")
    first = text.split("\n", 1)[0]
    separator = next((mark for mark in ",;\t" if mark in first), ",")  # semicolons in some locales
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True))
    except csv.Error as error:
        raise DataError(f"{file} cannot be read as CSV: {error}.") from None
    names = [name.strip() for name in rows[0]] if rows else []
    while rows and not any(rows[-1]):
        rows.pop()  # blank lines at the end
    for number, row in enumerate(rows, start=1):
        if row and len(row) != len(names):
            raise DataError(
                f"row {number} of {file.name} has {len(row)} cells; the first row, "
                f"{first.strip()[:80]!r}, names {len(names)} columns."
            )
    columns = {}
    for name in wanted & set(names):
        if names.count(name) > 1:
            raise DataError(f"{file} has two columns called {name!r}.")
        place = names.index(name)
        columns[name] = [from_cell(row[place]).strip() if row else "" for row in rows[1:]]
    return names, columns


def read_lists(files: Sequence[Path]) -> tuple[list[tuple[Path, str, str]], list[str]]:
    """Reads published lists of images, which have a line ``domain/class/image label`` for each.

    Args:
        files: the lists.

    Returns:
        List, path and class of each image; and the classes in the order of their labels.

    Raises:
        DataError: a list cannot be read, a line has another form, or a class two labels.
    """
    rows: list[tuple[Path, str, str]] = []
    class_of: dict[int, str] = {}
    for file in files:
        for number, line in enumerate(read_text(file, DataError).splitlines(), start=1):
            path, _, label = line.strip().rpartition(" ")
            steps = PurePosixPath(path).parts
            if not line.strip():
                continue
            fits = len(steps) == 3 and ".." not in steps and label.isdecimal()
            if not fits or class_of.setdefault(int(label), steps[1]) != steps[1]:
                raise DataError(
                    f"line {number} of {file} is {line.strip()!r}; expected domain/class/image and "
                    "a label, the same as in the other lines of its class alone."
                )
            rows.append((file, path, steps[1]))
    classes = [class_of[label] for label in sorted(class_of)]
    if not rows or len(set(classes)) < len(classes):
        raise DataError(f"{files[0]} and the lists beside it are empty, or a class has two labels.")
    return rows, classes
