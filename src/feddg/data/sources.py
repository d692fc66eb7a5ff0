"""Where images come from: a registry of sources, each giving an ``ImageTable``.

A source is a function ``(root, **options) -> ImageTable``. Another package adds one with
``@register_source("name")``, or without being imported first through an entry point of the group
``feddg.sources``.
"""

import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import numpy as np

from feddg.data.images import LAYOUT, ImageTable, from_folder, plain_name
from feddg.errors import DataError, nearest

ENTRY_POINTS = "feddg.sources"
PACS_COUNTS = {"photo": 1670, "art_painting": 2048, "cartoon": 2344, "sketch": 3929}
PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
PACS_FOLDERS = ("pacs", "kfold", "images", "rawimages")

Source = Callable[..., ImageTable]

logger = logging.getLogger("feddg")
_sources: dict[str, Source] = {}


def register_source(name: str) -> Callable[[Source], Source]:
    """Registers the decorated function ``(root, **options) -> ImageTable`` under ``name``.

    Raises:
        DataError: another function already has this name.
    """

    def register(source: Source) -> Source:
        if _sources.setdefault(name, source) is not source:
            raise DataError(f"There already is a data source named '{name}'. Choose another name.")
        return source

    return register


def source_names() -> list[str]:
    """Returns the names ``load_source`` knows, sorted; other packages' included."""
    return sorted({*_sources, *_installed_sources()})


def load_source(name: str, root: Path | str | None = None, **options: object) -> ImageTable:
    """Returns the images of a source.

    Args:
        name: one of ``source_names()``.
        root: the folder of the images, where the source needs one.
        **options: what the source itself takes.

    Raises:
        DataError: the name or an option is unknown, or the images cannot be listed.
    """
    source = _find(name)
    folder = None if root is None else Path(root).expanduser()
    try:
        inspect.signature(source).bind(folder, **options)
    except TypeError as error:
        raise DataError(f"The data source '{name}' cannot be used this way: {error}.") from None
    return source(folder, **options)


def _find(name: str) -> Source:
    if name in _sources:
        return _sources[name]
    installed = _installed_sources()
    if name not in installed:
        known = source_names()
        raise DataError(
            f"There is no data source {name!r}{nearest(name, known)}; "
            f"there are: {', '.join(known)}."
        )
    try:
        loaded: Source = installed[name].load()
    except Exception as error:
        raise DataError(
            f"The data source '{name}' ({installed[name].value}) cannot be loaded: {error}"
        ) from error
    return loaded


def _installed_sources() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


def _needs_root(source: str, root: Path | None) -> Path:
    if root is None:
        raise DataError(f"The data source '{source}' needs the folder of its images (root).")
    return root


@register_source("folder")
def folder(root: Path | None) -> ImageTable:
    """Any folder laid out as ``root/domain/class/image``.

    Raises:
        DataError: the folder is missing or empty, or has fewer than two classes.
    """
    table = from_folder(_needs_root("folder", root))
    if len(table.class_names) < 2:
        raise DataError(
            f"{root} holds the class '{table.class_names[0]}' only; there is nothing to tell "
            f"apart. Expected two or more class folders: {LAYOUT}."
        )
    return table


@register_source("pacs")
def pacs(root: Path | None) -> ImageTable:
    """PACS (Li et al., ICCV 2017): photos, art paintings, cartoons and sketches of 7 classes.

    Domains have the order of the FedDG benchmark's files (photo, art_painting, cartoon, sketch)
    whatever the spelling of their folders; labels are in alphabetical order. Image counts that
    differ from the published ones are logged as a warning, since copies differ.

    Args:
        root: the folder of the four domains, or the one around it.

    Raises:
        DataError: a domain is missing, or a class folder is not one of PACS's seven.
    """
    found = from_folder(_pacs_folder(_needs_root("pacs", root)))
    table = _rename(found, tuple(PACS_COUNTS), PACS_CLASSES)
    for domain, images in zip(table.domain_names, table.counts().sum(axis=1).tolist()):
        if images != PACS_COUNTS[domain]:
            logger.warning(
                "PACS has %d images in %s; %s holds %d.",
                PACS_COUNTS[domain],
                domain,
                table.root,
                images,
            )
    return table


@register_source("digits")
def digits(root: Path | None = None) -> ImageTable:
    """Handwritten digits in four domains (ink, chalk, photo, sketch), built in: see ``digits.py``.

    Raises:
        DataError: a folder was given, which would go unused.
    """
    if root is not None:
        raise DataError("The data source 'digits' is built in and reads no folder: leave out root.")
    from feddg.data.digits import render_digits  # scikit-learn's data sets are slow to import

    return render_digits()


def _pacs_folder(root: Path) -> Path:
    """Returns the folder that holds the domains: ``root``, or one known folder inside it."""
    while root.is_dir():
        inside = {plain_name(path.name): path for path in root.iterdir() if path.is_dir()}
        nested = [inside[name] for name in PACS_FOLDERS if name in inside]
        if len(nested) != 1 or any(plain_name(domain) in inside for domain in PACS_COUNTS):
            return root
        root = nested[0]
    return root


def _rename(
    table: ImageTable, domain_names: tuple[str, ...], class_names: tuple[str, ...]
) -> ImageTable:
    """Gives a table the names and order of a benchmark; images of other domains are left out."""
    domain_of = _positions(table.domain_names, domain_names)
    missing = [name for i, name in enumerate(domain_names) if i not in domain_of]
    if missing:
        raise DataError(
            f"{table.root} lacks {', '.join(missing)}. Found: {', '.join(table.domain_names)}."
        )
    extra = [name for name, i in zip(table.domain_names, domain_of) if i < 0]
    if extra:
        logger.warning("%s: %s left out; not a domain of it.", table.root, ", ".join(extra))
    kept = table.take(np.flatnonzero(domain_of[table.domains] >= 0))
    class_of = _positions(kept.class_names, class_names)
    strange = [kept.class_names[i] for i in np.unique(kept.labels) if class_of[i] < 0]
    if strange:
        raise DataError(
            f"{table.root} has unexpected class folders: {', '.join(strange)}. Expected "
            f"{', '.join(class_names)}. For other images, use the source 'folder'."
        )
    return replace(
        kept,
        labels=class_of[kept.labels],
        domains=domain_of[kept.domains],
        class_names=class_names,
        domain_names=domain_names,
    )


def _positions(found: tuple[str, ...], wanted: tuple[str, ...]) -> np.ndarray:
    """Returns, for each found name, its position among the wanted ones; -1 if it has none."""
    position = {plain_name(name): i for i, name in enumerate(wanted)}
    return np.array([position.get(plain_name(name), -1) for name in found], dtype=np.int64)
