"""How the images of each domain are stored: sizes, kinds, bit depths and values."""

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import UnidentifiedImageError

from feddg.data.bands import bits_used, is_deep, read_tiff
from feddg.data.decoding import quiet_pillow
from feddg.data.image_formats import open_image
from feddg.data.images import ImageTable
from feddg.data.survey import SAMPLE, evenly, files_by_domain, samples_of


@dataclass(frozen=True)
class StoredImages:
    """How one domain's images are stored.

    Attributes:
        files: how many there are, unusable ones included.
        smallest: width and height of the image with the fewest pixels; (0, 0) if none opens.
        middle: of the one in the middle.
        largest: of the one with the most.
        modes: how many files there are of each kind, such as ``RGB`` or ``uint16 x 4``.
        bits: bit depth that the values of the sample use.
        low: smallest value in the sample, over all bands.
        high: largest.
        mean: mean value.
        sampled: files whose values were looked at.
    """

    files: int
    smallest: tuple[int, int]
    middle: tuple[int, int]
    largest: tuple[int, int]
    modes: dict[str, int]
    bits: int
    low: float
    high: float
    mean: float
    sampled: int


def stored_images(table: ImageTable) -> dict[str, StoredImages]:
    """Looks at the head of every file, and at the values of up to ``SAMPLE`` of each domain.

    Args:
        table: all images; none of rendered ones are looked at.
    """
    if table.root is None:
        return {}
    root = table.root
    with quiet_pillow(tiled=True), ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return {
            domain: _domain(
                list(pool.map(lambda file: _head(root / file), files)),
                list(pool.map(lambda file: _values(root / file), evenly(files, SAMPLE))),
            )
            for domain, files in files_by_domain(table).items()
        }


def _domain(
    heads: Sequence[tuple[int, int, str] | None],
    values: Sequence[tuple[int, float, float, float] | None],
) -> StoredImages:
    known = sorted((head for head in heads if head), key=lambda head: (head[0] * head[1], head))
    sizes = [(width, height) for width, height, _ in known] or [(0, 0)]
    looked = [found for found in values if found]
    modes = Counter(mode for _, _, mode in known)
    unusable = len(heads) - len(known)
    return StoredImages(
        files=len(heads),
        smallest=sizes[0],
        middle=sizes[len(sizes) // 2],
        largest=sizes[-1],
        modes=dict(modes.most_common()) | ({"cannot be opened": unusable} if unusable else {}),
        bits=max((bits for bits, *_ in looked), default=0),
        low=min((low for _, low, _, _ in looked), default=0.0),
        high=max((high for _, _, high, _ in looked), default=0.0),
        mean=float(np.mean([mean for *_, mean in looked])) if looked else 0.0,
        sampled=len(looked),
    )


def _head(path: Path) -> tuple[int, int, str] | None:
    """Width, height and kind of a file; None where it cannot be opened."""
    try:
        with open_image(path) as image:
            bands = len(image.getbands())
            deep = is_deep(image) and image.mode in ("RGB", "RGBA")
            return (*image.size, f"16 bits x {bands}" if deep else image.mode)
    except UnidentifiedImageError:
        return _wide_head(path)
    except Exception:  # decoding says what is wrong with it
        return None


def _wide_head(path: Path) -> tuple[int, int, str] | None:
    try:
        values = read_tiff(path).values
    except Exception:  # no TIFF either
        return None
    height, width, bands = values.shape
    return width, height, f"{values.dtype} x {bands}"


def _values(path: Path) -> tuple[int, float, float, float] | None:
    """Bit depth, smallest, largest and mean value of a file."""
    try:
        samples = samples_of(path)
    except Exception:  # decoding says what is wrong with it
        return None
    if samples is None or not np.isfinite(samples.values).any():
        return None
    values = samples.values[:, :, :-1] if samples.alpha else samples.values
    numbers = values[np.isfinite(values)]
    bits = 8 if values.dtype == np.uint8 else bits_used(values)
    return bits, float(numbers.min()), float(numbers.max()), float(numbers.mean())
