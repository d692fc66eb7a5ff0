"""Image folders and tensors for the tests of styles."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from feddg.rng import numpy_stream, stream


def write_images(folder: Path, number: int, side: int = 40) -> Path:
    """Coloured ramps with a bright square; something a decoder can learn."""
    folder.mkdir(parents=True)
    draws = numpy_stream(number, "images", folder.name)
    for index in range(number):
        ramp = np.linspace(0, 1, side)[:, None, None] * draws.random(3) * np.ones((1, side, 1))
        ramp[5:20, 10:25] = draws.random(3)
        Image.fromarray((ramp * 255).astype(np.uint8)).save(folder / f"{index}.png")
    return folder


def random_unit_images(seed: int, count: int = 2, side: int = 32) -> Tensor:
    """Uniform noise in [0, 1]."""
    return torch.rand(count, 3, side, side, generator=stream(seed, "images"))
