"""Batch normalisation by other moments than a layer's own, for as long as a block of code lasts.

A *rule* says how a layer normalises; :func:`normalised_by` puts it into every batch-normalisation
layer of any network and takes it out again. Nothing of the network changes: not its layers, not its
running statistics. FedIG trains this way, and test-time adaptation predicts this way.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from feddg.models.norm import batch_norms

Rule = Callable[[_BatchNorm, Tensor], Tensor]
"""Normalises a layer's input, scale and shift included."""


class Moments(NamedTuple):
    """Means and standard deviations, epsilon included: ``(C,)``, or ``(B, C)`` for each image."""

    mean: Tensor
    deviation: Tensor

    def mixed(self, other: "Moments", share: Tensor) -> "Moments":
        """Returns the moments that hold ``share`` of ``other`` and the rest of these.

        Deviations are mixed, not variances (FedIG-A, Eq. 3 and 7).

        Args:
            other: moments of the same, or a broadcastable shape.
            share: broadcastable to them; beyond [0, 1] it extrapolates.
        """
        mean, deviation = (own + share * (new - own) for own, new in zip(self, other))
        return Moments(mean, deviation)


class Stored(NamedTuple):
    """A layer's kept statistics: mean and variance, ``(C,)`` each."""

    mean: Tensor
    variance: Tensor

    def moments(self, epsilon: float) -> Moments:
        """Returns them as moments, float32."""
        return Moments(self.mean, (self.variance + epsilon).sqrt())


def stored(layer: _BatchNorm) -> Stored:
    """Returns the running statistics of a layer."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return Stored(layer.running_mean, layer.running_var)


def stored_in(network: nn.Module, weights: Mapping[str, Tensor]) -> dict[_BatchNorm, Stored]:
    """Returns each layer's running statistics as they stand in ``weights``, a state of it."""
    return {
        layer: Stored(weights[f"{name}.running_mean"], weights[f"{name}.running_var"])
        for name, layer in batch_norms(network).items()
    }


def has_map(inputs: Tensor) -> bool:
    """Whether each image has moments of its own: a feature map of more than one pixel."""
    return inputs.dim() == 4 and inputs.shape[2] * inputs.shape[3] > 1


def map_layers(network: nn.Module) -> dict[str, nn.BatchNorm2d]:
    """Returns the batch-normalisation layers of feature maps by name, in the network's order."""
    return {
        name: layer
        for name, layer in batch_norms(network).items()
        if isinstance(layer, nn.BatchNorm2d)
    }


class _MapMoments(torch.autograd.Function):
    """Mean and biased variance of each map, an order of magnitude faster than ``var_mean`` on CPUs.

    The gradient of both together is linear in the map, so it takes one pass over it.
    """

    @staticmethod
    def forward(context: Any, inputs: Tensor) -> tuple[Tensor, Tensor]:
        maps = inputs if inputs.dtype == torch.float64 else inputs.float()
        mean = maps.mean((2, 3), keepdim=True)
        variance = (maps - mean).square_().mean((2, 3))
        context.save_for_backward(inputs, mean)
        return mean, variance

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        inputs, mean = context.saved_tensors
        of_mean, of_variance = gradients[0], gradients[1][..., None, None]
        pixels = inputs.shape[2] * inputs.shape[3]
        scale = 2 / pixels * of_variance
        shift = of_mean / pixels - scale * mean
        return torch.addcmul(shift.to(inputs), inputs, scale.to(inputs))


def map_moments(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean and variance ``(B, C)`` of each image's maps ``(B, C, H, W)``, in float32.

    The variance is that over the pixels (biased), as in instance normalisation.
    """
    mean, variance = _MapMoments.apply(inputs)
    return mean[..., 0, 0], variance


def instance_moments(inputs: Tensor, epsilon: float) -> Moments:
    """Returns each image's own moments ``(B, C)`` of maps ``(B, C, H, W)``, in float32."""
    mean, variance = map_moments(inputs)
    return Moments(mean, (variance + epsilon).sqrt())


def normalize(layer: _BatchNorm, inputs: Tensor, moments: Moments) -> Tensor:
    """Normalises maps ``(B, C, H, W)`` by ``moments``, then applies the layer's scale and shift."""
    # Extrapolated deviations may fall below zero; no true one falls below the root of epsilon.
    scale = layer.weight / moments.deviation.clamp_min(layer.eps**0.5)
    shift = layer.bias - moments.mean * scale
    scale, shift = (part.to(inputs)[..., None, None] for part in (scale, shift))
    return torch.addcmul(shift, inputs, scale)


def normalize_stored(layer: _BatchNorm, inputs: Tensor, statistics: Stored) -> Tensor:
    """Normalises inputs of any shape by kept statistics: evaluation mode, with these for its own.

    It is the very function a layer calls in evaluation mode, so its bits are the same.
    """
    mean, variance = statistics
    return nn.functional.batch_norm(
        inputs, mean, variance, layer.weight, layer.bias, False, 0.0, layer.eps
    )


@contextmanager
def normalised_by(network: nn.Module, rule: Rule) -> Iterator[None]:
    """Has every batch-normalisation layer inside ``network`` follow ``rule`` inside the block."""
    layers = list(batch_norms(network).values())
    for layer in layers:
        # An attribute of the object goes before the method of its class.
        layer.forward = _following(rule, layer)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _following(rule: Rule, layer: _BatchNorm) -> Callable[[Tensor], Tensor]:
    return lambda inputs: rule(layer, inputs)
