"""Reads folders of published data sets, with names and order as in the papers."""

import filecmp
import io
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

from feddg.data.columns import Columns, read_columns
from feddg.data.data_set import DataSet
from feddg.data.images import (
    FORMATS,
    USABLE_FORMATS,
    ImageTable,
    check_folder,
    folder_names,
    from_folder,
    image_names,
    listed_images,
    plain_name,
)
from feddg.diagnostics import warn
from feddg.errors import DataError
from feddg.storage import (
    FILE_MODE,
    cache_folder,
    file_faults,
    hash_of,
    private_folder,
    read_text,
    replace_text,
)

METADATA = "metadata.csv"
LEVELS = 3
"""How deep in the root the folder of a data set may lie."""
_RANK = ("", "train", "id_val", "val", "id_test", "test")
LISTING = ".paths.json"


def needs_root(source: str, root: Path | None) -> Path:
    """Returns the folder of the images.

    Raises:
        DataError: none was given.
    """
    if root is None:
        raise DataError(
            f"The data source '{source}' needs the folder of its images: --root FOLDER, or "
            "data.root in an experiment file."
        )
    return root


def folder_of(definition: DataSet, root: Path | None, holds: Callable[[Path], bool]) -> Path | None:
    """Returns the folder of a data set: the root, or the nearest of the folders inside it.

    Archives are often unpacked into a folder of their name, or into ``downloads``: folders are
    searched level by level, down to :data:`LEVELS` below the root.

    Args:
        definition: the data set, for messages.
        root: where to look.
        holds: returns whether a folder is the right one.

    Raises:
        DataError: no root was given, or a folder cannot be read.
    """
    level = [needs_root(definition.name, root)]
    check_folder(level[0])
    for depth in range(LEVELS + 1):
        if depth:
            level = [folder / name for folder in level for name in folder_names(folder)]
        for folder in level:
            if holds(folder):
                return folder
    return None


def load_published(definition: DataSet, root: Path | None) -> ImageTable:
    """Lists the images of a data set whose domains and classes are known, ``domain/class/image``.

    Domains and classes get the names and order of the definition; case, blanks, ``_`` and ``-`` in
    folder names do not matter. Folders of other domains are skipped, and counts that differ from
    the published ones are logged.

    Args:
        definition: with ``domains``, and perhaps ``classes``, ``counts``, further ``spellings`` and
            ``parts``.
        root: the folder of the domains, or one around it.

    Raises:
        DataError: no root, a domain is missing, or a class folder is not in the definition.
    """
    folder = domains_folder(definition, root)
    folders = [name for name in folder_names(folder) if meant(definition, name)]
    inside = {plain_name(part) for name in folders for part in folder_names(folder / name)}
    listed = _from_parts(folder, folders, definition) if inside & set(definition.parts) else None
    table = rename(listed or from_folder(folder), definition)
    compare_counts(definition, table)
    return table


def domains_folder(definition: DataSet, root: Path | None) -> Path:
    """Returns the folder with all domains, else one with any of them, else the root."""

    def inside(folder: Path) -> set[str | None]:
        return {meant(definition, name) for name in folder_names(folder)}

    domains = {*definition.domains}
    return (
        folder_of(definition, root, lambda folder: domains <= inside(folder))
        or folder_of(definition, root, lambda folder: bool(domains & inside(folder)))
        or needs_root(definition.name, root)
    )


def meant(definition: DataSet, name: str) -> str | None:
    """Returns the definition's name of a domain or class, from a plain spelling of it."""
    if name in definition.domains or name in definition.classes:
        return name  # FEMNIST tells A from a
    name_of = {plain_name(name): name for name in (*definition.domains, *definition.classes)}
    name_of |= {plain_name(other): name for other, name in definition.spellings.items()}
    return name_of.get(plain_name(name))


def compare_counts(definition: DataSet, table: ImageTable) -> None:
    """Logs where numbers of images or classes differ from the published ones.

    Args:
        definition: with ``counts``, ``split_counts`` and classes.
        table: its images.
    """
    found = zip(table.domain_names, table.counts().sum(axis=1).tolist())
    published, here = definition.counts, table.root or "this copy"
    differences = [(name, published[name], count) for name, count in found if name in published]
    if table.split is not None:
        split = table.split.tolist()
        differences += [
            (f"its split {role}", count, split.count(role))
            for role, count in definition.split_counts.items()
        ]
    texts = [
        f"{definition.title} has {count} images in {where}; {here} holds {images} "
        f"({images - count:+d})."
        for where, count, images in differences
        if images != count
    ]
    classes, expected = len(table.class_names), definition.class_count or len(definition.classes)
    if expected and classes != expected:
        texts.append(f"{definition.title} has {expected} classes; {here} holds {classes}.")
    for text in texts:
        warn("other-count", text)


def _from_parts(folder: Path, domains: Collection[str], definition: DataSet) -> ImageTable:
    """Lists images that lie as ``domain/part/class/image``, each once.

    If one part (without a role) repeats the images of all others, an image gets the role of the
    other part with a file of its class, name and content. A domain without parts holds its classes
    itself. An image in parts of two roles goes to
    validation rather than training, and to test rather than validation.
    """
    parts = definition.parts
    rows = [row for domain in domains for row in _domain_rows(folder, domain, parts)]
    if not rows:
        raise DataError(f"{folder} holds no images in {', '.join(parts)} below its domains.")
    paths, labels, names, roles = zip(*rows)
    split = roles if any(role != "train" for role in roles) else None
    return listed_images(
        folder, paths, labels, names, listed_in="its published layout", split=split
    )


def _domain_rows(
    folder: Path, domain: str, parts: Mapping[str, str]
) -> list[tuple[str, str, str, str]]:
    roles: dict[tuple[str, str, int], str] = {}
    paths: dict[tuple[str, str, int], str] = {}
    whole: set[tuple[str, str, int]] = set()
    here = {plain_name(name): name for name in folder_names(folder / domain)}
    ranked = sorted(parts.items(), key=lambda item: _RANK.index(item[1]))
    found = [(f"{domain}/{here[part]}", role) for part, role in ranked if part in here]
    for part, role in found or [(domain, "")]:
        for label in folder_names(folder / part):
            place = f"{part}/{label}"
            for file in image_names(folder / place):
                key = label, file, (folder / place / file).stat().st_size
                first = paths.get(key)
                if first and not filecmp.cmp(folder / first, folder / place / file, shallow=False):
                    key = label, f"{place}/{file}", key[2]
                paths.setdefault(key, f"{place}/{file}")
                roles[key] = max(roles.get(key, ""), role, key=_RANK.index)
                if not role:
                    whole.add(key)
    if whole and whole != set(paths):  # its files are called otherwise: who is who is not known
        warn(
            "split-unused",
            f"{folder / domain}: its parts hold other files than the folder of all its images, so "
            "its official split is not known; a random one is drawn.",
        )
        paths = {key: paths[key] for key in paths if key in whole}
        roles = dict.fromkeys(paths, "")
    return [(paths[key], key[0], domain, roles[key] or "train") for key in sorted(paths)]


def rename(table: ImageTable, definition: DataSet) -> ImageTable:
    """Gives a table the names and order of a definition; images of other domains are dropped.

    Classes or domains that the definition does not name stay.
    """
    classes = definition.classes or table.class_names
    domains = definition.domains or table.domain_names
    domain_of = _places(definition, table.domain_names, domains)
    missing = [name for i, name in enumerate(domains) if i not in domain_of]
    if missing:
        raise DataError(
            f"{table.root} lacks {', '.join(missing)}. Found: {', '.join(table.domain_names)}."
        )
    extra = [name for name, i in zip(table.domain_names, domain_of) if i < 0]
    if extra:
        text = f"{table.root}: {', '.join(extra)} left out; not a domain of it."
        warn("folder-left-out", text)
    table = table.take(np.flatnonzero(domain_of[table.domains] >= 0))
    class_of = _places(definition, table.class_names, classes)
    strange = [table.class_names[i] for i in np.unique(table.labels) if class_of[i] < 0]
    if strange:
        raise DataError(
            f"{table.root} has unexpected class folders: {', '.join(strange)}. Expected "
            f"{', '.join(classes)}. Take the others out; for other images, use the source 'folder'."
        )
    return replace(
        table,
        labels=class_of[table.labels],
        domains=domain_of[table.domains],
        class_names=classes,
        domain_names=domains,
    )


def _places(definition: DataSet, folders: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """Returns the position of each found name among the definition's names; -1 if it has none."""
    place = {name: i for i, name in enumerate(names)}
    return np.array(
        [place.get(meant(definition, name) or name, -1) for name in folders], dtype=np.int64
    )


def read_metadata(
    definition: DataSet,
    root: Path | None,
    wanted: Collection[str],
    optional: Collection[str] = (),
    files: Collection[str] = (METADATA,),
) -> Columns:
    """Reads the metadata file of a WILDS data set.

    Args:
        definition: the data set.
        root: its folder, or one around it.
        wanted: required columns.
        optional: columns that are read if they exist.
        files: possible names of the metadata file; the first that exists is read.

    Raises:
        DataError: it does not exist, or cannot be read.
    """
    folder = folder_of(definition, root, lambda place: any((place / f).is_file() for f in files))
    if folder is None:
        start = needs_root(definition.name, root)
        there = ", ".join(sorted(path.name for path in start.iterdir())[:10]) or "nothing"
        raise DataError(
            f"{start} holds no {' or '.join(files)}, as {definition.title} has it. Found: {there}."
        )
    file = next(folder / name for name in files if (folder / name).is_file())
    return read_columns(file, wanted, optional)


def taken_images(
    key: Sequence[str], contents: Callable[[], Iterable[tuple[str, bytes]]]
) -> tuple[Path, list[str]]:
    """Writes images as files into a cache folder, once, and returns the folder.

    Args:
        key: identifies the images; another key gives another folder.
        contents: yields the name of each image, without an ending, and the bytes of its file.

    Returns:
        The folder, and the path of each image below it.

    Raises:
        DataError: the cache cannot be written, or ``contents`` fails.
    """
    folder = cache_folder() / f"taken-{hash_of(list(key))}"
    if not (folder / LISTING).is_file():
        with (
            file_faults(DataError, f"Cannot write images to {folder}"),
            TemporaryDirectory(prefix="partial-", dir=private_folder(folder.parent)) as name,
        ):
            aside = Path(name)
            paths = [_write(aside, path, content) for path, content in contents()]
            replace_text(aside / LISTING, json.dumps(paths))
            if not folder.is_dir():
                aside.rename(folder)
    return folder, [str(path) for path in json.loads(read_text(folder / LISTING, DataError))]


def _write(folder: Path, name: str, content: bytes) -> str:
    path = f"{name}{image_suffix(content)}"
    private_folder((folder / path).parent)
    (folder / path).write_bytes(content)
    (folder / path).chmod(FILE_MODE)
    return path


def image_suffix(content: bytes) -> str:
    """Returns the suffix of an image file by its content; ``.png`` if it is not an image."""
    suffixes = {name: suffix for suffix, name in reversed(USABLE_FORMATS.items())}
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            return suffixes.get(str(image.format), ".png")
    except Exception:  # decoding says what is wrong with it
        return ".png"
