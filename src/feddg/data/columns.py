"""Tables of images: columns of CSV or Parquet as texts, and WILDS' ``metadata.csv``."""

import csv
import io
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from feddg.data.images import check_folder, folder_names, plain_name
from feddg.errors import DataError, nearest
from feddg.records import from_cell
from feddg.storage import open_file, why

LONGEST_CELL = 1 << 20
PARQUET = (".parquet", ".pq")
TABLES = (".csv", *PARQUET)
_CONTROL = re.compile("[\x00-\x1f\x7f]")


@dataclass(frozen=True, eq=False)
class Columns:
    """Columns of a table, each a list of texts of the same length.

    Attributes:
        file: where they are from.
        values: by the name that was asked for.
        first: number of the first row as a person counts: 2 below a line of names, else 1.
    """

    file: Path
    values: Mapping[str, Sequence[str]]
    first: int

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))

    def __getitem__(self, name: str) -> Sequence[str]:
        return self.values[name]

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def row(self, index: int) -> str:
        """Says which row it is: ``row 3 of patients.csv``, counted as spreadsheets do."""
        return f"row {index + self.first} of {self.file.name}"

    def numbers(self, name: str) -> list[int]:
        """Returns a column of whole numbers.

        Raises:
            DataError: a cell holds none.
        """
        found = []
        for index, text in enumerate(self[name]):
            try:
                found.append(int(text))
            except ValueError:
                raise DataError(
                    f"{self.row(index)} has {text!r} as {name}; expected a whole number."
                ) from None
        return found


def read_columns(
    file: Path, wanted: Collection[str], optional: Collection[str] = (), remedy: str = ""
) -> Columns:
    """Reads columns of a CSV or Parquet file; empty and missing cells are empty texts.

    Cells of a CSV file are separated by commas, or by semicolons or tabs where its first row is.

    Args:
        file: ends in ``.csv``, or ``.parquet`` for Parquet.
        wanted: columns that must be there.
        optional: columns that are read where they are there.
        remedy: what to do where one is missing, as a sentence.

    Raises:
        DataError: it cannot be read, lacks a column, or has no rows.
    """
    parquet = file.suffix.lower() in PARQUET
    names, columns = (_parquet if parquet else _csv)(file, {*wanted, *optional})
    for name in wanted:
        if name not in columns:
            raise DataError(
                f"{file} has no column {name!r}{nearest(name, names)}; it has: "
                f"{', '.join(names) or 'none'}.{' ' if remedy else ''}{remedy}"
            )
    found = Columns(file, columns, 1 if parquet else 2)
    if not len(found):
        raise DataError(f"{file} has no rows.")
    for name, values in columns.items():
        odd = next((index for index, text in enumerate(values) if _CONTROL.search(text)), None)
        if odd is not None:
            raise DataError(
                f"{found.row(odd)} has {values[odd][:80]!r} as {name}, with a control character; "
                "take it out."
            )
    return found


def _csv(file: Path, wanted: Collection[str]) -> tuple[list[str], dict[str, list[str]]]:
    try:
        with open_file(file) as opened:
            text = opened.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text (byte {error.start + 1}).") from None
    except (OSError, ValueError) as error:
        raise DataError(f"Cannot read {file}: {why(error)}.") from None
    before = csv.field_size_limit(LONGEST_CELL)
    try:
        between = _separator(text.split("\n", 1)[0])
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=between, strict=True)
        names = [name.strip() for name in next(lines, [])]
        places = {name: names.index(name) for name in names if name in wanted}
        rows: list[list[str]] = []
        for number, line in enumerate(lines, start=2):
            if len(line) != len(names) and line:
                raise DataError(
                    f"row {number} of {file.name} has {len(line)} cells; the first row names "
                    f"{len(names)} columns."
                )
            rows.append(line or [""] * len(names))
        while rows and not any(rows[-1]):
            rows.pop()  # blank lines at the end
    except csv.Error as error:
        raise DataError(f"{file} cannot be read as CSV: {error}.") from None
    finally:
        csv.field_size_limit(before)
    twice = next((name for name in places if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{file} has two columns called {twice!r}.")
    return names, {
        name: [from_cell(row[place]).strip() for row in rows] for name, place in places.items()
    }


def _separator(names: str) -> str:
    """What separates the names in a first row: most often a comma, a semicolon in some locales."""
    return next((one for one in ",;\t" if one in names), ",")


def _parquet(file: Path, wanted: Collection[str]) -> tuple[list[str], dict[str, list[str]]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(f"{file}: Parquet needs `pip install 'feddg[parquet]'`.") from None
    try:
        with parquet.ParquetFile(file) as opened:
            names = opened.schema_arrow.names
            table = opened.read(columns=[name for name in names if name in wanted])
        return names, {
            name: list(map(_text, table[name].to_pylist())) for name in table.schema.names
        }
    except (OSError, ValueError, ArrowException) as error:
        raise DataError(f"Cannot read {file}: {why(error)}.") from None


def _text(value: object) -> str:
    if value is None or value != value:  # not a number: pandas' missing value
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # pandas turns whole numbers with gaps into floats
    return str(value).strip()


# Data sets of WILDS: a folder with ``metadata.csv``, and the images below it.


ROLES = ("train", "val", "test", "id_val", "id_test")
METADATA = "metadata.csv"


def holding(
    root: Path, files: Collection[str] = (METADATA,), around: Collection[str] = ()
) -> Path | None:
    """Returns the folder that holds one of the files: ``root``, or a known one inside it.

    Args:
        root: where to look.
        files: names, or patterns of names.
        around: names of folders that archives put around.

    Raises:
        DataError: there is no such folder.
    """
    check_folder(root)
    wrappers = {plain_name(name) for name in around}
    inside = [root / name for name in folder_names(root) if plain_name(name) in wrappers]
    deeper = [
        place / name
        for place in inside
        for name in folder_names(place)
        if plain_name(name) in wrappers
    ]
    for folder in (root, *inside, *deeper):
        if any(next(folder.glob(name), None) for name in files):
            return folder
    return None


def read_metadata(
    root: Path,
    title: str,
    around: Collection[str],
    wanted: Collection[str],
    optional: Collection[str] = (),
    files: Collection[str] = (METADATA,),
) -> Columns:
    """Reads the metadata of a data set of WILDS.

    Args:
        root: its folder, or one around it.
        title: its name, for messages.
        around: names that its folder has.
        wanted: columns that must be there.
        optional: columns that may be there.
        files: names of the metadata file, the first that is there.

    Raises:
        DataError: it is not there, or cannot be read.
    """
    folder = holding(root, files, around)
    if folder is None:
        there = ", ".join(sorted(path.name for path in root.iterdir())[:10]) or "nothing"
        raise DataError(
            f"{root} holds no {' or '.join(files)}, as {title} has it in "
            f"{' or '.join(dict.fromkeys(around))}. Found: {there}."
        )
    return read_columns(
        next(folder / name for name in files if (folder / name).is_file()), wanted, optional
    )


def check_images(root: Path, paths: Collection[str], listed_in: str) -> None:
    """Makes sure that a list and its images are beside each other, by a look at a few of them.

    Raises:
        DataError: none of the first is there.
    """
    first = list(paths)[:20]
    if first and not any((root / path).is_file() for path in first):
        raise DataError(
            f"{listed_in} lists images that are not there, the first as {root / first[0]}. Put the "
            "images there, or name another root."
        )


def roles(found: Columns, name: str = "split") -> list[str]:
    """Returns the column of roles.

    Raises:
        DataError: a row has none of WILDS' five.
    """
    for index, role in enumerate(found[name]):
        if role not in ROLES:
            raise DataError(
                f"{found.row(index)} has the split {role!r}; there are: {', '.join(ROLES)}."
            )
    return list(found[name])
