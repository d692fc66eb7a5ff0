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


def random_features(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=stream(seed, "features")) * 3 + 1


def random_images(*shape: int, seed: int = 0) -> Tensor:
    generator = stream(seed, "images")
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def random_style(channels: int, seed: int = 0) -> Tensor:
    return torch.rand(2, channels, generator=stream(seed, "style")) + 0.1
