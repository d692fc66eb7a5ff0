"""Near copies: an image saved again, at another quality or size, on both sides of a split."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import numpy as np

from feddg.data.pixels import PixelStore
from feddg.data.splits import Splits
from feddg.diagnostics import Diagnostic
from feddg.errors import first_names

MOST_BITS = 6
"""Bits of 64 in which the hashes of near copies may differ ..."""
LEAST_CORRELATION = 0.98
"""... and how alike their grey values are then, at ``_SIDE`` x ``_SIDE``."""
_SIDE, _BATCH, _PAIRS = 32, 128, 2**22
_LINES = 64
"""Lines of a large image that its hash looks at, at least: all hold the low frequencies."""
_FREQUENCIES, _BITS = 8, 64


def about_near_copies(
    pixels: PixelStore, paths: Sequence[str], contents: Sequence[str], splits: Splits
) -> Iterator[Diagnostic]:
    """Warns where images that measure are nearly those of training.

    Args:
        pixels: of all rows.
        paths: by row.
        contents: by row, a hash of the file; copies to the byte are another matter.
        splits: the rows by role.
    """
    measured = np.concatenate([splits.id_val, splits.id_test, splits.val, splits.test])
    pairs = [
        (own, other)
        for own, other in near_copies(pixels, splits.train, measured)
        if not contents[own] or contents[own] != contents[other]
    ]
    if pairs:
        images = len({other for _, other in pairs})
        named = first_names([f"{paths[own]} and {paths[other]}" for own, other in pairs], 3)
        yield Diagnostic(
            "near-copies",
            "warning",
            f"{images:,} of {len(measured):,} images that measure look like images of training "
            f"({named}). Where they are copies, saved again, accuracies are too high.",
            "Look at them, and remove the copies.",
        )


def near_copies(
    pixels: PixelStore, rows: np.ndarray, others: np.ndarray
) -> Iterator[tuple[int, int]]:
    """Yields pairs of images that show the same, one of ``rows`` and one of ``others``.

    Their hashes differ in few bits, and their grey values correlate: hashes alone mistake drawings
    of few lines for each other.
    """
    own, theirs = perceptual_hashes(pixels, rows), perceptual_hashes(pixels, others)
    chunk = max(1, _PAIRS // max(1, len(own)))
    for start in range(0, len(theirs), chunk):
        shared = (theirs[start : start + chunk] @ own.T + _BITS) / 2
        place, match = np.nonzero(_BITS - shared <= MOST_BITS)
        pairs = np.stack([rows[match], others[start + place]], axis=1)
        for some in np.split(pairs, range(_BATCH, len(pairs), _BATCH)) if len(pairs) else ():
            one, other = (_normalized(_transformed(pixels, part, _averages)) for part in some.T)
            alike = (one * other).sum(axis=1) >= LEAST_CORRELATION
            yield from map(tuple, some[alike].tolist())


def _normalized(grey: np.ndarray) -> np.ndarray:
    """Returns images without their mean and of length 1, so that products are correlations."""
    flat = grey.reshape(len(grey), -1)
    flat = flat - flat.mean(axis=1, keepdims=True)
    found: np.ndarray = flat / np.linalg.norm(flat, axis=1, keepdims=True).clip(1e-6)
    return found


def perceptual_hashes(pixels: PixelStore, rows: np.ndarray) -> np.ndarray:
    """Returns a 64-bit hash of each image's coarse structure.

    Of the grey image's discrete cosine transform the 8 x 8 lowest frequencies but the constant
    ones; a bit says whether a coefficient lies above their median (Zauner, "Implementation and
    Benchmarking of Perceptual Image Hash Functions", 2010, section 3.2.1, pHash; there after
    shrinking to 32 x 32, which leaves these frequencies as they are).

    Args:
        pixels: the store.
        rows: of the store.

    Returns:
        ``(len(rows), 64)`` float32, the bits as -1 and 1: their products count the equal ones.
    """
    found = np.empty((len(rows), _BITS), np.float32)
    for start in range(0, len(rows), _BATCH):
        chosen = rows[start : start + _BATCH]
        every = max(1, pixels.size // _LINES)
        coefficients = _transformed(pixels, chosen, _cosines, every).reshape(len(chosen), -1)
        above = coefficients > np.median(coefficients, axis=1, keepdims=True)
        found[start : start + _BATCH] = np.where(above, 1, -1)
    return found


def _transformed(
    pixels: PixelStore, rows: np.ndarray, basis: Callable[[int], np.ndarray], every: int = 1
) -> np.ndarray:
    """Returns ``B g B'`` of the grey images g: ``(len(rows), n, n)`` for a basis ``(n, side)``.

    Args:
        pixels: the store.
        rows: of the store.
        basis: returns B for a side.
        every: of so many lines of an image one is looked at.
    """
    across = basis(pixels.size)
    images = pixels.gather(rows).permute(0, 2, 3, 1).numpy()[:, ::every]
    lines = images.reshape(*images.shape[:2], -1).astype(np.float32)
    halfway = lines @ np.repeat(across, 3, axis=1).T  # the sum of the colours, in one product
    found: np.ndarray = across[:, ::every] @ halfway
    return found


@cache
def _cosines(side: int) -> np.ndarray:
    frequencies, places = np.arange(1, _FREQUENCIES + 1), np.arange(side) + 0.5
    return np.cos(np.pi / side * np.outer(frequencies, places)).astype(np.float32)


@cache
def _averages(side: int) -> np.ndarray:
    """What part of each of ``_SIDE`` places every pixel of a side covers."""
    ends = np.arange(_SIDE + 1) * side / _SIDE
    starts = np.arange(side)
    covered = np.minimum(ends[1:, None], starts + 1) - np.maximum(ends[:-1, None], starts)
    return (covered.clip(0) * _SIDE / side).astype(np.float32)
