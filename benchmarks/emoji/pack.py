"""Packs the drawings of the data set ``emoji`` into the one file that the package holds.

python benchmarks/emoji/pack.py /path/to/emoji

The folder holds ``style/class/code point.png``, 64 x 64 RGB on white, from the projects and commits
that ``src/feddg/data/emoji/CREDITS.md`` names. Objects of which a style draws nothing are left out.
Each drawing is shrunk to 48 x 48, and each colour value rounded to one of 64 levels, which nobody
sees and halves the file; each style is one sheet of drawings, compressed without further loss.
"""

import io
import sys
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

from feddg.data.sets.emoji import COLUMNS, EMOJI, FILE, SIDE

LEVELS = 64
DATE = (2020, 1, 1, 0, 0, 0)
"""Of every file in the archive, so that the same drawings give the same bytes."""


def shrunk(file: Path) -> np.ndarray:
    with Image.open(file) as image:
        small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.HAMMING)
    return np.round(np.round(np.asarray(small) / 255 * (LEVELS - 1)) / (LEVELS - 1) * 255)


def main() -> None:
    root = Path(sys.argv[1])
    listed = sorted(
        p.relative_to(root / "noto").as_posix() for p in (root / "noto").glob("*/*.png")
    )
    drawn = {
        style: np.stack([shrunk(root / style / name) for name in listed]).astype(np.uint8)
        for style in EMOJI.domains
    }
    blank = np.any([(images == 255).all(axis=(1, 2, 3)) for images in drawn.values()], axis=0)
    print("left out:", *(name for name, empty in zip(listed, blank) if empty))
    names = [name.removesuffix(".png") for name, empty in zip(listed, blank) if not empty]
    files = {"objects.txt": "".join(f"{name}\n" for name in names).encode()}
    for style, images in drawn.items():
        rows = -(-len(names) // COLUMNS)
        tiles = np.full((rows * COLUMNS, SIDE, SIDE, 3), 255, np.uint8)
        tiles[: len(names)] = images[~blank]
        sheet = tiles.reshape(rows, COLUMNS, SIDE, SIDE, 3).swapaxes(1, 2)
        content = io.BytesIO()
        Image.fromarray(sheet.reshape(rows * SIDE, COLUMNS * SIDE, 3)).save(
            content, "WEBP", lossless=True, quality=100, method=6
        )
        files[f"{style}.webp"] = content.getvalue()
    with zipfile.ZipFile(FILE, "w", zipfile.ZIP_STORED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, DATE), data)
    print(len(names), "objects;", FILE.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
