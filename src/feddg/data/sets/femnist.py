"""FEMNIST: handwritten digits and letters of 3,550 writers, each a domain."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from feddg.data.data_set import define
from feddg.data.images import ImageTable, folder_names, from_folder, listed_images
from feddg.data.published import compare_counts, folder_of, read_metadata, rename
from feddg.data.splits import ROLES

TABLES = ("metadata.csv", "femnist_new_metadata.csv")


def list_femnist(root: Path | None) -> ImageTable:
    """FEMNIST as WILDS' folder with ``metadata.csv``, or from the mirror, in ``writer/class``.

    Raises:
        DataError: neither exists, or the list has another format.
    """
    folder = folder_of(FEMNIST, root, lambda folder: _has_table(folder) or _has_writers(folder))
    if folder is not None and not _has_table(folder):
        table = rename(from_folder(folder), FEMNIST)
        return replace(table, clients=np.array(table.domain_names)[table.domains])
    table = _listed(root)
    compare_counts(FEMNIST, table)
    return table


def _has_table(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TABLES)


def _has_writers(folder: Path) -> bool:
    writers = folder_names(folder)
    return bool(writers) and not {*FEMNIST.classes}.isdisjoint(folder_names(folder / writers[0]))


def _listed(root: Path | None) -> ImageTable:
    wanted, optional = ("path", "split", "y", "domain_remapped"), ("domain",)
    table = read_metadata(FEMNIST, root, wanted, optional, TABLES)
    numbers = table.numbers("domain_remapped")
    writers = table["domain"] if "domain" in table else [f"writer_{number}" for number in numbers]
    by_number = dict(sorted(zip(numbers, writers)))
    return listed_images(
        table.file.parent,
        table["path"],
        [FEMNIST.classes[label] for label in table.numbers("y", len(FEMNIST.classes))],
        writers,
        listed_in=table.file.name,
        split=table.check("split", ROLES),
        clients=writers,
        class_names=FEMNIST.classes,
        domain_names=list(dict.fromkeys([*by_number.values(), *writers])),
    )


FEMNIST = define("femnist", list_femnist)
