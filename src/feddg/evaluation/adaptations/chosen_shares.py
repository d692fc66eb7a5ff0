"""A share of the image's own moments that nobody learned: one number, or drawn at random."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from feddg.evaluation.adaptation import register_adaptation
from feddg.evaluation.predictors import Parts, Predictor
from feddg.models.normalization import Moments, Rule, interpolated, map_layers
from feddg.rng import stream
from feddg.settings import Fraction, Settings


class FixedSettings(Settings):
    """Settings of ``fixed``."""

    alpha: Fraction = 0.5


@register_adaptation
class Fixed(Predictor):
    """The same share of the image's own moments in every layer (FedIG-A, Table 3; You et al.)."""

    name = "fixed"
    summary = "a fixed share alpha of the image's own moments"
    order = 10
    cost = "moments of every map"
    Settings = FixedSettings

    def rule(self, images: Tensor) -> Rule:
        """Mixes ``alpha`` parts of the instance's moments."""
        alpha = self.settings.alpha

        def share(number: int, layer: _BatchNorm, ours: Moments, image: Moments) -> Tensor:
            return torch.full((image.mean.shape[0],), alpha, device=image.mean.device)

        return interpolated(self.model, share)


@register_adaptation
class Random(Predictor):
    """A random share for each layer and image (FedIG-A, Table 3).

    The draw belongs to the image's place since the last reset, whatever the batches.
    """

    name = "random"
    summary = "a random share of the image's own moments, for each layer and image"
    order = 20
    changes = "counts the images, which decides the draws"
    cost = "moments of every map"

    def __init__(self, model: nn.Module, settings: Any, parts: Parts) -> None:
        super().__init__(model, settings, parts)
        self._seen = 0

    def reset(self) -> None:
        """Counts from the beginning."""
        self._seen = 0

    def rule(self, images: Tensor) -> Rule:
        """Draws alpha ``(B, layers)``, then mixes."""
        layers, seed = len(map_layers(self.model)), self.parts.seed
        places = range(self._seen, self._seen + len(images))
        self._seen += len(images)
        draws = [
            torch.rand(layers, generator=stream(seed, "random alpha", place)) for place in places
        ]
        alpha = torch.stack(draws).to(images.device)

        def share(number: int, layer: _BatchNorm, ours: Moments, image: Moments) -> Tensor:
            return alpha[:, number]

        return interpolated(self.model, share)
