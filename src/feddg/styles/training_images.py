"""What a codec's training looks at: squares of two collections, in many styles.

A batch is made of groups. Each has its own contents and styles, and one variant (see
:mod:`feddg.styles.variants`) of either, drawn once for the group. So a group's styles may be
pooled, as a client's or a cluster's are, and the *counterpart* of a content, itself in the styles'
variant, is known where both come from the same collection.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from feddg.data.decoding import UnusableImageError, decode_image
from feddg.data.images import IMAGE_SUFFIXES
from feddg.errors import DataError
from feddg.rng import stream
from feddg.styles.variants import VARIANTS, Variant, inverted, recoloured, texture, unchanged

GROUP = 4
"""Images of a group, at most."""

MOST_IMAGES = 32
"""Images of a batch, at most, however small they are."""

RECOVERABLE: tuple[Variant, ...] = (unchanged, recoloured, inverted)
"""Variants that leave enough of an image to ask for its counterpart."""

logger = logging.getLogger("feddg")


@dataclass(frozen=True)
class TrainingBatch:
    """Images of one step, float RGB in [0, 1].

    Attributes:
        contents: ``(B, 3, S, S)``, to be re-drawn.
        styles: ``(B, 3, S, S)``, to take the styles of.
        counterparts: ``(B, 3, S, S)``, what re-drawing at strength 1 should give.
        known: ``(B, 1, 1, 1)``, 1 where the counterpart is one, 0 where it must not be looked at.
        strength: ``(B, 1, 1)`` in [0, 1].
        pool: neighbouring images that share one style.
    """

    contents: Tensor
    styles: Tensor
    counterparts: Tensor
    known: Tensor
    strength: Tensor
    pool: int


def load_images(folders: Sequence[Path], side: int) -> Tensor:
    """Returns every readable image under some folders, as squares.

    Args:
        folders: searched in depth, in the order of their paths.
        side: the short side is resized to this many pixels and the centre square kept.

    Returns:
        ``(N, 3, side, side)``, uint8 RGB.

    Raises:
        DataError: a folder is missing or has no readable image.
    """
    return torch.stack([image for folder in folders for image in _images_of(folder, side)])


def draw_batch(
    contents: Tensor, styles: Tensor, *, sizes: Sequence[int], pixels: int, seed: int, step: int
) -> TrainingBatch:
    """Returns the batch of one step, a function of the seed and the step alone.

    Args:
        contents: ``(N, 3, s, s)`` uint8, photographs.
        styles: ``(M, 3, s, s)`` uint8, images in other styles.
        sizes: sides of the squares, one of which is drawn; repeat one to draw it more often.
        pixels: of the contents together, as nearly as groups allow.
        seed: of the training.
        step: counted from 0.
    """
    generator = stream(seed, "batch", step)
    size = sizes[int(torch.randint(len(sizes), (), generator=generator))]
    count = min(MOST_IMAGES, max(2, pixels // size**2))
    group = min(GROUP, count)
    groups = [
        _group(contents, styles, group, size, generator) for _ in range(max(1, count // group))
    ]
    count = group * len(groups)
    drawn, copied, counterparts = (torch.cat(part) for part in list(zip(*groups))[:3])
    known = torch.tensor([float(one[3]) for one in groups]).repeat_interleave(group)
    strength = (1.7 * torch.rand(count, 1, 1, generator=generator) - 0.4).clamp(0, 1)
    pool = group if _chance(0.5, generator) else 1
    return TrainingBatch(drawn, copied, counterparts, known[:, None, None, None], strength, pool)


def _group(
    contents: Tensor, styles: Tensor, count: int, size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Contents, styles, counterparts, and whether the latter are any."""
    of_content, of_style = _chance(0.75, generator), _chance(0.65, generator)
    plain = _squares(contents if of_content else styles, count, size, generator)
    other = _squares(contents if of_style else styles, count, size, generator)
    before, after = _variant(0.5, generator), _variant(0.35 if of_style else 0.5, generator)
    both = after(torch.cat([plain, other]), generator)
    known = of_content == of_style and before in RECOVERABLE and after is not texture
    return before(plain, generator), both[count:], both[:count], known


def _variant(plain: float, generator: torch.Generator) -> Variant:
    """One of the variants; the unchanged image with the probability ``plain``, and by chance."""
    choice = VARIANTS[int(torch.randint(len(VARIANTS), (), generator=generator))]
    return unchanged if _chance(plain, generator) else choice


def _chance(share: float, generator: torch.Generator) -> bool:
    return bool(torch.rand((), generator=generator) < share)


def _squares(images: Tensor, count: int, size: int, generator: torch.Generator) -> Tensor:
    """Random squares of one random scale, resized to ``size``, some mirrored; in [0, 1]."""
    side = images.shape[-1]
    smallest = min(max(size, 48), side)
    crop = int(torch.randint(smallest, side + 1, (), generator=generator))
    rows = torch.randint(len(images), (count,), generator=generator).tolist()
    corners = torch.randint(side - crop + 1, (count, 2), generator=generator).tolist()
    squares = torch.stack(
        [images[row, :, y : y + crop, x : x + crop] for row, (y, x) in zip(rows, corners)]
    )
    resized = functional.interpolate(squares / 255, (size, size), mode="bilinear", antialias=True)
    return (resized.flip(-1) if _chance(0.5, generator) else resized).clamp(0, 1)


def _images_of(folder: Path, side: int) -> list[Tensor]:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; give a folder of images")
    images = []
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in IMAGE_SUFFIXES:
            try:
                images.append(torch.from_numpy(decode_image(path, side, "crop")).permute(2, 0, 1))
            except UnusableImageError as error:
                logger.warning("%s is left out: %s", path, error)
    if not images:
        raise DataError(f"{folder}: no readable image ({', '.join(sorted(IMAGE_SUFFIXES))})")
    return images
