"""Image folders and tensors for the tests of styles, and FINCH in plain Python."""

import math
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


def slow_finch(points: list[list[float]]) -> list[list[int]]:
    """Every level of FINCH in plain Python, with the stopping rules of the authors' release."""
    partitions: list[list[int]] = []
    clusters = [[i] for i in range(len(points))]
    while True:
        means = [
            [sum(points[i][k] for i in members) / len(members) for k in range(len(points[0]))]
            for members in clusters
        ]
        merged = join(clusters, [nearest(i, means) for i in range(len(means))])
        first = not partitions
        if not first and (len(merged) <= 1 or len(merged) == len(clusters)):
            return partitions
        partitions.append([next(c for c, m in enumerate(merged) if i in m) for i in flat(clusters)])
        if len(merged) <= 1 or (not first and len(clusters) - len(merged) == 1):
            return partitions
        clusters = merged


def flat(clusters: list[list[int]]) -> list[int]:
    return sorted(i for members in clusters for i in members)


def nearest(i: int, points: list[list[float]]) -> int:
    def cosine(j: int) -> float:
        dot = math.fsum(a * b for a, b in zip(points[i], points[j]))
        return dot / (math.hypot(*points[i]) * math.hypot(*points[j]))

    return max((j for j in range(len(points)) if j != i), key=cosine, default=i)


def join(clusters: list[list[int]], neighbor: list[int]) -> list[list[int]]:
    """Union-find over the links, merged clusters ordered by their first member."""
    parent = list(range(len(clusters)))

    def root(i: int) -> int:
        return i if parent[i] == i else root(parent[i])

    for i, j in enumerate(neighbor):
        parent[root(i)] = root(j)
    merged: dict[int, list[int]] = {}
    for i, members in enumerate(clusters):
        merged.setdefault(root(i), []).extend(members)
    return sorted(merged.values(), key=min)
