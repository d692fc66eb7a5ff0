"""Every image decoded once, kept as bytes, gathered by row.

A table's images are decoded to uint8 at training resolution into one memory-mapped file that all
clients, runs and seeds share. Its name is a hash of what it was made from, so a changed file or
another resolution never meets a stale cache. Tables too large for that are decoded on demand behind
the same interface.
"""

import hashlib
import json
import logging
import os
import shutil
import time
import uuid
import zlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Literal, get_args

import numpy as np
import PIL
import torch
from PIL import Image
from torch import Tensor

from feddg.arrays import keep_array, open_array
from feddg.data.bands import Reading, UnusableImageError
from feddg.data.checked_rows import CheckedRows
from feddg.data.decoding import (
    AS_IT_IS,
    Resize,
    decode_image,
    decode_parts,
    make_square,
    quiet_pillow,
)
from feddg.data.images import ImageTable
from feddg.data.survey import Survey, survey
from feddg.data.tiles import Tile, cut
from feddg.errors import DataError
from feddg.files import (
    FILE_MODE,
    open_file,
    private_folder,
    replace_text,
    sweep_asides,
    sync,
    sync_folder,
    why,
)

logger = logging.getLogger("feddg")

BUDGET_BYTES = 16 * 2**30
"""Default limit of one cache file: PACS at 224 pixels needs 1.5 GB."""

Rows = Tensor | np.ndarray | Sequence[int]
Progress = Callable[[int, int], None]

_LAYOUT = 2
"""Raise when the cache's layout or the way images are decoded changes."""
_PIXELS, _SUMS, _FACTS = "pixels.npy", "checksums.npy", "facts.json"
_LEFT = 86_400
"""Age in seconds of what no living process can be writing any more."""
_WAVE, _WAVE_OF_TILES = 256, 4
"""Files decoded ahead of the one being written."""


@dataclass(frozen=True)
class BadImage:
    """A file that was left out, and why."""

    path: str
    reason: str


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

    def close(self) -> None:  # noqa: B027 - nothing to free is the common case
        """Frees what the store holds; it cannot be gathered from afterwards."""


class ArrayPixels(PixelStore):
    """Pixels in memory or memory-mapped from the cache."""

    def __init__(
        self,
        pixels: np.ndarray,
        positions: np.ndarray | None = None,
        fingerprint: str = "",
        checked: CheckedRows | None = None,
    ) -> None:
        """Wraps an array.

        Args:
            pixels: ``(count, size, size, 3)`` uint8.
            positions: ``(rows,)`` int64, where each row's image lies in ``pixels``; None when row
                i is image i.
            fingerprint: see :class:`PixelStore`.
            checked: makes sure of images that come from a cache.
        """
        super().__init__(pixels.shape[1], fingerprint)
        self._pixels, self._checked = pixels, checked
        self._positions = np.arange(len(pixels)) if positions is None else positions

    def __len__(self) -> int:
        return len(self._positions)

    def gather(self, rows: Rows) -> Tensor:
        """Copies the pixels of some rows, see :class:`PixelStore`."""
        positions = self._positions[np.asarray(rows, dtype=np.int64)]
        if self._checked is not None:
            self._checked.check(positions)
        return _channels_last(np.take(self._pixels, positions, axis=0))

    def close(self) -> None:
        """Lets go of the array or map."""
        self._checked = None
        self._pixels = np.empty((0, self.size, self.size, 3), np.uint8)
        self._positions = self._positions[:0]


class StreamingPixels(PixelStore):
    """Pixels decoded anew whenever they are gathered, by a pool of threads."""

    def __init__(self, files: "_Files", paths: Sequence[str], fingerprint: str) -> None:
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
    files = _Files.of(table, size, resize, seen, reading, depths)
    if tiled and files.cache_bytes > budget_bytes:
        raise DataError(
            f"{len(files.paths):,} tiles need {files.cache_bytes / 2**30:.1f} GB of pixels: raise "
            "data.pixel_budget_gb, choose larger tiles, or a smaller image size."
        )
    entry = None
    with quiet_pillow(tiled=tiled):
        if cache is None or files.cache_bytes > budget_bytes:
            bad = _checked(files, cache, progress)
        else:
            entry = _cached(files, cache, progress)
            bad = entry.bad
    once = [BadImage(Tile.named(image.path).file, image.reason) for image in bad]
    _complain(list(dict.fromkeys(once)), len(files.by_file), on_bad_image)
    broken = {image.path for image in bad}
    kept = table.take([row for row, path in enumerate(table.paths) if path not in broken])
    return kept, _store(files, kept, entry), list({image.path: image for image in once}.values())


def _rendered(images: np.ndarray, size: int, resize: Resize) -> PixelStore:
    if images.shape[1:3] != (size, size):
        images = np.stack([make_square(Image.fromarray(image), size, resize) for image in images])
    fingerprint = _hash(images.shape, images)
    return ArrayPixels(images, fingerprint=fingerprint)


def _store(files: "_Files", table: ImageTable, entry: "_Entry | None") -> PixelStore:
    fingerprint = _hash([files.key, table.paths])
    if entry is None:
        return StreamingPixels(files, table.paths, fingerprint)
    place = {path: index for index, path in enumerate(files.paths)}
    positions = np.array([place[path] for path in table.paths])
    checked = CheckedRows(entry.pixels, entry.sums, lambda place: _repair(entry, files, place))
    return ArrayPixels(entry.pixels, positions, fingerprint, checked)


def _hash(facts: object, content: np.ndarray | None = None) -> str:
    digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16)
    if content is not None:
        digest.update(np.ascontiguousarray(content).data)
    return digest.hexdigest()


@dataclass(frozen=True)
class _Files:
    """What a cache is made from: distinct files in path order, and how they are decoded."""

    root: Path
    paths: tuple[str, ...]
    size: int
    resize: Resize
    seen: Callable[[str], object] | None = None
    reading: Reading = AS_IT_IS
    bits: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        table: ImageTable,
        size: int,
        resize: Resize,
        seen: Callable[[str], object] | None = None,
        reading: Reading = AS_IT_IS,
        depths: Mapping[str, int] = MappingProxyType({}),
    ) -> "_Files":
        if table.root is None or len(table) == 0:
            raise DataError("There are no images to open: the table is empty.")
        domains = (table.domain_names[domain] for domain in table.domains.tolist())
        known = zip(table.paths, domains)
        bits = {path: depths[domain] for path, domain in known if domain in depths}
        paths = tuple(sorted(set(table.paths)))
        return cls(table.root.resolve(), paths, size, resize, seen, reading, bits)

    @cached_property
    def by_file(self) -> dict[str, list[str]]:
        """The rows' paths by the file they are from: itself, or the tiles of a larger image."""
        found: dict[str, list[str]] = {}
        for path in self.paths:
            found.setdefault(Tile.named(path).file, []).append(path)
        return found

    @property
    def cache_bytes(self) -> int:
        return len(self.paths) * self.size * self.size * 3

    @cached_property
    def key(self) -> str:
        """A hash that changes whenever the decoded pixels could."""
        return self.key_now()

    def key_now(self) -> str:
        """The same of the files as they are now."""
        made_from = [_LAYOUT, PIL.__version__, str(self.root), self.size, self.resize]
        made_from += [asdict(self.reading), sorted(self.bits.items())]
        stamps = [
            [paths, *_stamp(self.root / file)] for file, paths in sorted(self.by_file.items())
        ]
        return _hash([made_from, stamps])

    def decode_all(
        self, keep: Callable[[np.ndarray], object], progress: Progress | None
    ) -> list[BadImage]:
        """Hands every file's pixels to ``keep`` in path order, black ones for a bad file."""
        total, bad = len(self.paths), []
        black = np.zeros((self.size, self.size, 3), np.uint8)
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            for done, result in enumerate(self._decode_ahead(pool), start=1):
                if isinstance(result, BadImage):
                    bad.append(result)
                keep(black if isinstance(result, BadImage) else result)
                if progress is not None:
                    progress(done, total)
        return bad

    def _decode_ahead(self, pool: ThreadPoolExecutor) -> Iterator[np.ndarray | BadImage]:
        files = list(self.by_file.items())
        wave = _WAVE if self.reading.tile is None else _WAVE_OF_TILES
        for start in range(0, len(files), wave):
            for found in pool.map(lambda item: self.decode(*item), files[start : start + wave]):
                yield from found

    def decode(self, file: str, paths: Sequence[str]) -> Sequence[np.ndarray | BadImage]:
        """Decodes rows of one file: all of it, or its tiles."""
        boxes = [Tile.named(path).box for path in paths]
        look = (self.size, self.resize, self.reading, self.bits.get(paths[0], 0))
        try:
            if boxes == [None]:
                return [decode_image(self.root / file, *look)]
            return decode_parts(self.root / file, boxes, *look)
        except UnusableImageError as error:
            return [BadImage(path, str(error)) for path in paths]
        finally:
            if self.seen is not None:
                self.seen(file)


def _stamp(path: Path) -> tuple[int, int, int]:
    """Size, time of change, and the time nobody can set back: it tells of a change that kept both.

    Not the file's number, which some network file systems make up anew with every mount.
    """
    try:
        status = path.stat()
    except OSError:
        return -1, -1, -1
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


@dataclass(frozen=True)
class _Entry:
    """A cache entry: what was decoded, a checksum of each image, and what could not be."""

    folder: Path
    pixels: np.ndarray
    sums: np.ndarray
    bad: list[BadImage]


def _cached(files: _Files, cache: Path, progress: Progress | None) -> _Entry:
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


def _open_entry(folder: Path, files: _Files) -> _Entry | None:
    """Opens an entry; None if there is none, or if it is no whole one of these files."""
    if not folder.is_dir():
        return None
    bad = _read_bad(folder / _FACTS)
    try:
        sums = open_array(folder / _SUMS)
        pixels = np.load(folder / _PIXELS, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        sums = pixels = np.empty(0)
    count = len(files.paths)
    whole = pixels.shape == (count, files.size, files.size, 3) and pixels.dtype == np.uint8
    if bad is None or not whole or sums.shape != (count,):
        logger.warning("The pixel cache %s is damaged; the images are decoded again.", folder)
        return None
    return _Entry(folder, pixels, sums, bad)


def _repair(entry: _Entry, files: _Files, place: int) -> None:
    """Decodes a damaged image again and writes it where it was; the open map shows it at once."""
    path, cached = files.paths[place], entry.pixels[place]
    remedy = "Delete that folder, and the images are decoded again."
    with quiet_pillow(tiled=files.reading.tile is not None):
        (pixels,) = files.decode(Tile.named(path).file, [path])
    if isinstance(pixels, BadImage):
        if path not in {image.path for image in entry.bad}:
            raise DataError(
                f"The pixel cache {entry.folder} is damaged at {path}, which cannot be decoded "
                f"again ({pixels.reason}). {remedy}"
            )
        pixels = np.zeros_like(cached)
    if zlib.crc32(pixels.data) != entry.sums[place]:
        raise DataError(
            f"The pixel cache {entry.folder} is damaged at {path}, and that file is another one "
            f"now. {remedy}"
        )
    try:
        with (entry.folder / _PIXELS).open("r+b") as file:
            file.seek(entry.pixels.offset + place * cached.nbytes)  # type: ignore[attr-defined]
            file.write(pixels.tobytes())
            sync(file)
    except OSError as error:
        raise DataError(
            f"The pixel cache {entry.folder} is damaged at {path} and cannot be written "
            f"({why(error)}). {remedy}"
        ) from None
    logger.warning("The pixel cache was damaged at %s; it was decoded again.", path)


def _make_entry(entry: Path, files: _Files, progress: Progress | None) -> None:
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


def _write_entry(folder: Path, files: _Files, progress: Progress | None) -> None:
    # Plain writes, not a memory map: on a full disk a map kills the process, a write raises.
    header = {
        "descr": "|u1",
        "fortran_order": False,
        "shape": (len(files.paths), files.size, files.size, 3),
    }
    sums = array("L")
    with (folder / _PIXELS).open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)

        def keep(pixels: np.ndarray) -> None:
            content = pixels.tobytes()
            sums.append(zlib.crc32(content))
            file.write(content)

        bad = files.decode_all(keep, progress)
        sync(file)
    (folder / _PIXELS).chmod(FILE_MODE)
    if files.key_now() != files.key:
        raise DataError(
            f"Images in {files.root} were changed while they were decoded. Start again when "
            "nothing writes there any more."
        )
    keep_array(folder / _SUMS, np.array(sums, np.uint32))
    _write_bad(folder / _FACTS, bad)


def _checked(files: _Files, cache: Path | None, progress: Progress | None) -> list[BadImage]:
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
        return bad if content["checksum"] == _hash(content["bad"]) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _write_bad(path: Path, bad: list[BadImage]) -> None:
    rows = [asdict(image) for image in bad]
    replace_text(path, json.dumps({"checksum": _hash(rows), "bad": rows}, indent=1))


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
        if time.time() - _stamp(left)[1] / 1e9 > _LEFT:
            shutil.rmtree(left, ignore_errors=True)
    sweep_asides(cache, older_than=_LEFT)


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
    logger.warning("%d of %d images left out: %s%s", len(bad), total, named, more)
