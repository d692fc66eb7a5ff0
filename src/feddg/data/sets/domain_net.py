"""DomainNet (345 classes, six domains) and Mini-DomainNet (126 classes, four domains)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import Field

from feddg.data.columns import read_lists
from feddg.data.data_set import DataSet, define
from feddg.data.images import ImageTable, from_folder, listed_images
from feddg.data.published import compare_counts, domains_folder, rename
from feddg.diagnostics import warn
from feddg.errors import DataError
from feddg.settings import FixedPath, Settings
from feddg.storage import read_text
from feddg.text import counted

MINI_LISTS = "splits_mini"
"""Folder of Mini-DomainNet's lists, below the folder of the domains."""
DUPLICATES = "domain_net_duplicates.txt"
PARTS = {"train": "train", "test": "id_test"}


class DomainNetOptions(Settings):
    """The options of DomainNet in ``data.options``."""

    duplicates: FixedPath | None = Field(
        None,
        description="a file of images to leave out, a path domain/class/image in each line "
        "(DomainBed's domain_net_duplicates.txt); by default the one of this name in the root",
    )


def list_domain_net(root: Path | None, options: DomainNetOptions) -> ImageTable:
    """DomainNet: the official folders, with the official lists if they are beside them.

    The lists give labels and split if they exist; otherwise labels follow a case-sensitive sort of
    the class folders.

    Args:
        root: the folder of the six domains, or one around it.
        options: which images to skip.

    Raises:
        DataError: a domain is missing, or a list cannot be read.
    """
    folder = domains_folder(DOMAIN_NET, root)
    table = _from_lists(folder, DOMAIN_NET, ("", MINI_LISTS))
    if table is None:
        table = rename(from_folder(folder), DOMAIN_NET)
    file = options.duplicates or _duplicates_beside(folder)
    if file is not None:
        table = _without(DOMAIN_NET, table, file)
    if file is None and len(table) > sum(DOMAIN_NET.counts.values()):
        warn(
            "known-copies",
            "DomainNet holds copies: DomainBed leaves 9,431 out.",
            f"Put its {DUPLICATES} into {folder}, or name it: --set data.options.duplicates=FILE.",
        )
    else:
        compare_counts(DOMAIN_NET, table)
    return table


def list_mini_domain_net(root: Path | None) -> ImageTable:
    """Mini-DomainNet: DomainNet's folders, and Dassl's lists with class and split.

    Raises:
        DataError: a list is missing or cannot be read.
    """
    folder = domains_folder(MINI_DOMAIN_NET, root)
    table = _from_lists(folder, MINI_DOMAIN_NET, (MINI_LISTS,))
    if table is None:
        first = MINI_DOMAIN_NET.domains[0]
        raise DataError(
            f"{folder} has no {MINI_LISTS}/ with {first}_train.txt, {first}_test.txt, ..., which "
            f"list the classes of {MINI_DOMAIN_NET.title}. `feddg data get {MINI_DOMAIN_NET.name}` "
            "says where they are."
        )
    file = _duplicates_beside(folder)
    table = table if file is None else _without(MINI_DOMAIN_NET, table, file)
    compare_counts(MINI_DOMAIN_NET, table)
    return table


def _from_lists(folder: Path, definition: DataSet, places: Sequence[str]) -> ImageTable | None:
    """Reads the lists of all domains and parts from one of these places; None if one is missing."""
    keys = [(domain, part) for domain in definition.domains for part in PARTS]
    lists = [[folder / place / f"{domain}_{part}.txt" for domain, part in keys] for place in places]
    files = next((files for files in lists if all(file.is_file() for file in files)), None)
    if files is None:
        if some := [file for own in lists for file in own if file.is_file()]:
            warn(
                "lists-unused",
                f"{some[0]} is there, but not the lists of all domains and parts: none is used.",
            )
        return None
    key_of = dict(zip(files, keys))
    rows, class_names = read_lists(files)
    return listed_images(
        folder,
        [path for _, path, _ in rows],
        [label for _, _, label in rows],
        [key_of[file][0] for file, _, _ in rows],
        listed_in="the official lists",
        split=[PARTS[key_of[file][1]] for file, _, _ in rows],
        class_names=class_names,
        domain_names=definition.domains,
    )


def _duplicates_beside(folder: Path) -> Path | None:
    files = (folder / DUPLICATES, folder.parent / DUPLICATES)
    return next((file for file in files if file.is_file()), None)


def _without(definition: DataSet, table: ImageTable, file: Path) -> ImageTable:
    """Returns the table without the images that a file lists."""
    lines = read_text(file, DataError).splitlines()
    listed = {line.strip().removeprefix("./") for line in lines} - {""}
    rows = np.flatnonzero([path not in listed for path in table.paths])
    warn(
        "images-left-out",
        f"{definition.title}: {counted(len(table) - len(rows), 'image')} left out, of "
        f"{len(listed)} that {file} lists as domain/class/image.",
    )
    return table.take(rows)


DOMAIN_NET = define("domain_net", list_domain_net, DomainNetOptions)
MINI_DOMAIN_NET = define("mini_domain_net", list_mini_domain_net)
