"""Images of a cache compared with their checksums, each when it is first used."""

import zlib
from collections.abc import Callable

import numpy as np


class CheckedRows:
    """Checks the images of an array, each once per process, and has damaged ones repaired.

    A cache of gigabytes is thus not read through before the first batch, and what is never used is
    never read.

    Args:
        pixels: ``(count, size, size, 3)`` uint8, memory-mapped.
        sums: ``(count,)`` uint32, CRC-32 of each image's bytes.
        repair: puts right the image at a position, in the file behind ``pixels``.
    """

    def __init__(self, pixels: np.ndarray, sums: np.ndarray, repair: Callable[[int], None]) -> None:
        self._pixels, self._sums, self._repair = pixels, sums, repair
        self._seen = np.zeros(len(sums), bool)

    def check(self, positions: np.ndarray) -> None:
        """Makes sure of the images at some positions.

        Raises:
            DataError: one is damaged and cannot be repaired.
        """
        if self._seen[positions].all():
            return
        for position in np.unique(positions[~self._seen[positions]]).tolist():
            if zlib.crc32(self._pixels[position].data) != self._sums[position]:
                self._repair(position)
            self._seen[position] = True
