"""Folders of published data sets: found below the root, named and ordered as the papers do."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from feddg.data.data_set import DataSet
from feddg.data.images import ImageTable, from_folder, plain_name
from feddg.errors import DataError
from feddg.files import entries

logger = logging.getLogger("feddg")


def needs_root(source: str, root: Path | None) -> Path:
    """Returns the folder of the images.

    Raises:
        DataError: none was given.
    """
    if root is None:
        raise DataError(f"The data source '{source}' needs the folder of its images (root).")
    return root


def load_published(
    definition: DataSet,
    root: Path | None,
    around: Collection[str] = (),
    spellings: Mapping[str, str] | None = None,
) -> ImageTable:
    """Lists the images of a data set whose domains and classes are known, ``domain/class/image``.

    Domains and classes get the names and the order of the definition, whatever the spelling of
    their folders: case, blanks, ``_`` and ``-`` do not matter. Folders of other domains are left
    out, and counts that differ from the published ones are logged, as copies differ.

    Args:
        definition: with ``domains``, ``classes`` and perhaps ``counts``.
        root: the folder of the domains, or one around it.
        around: names of folders that archives put around the domains.
        spellings: further names of domains and classes, with the definition's.

    Raises:
        DataError: no root, a domain is missing, or a class folder is none of the definition's.
    """
    known = {plain_name(name): name for name in (*definition.domains, *definition.classes)}
    known |= {plain_name(name): meant for name, meant in (spellings or {}).items()}
    folder = _domains_folder(needs_root(definition.name, root), definition, around, known)
    table = _rename(from_folder(folder), definition, known)
    for domain, images in zip(table.domain_names, table.counts().sum(axis=1).tolist()):
        published = definition.counts.get(domain, images)
        if images != published:
            logger.warning(
                "%s has %d images in %s; %s holds %d.",
                definition.summary.partition(" (")[0],
                published,
                domain,
                table.root,
                images,
            )
    return table


def _domains_folder(
    root: Path, definition: DataSet, around: Collection[str], known: Mapping[str, str]
) -> Path:
    """Returns the folder that holds the domains: ``root``, or one known folder inside it."""
    wrappers = {plain_name(name) for name in around}
    while root.is_dir():
        below = (root / entry.name for entry in entries(root, DataError))
        inside = {plain_name(path.name): path for path in below if path.is_dir()}
        nested = [path for name, path in inside.items() if name in wrappers]
        if len(nested) != 1 or any(known.get(name) in definition.domains for name in inside):
            return root
        root = nested[0]
    return root


def _rename(table: ImageTable, definition: DataSet, known: Mapping[str, str]) -> ImageTable:
    """Gives a table the names and order of a benchmark; images of other domains are left out."""
    domain_of = _positions(table.domain_names, definition.domains, known)
    missing = [name for i, name in enumerate(definition.domains) if i not in domain_of]
    if missing:
        raise DataError(
            f"{table.root} lacks {', '.join(missing)}. Found: {', '.join(table.domain_names)}."
        )
    extra = [name for name, i in zip(table.domain_names, domain_of) if i < 0]
    if extra:
        logger.warning("%s: %s left out; not a domain of it.", table.root, ", ".join(extra))
    kept = table.take(np.flatnonzero(domain_of[table.domains] >= 0))
    class_of = _positions(kept.class_names, definition.classes, known)
    strange = [kept.class_names[i] for i in np.unique(kept.labels) if class_of[i] < 0]
    if strange:
        raise DataError(
            f"{table.root} has unexpected class folders: {', '.join(strange)}. Expected "
            f"{', '.join(definition.classes)}. For other images, use the source 'folder'."
        )
    return replace(
        kept,
        labels=class_of[kept.labels],
        domains=domain_of[kept.domains],
        class_names=definition.classes,
        domain_names=definition.domains,
    )


def _positions(
    found: tuple[str, ...], wanted: tuple[str, ...], known: Mapping[str, str]
) -> np.ndarray:
    """Returns, for each found name, its position among the wanted ones; -1 if it has none."""
    position = {name: i for i, name in enumerate(wanted)}
    places = [position.get(known.get(plain_name(name), ""), -1) for name in found]
    return np.array(places, dtype=np.int64)
