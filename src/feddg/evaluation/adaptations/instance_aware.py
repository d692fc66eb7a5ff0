"""IABN: instance-aware batch normalisation."""

import math

from pydantic import Field
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from feddg.evaluation.adaptation import register_adaptation
from feddg.evaluation.predictors import Predictor
from feddg.models.normalization import (
    Rule,
    Stored,
    has_map,
    map_moments,
    normalize,
    normalize_stored,
    stored,
)
from feddg.settings import Settings


class IABNSettings(Settings):
    """Settings of ``iabn``."""

    k: float = Field(4.0, ge=0, allow_inf_nan=False, description="standard errors tolerated")


@register_adaptation
class InstanceAware(Predictor):
    """IABN (Gong et al. 2022): an image's moments count as far as chance does not explain them.

    With n pixels and kept moments m, v:  m + soft(m_i - m; k sqrt(v / n)) and
    v + soft(v_i - v; k v sqrt(2 / (n - 1))), where soft takes the second number off the size of the
    first. k = 4 in all of the authors' runs. They train with it too; here it only predicts.
    """

    name = "iabn"
    summary = "instance-aware: moments are corrected where an image's differ significantly"
    order = 60
    cost = "moments of every map"
    Settings = IABNSettings

    def rule(self, images: Tensor) -> Rule:
        """Corrects each layer's moments, image by image."""
        k = self.settings.k

        def rule(layer: _BatchNorm, inputs: Tensor) -> Tensor:
            kept = stored(layer)
            if not has_map(inputs):
                return normalize_stored(layer, inputs, kept)
            pixels = inputs.shape[2] * inputs.shape[3]
            spread = kept.variance + layer.eps
            mean, variance = map_moments(inputs)
            variance = variance * (pixels / (pixels - 1))
            mean = kept.mean + soft(mean - kept.mean, k * (spread / pixels).sqrt())
            allowed = k * spread * math.sqrt(2 / (pixels - 1))
            variance = (kept.variance + soft(variance - kept.variance, allowed)).clamp_min(0)
            return normalize(layer, inputs, Stored(mean, variance).moments(layer.eps))

        return rule


def soft(values: Tensor, threshold: Tensor) -> Tensor:
    """Returns ``values`` moved towards zero by ``threshold``, and no further than zero."""
    return values.sign() * (values.abs() - threshold).clamp_min(0)
