"""Split files of the FedDG benchmark, written as its own are, and tables to split."""

import csv
from pathlib import Path

import numpy as np

from feddg.data.images import ImageTable
from feddg.data.splits import ROLES, Splits
from feddg.records import as_cell

COLUMNS = ("", "split", "domain_remapped", "domain", "category", "y", "path")
"""The first one numbers the rows."""
NAMES = ("photo", "art_painting", "cartoon", "sketch")


def table_of(counts: np.ndarray, seed: int = 0) -> ImageTable:
    """A table with these counts per domain and class, rows in random order."""
    domains, labels = (np.repeat(ids.ravel(), counts.ravel()) for ids in np.indices(counts.shape))
    order = np.random.default_rng(seed).permutation(len(domains))
    domains, labels = domains[order], labels[order]
    return ImageTable(
        paths=tuple(
            f"{NAMES[d]}/class{y}/{i}.jpg" for i, (d, y) in enumerate(zip(domains, labels))
        ),
        labels=labels,
        domains=domains,
        class_names=tuple(f"class{y}" for y in range(counts.shape[1])),
        domain_names=NAMES[: counts.shape[0]],
        root=Path("images"),
    )


PACS_LIKE = np.array([[189, 202, 432], [379, 255, 449], [389, 457, 405], [772, 80, 160]])


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
