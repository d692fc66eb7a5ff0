"""Image files below whatever a user names: files, folders and globs, one after another."""

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from feddg.data.images import IMAGE_SUFFIXES
from feddg.errors import DataError


def image_files(named: Sequence[Path | str]) -> Iterator[Path]:
    """Yields the image files that are named, in the order of the names.

    A file counts whatever its ending. A folder gives the image files below it, sorted by name,
    hidden ones and those behind linked folders left out. A glob (``*``, ``?``, ``[...]``, ``**``)
    gives what it matches, sorted. Memory holds the names of one folder, or of one glob, at a time.

    Args:
        named: files, folders, globs.

    Raises:
        DataError: something named does not exist, or cannot be listed; raised before any file.
    """
    names = [Path(name).expanduser() for name in named]
    for name in names:
        if not name.exists() and not glob.has_magic(str(name)):
            raise DataError(f"{name} does not exist; name images, folders or globs")
    return (file for name in names for file in _below(name))


def count_files(named: Sequence[Path | str]) -> int:
    """Returns how many files :func:`image_files` yields.

    Raises:
        DataError: as there, and where there are none at all.
    """
    count = sum(1 for _ in image_files(named))
    if not count:
        said = ", ".join(str(name) for name in named) or "nothing"
        raise DataError(
            f"there is no image in {said}; known endings: {', '.join(sorted(IMAGE_SUFFIXES))}"
        )
    return count


def _below(name: Path) -> Iterator[Path]:
    if name.is_dir():
        yield from _in_folder(name)
    elif name.exists():
        yield name
    else:
        for match in sorted(glob.iglob(str(name), recursive=True)):
            if os.path.isdir(match) and "**" not in str(name):
                yield from _in_folder(Path(match))
            elif Path(match).suffix.lower() in IMAGE_SUFFIXES and os.path.isfile(match):
                yield Path(match)


def _in_folder(folder: Path) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            names = sorted((e.name, e.is_dir(follow_symlinks=False)) for e in entries)
    except OSError as error:
        raise DataError(f"{folder} cannot be listed: {error.strerror}") from None
    for name, is_folder in names:
        if name.startswith("."):
            continue
        if is_folder:
            yield from _in_folder(folder / name)
        elif os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES and (folder / name).is_file():
            yield folder / name
