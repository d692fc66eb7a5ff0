"""Published test-time adaptations of batch normalisation: IABN, MixNorm, TsmoBN, Tent."""

import math
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from feddg.evaluation.predictors import Parts, Predictor, by_running_statistics
from feddg.models.moments import (
    Rule,
    Stored,
    has_map,
    map_layers,
    map_moments,
    normalize,
    normalize_stored,
    stored,
)
from feddg.randomness import stream
from feddg.settings import Fraction, Positive, Settings

CROPS, CROP_SHARE = 3, (0.8, 1.0)


class IABNSettings(Settings):
    """Settings of ``iabn``."""

    k: float = Field(4.0, ge=0, allow_inf_nan=False, description="standard errors tolerated")


class InstanceAware(Predictor):
    """IABN (Gong et al. 2022): an image's moments count as far as chance does not explain them.

    With n pixels and kept moments m, v:  m + soft(m_i - m; k sqrt(v / n)) and
    v + soft(v_i - v; k v sqrt(2 / (n - 1))), where soft takes the second number off the size of the
    first. k = 4 in all of the authors' runs. They train with it too; here it only predicts.
    """

    name = "iabn"
    summary = "instance-aware: moments are corrected where an image's differ significantly"
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


class MixNormSettings(Settings):
    """Settings of ``mixnorm``."""

    share: Fraction = Field(0.05, description="of the image's own moments (second-hand)")
    tau: Fraction = Field(
        0.0, description="how fast the kept moments follow the images; 0 keeps every image apart"
    )


class MixNorm(Predictor):
    """MixNorm (Hu et al. 2021), our reading: moments pooled over an image and four views of it.

    The views are the mirror image and three crops of 80 to 100 % of its area, the same crops for
    every image; all five go through the network together, and the image itself is predicted. Each
    layer takes ``share`` parts of the pooled moments. With ``tau`` above 0 the kept moments follow
    the images one by one, and their order matters.
    """

    name = "mixnorm"
    summary = "a share of the moments of an image and four views of it (our reading)"
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
        return super().forward(self.views(images))[: len(images)]

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
        self._kept[layer] = kept
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


class TsmoBNSettings(Settings):
    """Settings of ``tsmobn``."""

    tau: Fraction | None = Field(
        0.9,
        description="share of the moments kept at each batch (from memory); none for the average "
        "of all batches so far",
    )
    smallest_batch: int = Field(8, ge=2, description="smaller ones move nothing")


class TsmoBN(Predictor):
    """TsmoBN (Jiang et al. 2021): moments are estimated anew from the stream of test batches.

    It begins with the running statistics, for an unseen domain the average of the clients'; a batch
    is predicted after it has moved the estimate.
    """

    name = "tsmobn"
    summary = "the statistics follow the test batches"
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
                variance, mean = torch.var_mean(inputs.float(), dim=axes, correction=1)
                kept = Stored(
                    mean + keep * (kept.mean - mean), variance + keep * (kept.variance - variance)
                )
                self._kept[layer] = kept
            return normalize_stored(layer, inputs, kept)

        return rule


class TentSettings(Settings):
    """Settings of ``tent``."""

    lr: Positive = Field(1e-3, description="of Adam (authors: 0.001; try also the training's)")
    steps: int = Field(1, ge=1, description="on each batch")


class Tent(Predictor):
    """Tent (Wang et al. 2021): scales and shifts follow the gradient of the predictions' entropy.

    Maps are normalised by the batch's own moments. A batch is predicted before the step it causes.
    Batches of one class, or small ones, lead it astray: shuffle the stream, as evaluation does. A
    batch of one image is predicted by the running statistics and changes nothing.
    """

    name = "tent"
    summary = "scales and shifts are trained to make predictions certain, batch by batch"
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
        """Returns logits ``(B, classes)``, then takes the steps."""
        if len(images) < 2:
            with torch.no_grad():
                return super().forward(images)
        first: Tensor | None = None
        with torch.inference_mode(False), torch.enable_grad():
            images = images.clone()  # one made in inference mode cannot be differentiated through
            for _ in range(self.settings.steps):
                logits = super().forward(images)
                first = logits.detach() if first is None else first
                logs = logits.float().log_softmax(-1)
                entropy = -(logs.exp() * logs).sum(-1).mean()
                gradients = torch.autograd.grad(entropy, self._trained)  # the model gets none
                for parameter, gradient in zip(self._trained, gradients):
                    parameter.grad = gradient
                self._optimizer.step()
        assert first is not None
        return first
