"""Normalisation layers, found by type, and other statistics and gates for them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from feddg.models.network import Network
from feddg.settings import TrainSettings

NORMALISATION = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
HEAD = "zero_shot_adapter"


def batch_norms(module: nn.Module) -> dict[str, _BatchNorm]:
    """Returns every batch-normalisation layer inside ``module`` by its full name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)}


def statistics_names(module: nn.Module) -> set[str]:
    """Returns the state-dict names of running means, variances and counters."""
    layers = batch_norms(module).items()
    return {entry for name, layer in layers for entry, _ in layer.named_buffers(name)}


def never_negative_names(module: nn.Module) -> set[str]:
    """Returns the state-dict names of running variances and counters, of every kind of layer."""
    return {
        f"{name}.{buffer}" if name else buffer
        for name, layer in module.named_modules(remove_duplicate=False)
        if isinstance(layer, _NormBase) and layer.track_running_stats
        for buffer in ("running_var", "num_batches_tracked")
    }


def norms_and_biases(module: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that weight decay often spares: normalisation layers and biases.

    Names of biases begin or end with it: ``bias``, ``in_proj_bias``, ``bias_ih_l0``, ``q_bias``.
    """
    return [
        parameter
        for layer in module.modules()
        for name, parameter in layer.named_parameters(recurse=False)
        if name.startswith("bias") or name.endswith("bias") or isinstance(layer, NORMALISATION)
    ]


def is_plain(layer: nn.Module) -> TypeGuard[nn.BatchNorm2d]:
    """Returns whether a layer is PyTorch's whole BatchNorm2d, or timm's with an activation."""
    plain = type(layer) is nn.BatchNorm2d or type(layer).__name__ == "BatchNormAct2d"
    return plain and bool(layer.affine) and bool(layer.track_running_stats)


def freeze_statistics(module: nn.Module) -> None:
    """Puts every batch-normalisation layer in eval mode: running statistics are used, not updated.

    Scales and shifts still train. This is PARDON's official setting; call it after ``train()``.
    """
    for layer in batch_norms(module).values():
        layer.eval()


# Batch normalisation by other moments than a layer's own, for as long as a block of code lasts.
#
# A *rule* says how a layer normalises; :func:`normalised_by` puts it into every batch-
# normalisation layer of any network and takes it out again. Nothing of the network changes: not
# its layers, not its running statistics. FedIG trains this way, and test-time adaptation predicts
# this way.


Rule = Callable[[_BatchNorm, Tensor], Tensor]
"""A function that normalises a layer's input, including scale and shift."""


class Moments(NamedTuple):
    """Means and standard deviations (with epsilon): ``(C,)``, or ``(B, C)`` for each image."""

    mean: Tensor
    deviation: Tensor

    def mixed(self, other: "Moments", share: Tensor) -> "Moments":
        """Returns the weighted average: ``share`` of ``other`` and the rest of these moments.

        Deviations are mixed, not variances (FedIG-A, Eq. 3 and 7).

        Args:
            other: moments of the same or a broadcastable shape.
            share: broadcastable to them; values outside [0, 1] extrapolate.
        """
        mean, deviation = (old + share * (new - old) for old, new in zip(self, other))
        return Moments(mean, deviation)


class Stored(NamedTuple):
    """A layer's running statistics: mean and variance, ``(C,)`` each."""

    mean: Tensor
    variance: Tensor

    def moments(self, epsilon: float) -> Moments:
        """Returns the statistics as moments, float32."""
        return Moments(self.mean, (self.variance + epsilon).sqrt())


def stored(layer: _BatchNorm) -> Stored:
    """Returns the running statistics of a layer."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return Stored(layer.running_mean, layer.running_var)


def stored_in(network: nn.Module, weights: Mapping[str, Tensor]) -> dict[_BatchNorm, Stored]:
    """Returns each layer's running statistics in ``weights``, a state of the network."""
    return {
        layer: Stored(weights[f"{name}.running_mean"], weights[f"{name}.running_var"])
        for name, layer in batch_norms(network).items()
    }


def has_map(inputs: Tensor) -> bool:
    """Returns whether the input is a feature map with more than one pixel."""
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

    The gradient of both together is linear in the map, so one pass over the map is enough.
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

    The variance is taken over the pixels (biased), as in instance normalisation.
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
    """Normalises inputs of any shape by given running statistics, as in evaluation mode.

    It calls the same function as the layer in evaluation mode, so the bits are the same.
    """
    mean, variance = statistics
    return nn.functional.batch_norm(
        inputs, mean, variance, layer.weight, layer.bias, False, 0.0, layer.eps
    )


@contextmanager
def normalised_by(network: nn.Module, rule: Rule) -> Iterator[None]:
    """Makes every batch-normalisation layer of ``network`` follow ``rule`` inside the block."""
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
    return lambda inputs: activated(layer, rule(layer, inputs))


def activated(layer: nn.Module, outputs: Tensor) -> Tensor:
    """Applies what a layer does after normalising: timm's BatchNormAct2d has an activation."""
    for name in ("drop", "act"):
        module = getattr(layer, name, None)
        if module is not None:
            outputs = module(outputs)
    return outputs


# Batch-instance normalisation: each channel mixes both statistics by a gate that it learns.
#
# Nam and Kim, "Batch-Instance Normalization for Adaptively Style-Invariant Neural Networks"
# (NeurIPS 2018):  y = gamma (rho x_BN + (1 - rho) x_IN) + beta,  one rho in [0, 1] per channel.


class BatchInstanceNorm2d(nn.BatchNorm2d):
    """A ``BatchNorm2d`` whose output is mixed with that of instance normalisation.

    Args:
        channels: C, channels of its ``(B, C, H, W)`` input.
        gate: initial rho; 1 is batch normalisation only, as in the paper.
        **options: options of ``BatchNorm2d``.
    """

    def __init__(self, channels: int, gate: float = 1.0, **options: Any) -> None:
        super().__init__(channels, **options)
        self.gate = nn.Parameter(torch.full((channels,), gate))

    def forward(self, input: Tensor) -> Tensor:
        """Normalises ``(B, C, H, W)``; instance statistics always come from the input."""
        return activated(self, self.mixed(input))

    def mixed(self, input: Tensor) -> Tensor:
        """Returns the output before an activation inside the layer, for rules."""
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        batch = nn.functional.batch_norm(
            input,
            self.running_mean,
            self.running_var,
            training=self.training,
            momentum=self.momentum,  # type: ignore[arg-type]
            eps=self.eps,
        )
        mean, deviation = (part.to(batch) for part in instance_moments(input, self.eps))
        instance = (input - mean[..., None, None]) / deviation[..., None, None]
        # A plain clamp lets no gradient through at 1, where the gate begins.
        gate = self.gate + (self.gate.clamp(0, 1) - self.gate).detach()
        # Under mixed precision the maps are bfloat16 and the parameters are not.
        parts = (gate, self.weight, self.bias)
        gate, scale, shift = (part.to(batch)[:, None, None] for part in parts)
        return torch.lerp(instance, batch, gate) * scale + shift


@torch.no_grad()
def clamp_gates(layers: Iterable[BatchInstanceNorm2d]) -> None:
    """Clamps every rho to [0, 1], as the paper does after each optimizer step."""
    for layer in layers:
        layer.gate.clamp_(0, 1)


def gates_apart(
    optimizer: torch.optim.Optimizer, network: nn.Module, train: TrainSettings, factor: float
) -> None:
    """Gives every rho its own learning rate without weight decay, and keeps it in [0, 1].

    Args:
        optimizer: contains all parameters; has not stepped yet.
        network: the network with the gates; without gates nothing happens.
        train: the settings of the optimizer.
        factor: learning rate of the gates under SGD, as a multiple of the others'.
    """
    layers = [layer for layer in network.modules() if isinstance(layer, BatchInstanceNorm2d)]
    gates = {id(layer.gate): layer.gate for layer in layers}
    if not gates:
        return
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in gates]
    lr = (factor if train.optimizer == "sgd" else 1.0) * train.lr
    optimizer.add_param_group({"params": list(gates.values()), "lr": lr, "weight_decay": 0.0})
    optimizer.register_step_post_hook(lambda *_: clamp_gates(layers))


def mix_instance_statistics(module: nn.Module, gate: float) -> list[BatchInstanceNorm2d]:
    """Gives every plain ``BatchNorm2d`` inside ``module`` a gate, in place; weights stay the same.

    Returns:
        The layers with a gate.
    """
    layers: list[BatchInstanceNorm2d] = []
    for layer in module.modules():
        if is_plain(layer):
            layer.__class__ = BatchInstanceNorm2d
            assert isinstance(layer, BatchInstanceNorm2d)
            layer.gate = nn.Parameter(torch.full_like(layer.weight, gate))
            layers.append(layer)
    return layers


# FedIG-A's zero-shot adapter: how far each layer trusts an image's own moments.
#
# For every batch-normalisation layer of feature maps, a network of two linear layers sees how far
# an image's moments are from the global ones and gives a share alpha in [0, 1]; the layer
# normalises by alpha parts of the image's moments and 1 - alpha parts of the global ones (FedIG-A,
# Eq. 7 and 9).


Statistics = Callable[[_BatchNorm], Stored]
Share = Callable[[int, _BatchNorm, Moments, Moments], Tensor]
"""Maps a layer's number, the layer, global and instance moments to alpha ``(B,)``."""


class LayerAdapter(nn.Module):
    """Maps the distance between moments of C channels to the distribution of alpha.

    Args:
        channels: C.
        reduction: the hidden layer has C / reduction units, at least one.
        alpha: its output before training, for all inputs.
        spread: the initial standard deviation.
    """

    def __init__(self, channels: int, reduction: int, alpha: float, spread: float) -> None:
        super().__init__()
        hidden = max(1, channels // reduction)
        first, last = nn.Linear(2 * channels, hidden), nn.Linear(hidden, 2)
        self.layers = nn.Sequential(first, nn.ReLU(), last)
        # Outside [0, 1] alpha is clamped and learns nothing: begin well inside, for every input.
        with torch.no_grad():
            last.weight.zero_()
            last.bias.copy_(torch.tensor([spread, alpha]))

    def forward(self, ours: Moments, image: Moments) -> tuple[Tensor, Tensor]:
        """Returns standard deviation and mean of alpha before clamping, ``(B,)`` each.

        Args:
            ours: the global moments, ``(C,)``.
            image: the moments of each image, ``(B, C)``.
        """
        distance = torch.cat([image.mean - ours.mean, image.deviation - ours.deviation], dim=1)
        spread, mean = self.layers(distance).unbind(1)
        return spread.float(), mean.float()


class ZeroShotAdapter(nn.ModuleList):
    """One :class:`LayerAdapter` for each layer of feature maps, in the network's order."""

    def share(self, noise: Tensor | None = None) -> Share:
        """Returns the function that gives alpha: its mean, or a sample.

        Args:
            noise: ``(layers, B)`` standard normal, a row for each pass in its turn.
        """
        rows = None if noise is None else iter(noise)

        def alpha(number: int, layer: _BatchNorm, ours: Moments, image: Moments) -> Tensor:
            spread, mean = self[number](ours, image)
            if rows is not None:
                mean = mean + spread * next(rows)
            return mean.clamp(0, 1)

        return alpha


def adapter_of(network: nn.Module) -> ZeroShotAdapter | None:
    """Returns the network's adapter, or None if it was trained without one."""
    adapters = [layer for layer in network.modules() if isinstance(layer, ZeroShotAdapter)]
    return adapters[0] if adapters else None


def interpolated(
    network: nn.Module,
    share: Share,
    statistics: Statistics = stored,
) -> Rule:
    """Returns the rule that mixes each image's moments into the running ones (FedIG-A, Eq. 7).

    A layer whose input is not a map of several pixels, such as a bottleneck's, uses the running
    statistics.

    Args:
        network: the network that the rule is for.
        share: computes alpha.
        statistics: the global statistics of a layer; its running ones by default.
    """
    numbers: dict[nn.Module, int] = {
        layer: number for number, layer in enumerate(map_layers(network).values())
    }

    def rule(layer: _BatchNorm, inputs: Tensor) -> Tensor:
        kept = statistics(layer)
        if not has_map(inputs):
            return normalize_stored(layer, inputs, kept)
        ours, image = kept.moments(layer.eps), instance_moments(inputs, layer.eps)
        alpha = share(numbers[layer], layer, ours, image)
        # A graph that is traced must not depend on the images it is traced with.
        traced = torch.compiler.is_compiling()
        if not traced and not alpha.requires_grad and not alpha.any():
            return normalize_stored(layer, inputs, kept)  # the plain model, to the bit
        return normalize(layer, inputs, ours.mixed(image, alpha[:, None]))

    return rule


class Adapted(nn.Module):
    """Predicts with the network's adapter in one forward pass, each image by itself.

    Attributes:
        network: the network; without the adapter it uses its running statistics.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits ``(B, classes)``."""
        adapter = adapter_of(self.network)
        assert adapter is not None, "the network has no adapter"
        with normalised_by(self.network, interpolated(self.network, adapter.share())):
            logits: Tensor = self.network(images)
        return logits
