"""The cache of decoded pixels: one folder per set of files, whole or not there at all.

Its name is a hash of what it was made from, so a changed file or another resolution never meets a
stale one. One that is not as large as its header says is decoded again.
"""

import json
import logging
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from feddg.data.decoded_files import BadImage, DecodedFiles, Progress, hash_of, stamp_of
from feddg.errors import DataError
from feddg.storage import (
    FILE_MODE,
    open_array,
    open_file,
    private_folder,
    replace_text,
    sweep_asides,
    sync,
    sync_folder,
)

logger = logging.getLogger("feddg")

_PIXELS, _FACTS = "pixels.npy", "facts.json"
_LEFT = 86_400
"""Age in seconds of what no living process can be writing any more."""


@dataclass(frozen=True)
class CacheEntry:
    """A cache entry: what was decoded, and what could not be."""

    pixels: np.ndarray
    bad: list[BadImage]


def cached_entry(files: DecodedFiles, cache: Path, progress: Progress | None) -> CacheEntry:
    """Opens the cache entry of some files, making it first if it is not there."""
    entry = cache / f"pixels-{files.key}"
    found = _open_entry(entry, files)
    if found is None:
        with _writing_to(cache):
            _make_entry(entry, files, progress)
        found = _open_entry(entry, files)
    if found is None:
        raise DataError(f"The pixel cache {entry} is damaged. Delete that folder and try again.")
    return found


def _open_entry(folder: Path, files: DecodedFiles) -> CacheEntry | None:
    """Opens an entry; None if there is none, or if it is no whole one of these files."""
    if not folder.is_dir():
        return None
    bad = _read_bad(folder / _FACTS)
    try:
        pixels = open_array(folder / _PIXELS, writable=False)
    except (OSError, ValueError):
        pixels = np.empty(0)
    count = len(files.paths)
    whole = pixels.shape == (count, files.size, files.size, 3) and pixels.dtype == np.uint8
    if bad is None or not whole:
        logger.warning("The pixel cache %s is damaged; the images are decoded again.", folder)
        return None
    return CacheEntry(pixels, bad)


def _make_entry(entry: Path, files: DecodedFiles, progress: Progress | None) -> None:
    """Writes an entry aside and renames it: it is there whole or not at all.

    Two processes may do so at once; the first rename wins and the other's work is thrown away.
    """
    _sweep(entry.parent)
    aside = _new_folder(entry.parent)
    try:
        _write_entry(aside, files, progress)
        try:
            aside.rename(entry)
            sync_folder(entry.parent)
        except OSError:
            if _open_entry(entry, files) is None:  # damaged, or a plain failure to rename
                shutil.rmtree(entry, ignore_errors=True)
                aside.rename(entry)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_entry(folder: Path, files: DecodedFiles, progress: Progress | None) -> None:
    # Plain writes, not a memory map: on a full disk a map kills the process, a write raises.
    header = {
        "descr": "|u1",
        "fortran_order": False,
        "shape": (len(files.paths), files.size, files.size, 3),
    }
    with (folder / _PIXELS).open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        bad = files.decode_all(lambda pixels: file.write(pixels.tobytes()), progress)
        sync(file)
    (folder / _PIXELS).chmod(FILE_MODE)
    if files.key_now() != files.key:
        raise DataError(
            f"Images in {files.root} were changed while they were decoded. Start again when "
            "nothing writes there any more."
        )
    _write_bad(folder / _FACTS, bad)


def bad_images_of(
    files: DecodedFiles, cache: Path | None, progress: Progress | None
) -> list[BadImage]:
    """Finds the bad files by decoding everything once; a cache folder remembers the answer."""
    if cache is None:
        return files.decode_all(lambda pixels: None, progress)
    answer = cache / f"checked-{files.key}.json"
    bad = _read_bad(answer)
    if bad is None:
        bad = files.decode_all(lambda pixels: None, progress)
        with _writing_to(cache):
            _sweep(cache)
            _write_bad(answer, bad)
    return bad


def _read_bad(path: Path) -> list[BadImage] | None:
    """Reads a list of bad images; None if it is not there or damaged."""
    try:
        with open_file(path) as file:
            content = json.loads(file.read())
        bad = [BadImage(str(image["path"]), str(image["reason"])) for image in content["bad"]]
        return bad if content["checksum"] == hash_of(content["bad"]) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _write_bad(path: Path, bad: list[BadImage]) -> None:
    rows = [asdict(image) for image in bad]
    replace_text(path, json.dumps({"checksum": hash_of(rows), "bad": rows}, indent=1))


@contextmanager
def _writing_to(cache: Path) -> Iterator[None]:
    try:
        private_folder(cache)
        yield
    except OSError as error:
        raise DataError(
            f"Cannot write the pixel cache in {cache}: {error.strerror or error}. "
            "Free some space there, or name another cache folder."
        ) from error


def _new_folder(cache: Path) -> Path:
    folder = cache / f"partial-{uuid.uuid4().hex}"
    return private_folder(folder)


def _sweep(cache: Path) -> None:
    """Removes what processes that were killed more than a day ago left behind."""
    for left in cache.glob("partial-*"):
        if time.time() - stamp_of(left)[1] / 1e9 > _LEFT:
            shutil.rmtree(left, ignore_errors=True)
    sweep_asides(cache, older_than=_LEFT)
