"""Tent: scales and shifts are trained to make predictions certain."""

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from feddg.evaluation.adaptation import register_adaptation
from feddg.evaluation.predictors import Parts, Predictor, by_running_statistics
from feddg.models.normalization import Rule, map_layers
from feddg.settings import Positive, Settings


class TentSettings(Settings):
    """Settings of ``tent``."""

    lr: Positive = Field(1e-3, description="of Adam (authors: 0.001; try also the training's)")
    steps: int = Field(1, ge=1, description="on each batch")


@register_adaptation
class Tent(Predictor):
    """Tent (Wang et al. 2021): scales and shifts follow the gradient of the predictions' entropy.

    Maps are normalised by the batch's own moments. A batch is predicted before the last step that
    it causes.
    Batches of one class, or small ones, lead it astray: shuffle the stream, as evaluation does. A
    batch of one image is predicted by the running statistics and changes nothing.
    """

    name = "tent"
    summary = "scales and shifts are trained to make predictions certain, batch by batch"
    order = 90
    needs = "a stream"
    changes = "scales and shifts of every layer, and an optimizer"
    cost = "a backward pass"
    Settings = TentSettings

    def __init__(self, model: nn.Module, settings: Any, parts: Parts) -> None:
        super().__init__(model, settings, parts)
        self.reset()

    def reset(self) -> None:
        """Goes back to the trained scales and shifts."""
        with torch.inference_mode(False):
            self._affine = {
                layer: tuple(
                    p.detach().clone().requires_grad_() for p in (layer.weight, layer.bias)
                )
                for layer in map_layers(self.model).values()
            }
            self._trained = [part for pair in self._affine.values() for part in pair]
            self._optimizer = torch.optim.Adam(self._trained, self.settings.lr)

    def rule(self, images: Tensor) -> Rule:
        """The batch's own moments, and the scales and shifts as they stand, in layers of maps."""
        if len(images) < 2:
            return by_running_statistics

        def rule(layer: _BatchNorm, inputs: Tensor) -> Tensor:
            if layer not in self._affine:
                return by_running_statistics(layer, inputs)
            scale, shift = self._affine[layer]
            return nn.functional.batch_norm(inputs, None, None, scale, shift, True, 0.0, layer.eps)

        return rule

    def forward(self, images: Tensor) -> Tensor:
        """Returns the logits ``(B, classes)`` that its last step began from."""
        if len(images) < 2:
            with torch.no_grad():
                return super().forward(images)
        with torch.inference_mode(False), torch.enable_grad():
            images = images.clone()  # one made in inference mode cannot be differentiated through
            for _ in range(self.settings.steps):
                logits = super().forward(images)
                logs = logits.float().log_softmax(-1)
                entropy = -(logs.exp() * logs).sum(-1).mean()
                gradients = torch.autograd.grad(entropy, self._trained)  # the model gets none
                for parameter, gradient in zip(self._trained, gradients):
                    parameter.grad = gradient
                self._optimizer.step()
        return logits.detach()
