"""The layouts of DomainNet: folders, folders with official lists, WILDS' metadata."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

import numpy as np

from feddg.data.data_set import DataSet
from feddg.data.images import ImageTable, check_folder, from_folder
from feddg.data.listed_images import listed_images
from feddg.data.published import (
    compare_counts,
    domains_folder,
    known_names,
    published_root,
    rename,
)
from feddg.data.wilds_folders import METADATA, check_images, holding, read_metadata
from feddg.errors import DataError
from feddg.files import read_text

AROUND = ("domain_net", "domainnet", "DomainNet", "images")
WILDS = ("domainnet_v1.0", "domainnet", "domain_net")
LISTS = ("", "splits_mini", "splits", "txt")
"""Folders that hold the lists, below that of the domains."""
DUPLICATES = "domain_net_duplicates.txt"
ROLES = {"train": "train", "test": "id_test"}
WITHOUT_DUPLICATES = {
    "clipart": 48_129,
    "infograph": 51_605,
    "painting": 72_266,
    "quickdraw": 172_500,
    "real": 172_947,
    "sketch": 69_128,
}
log = logging.getLogger("feddg")


@dataclass
class _Listed:
    """Images of lists, in columns."""

    paths: list[str] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    domains: list[str] = field(default_factory=list)
    split: list[str] = field(default_factory=list)


def list_domain_net(
    definition: DataSet,
    root: Path | None,
    duplicates: Path | None,
    with_duplicates: Mapping[str, int] | None = None,
    *,
    needs_lists: bool = False,
) -> ImageTable:
    """Lists DomainNet or a part of it.

    Args:
        definition: with its domains.
        root: the folder of the domains, or one around it.
        duplicates: a file of images to leave out; None for the known one in the folder.
        with_duplicates: counts by domain where nothing is left out.
        needs_lists: whether lists say which classes count.

    Raises:
        DataError: a domain or list is missing, or cannot be read.
    """
    start = published_root(definition, root)
    check_folder(start)
    folder = domains_folder(start, definition, AROUND, known_names(definition))
    lists = _lists(folder, definition.domains, mini=needs_lists)
    if needs_lists and not lists:
        names = f"{definition.domains[0]}_train.txt, {definition.domains[0]}_test.txt, ..."
        raise DataError(
            f"{folder} has no splits_mini/ with {names}, which say the classes of "
            f"{definition.title}. `feddg data get {definition.name}` says where they are."
        )
    if lists:
        table = _from_lists(folder, definition, lists)
    elif holding(start, (METADATA,), WILDS) is not None:
        table = _from_metadata(start, definition)
    else:
        check_folder(folder)
        listed = from_folder(folder)
        table = rename(
            listed, replace(definition, classes=listed.class_names), _names(definition, listed)
        )
    table = _without(table, folder, duplicates, bool(with_duplicates))
    compare_counts(definition, table, *([with_duplicates] if with_duplicates else []))
    return table


def _names(definition: DataSet, table: ImageTable) -> dict[str, str]:
    return known_names(replace(definition, classes=table.class_names))


def _lists(folder: Path, domains: Collection[str], *, mini: bool) -> dict[tuple[str, str], Path]:
    """Returns the list of every domain and part; none where one is missing."""
    for place in ("splits_mini",) if mini else LISTS:
        files = {(d, part): folder / place / f"{d}_{part}.txt" for d in domains for part in ROLES}
        if all(file.is_file() for file in files.values()):
            return files
    return {}


def _from_lists(
    folder: Path, definition: DataSet, lists: Mapping[tuple[str, str], Path]
) -> ImageTable:
    found = _Listed()
    for (domain, part), file in lists.items():
        for number, line in enumerate(read_text(file, DataError).splitlines(), start=1):
            path, _, label = line.strip().rpartition(" ")
            steps = PurePosixPath(path).parts
            if not line.strip():
                continue
            if len(steps) != 3 or ".." in steps or not label.isdecimal():
                raise DataError(
                    f"line {number} of {file} is {line.strip()!r}; expected domain/class/image and "
                    "a label."
                )
            found.paths.append(path)
            found.labels.append(int(label))
            found.classes.append(steps[1])
            found.domains.append(domain)
            found.split.append(ROLES[part])
    return _table(folder, definition, found, "the official lists")


def _from_metadata(root: Path, definition: DataSet) -> ImageTable:
    wanted = ("image_path", "domain", "split", "category", "y")
    found = read_metadata(root, definition.title, WILDS, wanted)
    for index, (domain, part) in enumerate(zip(found["domain"], found["split"])):
        if domain not in definition.domains or part not in ROLES:
            raise DataError(
                f"{found.row(index)} has the domain {domain!r} and the split {part!r}; expected "
                f"one of {', '.join(definition.domains)}, and train or test."
            )
    listed = _Listed(
        list(found["image_path"]),
        found.numbers("y"),
        list(found["category"]),
        list(found["domain"]),
        [ROLES[part] for part in found["split"]],
    )
    return _table(found.file.parent, definition, listed, METADATA)


def _table(folder: Path, definition: DataSet, found: _Listed, listed_in: str) -> ImageTable:
    name_of: dict[int, str] = {}
    for label, name in zip(found.labels, found.classes):
        if name_of.setdefault(label, name) != name:
            raise DataError(
                f"{listed_in} in {folder}: the label {label} stands for both {name_of[label]} and "
                f"{name}."
            )
    if len(set(name_of.values())) < len(name_of):
        raise DataError(f"{listed_in} in {folder}: one class has two labels.")
    check_images(folder, found.paths, f"{listed_in} in {folder}")
    return listed_images(
        folder,
        found.paths,
        found.classes,
        found.domains,
        listed_in=listed_in,
        split=found.split,
        class_names=[name_of[label] for label in sorted(name_of)],
        domain_names=definition.domains,
    )


def _without(
    table: ImageTable, folder: Path, duplicates: Path | None, known_to_have: bool
) -> ImageTable:
    """Leaves the images out that a file lists."""
    file = duplicates
    if file is None:
        places = (folder / DUPLICATES, folder.parent / DUPLICATES)
        file = next((place for place in places if place.is_file()), None)
    if file is None:
        whole = sum(WITHOUT_DUPLICATES.values())
        if known_to_have and len(table) > whole:
            log.warning(
                "DomainNet holds copies: DomainBed leaves 9,431 out. Put its %s into %s, or name "
                "it: --set data.options.duplicates=FILE.",
                DUPLICATES,
                folder,
            )
        return table
    listed = {
        line.strip().removeprefix("./") for line in read_text(file, DataError).splitlines()
    } - {""}
    kept = np.flatnonzero([path not in listed for path in table.paths])
    out = len(table) - len(kept)
    log.warning("DomainNet: %d images left out, as %s lists them.", out, file)
    if listed and not out:
        log.warning(
            "None of the %d lines of %s is an image of %s; lines read domain/class/image.",
            len(listed),
            file,
            folder,
        )
    return table.take(kept)
