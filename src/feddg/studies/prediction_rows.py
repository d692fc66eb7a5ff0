"""Predictions as rows of CSV, JSON lines or Parquet."""

import csv
import io
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from feddg.errors import DataError
from feddg.records import as_cell
from feddg.studies.prediction import Prediction

TEXT_SUFFIXES = (".csv", ".jsonl")
SUFFIXES = (*TEXT_SUFFIXES, ".parquet")
ROWS_AT_ONCE = 4096


def columns(class_names: Sequence[str], probabilities: bool) -> list[str]:
    """Returns the names of the columns."""
    names = ["file", "label", "confidence", "energy", "unlike_training", "reason"]
    return names + [f"probability: {name}" for name in class_names if probabilities]


def cells(row: Prediction, classes: int, probabilities: bool) -> list[Any]:
    """Returns what a prediction holds, column by column; None where there is nothing."""
    unlike = None if row.unlike_training is None else ("yes" if row.unlike_training else "no")
    found = [row.file, row.label, rounded(row.confidence), rounded(row.energy), unlike]
    shares = row.probabilities or (None,) * classes
    return [*found, row.reason, *(rounded(share) for share in shares if probabilities)]


def csv_text(rows: Sequence[Sequence[Any]]) -> str:
    """Returns rows as lines of CSV; texts that a spreadsheet would compute begin with ``'``."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([as_cell(cell) for cell in row] for row in rows)
    return text.getvalue()


def json_lines(rows: Sequence[Sequence[Any]], names: Sequence[str]) -> str:
    """Returns rows as JSON lines, one object each."""
    objects = (dict(zip(names, row)) for row in rows)
    return "".join(json.dumps(found, ensure_ascii=False) + "\n" for found in objects)


def check_suffix(out: Path) -> None:
    """Makes sure that a file can be written as its ending says.

    Raises:
        DataError: the ending is unknown, its extra is not installed, or a folder is in the way.
    """
    if out.suffix.lower() not in SUFFIXES:
        raise DataError(f"{out} must end in one of {', '.join(SUFFIXES)}")
    if out.is_dir():
        raise DataError(f"{out} is a folder; name a file")
    if out.suffix.lower() == ".parquet":
        parquet()


def parquet(otherwise: str = "let --out end in .csv") -> Any:
    """Returns PyArrow, with its Parquet module loaded.

    Args:
        otherwise: what else the user can do, for the message.

    Raises:
        DataError: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"Parquet needs PyArrow: pip install 'feddg[parquet]'; or {otherwise}"
        ) from None
    return pyarrow


class ParquetRows:
    """A Parquet file that grows by batches of rows.

    Args:
        path: the file.
        names: of its columns; numbers are float64, everything else text.
    """

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        arrow = parquet()
        number, text = arrow.float64(), arrow.string()
        kinds = [
            (name, number if name in ("confidence", "energy") or ": " in name else text)
            for name in names
        ]
        self._arrow, self._schema = arrow, arrow.schema(kinds)
        self._writer = arrow.parquet.ParquetWriter(path, self._schema)

    def append(self, rows: Sequence[Sequence[Any]]) -> None:
        """Writes rows as one group."""
        table = [dict(zip(self._schema.names, row)) for row in rows]
        self._writer.write_table(self._arrow.Table.from_pylist(table, schema=self._schema))

    def close(self) -> None:
        """Writes the file's end."""
        self._writer.close()


def write_parquet(lines: Path, out: Path, names: Sequence[str]) -> None:
    """Writes a table of JSON lines as Parquet, some thousand rows at a time.

    Args:
        lines: the table as :func:`json_lines` writes it.
        out: the Parquet file.
        names: of the columns.
    """
    rows = ParquetRows(out, names)
    with lines.open(encoding="utf-8", newline="\n") as table:
        while group := list(islice(table, ROWS_AT_ONCE)):
            rows.append([list(json.loads(line).values()) for line in group])
    rows.close()


def rounded(value: float | None) -> float | None:
    """Returns six decimals of a number: the digits that do not depend on the machine."""
    return None if value is None else round(value, 6)
