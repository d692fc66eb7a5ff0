"""Batch-instance normalisation: each channel mixes both statistics by a gate that it learns.

Nam and Kim, "Batch-Instance Normalization for Adaptively Style-Invariant Neural Networks" (NeurIPS
2018):  y = gamma (rho x_BN + (1 - rho) x_IN) + beta,  one rho in [0, 1] per channel.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from feddg.models.moments import instance_moments
from feddg.settings import TrainSettings


class BatchInstanceNorm2d(nn.BatchNorm2d):
    """A ``BatchNorm2d`` whose output is mixed with that of instance normalisation.

    Args:
        channels: C of its ``(B, C, H, W)`` input.
        gate: rho to begin with; 1 is batch normalisation alone, the paper's start.
        **options: those of ``BatchNorm2d``.
    """

    def __init__(self, channels: int, gate: float = 1.0, **options: Any) -> None:
        super().__init__(channels, **options)
        self.gate = nn.Parameter(torch.full((channels,), gate))

    def forward(self, input: Tensor) -> Tensor:
        """Normalises ``(B, C, H, W)``; instance statistics are always the images' own."""
        training = self.training or self.running_mean is None
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        batch = nn.functional.batch_norm(
            input,
            self.running_mean,
            self.running_var,
            training=training,
            momentum=self.momentum or 0.0,
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
    """Puts every rho back into [0, 1], as the paper does after each optimizer step."""
    for layer in layers:
        layer.gate.clamp_(0, 1)


def gates_apart(
    optimizer: torch.optim.Optimizer, network: nn.Module, train: TrainSettings, factor: float
) -> None:
    """Gives every rho its own learning rate and no weight decay, and keeps it in [0, 1].

    Args:
        optimizer: holds all parameters, and has not stepped.
        network: whose gates they are; without any nothing happens.
        train: what the optimizer was made from.
        factor: learning rate of the gates under SGD, times the others'.
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
    """Replaces every ``BatchNorm2d`` inside ``module``, in place; its entries keep their values.

    Returns:
        The new layers.
    """
    new: list[BatchInstanceNorm2d] = []
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.BatchNorm2d and layer.affine and layer.track_running_stats:
                new.append(_like(layer, gate))
                setattr(parent, name, new[-1])
    return new


def _like(layer: nn.BatchNorm2d, gate: float) -> BatchInstanceNorm2d:
    options = {"eps": layer.eps, "momentum": layer.momentum}
    mixed = BatchInstanceNorm2d(layer.num_features, gate, **options).to(layer.weight)
    mixed.load_state_dict(layer.state_dict(), strict=False)
    return mixed
