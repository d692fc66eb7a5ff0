"""The range of possible styles: the values that a codec can give for any image in [0, 1].

A mean over places lies between the map's smallest and largest value, and a standard deviation is at
most half their distance (Popoviciu's inequality). For colours both are 0 and 1. For a network they
are measured channel by channel on synthetic images with more contrast than photographs: all corners
of the colour cube against each other, in flat areas, stripes, boards and noise. A margin is added.
For single images of PACS at 32 to 224 pixels, means exceeded the measured range by at most 0.13 of
it (VGG-19 at 32 pixels; ``compact`` never exceeded it and used a third of it), and deviations
reached 0.9 of their limit.

So the range excludes values that cannot be a style. It does not exclude styles that no photograph
has.
"""

import itertools
from functools import lru_cache

import torch
from torch import Tensor

from feddg.rng import stream
from feddg.styles.codec import VARIANCE_FLOOR, Codec
from feddg.styles.statistics import StyleNoise, public_reference, sensitivity

SIDES = (8, 16, 32)
"""Sides of the measured images in pixels; small maps consist mostly of border."""
ROOM = 0.25
"""Margin on either side of the measured range, as a share of it."""
LEAST_SHARE = 0.1
"""Channels that hardly respond get at least this share of the largest channel's range."""
DEVIATIONS = 8.0
"""Noise is bounded by this many standard deviations; more has probability 10^-15."""


def extreme_images() -> Tensor:
    """Returns images ``(n, 3, 32, 32)`` in [0, 1] with the strongest possible contrasts."""
    side = SIDES[-1]
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    masks = [torch.zeros(side, side, dtype=torch.bool)]
    masks += [
        (place // width) % 2 == 0
        for width in (1, 2, 4, 16)
        for place in (rows, columns, rows + columns, rows - columns, rows ^ columns)
    ]
    masks += [((rows // 2) + (columns // 2)) % 2 == 0, (rows % 4 == 0) & (columns % 4 == 0)]
    rng = stream(0, "extreme images")
    masks += [torch.rand(side, side, generator=rng) < share for share in (0.1, 0.5)]
    colours = itertools.product((0.0, 1.0), repeat=3)
    pairs = [*itertools.permutations([torch.tensor(c).view(3, 1, 1) for c in colours], 2)]
    drawn = [
        torch.where(mask, *pairs[(start + step) % len(pairs)])
        for start, mask in enumerate(masks)
        for step in range(0, len(pairs), 7)
    ]
    return torch.stack(drawn)


@lru_cache(maxsize=8)
def style_range(codec: Codec) -> tuple[Tensor, Tensor]:
    """Returns the smallest and the largest style that a codec can measure on images.

    Returns:
        ``(2, C)`` float32 each: means and standard deviations (at least 0).
    """
    least, most = codec.value_range() or _measured_range(codec)
    widest = ((most - least).square() / 4 + VARIANCE_FLOOR).sqrt()
    rounding = 1e-4 * (most - least)
    low = torch.stack([least - rounding, torch.zeros_like(least)])
    return low, torch.stack([most + rounding, widest + rounding])


def noised_range(codec: Codec, noise: StyleNoise, images: int) -> tuple[Tensor, Tensor]:
    """Returns the same range for noised styles, which may lie outside that of images.

    Clipped moments lie within the radius, and their noise within :data:`DEVIATIONS` deviations.

    Args:
        codec: the codec that measured the moments.
        noise: how they are noised.
        images: the client's number of images; 1 if unknown.
    """
    reference = public_reference(codec)
    radius = noise.norm * reference.radius
    reach = radius + DEVIATIONS * noise.multiplier * sensitivity(noise, images, radius)
    mean, square = reference.centre
    mean_reach, square_reach = reach * reference.spread
    widest = (square + square_reach + VARIANCE_FLOOR).clamp(min=0).sqrt()
    low = torch.stack([mean - mean_reach, torch.zeros_like(mean)])
    high = torch.stack([mean + mean_reach, widest])
    rounding = 1e-4 * (high - low)
    low[0] -= rounding[0]
    return low.float(), (high + rounding).float()


def _measured_range(codec: Codec) -> tuple[Tensor, Tensor]:
    """Returns the smallest and largest value of each channel, with the margin."""
    with torch.inference_mode():
        maps = [
            codec.style_features(part.to(codec.unit)).flatten(2).float().cpu()
            for side in SIDES
            for part in extreme_images()[..., :side, :side].split(32)
        ]
    # Outside inference mode, so that the result may be used anywhere.
    least = torch.stack([values.amin((0, 2)) for values in maps]).amin(0)
    most = torch.stack([values.amax((0, 2)) for values in maps]).amax(0)
    span = most - least
    room = ROOM * span + LEAST_SHARE * span.max()
    # Nowhere below 0, in no channel: the map ends in a ReLU.
    lower = torch.zeros_like(least) if least.min() >= 0 else least - room
    return lower, most + room
