"""MixNorm: moments pooled over an image and four views of it."""

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from feddg.evaluation.adaptation import register_adaptation
from feddg.evaluation.predictors import Parts, Predictor
from feddg.models.normalization import (
    Rule,
    Stored,
    has_map,
    map_moments,
    normalize,
    normalize_stored,
    stored,
)
from feddg.rng import stream
from feddg.settings import Fraction, Settings

CROPS, CROP_SHARE = 3, (0.8, 1.0)


class MixNormSettings(Settings):
    """Settings of ``mixnorm``."""

    share: Fraction = Field(0.05, description="of the image's own moments (second-hand)")
    tau: Fraction = Field(
        0.0, description="how fast the kept moments follow the images; 0 keeps every image apart"
    )


@register_adaptation
class MixNorm(Predictor):
    """MixNorm (Hu et al. 2021), our reading: moments pooled over an image and four views of it.

    The views are the mirror image and three crops of 80 to 100 % of its area, the same crops for
    every image; all five go through the network together, and the image itself is predicted. Each
    layer takes ``share`` parts of the pooled moments. With ``tau`` above 0 the kept moments follow
    the images one by one, and their order matters.
    """

    name = "mixnorm"
    summary = "a share of the moments of an image and four views of it (our reading)"
    order = 70
    changes = "nothing; with tau above 0 the kept moments follow the images"
    cost = "five forward passes"
    Settings = MixNormSettings

    def __init__(self, model: nn.Module, settings: Any, parts: Parts) -> None:
        super().__init__(model, settings, parts)
        chance = stream(parts.seed, "mixnorm crops")
        low, high = CROP_SHARE
        draws = torch.rand(CROPS, 3, generator=chance)
        sides = (low + (high - low) * draws[:, 0]).sqrt()
        self._boxes = torch.stack([sides, *(draws[:, 1:] * (1 - sides[:, None])).T], 1).tolist()
        self._kept: dict[_BatchNorm, Stored] = {}

    def reset(self) -> None:
        """Goes back to the running statistics."""
        self._kept = {}

    @property
    def keeps_state(self) -> bool:
        """Only where the kept moments follow the images."""
        return bool(self.settings.tau)

    def views(self, images: Tensor) -> Tensor:
        """Returns the images and their views, ``(5 B, 3, H, W)``, view by view."""
        crops = [self._crop(images, *box) for box in self._boxes]
        return torch.cat([images, images.flip(-1), *crops])

    def _crop(self, images: Tensor, side: float, top: float, left: float) -> Tensor:
        height, width = images.shape[-2:]
        rows, columns = (max(1, round(side * size)) for size in (height, width))
        row = min(round(top * height), height - rows)
        column = min(round(left * width), width - columns)
        part = images[:, :, row : row + rows, column : column + columns]
        return nn.functional.interpolate(part, (height, width), mode="bilinear")

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits ``(B, classes)`` of the images as they are."""
        return super().forward(self.views(images))[: images.shape[0]]

    def rule(self, images: Tensor) -> Rule:
        """Mixes moments pooled over views, image by image."""
        chosen, views = self.settings, 2 + CROPS

        def rule(layer: _BatchNorm, inputs: Tensor) -> Tensor:
            if not has_map(inputs):
                return normalize_stored(layer, inputs, stored(layer))
            own = pooled(inputs, views)
            kept = self._followed(layer, own)
            mean, variance = (k + chosen.share * (o - k) for k, o in zip(kept, own))
            moments = Stored(mean.repeat(views, 1), variance.repeat(views, 1)).moments(layer.eps)
            return normalize(layer, inputs, moments)

        return rule

    def _followed(self, layer: _BatchNorm, own: Stored) -> Stored:
        """Returns the kept moments as they stand at each image, itself included: ``(B, C)``."""
        tau, kept = self.settings.tau, self._kept.get(layer, stored(layer))
        if not tau:
            return Stored(*(part.expand_as(mine) for part, mine in zip(kept, own)))
        followed = []
        for mean, variance in zip(*own):
            moved = (part + tau * (new - part) for part, new in zip(kept, (mean, variance)))
            kept = Stored(*moved)
            followed.append(kept)
        self._kept[layer] = Stored(*(part.detach() for part in kept))  # part of no batch's graph
        return Stored(*(torch.stack(parts) for parts in zip(*followed)))


def pooled(inputs: Tensor, views: int) -> Stored:
    """Returns mean and variance ``(B, C)`` of all pixels of all views of each image.

    Args:
        inputs: ``(views B, C, H, W)``, view by view.
        views: how many there are of each image.
    """
    mean, variance = map_moments(inputs)
    means, variances = (part.unflatten(0, (views, -1)) for part in (mean, variance))
    return Stored(means.mean(0), variances.mean(0) + means.var(0, correction=0))
