"""Pixels of image files: each file is decoded once and kept.

A table's images are decoded to uint8 at training resolution into one memory-mapped file that all
clients, runs and seeds share. The file's name is a hash of its sources, so a changed image or
another resolution gets a new file. Tables too large for that are decoded on demand behind the same
interface.

A checksum of a file's pixels, which tells exchanged rows, too, is looked at whenever it is opened:
0.13 s for PACS at 96 pixels. What is damaged is decoded again.
"""

import logging
import math
import os
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from feddg.data.decoding import (
    AS_IT_IS,
    Reading,
    Resize,
    Tile,
    UnreadImageError,
    UnusableImageError,
    cut,
    decode_parts,
    make_square,
    quiet_pillow,
)
from feddg.data.images import ImageTable, positions
from feddg.data.pixels import ArrayPixels, PixelStore, Rows, Vectors, channels_last
from feddg.diagnostics import Progress, arriving, silent, warn
from feddg.errors import DataError, RunError, first_names
from feddg.records import BadImageRow, JsonFile
from feddg.settings import grouped
from feddg.storage import (
    A_DAY,
    file_faults,
    hash_of,
    open_array,
    private_folder,
    replace_file,
    replace_text,
    stamp,
    sweep_asides,
)

_LAYOUT = 6
"""Increase when the cache's layout or the decoding changes."""
DECODERS = (
    *("Pillow", "pillow-heif", "tifffile", "imagecodecs", "pydicom", "pyjpegls", "python-gdcm"),
    *("pylibjpeg", "pylibjpeg-libjpeg", "pylibjpeg-openjpeg", "pylibjpeg-rle"),
)
"""Packages that decode images. What one was missing for is decoded once it is installed."""
_WAVE, _WAVE_OF_TILES = 256, 4
"""Files decoded ahead of the one being written."""

logger = logging.getLogger("feddg")
BUDGET_BYTES = 16 * 2**30
"""Default limit of one cache file: PACS at 224 pixels needs 1.5 GB."""


@cache
def installed_decoders() -> dict[str, str]:
    """Returns the versions of the installed ``DECODERS``."""
    versions = {}
    for name in DECODERS:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


class DecodedFiles:
    """The sources of a cache: a table's distinct files sorted by path, and how they are decoded.

    Attributes:
        shape: of the array of all pixels: ``(rows, size, size, 3)``.
        by_file: the rows' paths by file: the file itself, or the tiles of a large image.
        key: a hash that changes whenever the decoded pixels could change.

    Args:
        table: images in files.
        size: as the rest, see :func:`open_pixels`.
        resize: see there.
        reading: see there.
        depths: see there.

    Raises:
        DataError: there are no images.
    """

    def __init__(
        self,
        table: ImageTable,
        size: int,
        resize: Resize,
        reading: Reading,
        depths: Mapping[str, int],
    ) -> None:
        if table.root is None or len(table) == 0:
            raise DataError("There are no images to open: the table is empty.")
        self.root, self.paths = table.root.resolve(), tuple(sorted(set(table.paths)))
        self.size, self.resize, self.reading = size, resize, reading
        self.shape = (len(self.paths), size, size, 3)
        self.by_file = grouped((Tile.named(path).file, path) for path in self.paths)
        domains = (table.domain_names[domain] for domain in table.domains.tolist())
        by_path = zip(table.paths, domains)
        self.bits = {path: depths[domain] for path, domain in by_path if domain in depths}
        self.key = self.key_now()

    def key_now(self) -> str:
        """Returns the key computed from the files' present state."""
        made_from = [_LAYOUT, installed_decoders(), str(self.root), self.size, self.resize]
        made_from += [asdict(self.reading), sorted(self.bits.items())]
        stamps = [
            [paths, *(stamp(self.root / file) or (-1, -1, -1))]
            for file, paths in sorted(self.by_file.items())
        ]
        return hash_of([made_from, stamps])

    def decoded(self, progress: Progress) -> Iterator[np.ndarray | BadImageRow]:
        """Yields every row's pixels in path order, or why it has none."""
        return arriving(self._decode_ahead(), progress, "decoding images", len(self.paths))

    def bad(self, progress: Progress) -> list[BadImageRow]:
        """Decodes every file; returns the rows that have no pixels."""
        return [image for image in self.decoded(progress) if isinstance(image, BadImageRow)]

    def _decode_ahead(self) -> Iterator[np.ndarray | BadImageRow]:
        files = list(self.by_file.items())
        wave = _WAVE if self.reading.tile is None else _WAVE_OF_TILES
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            for start in range(0, len(files), wave):
                for row in pool.map(lambda item: self.decode(*item), files[start : start + wave]):
                    yield from row

    def decode(self, file: str, paths: Sequence[str]) -> Sequence[np.ndarray | BadImageRow]:
        """Decodes the rows of one file: the whole image, or its tiles.

        Raises:
            DataError: a disk, network or memory failed, and not the file.
        """
        boxes = [Tile.named(path).box for path in paths]
        bits = self.bits.get(paths[0], 0)
        try:
            return decode_parts(self.root / file, boxes, self.size, self.resize, self.reading, bits)
        except UnreadImageError as error:  # never stored: it would be left out for good
            raise DataError(f"{self.root / file} {error}; start again.") from None
        except UnusableImageError as error:
            return [BadImageRow(path=path, reason=str(error)) for path in paths]


def _cached_pixels(
    files: DecodedFiles, cache: Path, progress: Progress
) -> tuple[np.ndarray, list[BadImageRow]]:
    """Returns the pixels of files from the cache; decodes them first if necessary."""
    pixels, checked = cache / f"pixels-{files.key}.npy", cache / f"checked-{files.key}.json"
    if pixels.exists():
        with suppress(OSError, ValueError, RunError):
            known, stored = Checked.read(checked), open_array(pixels, writable=False)
            content = zlib.crc32(stored.reshape(-1).data)
            if known and stored.shape == files.shape and known.pixels == known.sealed(content):
                return stored, known.bad
        logger.warning("The pixel cache %s is damaged; the images are decoded again.", pixels)
    with _writing_to(cache):
        replace_file(pixels, lambda aside: _decode_to(aside, checked, files, progress))
    written = Checked.read(checked)
    assert written is not None
    return open_array(pixels, writable=False), written.bad


def _decode_to(file: Path, checked: Path, files: DecodedFiles, progress: Progress) -> None:
    # Plain writes, not a memory map: on a full disk a map kills the process, a write raises.
    header = {"descr": "|u1", "fortran_order": False, "shape": files.shape}
    bad: list[BadImageRow] = []
    checksum, black = 0, bytes(math.prod(files.shape[1:]))
    with file.open("wb") as opened:
        np.lib.format.write_array_header_1_0(opened, header)
        for image in files.decoded(progress):
            if isinstance(image, BadImageRow):
                bad.append(image)
            content = black if isinstance(image, BadImageRow) else image.tobytes()
            checksum = zlib.crc32(content, checksum)
            opened.write(content)
    if files.key_now() != files.key:
        raise DataError(
            f"Images in {files.root} were changed while they were decoded. Start again when "
            "nothing writes there any more."
        )
    answer = Checked(bad=bad)
    sealed = answer.model_copy(update={"pixels": answer.sealed(checksum)})
    replace_text(checked, sealed.to_text())


def _bad_images(files: DecodedFiles, cache: Path | None, progress: Progress) -> list[BadImageRow]:
    """Finds the bad files by decoding everything once; a cache folder stores the result."""
    if cache is None:
        return files.bad(progress)
    checked = cache / f"checked-{files.key}.json"
    with suppress(RunError):  # damaged
        if known := Checked.read(checked):
            return known.bad
    found = Checked(bad=files.bad(progress))
    with _writing_to(cache):
        replace_text(checked, found.to_text())
    return found.bad


class Checked(JsonFile):
    """The bad ones among decoded images, and a CRC-32 of these and all pixels."""

    bad: list[BadImageRow]
    pixels: int | None = None

    def sealed(self, pixels: int) -> int:
        """Returns the CRC-32 of the bad images after that of the pixels."""
        return zlib.crc32("".join(image.to_json() for image in self.bad).encode(), pixels)


@contextmanager
def _writing_to(cache: Path) -> Iterator[None]:
    """Removes temporary files of killed processes that are older than a day."""
    with file_faults(DataError, f"Cannot write the pixel cache in {cache}"):
        private_folder(cache)
        for left in cache.glob("partial-*"):
            if time.time() - left.stat().st_mtime > A_DAY:
                shutil.rmtree(left, ignore_errors=True)
        sweep_asides(cache)
        yield


class StreamingPixels(PixelStore):
    """Pixels decoded again at every gather, by a pool of threads."""

    def __init__(self, files: DecodedFiles, paths: Sequence[str], fingerprint: str) -> None:
        """Stores where the images are.

        Args:
            files: how they are decoded.
            paths: one path per row, all known to be readable.
            fingerprint: see :class:`PixelStore`.
        """
        super().__init__(files.size, fingerprint)
        self._files, self._paths = files, tuple(paths)
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="decode")

    def __len__(self) -> int:
        return len(self._paths)

    def gather(self, rows: Rows, device: torch.device | None = None) -> Tensor:
        """Decodes the images of some rows, see :class:`PixelStore`.

        Raises:
            DataError: for a file that was readable when the store was opened and is not now.
        """
        paths = [self._paths[row] for row in np.asarray(rows, dtype=np.int64)]
        batch = np.empty((len(paths), self.size, self.size, 3), np.uint8)
        with quiet_pillow(tiled=self._files.reading.tile is not None):
            for place, pixels in enumerate(self._pool.map(self._decode, paths)):
                batch[place] = pixels
        return channels_last(batch).to(device)

    def _decode(self, path: str) -> np.ndarray:
        (image,) = self._files.decode(Tile.named(path).file, [path])
        if isinstance(image, BadImageRow):
            raise DataError(
                f"{self._files.root / path} was readable before and is not any more: {image.reason}"
            )
        return image


def open_pixels(
    table: ImageTable,
    size: int,
    *,
    cache: Path | None,
    resize: Resize = "squash",
    budget_bytes: int = BUDGET_BYTES,
    on_bad_image: Literal["skip", "fail"] = "skip",
    progress: Progress = silent,
    reading: Reading = AS_IT_IS,
    depths: Mapping[str, int] = MappingProxyType({}),
) -> tuple[ImageTable, PixelStore, list[BadImageRow]]:
    """Makes a table's pixels ready; each file is decoded at most once per resolution.

    Args:
        table: the images; rendered tables keep their pixels in memory.
        size: the side of every image in pixels.
        cache: the folder of the shared cache files; None decodes on demand.
        resize: how an image becomes square.
        budget_bytes: tables that would need more than this are decoded on demand.
        on_bad_image: skip unusable files with a warning, or fail.
        progress: called while files are decoded.
        reading: which bands become colours, which values are black and white, and whether large
            images are cut into tiles, each a row of the returned table.
        depths: bits used by values deeper than 8 bits, by domain; see ``survey`` in
            :mod:`feddg.data.inspection`.

    Returns:
        The table without bad rows, a store with the same rows, and the skipped files, sorted by
        path.

    Raises:
        DataError: for settings out of range, bad images under ``fail``, no usable image at all, or
            a cache folder that cannot be written.
    """
    if table.images is not None:
        return table, _rendered(table.images, size, resize), []
    tiled = reading.tile is not None
    if reading.tile is not None:
        with quiet_pillow(tiled=True):
            table = cut(table, reading.tile)
    files = DecodedFiles(table, size, resize, reading, depths)
    needed = math.prod(files.shape)
    if tiled and needed > budget_bytes:
        raise DataError(
            f"{len(files.paths):,} tiles need {needed / 2**30:.1f} GB of pixels: raise "
            "data.pixel_budget_gb, choose larger tiles, or a smaller image size."
        )
    pixels = None
    with quiet_pillow(tiled=tiled):
        if cache is None or needed > budget_bytes:
            bad = _bad_images(files, cache, progress)
        else:
            pixels, bad = _cached_pixels(files, cache, progress)
    broken = {image.path for image in bad}
    once = {file: image.reason for image in bad for file in [Tile.named(image.path).file]}
    bad = [BadImageRow(path=file, reason=reason) for file, reason in once.items()]
    _complain(bad, len(files.by_file), on_bad_image)
    usable = table.take([row for row, path in enumerate(table.paths) if path not in broken])
    fingerprint = hash_of([files.key, usable.paths])
    if pixels is None:
        return usable, StreamingPixels(files, usable.paths, fingerprint), bad
    places = positions(usable.paths, files.paths)
    return usable, ArrayPixels(pixels, places, fingerprint), bad


def _rendered(images: np.ndarray, size: int, resize: Resize) -> PixelStore:
    if images.ndim == 2:
        return Vectors(images)
    if images.shape[1:3] != (size, size):
        images = np.stack([make_square(Image.fromarray(image), size, resize) for image in images])
    return ArrayPixels(images, fingerprint=hash_of(images.shape, images))


def _complain(bad: list[BadImageRow], total: int, on_bad_image: str) -> None:
    if not bad:
        return
    named = first_names([f"{image.path} ({image.reason})" for image in bad])
    if len(bad) == total:
        raise DataError(f"None of the {total} images can be used: {named}.")
    if on_bad_image == "fail":
        raise DataError(
            f"{len(bad)} of {total} images cannot be used: {named}. "
            "Repair or remove them, or set on_bad_image: skip."
        )
    warn("images-left-out", f"{len(bad)} of {total} images left out: {named}.")
