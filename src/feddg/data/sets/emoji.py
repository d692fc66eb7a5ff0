"""Emoji: the same objects drawn by four projects, built in.

``emoji/CREDITS.md`` names the artists and what was changed; ``benchmarks/emoji/pack.py`` made the
file.
"""

import io
import zipfile
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image
from pydantic import Field

from feddg.data.data_set import define
from feddg.data.images import ImageTable, positions
from feddg.errors import DataError
from feddg.settings import Settings

FILE = Path(__file__).parents[1] / "emoji" / "emoji.zip"
SIDE, COLUMNS = 48, 33
"""Pixels of a drawing's side, and drawings in a line of a style's sheet."""
HELD_BACK = 5
"""One of so many objects is new where ``objects`` is ``held_out``: those whose first code point is
a multiple of it. Neighbours in Unicode are related, so that each class has its share.
"""


class EmojiOptions(Settings):
    """The options of the emoji in ``data.options``."""

    objects: Literal["shared", "held_out"] = Field(
        "shared",
        description="shared: the objects of the held-out style are drawn in the training styles, "
        "too; held_out: a fifth of the objects trains in no style, and they alone are measured in "
        "the held-out style (and are the in-domain test)",
    )


def load_emoji(root: Path | None, options: EmojiOptions) -> ImageTable:
    """Emoji of seven classes, each drawn in four styles, as ``(n, 48, 48, 3)`` uint8 images.

    Raises:
        DataError: a folder was given, which would not be used.
    """
    if root is not None:
        raise DataError(
            "The data source 'emoji' is built in and reads no folder: leave out root, or leave out "
            "data for the folder's images."
        )
    names, images = _drawings()
    classes, codes = zip(*(name.split("/") for name in names))
    styles = len(EMOJI.domains)
    new = np.array([int(code.partition("-")[0], 16) % HELD_BACK == 0 for code in codes])
    return ImageTable(
        paths=tuple(f"{style}/{name}" for style in EMOJI.domains for name in names),
        labels=np.tile(positions(classes, EMOJI.classes), styles),
        domains=np.repeat(np.arange(styles), len(names)),
        class_names=EMOJI.classes,
        domain_names=EMOJI.domains,
        images=images.copy(),
        held_back=np.tile(new, styles) if options.objects == "held_out" else None,
    )


@cache
def _drawings() -> tuple[list[str], np.ndarray]:
    """Returns ``class/code point`` of each object, and all drawings, style by style."""
    with zipfile.ZipFile(FILE) as archive:  # which has a checksum of every sheet
        names = archive.read("objects.txt").decode().split()
        sheets = [archive.read(f"{style}.webp") for style in EMOJI.domains]
    images = []
    for sheet in sheets:
        with Image.open(io.BytesIO(sheet), formats=["WEBP"]) as opened:
            tiles = np.asarray(opened.convert("RGB")).reshape(-1, SIDE, COLUMNS, SIDE, 3)
        images.append(tiles.swapaxes(1, 2).reshape(-1, SIDE, SIDE, 3)[: len(names)])
    return names, np.concatenate(images)


EMOJI = define("emoji", load_emoji, EmojiOptions)
