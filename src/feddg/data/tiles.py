"""Large images cut into tiles: each tile a row, named after its image and its place in it."""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from feddg.data.image_formats import ImageSource, open_image
from feddg.data.images import ImageTable

MOST_TILED_PIXELS = 2**30
"""Larger images are refused even where tiles are cut from them: 3 GB as RGB."""

_NAME = re.compile(r"(.+)#x(\d+)y(\d+)w(\d+)h(\d+)")
Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class Tile:
    """A part of an image file.

    Attributes:
        file: path of the file.
        box: left, top, right and bottom, in pixels; None for all of it.
    """

    file: str
    box: Box | None = None

    @classmethod
    def named(cls, path: str) -> "Tile":
        """Reads a row's path: ``field/corn/7.tif#x512y0w512h512``, or that of a whole file."""
        found = _NAME.fullmatch(path)
        if found is None:
            return cls(path)
        left, top, width, height = map(int, found.groups()[1:])
        return cls(found[1], (left, top, left + width, top + height))


def tile_names(path: str, width: int, height: int, side: int) -> list[str]:
    """Returns the names of an image's tiles, row by row; its own if it is no larger than one.

    Tiles are of one size; the last of a row or column is moved inwards, over its neighbour.
    """
    if width <= side and height <= side:
        return [path]
    return [
        f"{path}#x{left}y{top}w{min(side, width)}h{min(side, height)}"
        for top in _starts(height, side)
        for left in _starts(width, side)
    ]


def cut(table: ImageTable, side: int) -> ImageTable:
    """Returns a table with a row for every tile; a file that cannot be opened stays one row.

    Args:
        table: images in files.
        side: of a tile, in pixels.
    """
    root = table.root
    assert root is not None
    with ThreadPoolExecutor() as pool:
        names = list(pool.map(lambda path: names_in(root / path, path, side), table.paths))
    rows = np.repeat(np.arange(len(table)), [len(tiles) for tiles in names])
    return replace(table.take(rows), paths=tuple(name for tiles in names for name in tiles))


def names_in(file: ImageSource, path: str, side: int) -> list[str]:
    """Returns the names of a file's tiles; its own if it is no larger than one, or does not open.

    Args:
        file: where it is.
        path: what it is called.
        side: of a tile, in pixels.
    """
    size = _size(file)
    return [path] if size is None else tile_names(path, *size, side)


def whole_images(table: ImageTable) -> tuple[ImageTable, np.ndarray]:
    """Returns a table of one row per file, and for each row of ``table`` which of them it is from.

    What is decided for files, as how they are split, then holds for all their tiles.
    """
    files = [Tile.named(path).file for path in table.paths]
    places = {file: place for place, file in enumerate(dict.fromkeys(files))}
    image_of = np.array([places[file] for file in files], dtype=np.int64)
    _, first = np.unique(image_of, return_index=True)
    return replace(table.take(first), paths=tuple(places)), image_of


def _starts(length: int, side: int) -> Sequence[int]:
    last = max(length - side, 0)
    return [min(number * side, last) for number in range(ceil(length / side))]


def _size(path: ImageSource) -> tuple[int, int] | None:
    """Width and height as stored; a turned photograph is cut before it is turned upright."""
    try:
        with open_image(path) as image:
            return image.size
    except Exception:  # decoding says what is wrong with it
        return None
