"""Every image decoded once, kept as bytes, gathered by row.

A table's images are decoded to uint8 at training resolution into one memory-mapped file that all
clients, runs and seeds share. Its name is a hash of what it was made from, so a changed file or
another resolution never meets a stale cache. Tables too large for that are decoded on demand behind
the same interface.
"""

import json
import logging
import os
import shutil
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Literal, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from feddg.data.decoding import (
    AS_IT_IS,
    BadImage,
    DecodedFiles,
    Progress,
    Reading,
    Resize,
    Tile,
    cut,
    hash_of,
    make_square,
    quiet_pillow,
    stamp_of,
)
from feddg.data.images import ImageTable
from feddg.data.inspection import Survey, survey
from feddg.diagnostics import Diagnostic, emit
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

# Pixels that stay on the device: an image is sent to it once, not with every batch.
#
# A copy from ordinary memory makes the host wait until the device has done all that was asked of
# it, so a batch sent with every step leaves the device idle between steps.


SHARE = 0.25
"""Of a device's free memory, what pixels may take; the rest is for networks and feature maps."""


class ResidentPixels:
    """Rows of an array on a device, sent when they are first asked for."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        """Reserves memory for all rows; sends none.

        Args:
            shape: ``(count, size, size, 3)``.
            device: not the CPU.
        """
        with torch.inference_mode(False):  # who evaluates first must not be the only one to write
            self._pixels = torch.empty(shape, dtype=torch.uint8, device=device)
        self._sent = np.zeros(shape[0], dtype=bool)

    def gather(self, rows: np.ndarray, read: Callable[[np.ndarray], np.ndarray]) -> Tensor:
        """Returns rows, ``(len(rows), 3, size, size)`` uint8 in channels-last memory order.

        Args:
            rows: ``(B,)`` int64, repeats allowed.
            read: returns the pixels of rows that were never sent, ``(n, size, size, 3)`` uint8.
        """
        device = self._pixels.device
        new = np.unique(rows[~self._sent[rows]])
        if len(new):
            self._pixels[torch.from_numpy(new).to(device)] = torch.from_numpy(read(new)).to(device)
            self._sent[new] = True
        chosen = self._pixels.index_select(0, torch.from_numpy(rows).to(device))
        return chosen.permute(0, 3, 1, 2)


def fits(count: int, device: torch.device) -> bool:
    """Whether so many bytes may stay on a device; never on one that does not tell its memory."""
    memory = getattr(torch.get_device_module(device), "mem_get_info", None)
    return memory is not None and count <= SHARE * memory(device)[0]


# The cache of decoded pixels: one folder per set of files, whole or not there at all.
#
# Its name is a hash of what it was made from, so a changed file or another resolution never meets
# a stale one. One that is not as large as its header says is decoded again.


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


BUDGET_BYTES = 16 * 2**30
"""Default limit of one cache file: PACS at 224 pixels needs 1.5 GB."""

Rows = Tensor | np.ndarray | Sequence[int]


class PixelStore(ABC):
    """The pixels of a table, gathered by row number of that table.

    Attributes:
        size: side of every image in pixels.
        fingerprint: a hash of the images behind the rows, in their order, for caches of what is
            made from them; empty for a store that nobody named.
    """

    def __init__(self, size: int, fingerprint: str) -> None:
        self.size = size
        self.fingerprint = fingerprint

    @abstractmethod
    def __len__(self) -> int:
        """The number of rows."""

    @abstractmethod
    def gather(self, rows: Rows) -> Tensor:
        """Copies the pixels of some rows.

        Args:
            rows: row numbers in any order, repeats allowed.

        Returns:
            ``(len(rows), 3, size, size)`` uint8 on the CPU, in channels-last memory order.

        Raises:
            IndexError: for a row beyond the table.
        """

    def gather_to(self, rows: Rows, device: torch.device) -> Tensor:
        """Copies the pixels of some rows to a device, see :meth:`gather`."""
        return self.gather(rows).to(device)

    def close(self) -> None:  # noqa: B027 - nothing to free is the common case
        """Frees what the store holds; it cannot be gathered from afterwards."""


class ArrayPixels(PixelStore):
    """Pixels in memory or memory-mapped from the cache."""

    def __init__(
        self,
        pixels: np.ndarray,
        positions: np.ndarray | None = None,
        fingerprint: str = "",
    ) -> None:
        """Wraps an array.

        Args:
            pixels: ``(count, size, size, 3)`` uint8.
            positions: ``(rows,)`` int64, where each row's image lies in ``pixels``; None when row
                i is image i.
            fingerprint: see :class:`PixelStore`.
        """
        super().__init__(pixels.shape[1], fingerprint)
        self._pixels = pixels
        self._positions = np.arange(len(pixels)) if positions is None else positions
        self._resident: dict[torch.device, ResidentPixels | None] = {}

    def __len__(self) -> int:
        return len(self._positions)

    def gather(self, rows: Rows) -> Tensor:
        """Copies the pixels of some rows, see :class:`PixelStore`."""
        return _channels_last(self._read(self._positions[np.asarray(rows, dtype=np.int64)]))

    def gather_to(self, rows: Rows, device: torch.device) -> Tensor:
        """Copies the pixels of some rows to a device, where they stay if there is room for all."""
        if device.type == "cpu":
            return self.gather(rows)
        if device not in self._resident:
            room = fits(self._pixels.nbytes, device)
            self._resident[device] = ResidentPixels(self._pixels.shape, device) if room else None
        resident = self._resident[device]
        if resident is None:
            return super().gather_to(rows, device)
        return resident.gather(self._positions[np.asarray(rows, dtype=np.int64)], self._read)

    def _read(self, positions: np.ndarray) -> np.ndarray:
        return np.take(self._pixels, positions, axis=0)

    def close(self) -> None:
        """Lets go of the array or map, and of what devices hold of it."""
        self._resident = {}
        self._pixels = np.empty((0, self.size, self.size, 3), np.uint8)
        self._positions = self._positions[:0]


class StreamingPixels(PixelStore):
    """Pixels decoded anew whenever they are gathered, by a pool of threads."""

    def __init__(self, files: DecodedFiles, paths: Sequence[str], fingerprint: str) -> None:
        """Remembers where the images are.

        Args:
            files: how they are decoded.
            paths: one path per row, all known to be readable.
            fingerprint: see :class:`PixelStore`.
        """
        super().__init__(files.size, fingerprint)
        self._files, self._paths = files, tuple(paths)
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="decode")
        self._alone = Lock()  # quiet_pillow is for one at a time, and the pool has all cores busy

    def __len__(self) -> int:
        return len(self._paths)

    def gather(self, rows: Rows) -> Tensor:
        """Decodes the images of some rows, see :class:`PixelStore`.

        Raises:
            DataError: for a file that was readable when the store was opened and is not now.
        """
        paths = [self._paths[row] for row in np.asarray(rows, dtype=np.int64)]
        batch = np.empty((len(paths), self.size, self.size, 3), np.uint8)
        with self._alone, quiet_pillow(tiled=self._files.reading.tile is not None):
            for place, pixels in enumerate(self._pool.map(self._decode, paths)):
                batch[place] = pixels
        return _channels_last(batch)

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _decode(self, path: str) -> np.ndarray:
        (found,) = self._files.decode(Tile.named(path).file, [path])
        if isinstance(found, BadImage):
            raise DataError(
                f"{self._files.root / path} was readable before and is not any more: {found.reason}"
            )
        return found


def open_pixels(
    table: ImageTable,
    size: int,
    *,
    cache: Path | None,
    resize: Resize = "squash",
    budget_bytes: int = BUDGET_BYTES,
    on_bad_image: Literal["skip", "fail"] = "skip",
    progress: Progress | None = None,
    seen: Callable[[str], object] | None = None,
    reading: Reading = AS_IT_IS,
    surveyed: Survey | None = None,
) -> tuple[ImageTable, PixelStore, list[BadImage]]:
    """Makes a table's pixels ready, decoding each file at most once per resolution.

    Args:
        table: the images; rendered tables keep their pixels in memory.
        size: the side of every image in pixels.
        cache: the folder of the shared cache files; None decodes on demand.
        resize: how an image becomes square.
        budget_bytes: tables that would need more than this are decoded on demand.
        on_bad_image: leave unusable files out with a warning, or fail.
        progress: called with (done, total) while files are decoded.
        seen: called with the path of each file right after it was decoded, in several threads.
        reading: which bands become colours, which values black and white, and whether large images
            are cut into tiles, each a row of the table that is returned.
        surveyed: how the images are stored; looked at here if None.

    Returns:
        The table without its bad rows, a store whose row i is that table's row i, and the files
        left out, ordered by path.

    Raises:
        DataError: for settings out of range, bad images under ``fail``, no usable image at all, or
            a cache folder that cannot be written.
    """
    _check_settings(size, resize, on_bad_image)
    if table.images is not None:
        return table, _rendered(table.images, size, resize), []
    tiled = reading.tile is not None
    if reading.tile is not None and table.root is not None:
        with quiet_pillow(tiled=True):
            table = cut(table, reading.tile)
    depths = (surveyed or survey(table)).depths if table.root is not None else {}
    files = DecodedFiles.of(table, size, resize, seen, reading, depths)
    if tiled and files.cache_bytes > budget_bytes:
        raise DataError(
            f"{len(files.paths):,} tiles need {files.cache_bytes / 2**30:.1f} GB of pixels: raise "
            "data.pixel_budget_gb, choose larger tiles, or a smaller image size."
        )
    entry = None
    with quiet_pillow(tiled=tiled):
        if cache is None or files.cache_bytes > budget_bytes:
            bad = bad_images_of(files, cache, progress)
        else:
            entry = cached_entry(files, cache, progress)
            bad = entry.bad
    once = [BadImage(Tile.named(image.path).file, image.reason) for image in bad]
    _complain(list(dict.fromkeys(once)), len(files.by_file), on_bad_image)
    broken = {image.path for image in bad}
    kept = table.take([row for row, path in enumerate(table.paths) if path not in broken])
    return kept, _store(files, kept, entry), list({image.path: image for image in once}.values())


def _rendered(images: np.ndarray, size: int, resize: Resize) -> PixelStore:
    if images.shape[1:3] != (size, size):
        images = np.stack([make_square(Image.fromarray(image), size, resize) for image in images])
    fingerprint = hash_of(images.shape, images)
    return ArrayPixels(images, fingerprint=fingerprint)


def _store(files: DecodedFiles, table: ImageTable, entry: CacheEntry | None) -> PixelStore:
    fingerprint = hash_of([files.key, table.paths])
    if entry is None:
        return StreamingPixels(files, table.paths, fingerprint)
    place = {path: index for index, path in enumerate(files.paths)}
    positions = np.array([place[path] for path in table.paths])
    return ArrayPixels(entry.pixels, positions, fingerprint)


def as_unit(images: Tensor, device: torch.device | str | None = None) -> Tensor:
    """Returns uint8 images as RGB in [0, 1] on the device, channels last."""
    moved = images if device is None else images.to(device)
    return (moved.float() / 255).contiguous(memory_format=torch.channels_last)


def _channels_last(batch: np.ndarray) -> Tensor:
    return torch.from_numpy(batch).permute(0, 3, 1, 2)


def _check_settings(size: int, resize: str, on_bad_image: str) -> None:
    if size < 1:
        raise DataError(f"The image size must be at least 1 pixel, not {size}.")
    if resize not in get_args(Resize):
        raise DataError(f"resize must be one of {', '.join(get_args(Resize))}, not {resize!r}.")
    if on_bad_image not in ("skip", "fail"):
        raise DataError(f"on_bad_image must be skip or fail, not {on_bad_image!r}.")


def _complain(bad: list[BadImage], total: int, on_bad_image: str) -> None:
    if not bad:
        return
    named = "; ".join(f"{image.path} ({image.reason})" for image in bad[:5])
    more = f"; and {len(bad) - 5} more" if len(bad) > 5 else ""
    if len(bad) == total:
        raise DataError(f"None of the {total} images can be used: {named}{more}.")
    if on_bad_image == "fail":
        raise DataError(
            f"{len(bad)} of {total} images cannot be used: {named}{more}. "
            "Repair or remove them, or set on_bad_image: skip."
        )
    text = f"{len(bad)} of {total} images left out: {named}{more}."
    emit(Diagnostic("images-left-out", "warning", text))
