"""Split files of the FedDG benchmark, written as its own are."""

import csv
from pathlib import Path

import numpy as np

from feddg.data.images import ImageTable
from feddg.data.splits import ROLES, Splits
from feddg.records import as_cell

COLUMNS = ("", "split", "domain_remapped", "domain", "category", "y", "path")
"""The first one numbers the rows."""


def write_csv(table: ImageTable, splits: Splits, path: Path | str) -> None:
    """Writes splits as a benchmark's file, which ``from_csv`` reads back."""
    roles = np.full(len(table), "", dtype="<U7")
    for role in ROLES:
        roles[getattr(splits, role)] = role
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in np.flatnonzero(roles != "").tolist():
            domain, label = int(table.domains[row]), int(table.labels[row])
            names = (domain, table.domain_names[domain], table.class_names[label])
            cells = (row, roles[row], *names, label, table.paths[row])
            writer.writerow(map(as_cell, cells))
