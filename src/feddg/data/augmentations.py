"""How training images may be varied: the settings, and the general ones by name.

A data set with an augmentation of its own keeps it in its definition, under its name; see
:mod:`feddg.data.data_set`, which knows both kinds. Those here suit any data set of their kind. A
program adds one with ``register_augmentation("name", settings)``, a package through an entry point
of the group ``feddg.augmentations``. What they do to pixels is in :mod:`feddg.data.augment`.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from feddg.errors import ExperimentError
from feddg.registry import Registry
from feddg.settings import Fraction, Settings

Strength = Annotated[float, Field(ge=0)]
HueStrength = Annotated[float, Field(ge=0, le=0.5)]


class AugmentSettings(Settings):
    """What may happen to a training image; the defaults leave it as it is."""

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
    color_jitter: tuple[Strength, Strength, Strength, HueStrength] = Field(
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
    def moves(self) -> bool:
        """Whether any pixel may change its place."""
        mirrors = self.flip > 0 or self.vertical_flip > 0 or self.quarter_turns
        return self.crop_scale is not None or self.shift > 0 or mirrors

    @property
    def recolors(self) -> bool:
        """Whether any colour may change."""
        return any(self.color_jitter) or self.grayscale > 0


def _adopt(name: str, loaded: Any) -> AugmentSettings:
    if not isinstance(loaded, AugmentSettings):
        raise ExperimentError(f"an augmentation is AugmentSettings, not {type(loaded).__name__}")
    return loaded


GENERAL_AUGMENTATIONS: Registry[AugmentSettings] = Registry(
    "augmentation", group="feddg.augmentations", error=ExperimentError, adopt=_adopt
)
"""Augmentations that belong to no data set."""


def register_augmentation(name: str, settings: AugmentSettings) -> AugmentSettings:
    """Makes settings known under a name, for ``train.augmentation``.

    Raises:
        ExperimentError: another augmentation has the name.
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
