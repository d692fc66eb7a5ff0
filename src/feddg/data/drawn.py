"""Images that a data set's files hold as numbers: read or drawn once, then kept in the cache."""

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from feddg.errors import DataError
from feddg.storage import cache_folder, kept_array, why

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
