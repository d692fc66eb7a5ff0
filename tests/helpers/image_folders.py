"""Small folders of images for tests: every image another, so that none is a copy."""

from pathlib import Path

import numpy as np
from PIL import Image


def noise(seed: int, side: int = 12) -> Image.Image:
    """Returns an image that no other seed gives."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def make_folder(
    root: Path,
    domains: tuple[str, ...] = ("a", "b", "c"),
    classes: tuple[str, ...] = ("x", "y"),
    each: int = 6,
) -> Path:
    """Writes ``each`` images of every class in every domain, as ``root/domain/class/0.png``."""
    seed = 0
    for domain in domains:
        for name in classes:
            folder = root / domain / name
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(each):
                seed += 1
                noise(seed).save(folder / f"{number}.png")
    return root
