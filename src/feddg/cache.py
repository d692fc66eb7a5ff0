"""What is kept on disk between runs: where it is, how much, and how it is removed.

Decoded pixels are written by :mod:`feddg.data.pixel_cache`, re-drawn images and whatever else
methods compute once by :meth:`feddg.clients.client.Client.cached`.
"""

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from feddg.errors import DataError

KINDS = {
    "pixels": "decoded images",
    "checks": "which files cannot be used, of images too many to keep decoded",
    "drawn": "images read or drawn from a data set's own files, as FEMNIST's",
    "taken": "images taken out of Hugging Face data sets",
    "hashes": "hashes of image files, to notice changes",
    "twins": "images re-drawn in other styles, and what else methods compute once",
    "partial": "left behind by processes that were killed, or being written",
}
OTHER = "other"
"""Anything else in the folder: counted, never touched."""
_NAMES = {
    "pixels": re.compile(r"pixels-[0-9a-f]{32}"),
    "checks": re.compile(r"checked-[0-9a-f]{32}\.json"),
    "drawn": re.compile(r"drawn-[0-9a-f]{32}-(images|facts)\.npy"),
    "taken": re.compile(r"taken-[0-9a-f]{32}"),
    "hashes": re.compile(r"hashes-[0-9a-f]{32}\.json"),
    "twins": re.compile(r"[0-9a-f]{24}-.+\.npy"),
    "partial": re.compile(
        r"partial-[0-9a-f]{32}|\.([0-9a-f]{24}-|checked-|hashes-|drawn-).+\.\d+\.\d+"
    ),
}


@dataclass(frozen=True)
class Held:
    """Entries of one kind, and their bytes."""

    entries: int
    size: int


def cache_folder() -> Path:
    """Returns where things are kept: ``$FEDDG_CACHE`` or the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("FEDDG_CACHE") or str(Path(home) / "feddg"))


def contents(cache: Path) -> dict[str, Held]:
    """Returns what a cache folder holds, by kind; all of nothing where there is no folder.

    Raises:
        DataError: it is no folder, or cannot be read.
    """
    found = dict.fromkeys(KINDS, Held(0, 0))
    for path, kind in _entries(cache):
        before = found.get(kind, Held(0, 0))
        found[kind] = Held(before.entries + 1, before.size + _size(path))
    return found


def clear(cache: Path, kinds: Iterable[str] = KINDS) -> None:
    """Removes entries of some kinds; what is not ours stays, and so does the folder.

    Raises:
        DataError: the folder is none, or something in it cannot be removed.
    """
    chosen = set(kinds) & set(KINDS)
    for path, kind in list(_entries(cache)):
        if kind not in chosen:
            continue
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise DataError(f"Cannot remove {path}: {error.strerror or error}.") from None


def _entries(cache: Path) -> Iterator[tuple[Path, str]]:
    if not cache.exists():
        return
    try:
        paths = sorted(cache.iterdir())
    except OSError as error:
        raise DataError(
            f"The cache {cache} cannot be read: {error.strerror or error}. Set FEDDG_CACHE to a "
            "folder, or to one that does not exist yet."
        ) from None
    for path in paths:
        kinds = (kind for kind, pattern in _NAMES.items() if pattern.fullmatch(path.name))
        yield path, next(kinds, OTHER)


def _size(path: Path) -> int:
    """Bytes of a file, or of the files in a folder; a link counts for itself."""
    try:
        if path.is_dir() and not path.is_symlink():
            return sum(_size(inside) for inside in path.iterdir())
        return path.lstat().st_size
    except OSError:
        return 0  # gone meanwhile, or not ours to read
