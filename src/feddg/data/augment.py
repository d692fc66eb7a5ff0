"""Augmentation of training images, in batches: every image gets its own random draw."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Generator, Tensor
from torch.nn import functional

from feddg.errors import ExperimentError
from feddg.messages import on_device
from feddg.registry import Registry
from feddg.settings import Fraction, NotNegative, Settings

# How training images may be varied: the settings, and the general ones by name.
#
# A data set with an augmentation of its own keeps it in its definition, under its name; see
# :mod:`feddg.data.data_set`, which knows both kinds. Those here suit any data set of their kind. A
# program adds one with ``register_augmentation("name", settings)``, a package through an entry
# point of the group ``feddg.augmentations``. What they do to pixels is in
# :mod:`feddg.data.augment`.


HueStrength = Annotated[float, Field(ge=0, le=0.5)]
_CROP_TRIES = 10
_LUMA = (0.299, 0.587, 0.114)
_RGB_TO_YIQ = torch.tensor([_LUMA, (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112)])
_TO_GRAY = torch.tensor([_LUMA] * 3)
_TO_CHROMA = torch.eye(3) - _TO_GRAY
_QUARTER_TURN = (  # of the chroma, at constant luma
    torch.linalg.inv(_RGB_TO_YIQ)
    @ torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, -1.0, 0.0]])
    @ _RGB_TO_YIQ
)


class AugmentSettings(Settings):
    """How training images are augmented; the defaults change nothing."""

    crop_scale: tuple[float, float] | None = Field(
        default=None, description="smallest and largest share of the area a random crop keeps"
    )
    crop_ratio: tuple[float, float] = Field(
        default=(3 / 4, 4 / 3), description="smallest and largest width / height of a crop"
    )
    shift: int = Field(default=0, ge=0, description="most pixels to move by; the edge is repeated")
    flip: Fraction = Field(default=0.0, description="probability of a left-right mirror image")
    vertical_flip: Fraction = Field(
        default=0.0, description="probability of an upside-down mirror image"
    )
    quarter_turns: bool = Field(
        default=False, description="turn by 0, 90, 180 or 270 degrees, each as often as the others"
    )
    color_jitter: tuple[NotNegative, NotNegative, NotNegative, HueStrength] = Field(
        default=(0.0, 0.0, 0.0, 0.0),
        description="brightness, contrast, saturation (factor 1 +- x), hue (+- x turns)",
    )
    hue: Literal["rotation", "hsv"] = Field(
        default="rotation", description="rotation at constant luma, or torchvision's shift in HSV"
    )
    grayscale: Fraction = Field(default=0.0, description="probability of losing all colour")

    @model_validator(mode="after")
    def _check_ranges(self) -> "AugmentSettings":
        low, high = self.crop_scale or (1.0, 1.0)
        if not 0 < low <= high <= 1:
            raise ValueError("crop_scale must be two shares with 0 < smallest <= largest <= 1")
        if not 0 < self.crop_ratio[0] <= self.crop_ratio[1]:
            raise ValueError("crop_ratio must be two positive numbers, the smaller first")
        if self.crop_scale is not None and self.shift:
            raise ValueError("crop_scale and shift both move the image: choose one")
        return self

    @property
    def own_hue(self) -> str | None:
        """How the hue changes, if these settings say so themselves; else ``train.hue`` does."""
        return self.hue if "hue" in self.model_fields_set else None

    @property
    def moves(self) -> bool:
        """Returns whether pixels may move."""
        mirrors = self.flip > 0 or self.vertical_flip > 0 or self.quarter_turns
        return self.crop_scale is not None or self.shift > 0 or mirrors

    @property
    def recolors(self) -> bool:
        """Returns whether colours may change."""
        return any(self.color_jitter) or self.grayscale > 0


GENERAL_AUGMENTATIONS: Registry[AugmentSettings] = Registry(
    "augmentation", group="feddg.augmentations", error=ExperimentError, made_of=AugmentSettings
)
"""The augmentations that belong to no data set."""


def register_augmentation(name: str, settings: AugmentSettings) -> AugmentSettings:
    """Registers augmentation settings under a name, for ``train.augmentation``.

    Raises:
        ExperimentError: the name is taken.
    """
    return GENERAL_AUGMENTATIONS.add(name, settings)


NONE = register_augmentation("none", AugmentSettings())
register_augmentation(
    "aerial",  # seen from above, no side is up; our choice of strengths
    AugmentSettings(
        crop_scale=(0.7, 1.0),
        flip=0.5,
        vertical_flip=0.5,
        quarter_turns=True,
        color_jitter=(0.3, 0.3, 0.3, 0.05),
    ),
)
register_augmentation(
    "microscope",  # no side is up, and scale tells tissues apart: little of it changes; our choice
    AugmentSettings(
        crop_scale=(0.9, 1.0),
        crop_ratio=(0.95, 1 / 0.95),
        flip=0.5,
        vertical_flip=0.5,
        quarter_turns=True,
        color_jitter=(0.2, 0.2, 0.2, 0.05),
    ),
)


@dataclass(frozen=True)
class Draw:
    """The random choices for a batch of B images; the same draw may be applied to several views.

    Attributes:
        places: ``(2, B, size)`` source coordinates: the image column of each result column, and the
            image row of each result row. Integers are whole pixels, fractions lie between two
            pixels. None when nothing moves.
        colors: ``(B, 3, 3)`` matrices for RGB columns. None when no colour changes.
        contrast: ``(B,)`` the share of an image's own mean gray that is added to its colours.
        transposed: ``(B,)`` whether rows and columns are exchanged first. None when no image is
            rotated.
        hue: ``(B,)`` shift of the hue in HSV, in full turns. None where the matrices contain it.
    """

    places: Tensor | None
    colors: Tensor | None
    contrast: Tensor
    transposed: Tensor | None = None
    hue: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The choices that were made, by name."""
        made = {part.name: getattr(self, part.name) for part in fields(self)}
        return {name: tensor for name, tensor in made.items() if tensor is not None}


def draw(settings: AugmentSettings, count: int, size: int, generator: Generator) -> Draw:
    """Makes the random choices for a batch.

    Args:
        settings: what may happen.
        count: the number of images B.
        size: their side in pixels.
        generator: a CPU generator; equal states give equal draws on every device.

    Returns:
        The choices, on the CPU.
    """
    places, transposed, colors, contrast, hue = None, None, None, torch.zeros(count), None
    if settings.moves:
        places = _draw_places(settings, count, size, generator)
        if settings.quarter_turns:
            transposed = _turn(places, torch.randint(4, (count,), generator=generator))
    if settings.recolors:
        colors, contrast, hue = _draw_colors(settings, count, generator)
    return Draw(places, colors, contrast, transposed, hue)


def apply(images: Tensor, draw: Draw) -> Tensor:
    """Augments a batch.

    Args:
        images: ``(B, 3, size, size)`` uint8, any memory order, on any device.
        draw: the choices for these B images.

    Returns:
        ``(B, 3, size, size)`` in [0, 1], in channels-last memory order: float32, but where colours
        change under autocast, whose type their product with the matrices has.
    """
    draw = replace(draw, **on_device(draw.tensors, images.device))
    if draw.transposed is not None:
        turned = draw.transposed[:, None, None, None]
        images = torch.where(turned, images.transpose(2, 3), images)
    if draw.places is not None and not draw.places.is_floating_point():
        images = _pixels(images, *draw.places)
        draw = replace(draw, places=None)
    if draw.places is None and draw.colors is None:
        return images.to(torch.float32, memory_format=torch.channels_last).div_(255)
    if draw.places is None:
        moved = images.to(torch.float32, memory_format=torch.contiguous_format)
    else:
        moved = _resample(images, *draw.places)
    if draw.colors is None:
        return moved.contiguous(memory_format=torch.channels_last).div_(255)
    colored = _recolor(moved, draw.colors, draw.contrast)
    return colored if draw.hue is None else shift_hue(colored, draw.hue)


def shows_pixels(shape: Sequence[int], size: int) -> bool:
    """Returns whether a target may say something of places in its image of ``size x size``.

    So may each of two or more sides (masks, at any resolution; boxes), and a flat one of as many
    numbers as there are pixels.
    """
    return len(shape) > 1 or tuple(shape) == (size * size,)


def can_move(shape: Sequence[int], size: int) -> bool:
    """Returns whether :func:`moved` takes targets ``(..., size, size)`` or ``(size, size, C)``."""
    channels_last = len(shape) == 3 and tuple(shape[:2]) == (size, size)
    return channels_last or (len(shape) > 1 and tuple(shape[-2:]) == (size, size))


def cannot_move(shape: Sequence[int], size: int) -> str:
    """Returns why targets of a shape cannot be augmented with their images, and what to do."""
    return (
        f"has targets {tuple(shape)}, which an augmentation that moves the pixels of its {size} x "
        f"{size} images would leave behind: give (..., {size}, {size}) or ({size}, {size}, C), or "
        "another train.augmentation, such as none; numbers that tell of no place have one side"
    )


def moved(targets: Tensor, draw: Draw) -> Tensor:
    """Moves the pixels of targets as :func:`apply` moves their images'; the nearest one counts.

    Args:
        targets: ``(B, ..., size, size)`` or ``(B, size, size, C)``, such as masks, on any device.
        draw: the choices for these B images.

    Returns:
        The same shape and type.
    """
    if draw.places is None:
        return targets
    if targets.shape[-2:] != 2 * draw.places.shape[-1:]:
        return moved(targets.movedim(-1, 1), draw).movedim(1, -1).contiguous()
    draw = replace(draw, **on_device(draw.tensors, targets.device))
    planes = targets.flatten(1, -3) if targets.dim() > 3 else targets[:, None]
    if draw.transposed is not None:
        planes = torch.where(draw.transposed[:, None, None, None], planes.mT, planes)
    assert draw.places is not None
    planes = _pixels(planes, *draw.places.round().long())
    return planes.reshape(targets.shape)


def _draw_places(settings: AugmentSettings, count: int, size: int, generator: Generator) -> Tensor:
    if settings.crop_scale is not None:
        scale, ratio = settings.crop_scale, settings.crop_ratio
        corners, sides = _draw_crops(scale, ratio, count, size, generator)
    else:
        most, shape = settings.shift, (count, 2)
        corners = torch.randint(-most, most + 1, shape, generator=generator).float()
        sides = torch.full(shape, float(size))
    places = _centers(corners.T[..., None], sides.T[..., None], size)
    mirrored = torch.rand(count, generator=generator) < settings.flip
    places[0, mirrored] = places[0, mirrored].flip(1)
    if settings.vertical_flip:  # drawn only where asked for: other settings keep their draws
        upended = torch.rand(count, generator=generator) < settings.vertical_flip
        places[1, upended] = places[1, upended].flip(1)
    return places if settings.crop_scale is not None else places.long()


def _turn(places: Tensor, turns: Tensor) -> Tensor:
    """Rotates each image to the left by quarter turns: a transposition, then flips.

    Args:
        places: ``(2, count, size)`` columns and rows; reversed in place where a flip is needed.
        turns: ``(count,)`` number of quarter turns, 0 to 3.

    Returns:
        ``(count,)`` whether an image is transposed.
    """
    for axis, quarters in ((0, (2, 3)), (1, (1, 2))):
        reversed_ = (turns == quarters[0]) | (turns == quarters[1])
        places[axis, reversed_] = places[axis, reversed_].flip(1)
    return turns % 2 == 1


def _draw_crops(
    scale: tuple[float, float],
    ratio: tuple[float, float],
    count: int,
    size: int,
    generator: Generator,
) -> tuple[Tensor, Tensor]:
    """Draws the crop of each image: (left, top) and (width, height).

    As torchvision's ``RandomResizedCrop``: up to ten tries, and the first that fits is taken.
    """
    share, tilt = torch.rand((2, count, _CROP_TRIES), generator=generator)
    area = size * size * (scale[0] + (scale[1] - scale[0]) * share)
    low, high = math.log(ratio[0]), math.log(ratio[1])
    root = torch.exp((low + (high - low) * tilt) / 2)
    sides = torch.stack([area.sqrt() * root, area.sqrt() / root], dim=-1).round()
    fits = ((sides >= 1) & (sides <= size)).all(dim=-1)
    chosen = sides[torch.arange(count), fits.int().argmax(dim=1)]
    chosen[~fits.any(dim=1)] = size
    corners = torch.rand((count, 2), generator=generator) * (size + 1 - chosen)
    return corners.floor(), chosen


def _centers(start: Tensor, length: Tensor, size: int) -> Tensor:
    """Returns the image coordinates of the centres of the result's ``size`` pixels.

    They are spread evenly over the box, and kept inside it and inside the image.
    """
    steps = torch.arange(size) + 0.5
    centers = start + steps * (length / size) - 0.5
    first, last = start.clamp(min=0), (start + length - 1).clamp(max=size - 1)
    # A shift by more than the image leaves nothing of the box: its nearest edge is repeated.
    return centers.clamp(min=first, max=last).clamp_(0, size - 1)


def _draw_colors(
    settings: AugmentSettings, count: int, generator: Generator
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draws the colour changes and folds them into a matrix and a share of the mean gray.

    Let P be the projection on gray, I - P the chroma and C its quarter turn. Every step is a sum of
    these three, P P = P, and P times the others is 0. So the product of brightness b, contrast c,
    saturation s and hue angle t is  b c (P + s (cos t (I - P) + sin t C)),  with s = 0 for
    grayscale. Contrast also adds (1 - c) b times the image's mean gray. A hue shift in HSV is not
    linear, so it is returned by itself, in full turns.
    """
    signs = torch.rand((4, count), generator=generator) * 2 - 1
    changes = signs * torch.tensor(settings.color_jitter)[:, None]
    brightness, contrast, saturation = (1 + changes[:3]).clamp_(min=0)
    saturation = saturation * (torch.rand(count, generator=generator) >= settings.grayscale)
    shifted = changes[3] if settings.hue == "hsv" and settings.color_jitter[3] else None
    angle = 2 * math.pi * (changes[3] if shifted is None else torch.zeros(count))
    chroma = (saturation * angle.cos())[:, None, None] * _TO_CHROMA + (saturation * angle.sin())[
        :, None, None
    ] * _QUARTER_TURN
    colors = (brightness * contrast)[:, None, None] * (_TO_GRAY + chroma)
    return colors, (1 - contrast) * brightness, shifted


def _pixels(images: Tensor, across: Tensor, down: Tensor) -> Tensor:
    """Takes whole pixels: :func:`_resample` at integer places, in a third of the time.

    Returns:
        ``(B, 3, size, size)`` of the images' type, in channels-last memory order.
    """
    count, channels, size, _ = images.shape
    first = torch.arange(count, device=images.device)[:, None, None] * size**2
    places = first + down[:, :, None] * size + across[:, None, :]
    pixels = images.permute(0, 2, 3, 1).reshape(-1, channels)
    taken = pixels.index_select(0, places.flatten())
    return taken.view(count, size, size, channels).permute(0, 3, 1, 2)


def _resample(images: Tensor, across: Tensor, down: Tensor) -> Tensor:
    """Interpolates bilinearly, columns first, then rows.

    Returns:
        ``(B, 3, size, size)`` float32 in 0..255, in the default memory order.
    """
    columns = images.transpose(2, 3).to(torch.float32, memory_format=torch.contiguous_format)
    rows = _pick(columns, across).transpose(2, 3).contiguous()
    return _pick(rows, down)


def _pick(lines: Tensor, centers: Tensor) -> Tensor:
    """Takes lines of pixels at fractional positions: the weighted sum of two neighbours.

    An embedding bag is exactly this sparse product. On a CPU it takes half the time of
    ``grid_sample`` or of a dense product, and it copies whole-pixel positions unchanged.

    Args:
        lines: ``(B, 3, size, length)`` float32, contiguous.
        centers: ``(B, size)`` positions in [0, size - 1] along the third axis.

    Returns:
        The same shape as ``lines``, contiguous.
    """
    count, channels, size, length = lines.shape
    before = centers.floor()
    share = centers - before
    weights = torch.stack([1 - share, share], dim=-1)
    pair = torch.stack([before, (before + 1).clamp_(max=size - 1)], dim=-1).long()
    planes = torch.arange(count * channels, device=lines.device).view(count, channels, 1, 1)
    taken = functional.embedding_bag(
        (pair[:, None] + planes * size).view(-1, 2),
        lines.view(-1, length),
        mode="sum",
        per_sample_weights=weights[:, None].expand(-1, channels, -1, -1).reshape(-1, 2),
    )
    return taken.view(lines.shape)


@functools.cache
def _luma_on(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return _TO_GRAY[0].to(device)


def _recolor(images: Tensor, colors: Tensor, contrast: Tensor) -> Tensor:
    """Maps the colours of ``(B, 3, size, size)`` images in 0..255 to channels-last [0, 1]."""
    mean_gray = images.mean(dim=(2, 3)) @ _luma_on(images.device)
    offset = (contrast * mean_gray / 255)[:, None, None]
    colored = torch.bmm(colors / 255, images.flatten(2)).add_(offset).clamp_(0, 1)
    return colored.view_as(images).contiguous(memory_format=torch.channels_last)


def shift_hue(images: Tensor, turns: Tensor) -> Tensor:
    """Shifts the hue in HSV as torchvision's ``adjust_hue``; saturation and value stay.

    Args:
        images: ``(B, 3, H, W)`` RGB in [0, 1].
        turns: ``(B,)`` the shift, in full turns.

    Returns:
        ``(B, 3, H, W)`` RGB in [0, 1], channels last.
    """
    value, low = images.amax(1), images.amin(1)
    chroma = value - low
    red, green, blue = images.unbind(1)
    spread = torch.where(chroma > 0, chroma, 1)
    sixths = torch.where(
        value == red,
        (green - blue) / spread,
        torch.where(value == green, 2 + (blue - red) / spread, 4 + (red - green) / spread),
    )
    moved = sixths + 6 * turns[:, None, None]
    # Each channel is the value, less the chroma where the hue is far from it (Foley and van Dam).
    steps = [(offset + moved) % 6 for offset in (5.0, 3.0, 1.0)]
    shares = [torch.minimum(step, 4 - step).clamp(0, 1) for step in steps]
    result = torch.stack([value - chroma * share for share in shares], 1)
    return result.contiguous(memory_format=torch.channels_last)
