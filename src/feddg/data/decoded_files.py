"""The image files behind a table's rows, decoded to squares of bytes by a pool of threads."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import numpy as np
import PIL

from feddg.data.bands import Reading, UnusableImageError
from feddg.data.decoding import AS_IT_IS, Resize, decode_image, decode_parts
from feddg.data.images import ImageTable
from feddg.data.tiles import Tile
from feddg.errors import DataError

Progress = Callable[[int, int], None]

_LAYOUT = 2
"""Raise when the cache's layout or the way images are decoded changes."""
_WAVE, _WAVE_OF_TILES = 256, 4
"""Files decoded ahead of the one being written."""


@dataclass(frozen=True)
class BadImage:
    """A file that was left out, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class DecodedFiles:
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
    ) -> "DecodedFiles":
        """The files of a table; ``depths`` is the bit depth in use by domain name."""
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
        """What their pixels need, in bytes."""
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
            [paths, *stamp_of(self.root / file)] for file, paths in sorted(self.by_file.items())
        ]
        return hash_of([made_from, stamps])

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


def stamp_of(path: Path) -> tuple[int, int, int]:
    """Size, time of change, and the time nobody can set back: it tells of a change that kept both.

    Not the file's number, which some network file systems make up anew with every mount.
    """
    try:
        status = path.stat()
    except OSError:
        return -1, -1, -1
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def hash_of(facts: object, content: np.ndarray | None = None) -> str:
    """Returns 32 characters that stand for some facts, written as JSON, and an array's bytes."""
    digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16)
    if content is not None:
        digest.update(np.ascontiguousarray(content).data)
    return digest.hexdigest()
