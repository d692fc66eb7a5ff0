"""Records which images a run used (paths, sizes, content hashes) and finds what has changed.

Hashes are cached by path, size and times. So a second look reads only the file entries of a folder
and the changed files.
"""

import base64
import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from feddg.data.decoding import Tile
from feddg.data.images import ImageTable
from feddg.errors import DataError, first_names
from feddg.records import JsonFile, Row
from feddg.storage import file_faults, open_file, replace_bytes, stamp

SHOWN = 3
"""Number of paths that a difference names."""

_Hashes = dict[str, tuple[int, int, int, str]]
_HASHES = TypeAdapter(_Hashes)


class FolderImages(Row):
    """The images of one folder, in columns.

    Attributes:
        names: file names, sorted.
        sizes: bytes; -1 for a file that cannot be read.
        hashes: of the content, 64 bits in base 64; empty for a file that cannot be read.
    """

    names: list[str]
    sizes: list[int]
    hashes: list[str]


class ImagesFile(JsonFile):
    """The images that a run started with: ``images.json``.

    Attributes:
        root: their folder at that time; not compared.
        count: rows of the table.
        labels: a hash of every image's class and domain.
        said: a hash of their roles, clients, groups and subgroups, and of a table's order; empty if
            nothing is said of these.
        rendered: a hash of the pixels, if they do not come from files.
        folders: the files by their folder, below the root.
        depths: bits used by values of files deeper than 8 bits, by domain; not compared.
        files: hashes of other files that the experiment names, by its field: a table of splits, a
            codec's weights.
    """

    root: str | None = None
    count: int
    labels: str
    said: str = ""
    rendered: str = ""
    folders: dict[str, FolderImages]
    depths: dict[str, int] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict)

    @property
    def bit_depths(self) -> tuple[int, ...]:
        """The bit depths that domains use, ascending; none if all have 8 bits."""
        return tuple(sorted({*self.depths.values()}))

    def to_text(self) -> str:
        """Returns the content of the file as compact JSON."""
        return self.model_dump_json() + "\n"

    def contents(self) -> dict[str, tuple[int, str]]:
        """Returns size and hash of every file, by its path."""
        return {
            f"{folder}/{name}" if folder else name: (size, content)
            for folder, images in self.folders.items()
            for name, size, content in zip(images.names, images.sizes, images.hashes)
        }

    def fingerprint(self) -> str:
        """Returns a hash of the images, 64 bits in base 64, without root and other files.

        Equal fingerprints mean that the images have no :func:`difference`.
        """
        parts = [self.count, self.labels, self.rendered, sorted(self.contents().items())]
        parts += [self.said] if self.said else []
        return _hash([repr(parts).encode("utf-8", "surrogateescape")])


@dataclass(frozen=True)
class Difference:
    """How a later table differs from an earlier one; false if it does not.

    Attributes:
        what: what has changed: ``images``, or ``files`` that the experiment names.
        how: the change in words.
    """

    what: str = "images"
    how: str = ""

    def __bool__(self) -> bool:
        return bool(self.how)

    def __str__(self) -> str:
        return self.how


def difference(before: ImagesFile, now: ImagesFile) -> Difference:
    """Compares the images, or else other files, of two tables; the root folder may differ.

    A file that no longer exists does not count as changed; the code that needs it reports it.
    """
    old, new = before.contents(), now.contents()
    parts = {
        "added": sorted(new.keys() - old.keys()),
        "removed": sorted(old.keys() - new.keys()),
        "changed": sorted(path for path in old.keys() & new.keys() if old[path] != new[path]),
    }
    if any(parts.values()):
        counts = ", ".join(f"{len(paths)} {part}" for part, paths in parts.items() if paths)
        paths = [path for part in reversed(parts.values()) for path in part]
        return Difference(how=f"{counts} ({first_names(paths, SHOWN)})")
    other = before.labels != now.labels
    other |= bool(before.said and now.said and before.said != now.said)
    if not old and (other or (before.rendered, before.count) != (now.rendered, now.count)):
        return Difference(how="they are drawn differently, or rows of their table have changed")
    if other:
        return Difference(
            how="the same files have other classes, domains, roles, clients or groups, or stand in "
            "another order"
        )
    files = [
        f"{field} has another content"
        for field, content in sorted(before.files.items())
        if now.files.get(field, content) != content
    ]
    return Difference("files", " and ".join(files)) if files else Difference()


def content_hashes(
    root: Path, paths: Iterable[str], cache: Path | None
) -> dict[str, tuple[int, str]]:
    """Returns size and hash of files by path; -1 and an empty text for one that cannot be read.

    Args:
        root: the folder that paths are relative to.
        paths: the files.
        cache: folder that stores the hashes, so that unchanged files are not read again; None
            stores nothing.

    Raises:
        DataError: the cache cannot be written.
    """
    root, names, stored = root.resolve(), {*paths}, _Hashes()
    name = hashlib.blake2b(os.fsencode(root), digest_size=16).hexdigest()
    file = None if cache is None else cache / f"hashes-{name}.json"
    if file is not None:
        # Not there yet, or damaged: files are read again.
        with suppress(OSError, ValidationError), open_file(file) as opened:
            stored = _HASHES.validate_json(opened.read())
    found = {
        path: entry
        for path, entry in stored.items()
        if path in names and entry[:3] == stamp(f"{root}/{path}")
    }
    new = sorted(names - found.keys())
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        read = {
            path: entry for path, entry in zip(new, pool.map(partial(_read, root), new)) if entry
        }
    if read and file is not None:
        with file_faults(DataError, f"Cannot write the cache {file}"):
            replace_bytes(file, _HASHES.dump_json(stored | read))
    found |= read
    return {path: (found[path][0], found[path][3]) if path in found else (-1, "") for path in names}


def _read(root: Path, path: str) -> tuple[int, int, int, str] | None:
    """Returns a file's stamp and hash; None if it cannot be read."""
    with suppress(OSError):
        if now := stamp(root / path):
            return *now, hash_file(root / path)
    return None


def images_file(table: ImageTable, cache: Path | None, *, with_contents: bool = True) -> ImagesFile:
    """Returns the record of a table's images.

    Args:
        table: all images, including those that cannot be decoded.
        cache: see :func:`content_hashes`.
        with_contents: whether files are read and hashed.

    Raises:
        DataError: the cache cannot be written.
    """
    rendered, folders = "", dict[str, FolderImages]()
    if table.images is not None:
        shape = repr(table.images.shape).encode()
        rendered = _hash([shape, np.ascontiguousarray(table.images).data])
    elif with_contents and table.root is not None:
        hashes = content_hashes(table.root, map(file_of, table.paths), cache)
        for path, (size, content) in sorted(hashes.items()):
            folder, _, name = path.rpartition("/")
            images = folders.setdefault(folder, FolderImages(names=[], sizes=[], hashes=[]))
            images.names.append(name)
            images.sizes.append(size)
            images.hashes.append(content)
    return ImagesFile(
        root=str(table.root) if folders else None,
        count=len(table),
        labels=_labels(table),
        said=_said(table),
        rendered=rendered,
        folders=folders,
    )


def contents_of_rows(table: ImageTable) -> list[str]:
    """Returns a hash of each row of a table that has its images or features itself."""
    assert table.images is not None
    return [_hash([np.ascontiguousarray(row + row.dtype.type(0)).data]) for row in table.images]


def file_of(path: str) -> str:
    """Returns the path of the file that a row's path (of a file or tile) names."""
    return Tile.named(path).file


def _labels(table: ImageTable) -> str:
    """Returns a hash of each path's class and domain, whatever the order of rows and names."""
    rows = sorted(
        f"{path}\0{table.class_names[label]}\0{table.domain_names[domain]}"
        for path, label, domain in zip(table.paths, table.labels.tolist(), table.domains.tolist())
    )
    return _hash(["\n".join(rows).encode("utf-8", "surrogateescape")])


def _said(table: ImageTable) -> str:
    """Returns a hash of what else is said of each path; empty if nothing is.

    The order of rows counts only in a user's table: it decides what is drawn.
    """
    more = (table.split, table.clients, table.groups, *table.subgroups.values())
    columns = [column.tolist() for column in more if column is not None]
    if not columns and table.listed_rows is None:
        return ""
    rows = ["\0".join(map(str, row)) for row in zip(table.paths, *columns)]
    if table.listed_rows is None:
        rows.sort()
    return _hash(["\n".join(rows).encode("utf-8", "surrogateescape")])


def hash_file(path: Path) -> str:
    """Returns the hash of a file's content: 64 bits in base 64.

    Raises:
        OSError: it cannot be read.
    """
    with open_file(path) as file:
        return _hash(iter(partial(file.read, 2**20), b""))


def _hash(parts: Iterable[bytes | memoryview]) -> str:
    content = hashlib.blake2b(digest_size=8)
    for part in parts:
        content.update(part)
    return base64.urlsafe_b64encode(content.digest()).decode().rstrip("=")
