"""A table of predictions read back: its most doubtful rows, and what all of them come to."""

import csv
import heapq
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feddg.errors import DataError
from feddg.records import from_cell
from feddg.storage import why
from feddg.studies.prediction_rows import check_suffix, parquet

MOST_SHOWN = 300
MOST_FAULTS = 100


@dataclass(frozen=True)
class PredictedRow:
    """A row of a table of predictions.

    Attributes:
        file: as in the table.
        label: the most probable class; empty where the file cannot be used.
        confidence: its probability, in [0, 1].
        unlike_training: whether the warning light is on; None without one.
        reason: why the file cannot be used; empty where it can.
    """

    file: str
    label: str
    confidence: float
    unlike_training: bool | None
    reason: str


@dataclass(frozen=True)
class Doubtful:
    """What a table comes to.

    Attributes:
        rows: the least confident rows, the most doubtful first.
        faults: the first rows that cannot be used.
        total: rows of the table.
        failed: of them, how many cannot be used.
        unlike: on how many the warning light is on; None without one.
        labels: how many rows have each label.
    """

    rows: list[PredictedRow]
    faults: list[PredictedRow]
    total: int
    failed: int
    unlike: int | None
    labels: Counter[str]


def doubtful(table: Path, most: int = MOST_SHOWN) -> Doubtful:
    """Reads a table of ``feddg predict``, in memory that does not grow with it.

    Args:
        table: the file, CSV, JSON lines or Parquet.
        most: how many doubtful rows are kept.

    Raises:
        DataError: it cannot be read.
    """
    faults: list[PredictedRow] = []
    labels: Counter[str] = Counter()
    total = failed = unlike = 0
    lit = False

    def usable() -> Iterator[PredictedRow]:
        nonlocal total, failed, unlike, lit
        for row in _rows(table):
            total += 1
            if row.reason:
                failed += 1
                if len(faults) < MOST_FAULTS:
                    faults.append(row)
                continue
            labels[row.label] += 1
            unlike += row.unlike_training is True
            lit = lit or row.unlike_training is not None
            yield row

    try:
        rows = heapq.nsmallest(most, usable(), key=lambda row: row.confidence)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{table} is no table of `feddg predict`: {why(error)}") from None
    return Doubtful(rows, faults, total, failed, unlike if lit else None, labels)


def _rows(table: Path) -> Iterator[PredictedRow]:
    check_suffix(table)
    for row in _READERS[table.suffix.lower()](table):
        unlike = row["unlike_training"]
        yield PredictedRow(
            row["file"],
            row["label"] or "",
            float(row["confidence"] or 0),
            None if not unlike else unlike == "yes",
            row["reason"] or "",
        )


def _read_csv(table: Path) -> Iterator[dict[str, Any]]:
    with table.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            yield {name: from_cell(cell or "") for name, cell in row.items()}


def _read_lines(table: Path) -> Iterator[dict[str, Any]]:
    with table.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def _read_parquet(table: Path) -> Iterator[dict[str, Any]]:
    wanted = ["file", "label", "confidence", "unlike_training", "reason"]
    for batch in parquet().parquet.ParquetFile(table).iter_batches(columns=wanted):
        yield from batch.to_pylist()


_READERS = {".csv": _read_csv, ".jsonl": _read_lines, ".parquet": _read_parquet}
