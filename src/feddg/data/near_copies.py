"""Finds near copies across a split: an image saved again at another quality or size."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import numpy as np

from feddg.data.pixels import PixelStore, Vectors
from feddg.data.splits import Splits
from feddg.diagnostics import Diagnostic, note, warning
from feddg.errors import first_names
from feddg.rng import numpy_stream
from feddg.text import number

MOST_BITS = 6
"""Largest number of the 64 hash bits in which near copies may differ."""
LEAST_CORRELATION = 0.98
"""Smallest correlation of the grey values of near copies, at ``_SIDE`` x ``_SIDE``."""
_SIDE, _BATCH, _PAIRS = 32, 128, 2**22
_LINES = 64
"""Smallest number of lines of a large image that are read for its hash; enough for the low
frequencies.
"""
_FREQUENCIES, _BITS = 8, 64
FARTHEST = 1e-3
"""How far near copies of features are apart: root mean square, in their standard deviations."""
FEWEST_FEATURES = 4
"""Of fewer, some rows of many are that near by chance."""
_LEAST_CONTRAST = 1.0
"""Coefficients below this are rounding: one pixel that differs by one level has some above."""


def about_near_copies(
    pixels: PixelStore,
    paths: Sequence[str],
    contents: Sequence[str],
    splits: Splits,
    alike: str = "",
) -> Iterator[Diagnostic]:
    """Warns if validation or test images are near copies of training images.

    Args:
        pixels: the store of all rows.
        paths: the path of each row.
        contents: a hash of each row's file; exact copies are reported elsewhere.
        splits: the rows by role.
        alike: why the data set has such pairs, if it must have them: then they are a note.
    """
    measured = np.concatenate([splits.id_val, splits.id_test, splits.val, splits.test])
    search = near_rows if isinstance(pixels, Vectors) else near_copies
    pairs = [
        (row, other)
        for row, other in search(pixels, splits.train, measured)
        if not contents[row] or contents[row] != contents[other]
    ]
    if pairs:
        images = len({other for _, other in pairs})
        named = first_names([f"{paths[row]} and {paths[other]}" for row, other in pairs], 3)
        text = (
            f"{number(images)} of {number(len(measured))} images that measure look like images of "
            f"training ({named})."
        )
        if alike:
            yield note("near-copies", text, alike)
        else:
            yield warning(
                "near-copies",
                f"{text} Where they are copies, saved again, accuracies are too high.",
                "Look at them, and remove the copies.",
            )


def near_copies(
    pixels: PixelStore, rows: np.ndarray, others: np.ndarray
) -> Iterator[tuple[int, int]]:
    """Yields pairs of near copies, one of ``rows`` and one of ``others``.

    Their hashes differ in few bits, and their grey values correlate. Hashes alone would confuse
    simple line drawings.
    """
    ours, theirs = perceptual_hashes(pixels, rows), perceptual_hashes(pixels, others)
    chunk = max(1, _PAIRS // max(1, len(ours)))
    for start in range(0, len(theirs), chunk):
        shared = (theirs[start : start + chunk] @ ours.T + _BITS) / 2
        place, match = np.nonzero(_BITS - shared <= MOST_BITS)
        if not len(place):
            continue
        pairs = np.stack([rows[match], others[start + place]], axis=1)
        used, where = np.unique(pairs, return_inverse=True)  # each image is read once
        grey = np.concatenate(
            [_normalized(_transformed(pixels, r, _averages)) for r in _parts(used)]
        )
        for some, images in zip(_parts(pairs), _parts(where.reshape(pairs.shape))):
            alike = (grey[images[:, 0]] * grey[images[:, 1]]).sum(axis=1) >= LEAST_CORRELATION
            yield from map(tuple, some[alike].tolist())


def near_rows(
    pixels: PixelStore, rows: np.ndarray, others: np.ndarray
) -> Iterator[tuple[int, int]]:
    """Yields pairs of near copies among features, one of ``rows`` and one of ``others``.

    Pairs are sought among rows that are near in a few random directions, in which a difference of
    root mean square r is normal with deviation r.
    """
    from scipy.spatial import cKDTree  # as slow to import as it is rarely needed

    ours, theirs = (pixels.gather(some).numpy() for some in (rows, others))
    if ours.shape[1] < FEWEST_FEATURES or not len(theirs):
        return
    mean, spread = ours.mean(0, dtype=np.float64), ours.std(0, dtype=np.float64)
    ours, theirs = ((some - mean) / np.where(spread > 0, spread, 1) for some in (ours, theirs))
    directions = numpy_stream(0, "near copies").standard_normal((ours.shape[1], 4))
    looks, sought = (some @ directions / ours.shape[1] ** 0.5 for some in (ours, theirs))
    tree = cKDTree(looks)
    for place, look in enumerate(sought):
        near = np.array(tree.query_ball_point(look, 5 * FARTHEST, p=np.inf), np.int64)
        apart = ((ours[near] - theirs[place]) ** 2).mean(1) ** 0.5
        yield from ((int(rows[row]), int(others[place])) for row in near[apart <= FARTHEST])


def _parts(rows: np.ndarray) -> list[np.ndarray]:
    return np.split(rows, range(_BATCH, len(rows), _BATCH))


def _normalized(grey: np.ndarray) -> np.ndarray:
    """Returns images with mean 0 and norm 1, so that their dot products are correlations."""
    flat = grey.reshape(len(grey), -1)
    flat = flat - flat.mean(axis=1, keepdims=True)
    return flat / np.linalg.norm(flat, axis=1, keepdims=True).clip(1e-6)


def perceptual_hashes(pixels: PixelStore, rows: np.ndarray) -> np.ndarray:
    """Returns a 64-bit hash of each image's coarse structure.

    The grey image's discrete cosine transform gives the 8 x 8 lowest frequencies without the
    constant ones. Each bit tells whether a coefficient lies above their median (Zauner,
    "Implementation and Benchmarking of Perceptual Image Hash Functions", 2010, section 3.2.1,
    pHash; there the image is first shrunk to 32 x 32, which hardly changes these frequencies).

    Args:
        pixels: the store.
        rows: rows of the store.

    Returns:
        ``(len(rows), 64)`` float32, the bits as -1 and 1, so that dot products count equal bits;
        zeros for a blank image, which then has half its bits in common with any other.
    """
    hashes = np.empty((len(rows), _BITS), np.float32)
    for start in range(0, len(rows), _BATCH):
        chosen = rows[start : start + _BATCH]
        every = max(1, pixels.size // _LINES)
        coefficients = _transformed(pixels, chosen, _cosines, every).reshape(len(chosen), -1)
        above = coefficients > np.median(coefficients, axis=1, keepdims=True)
        blank = abs(coefficients).max(axis=1, keepdims=True) < _LEAST_CONTRAST
        hashes[start : start + _BATCH] = np.where(above, 1, -1) * ~blank
    return hashes


def _transformed(
    pixels: PixelStore, rows: np.ndarray, basis: Callable[[int], np.ndarray], every: int = 1
) -> np.ndarray:
    """Returns ``B g B'`` of the grey images g and a basis B: ``(len(rows), n, n)``.

    Args:
        pixels: the store.
        rows: rows of the store.
        basis: a function from an image's side to B, ``(n, side)``.
        every: read one of so many lines of an image.
    """
    across = basis(pixels.size)
    images = pixels.gather(rows).permute(0, 2, 3, 1).numpy()[:, ::every]
    lines = images.reshape(*images.shape[:2], -1).astype(np.float32)
    halfway = lines @ np.repeat(across, 3, axis=1).T  # the sum of the colours, in one product
    return across[:, ::every] @ halfway


@cache
def _cosines(side: int) -> np.ndarray:
    frequencies, places = np.arange(1, _FREQUENCIES + 1), np.arange(side) + 0.5
    return np.cos(np.pi / side * np.outer(frequencies, places)).astype(np.float32)


@cache
def _averages(side: int) -> np.ndarray:
    """Returns the ``(_SIDE, side)`` matrix that averages a line of pixels to ``_SIDE`` values."""
    ends = np.arange(_SIDE + 1) * side / _SIDE
    starts = np.arange(side)
    covered = np.minimum(ends[1:, None], starts + 1) - np.maximum(ends[:-1, None], starts)
    return (covered.clip(0) * _SIDE / side).astype(np.float32)
