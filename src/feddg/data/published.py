"""Folders of published data sets: found below the root, named and ordered as the papers do."""

import hashlib
import io
import json
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from feddg.data.data_set import DataSet
from feddg.data.images import (
    ImageTable,
    folder_names,
    from_folder,
    image_names,
    is_image,
    plain_name,
)
from feddg.diagnostics import Diagnostic, emit
from feddg.errors import DataError
from feddg.storage import (
    FILE_MODE,
    cache_folder,
    entries,
    kept_array,
    private_folder,
    read_text,
    replace_text,
    why,
)

_LAYOUT_FOLDERS = {"train", "test", "val", "alldata", "images", "patches", "raw", "full"}
"""Plain names of folders that layouts have themselves: nobody's wrapper."""


def needs_root(source: str, root: Path | None) -> Path:
    """Returns the folder of the images.

    Raises:
        DataError: none was given.
    """
    if root is None:
        raise DataError(f"The data source '{source}' needs the folder of its images (root).")
    return root


def published_root(definition: DataSet, root: Path | None) -> Path:
    """Returns the folder of a published data set's images, without folders put around it.

    Archives are unpacked into a folder of their name, and that into ``downloads``: while there is
    nothing in a folder but one other, which is no part of the data set by its name and holds more
    than images, that one is meant.

    Raises:
        DataError: no folder was given, or one cannot be read.
    """
    folder = needs_root(definition.name, root)
    own = _LAYOUT_FOLDERS | {plain_name(name) for name in definition.domains}
    while folder.is_dir():
        inside = [one.name for one in entries(folder, DataError) if _counts(one.name)]
        if len(inside) != 1 or plain_name(inside[0]) in own:
            break
        only = folder / inside[0]
        if not only.is_dir() or not any(_counts(one.name) for one in _no_images(only)):
            break
        folder = only
    return folder


def _counts(name: str) -> bool:
    """Whether an entry of a folder is somebody's, and not left by a system or an archiver."""
    return name[0] != "." and name not in ("__MACOSX", "Thumbs.db", "desktop.ini")


def _no_images(folder: Path) -> Iterator[os.DirEntry[str]]:
    return (one for one in entries(folder, DataError) if not is_image(one.name))


def load_published(
    definition: DataSet,
    root: Path | None,
    around: Collection[str] = (),
    spellings: Mapping[str, str] | None = None,
    parts: Mapping[str, str] | None = None,
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
        parts: folders that some archives have between domain and class, with the role of their
            images (``train``, ``id_val``, ``id_test``; empty for none).

    Raises:
        DataError: no root, a domain is missing, or a class folder is none of the definition's.
    """
    known = known_names(definition, spellings)
    folder = domains_folder(published_root(definition, root), definition, around, known)
    domains = [name for name in _inside(folder) if known.get(plain_name(name))]
    if parts and any(_has_parts(folder / domain, parts) for domain in domains):
        listed = from_parts(folder, domains, parts)
    else:
        listed = from_folder(folder)
    table = rename(listed, definition, known)
    compare_counts(definition, table)
    return table


def known_names(definition: DataSet, spellings: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the definition's name of every domain and class by its plain spellings."""
    known = {plain_name(name): name for name in (*definition.domains, *definition.classes)}
    return known | {plain_name(name): meant for name, meant in (spellings or {}).items()}


def compare_counts(
    definition: DataSet, table: ImageTable, *alternatives: Mapping[str, int]
) -> None:
    """Logs where numbers of images or classes differ from the published ones, as copies differ.

    Args:
        definition: with ``counts``, ``split_counts`` and classes.
        table: its images.
        *alternatives: counts by domain that are as good as the definition's.
    """
    found = dict(zip(table.domain_names, table.counts().sum(axis=1).tolist()))
    if not any(found == dict(counts) for counts in alternatives):
        for domain, images in found.items():
            published = definition.counts.get(domain, images)
            if images != published:
                emit(_other_count(definition, table, domain, published, images))
    if definition.split_counts and table.split is not None:
        roles = table.split.tolist()
        for role, published in definition.split_counts.items():
            images = roles.count(role)
            if images != published:
                emit(_other_count(definition, table, f"its split {role}", published, images))
    classes = len(table.class_names)
    if definition.number_of_classes and classes != definition.number_of_classes:
        text = (
            f"{definition.title} has {definition.number_of_classes} classes; {table.root} holds "
            f"{classes}."
        )
        emit(Diagnostic("other-count", "warning", text))


def _other_count(
    definition: DataSet, table: ImageTable, where: str, published: int, images: int
) -> Diagnostic:
    text = (
        f"{definition.title} has {published} images in {where}; {table.root} holds {images} "
        f"({images - published:+d})."
    )
    return Diagnostic("other-count", "warning", text)


def from_parts(folder: Path, domains: Collection[str], parts: Mapping[str, str]) -> ImageTable:
    """Lists images that lie as ``domain/part/class/image``, each once.

    Where one part holds all images that others repeat, it is the one without a role, and an image
    has the role of the other part that holds a file of its class, name and size. An image in parts
    of two roles validates rather than trains, and tests rather than validates.

    Args:
        folder: holds the domains.
        domains: their folders.
        parts: see :func:`load_published`.
    """
    rows: list[tuple[str, str, str, str]] = []
    for domain in domains:
        rows += _domain_rows(folder, domain, parts)
    if not rows:
        raise DataError(f"{folder} holds no images in {', '.join(parts)} below its domains.")
    paths, labels, names, roles = zip(*rows)
    domain_names, domain_ids = np.unique(names, return_inverse=True)
    class_names, label_ids = np.unique(labels, return_inverse=True)
    return ImageTable(
        paths=paths,
        labels=label_ids.astype(np.int64),
        domains=domain_ids.astype(np.int64),
        class_names=tuple(class_names.tolist()),
        domain_names=tuple(domain_names.tolist()),
        root=folder,
        split=np.array(roles) if any(role != "train" for role in roles) else None,
        listed_in="its published layout",
    )


_RANK = ("", "train", "id_val", "id_test")


def _domain_rows(
    folder: Path, domain: str, parts: Mapping[str, str]
) -> list[tuple[str, str, str, str]]:
    roles: dict[tuple[str, str, int], str] = {}
    paths: dict[tuple[str, str, int], str] = {}
    whole: set[tuple[str, str, int]] = set()
    here = {plain_name(name): name for name in folder_names(folder / domain)}
    for part, role in sorted(parts.items(), key=lambda item: _RANK.index(item[1])):
        if part not in here:
            continue
        for label in folder_names(folder / domain / here[part]):
            place = f"{domain}/{here[part]}/{label}"
            for file in image_names(folder / place):
                key = label, file, (folder / place / file).stat().st_size
                paths.setdefault(key, f"{place}/{file}")
                roles[key] = max(roles.get(key, ""), role, key=_RANK.index)
                if not role:
                    whole.add(key)
    if whole and whole != set(paths):  # its files are called otherwise: who is who is not known
        paths = {key: paths[key] for key in paths if key in whole}
        roles = dict.fromkeys(paths, "")
    return [(paths[key], key[0], domain, roles[key] or "train") for key in sorted(paths)]


def _inside(folder: Path) -> list[str]:
    return folder_names(folder) if folder.is_dir() else []


def _has_parts(domain: Path, parts: Mapping[str, str]) -> bool:
    return any(plain_name(name) in parts for name in folder_names(domain))


def domains_folder(
    root: Path, definition: DataSet, around: Collection[str], known: Mapping[str, str]
) -> Path:
    """Returns the folder that holds the domains: ``root``, or one known folder inside it."""
    wrappers = {plain_name(name) for name in around}
    while root.is_dir():
        inside = {plain_name(name): root / name for name in folder_names(root)}
        nested = [path for name, path in inside.items() if name in wrappers]
        if len(nested) != 1 or any(known.get(name) in definition.domains for name in inside):
            return root
        root = nested[0]
    return root


def rename(table: ImageTable, definition: DataSet, known: Mapping[str, str]) -> ImageTable:
    """Gives a table the names and order of a benchmark; images of other domains are left out."""
    domain_of = _positions(table.domain_names, definition.domains, known)
    missing = [name for i, name in enumerate(definition.domains) if i not in domain_of]
    if missing:
        raise DataError(
            f"{table.root} lacks {', '.join(missing)}. Found: {', '.join(table.domain_names)}."
        )
    extra = [name for name, i in zip(table.domain_names, domain_of) if i < 0]
    if extra:
        text = f"{table.root}: {', '.join(extra)} left out; not a domain of it."
        emit(Diagnostic("folder-left-out", "warning", text))
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


# Images that a data set's files hold as numbers: read or drawn once, then kept in the cache.


Drawn = tuple[np.ndarray, np.ndarray]
"""``(n, height, width)`` uint8 grey images, and ``(n,)`` facts about each, a structured array."""


def kept_drawn(files: Sequence[Path], how: str, draw: Callable[[], Drawn]) -> Drawn:
    """Returns what ``draw`` makes of some files, from the cache where nothing has changed.

    Args:
        files: what it is made from; another size or time of change is another content.
        how: what is made of them, with a number that rises when that changes.
        draw: makes it.

    Raises:
        DataError: a file is gone, or whatever ``draw`` raises.
    """
    once = cache(draw)
    stamps = []
    for file in files:
        try:
            status = file.stat()
        except OSError as error:
            raise DataError(f"Cannot read {file}: {why(error)}.") from None
        stamps.append([str(file.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns])
    key = hashlib.blake2b(json.dumps([how, stamps]).encode(), digest_size=16).hexdigest()
    images = kept_array(cache_folder() / f"drawn-{key}-images.npy", lambda: once()[0])
    facts = kept_array(cache_folder() / f"drawn-{key}-facts.npy", lambda: once()[1])
    if len(images) != len(facts):
        raise DataError(f"The cache holds two things as drawn-{key}: `feddg cache clear`.")
    return images, facts


def as_rgb(grey: np.ndarray) -> np.ndarray:
    """Returns ``(n, height, width)`` grey images as ``(n, height, width, 3)``, not copied."""
    return np.broadcast_to(grey[..., None], (*grey.shape, 3))


# Images taken out of a data set that holds their bytes, kept in the cache as files.


LISTING = ".paths.json"
_SUFFIXES = {"JPEG": ".jpg", "PNG": ".png", "WEBP": ".webp", "TIFF": ".tif", "BMP": ".bmp"} | {
    "GIF": ".gif",
    "JPEG2000": ".jp2",
    "AVIF": ".avif",
}


def taken_images(
    key: Sequence[str], contents: Callable[[], Iterable[tuple[str, bytes]]]
) -> tuple[Path, list[str]]:
    """Returns a folder with images as files, made once.

    Args:
        key: what the images are; another key is another folder.
        contents: gives the name of each image, without an ending, and the bytes of its file.

    Returns:
        The folder, and the path of each image below it.

    Raises:
        DataError: the cache cannot be written, or whatever ``contents`` raises.
    """
    name = hashlib.blake2b(json.dumps(list(key)).encode(), digest_size=16).hexdigest()
    folder = cache_folder() / f"taken-{name}"
    if not (folder / LISTING).is_file():
        aside = cache_folder() / f"partial-{uuid.uuid4().hex}"
        try:
            private_folder(aside)
            paths = [_write(aside, name, content) for name, content in contents()]
            replace_text(aside / LISTING, json.dumps(paths))
            if not folder.is_dir():
                aside.rename(folder)
        except OSError as error:
            raise DataError(f"Cannot write images to {folder}: {why(error)}.") from None
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    try:
        return folder, [str(path) for path in json.loads(read_text(folder / LISTING, DataError))]
    except ValueError:
        raise DataError(f"{folder} is damaged. Delete that folder and try again.") from None


def _write(folder: Path, name: str, content: bytes) -> str:
    path = f"{name}{_suffix(content)}"
    private_folder((folder / path).parent)
    (folder / path).write_bytes(content)
    (folder / path).chmod(FILE_MODE)
    return path


def _suffix(content: bytes) -> str:
    try:
        with Image.open(io.BytesIO(content)) as image:
            return _SUFFIXES.get(str(image.format), ".png")
    except Exception:  # decoding says what is wrong with it
        return ".png"
