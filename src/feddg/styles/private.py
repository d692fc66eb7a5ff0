"""A style that says little about any one image, or client: moments clipped and noised.

What is released are first and second moments, never deviations: one of n images moves a pooled
mean of channels in [0, B] by at most B / n, but their deviation by up to about B / sqrt(n). The
deviation is computed afterwards, from what was noised. Neither is a mean over clusters released:
one image can change the clusters.

Equations, with the moments ``v_i = (E[F], E[F^2])`` of image i, n images, a public centre m and
spread s, and a radius R::

    u_i = (v_i - m) / s;   u_i <- u_i min(1, R / |u_i|);   u = (1/n) sum_i u_i
    released: m + s (u + N(0, (z Delta)^2)),   z the noise multiplier, and the sensitivity is
    Delta = 2 R / n   an image is replaced by any other (n is no secret)
    Delta = 2 R       all images of a client are replaced by any others

Centre, spread and radius come from textures that anybody can draw (:func:`public_reference`): they
say nothing about anybody's images. The noise is :mod:`feddg.rng`'s.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from feddg.rng import add_noise, stream
from feddg.styles.codec import Codec
from feddg.styles.statistics import FeatureMoments, measure, style_from_averages
from feddg.styles.variants import texture

TEXTURES, SIDE = 256, 32
"""How many textures are measured, and their side in pixels."""
_SHARE = 0.9
_LEAST_SPREAD = 1e-3


@dataclass(frozen=True)
class StyleNoise:
    """How styles are noised before they leave a client.

    Attributes:
        multiplier: z, deviation over sensitivity.
        unit: what is hidden: an image, or all that a client has.
        norm: the radius, as a multiple of that within which most textures lie.
    """

    multiplier: float
    unit: Literal["image", "client"] = "image"
    norm: float = 1.0


@dataclass(frozen=True)
class PublicReference:
    """What clipping is measured in.

    Attributes:
        centre: ``(2, C)`` float64, m.
        spread: ``(2, C)`` float64, s.
        radius: within which nine in ten textures lie.
    """

    centre: Tensor
    spread: Tensor
    radius: float


@lru_cache(maxsize=8)
def public_reference(codec: Codec) -> PublicReference:
    """Returns the moments of textures under a codec: no image of anybody is looked at."""
    chance = stream(0, "public textures")
    drawn = [
        texture(torch.rand(8, 3, SIDE, SIDE, generator=chance), chance)
        for _ in range(TEXTURES // 8)
    ]
    images = (torch.cat(drawn).clamp(0, 1) * 255).to(torch.uint8)
    averages = measure(codec, images).averages
    centre = averages.mean(0)
    spread = averages.std(0).clamp_min(_LEAST_SPREAD)
    lengths = ((averages - centre) / spread).flatten(1).norm(dim=1)
    return PublicReference(centre, spread, float(lengths.quantile(_SHARE)))


def clipped_mean(averages: Tensor, reference: PublicReference, radius: float) -> Tensor:
    """Returns u: the mean of clipped, whitened moments.

    Args:
        averages: ``(n, 2, C)``, E[F] and E[F^2] of each image; what is not finite counts as the
            centre.
        reference: what they are measured in.
        radius: R.

    Returns:
        ``(2, C)`` float64, of length at most R.
    """
    whitened = (averages.double() - reference.centre) / reference.spread
    rows = whitened.flatten(1).nan_to_num(0.0, 0.0, 0.0)
    lengths = rows.norm(dim=1, keepdim=True)
    # A length that overflows is infinite: its direction is lost, and it counts as the centre.
    mean: Tensor = (rows * (radius / lengths.clamp_min(radius))).mean(0)
    return mean.reshape(averages.shape[1:])


def sensitivity(noise: StyleNoise, images: int, radius: float) -> float:
    """Returns how far neighbours' means are apart at most.

    Args:
        noise: says who is hidden.
        images: n.
        radius: R.
    """
    return 2 * radius / (images if noise.unit == "image" else 1)


def private_style(moments: FeatureMoments, codec: Codec, noise: StyleNoise) -> Tensor:
    """Returns a client's noised style.

    Args:
        moments: one row per image.
        codec: what they were measured with.
        noise: how it is noised.

    Returns:
        ``(2, C)`` float64: a mean and a deviation per channel.
    """
    reference = public_reference(codec)
    radius = noise.norm * reference.radius
    mean = clipped_mean(moments.averages, reference, radius)
    deviation = noise.multiplier * sensitivity(noise, len(moments), radius)
    noised = add_noise(mean, deviation) if deviation else mean
    return style_from_averages(reference.centre + reference.spread * noised)
