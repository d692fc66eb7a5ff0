"""TsmoBN: the statistics follow the stream of test batches."""

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from feddg.evaluation.adaptation import register_adaptation
from feddg.evaluation.predictors import Parts, Predictor
from feddg.models.normalization import Rule, Stored, normalize_stored, stored
from feddg.settings import Fraction, Settings


class TsmoBNSettings(Settings):
    """Settings of ``tsmobn``."""

    tau: Fraction | None = Field(
        0.9,
        description="share of the moments kept at each batch (from memory); none for the average "
        "of all batches so far",
    )
    smallest_batch: int = Field(8, ge=2, description="smaller ones move nothing")


@register_adaptation
class TsmoBN(Predictor):
    """TsmoBN (Jiang et al. 2021): moments are estimated anew from the stream of test batches.

    It begins with the running statistics, for an unseen domain the average of the clients'; a batch
    is predicted after it has moved the estimate.
    """

    name = "tsmobn"
    summary = "the statistics follow the test batches"
    order = 80
    needs = "a stream"
    changes = "the statistics of every layer"
    cost = "moments of every layer"
    Settings = TsmoBNSettings

    def __init__(self, model: nn.Module, settings: Any, parts: Parts) -> None:
        super().__init__(model, settings, parts)
        self.reset()

    def reset(self) -> None:
        """Goes back to the running statistics."""
        self._kept: dict[_BatchNorm, Stored] = {}
        self._batches = 0

    def rule(self, images: Tensor) -> Rule:
        """Moves each layer's estimate, then normalises by it."""
        moves = len(images) >= self.settings.smallest_batch
        self._batches += moves
        tau = self.settings.tau
        keep = 1 - 1 / max(self._batches, 1) if tau is None else tau

        def rule(layer: _BatchNorm, inputs: Tensor) -> Tensor:
            kept = self._kept.get(layer, stored(layer))
            if moves:
                axes = [axis for axis in range(inputs.dim()) if axis != 1]
                # What is kept from batch to batch is no part of any batch's graph.
                own = inputs.detach().float()
                variance, mean = torch.var_mean(own, dim=axes, correction=1)
                kept = Stored(
                    mean + keep * (kept.mean - mean), variance + keep * (kept.variance - variance)
                )
                self._kept[layer] = kept
            return normalize_stored(layer, inputs, kept)

        return rule
