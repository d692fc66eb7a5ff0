"""How a client steps: which optimizer, when it steps, whose memory it uses."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from feddg.clients.optimizers import MemoryOrder, MemoryOrderAdam, MemoryOrderSGD
from feddg.models.normalization import norms_and_biases
from feddg.settings import TrainSettings

PENDING_BYTES = 4 * 2**20
"""Gradients that may wait for their step during a backward pass."""


class Stepper:
    """How the clients step that take turns on one network.

    A step is a backward pass, clipping where it is asked for, and a step of the optimizer. Large
    networks step *inside* the backward pass, which changes no number and needs no memory for most
    gradients; nobody can see all gradients at one time then. It is only done where nobody could
    look: by the optimizers made here, without clipping, and without step hooks on the optimizer.
    """

    def __init__(self) -> None:
        self._spent: MemoryOrder | None = None

    def optimizer(self, network: nn.Module, train: TrainSettings) -> torch.optim.Optimizer:
        """Returns the optimizer that ``train`` names, over what needs a gradient; none is left.

        Without weight decay, or with decay of everything, all parameters are in one group.
        """
        groups = _groups(network, train)
        for group in groups:
            for parameter in group["params"]:
                parameter.grad = None
        made: MemoryOrder
        if train.optimizer == "sgd":
            made = MemoryOrderSGD(groups, train.lr, train.momentum, weight_decay=train.weight_decay)
        else:
            made = MemoryOrderAdam(groups, train.lr, weight_decay=train.weight_decay)
        if self._spent is not None:
            made.take_over(self._spent)
            self._spent = None
        return made

    def keep(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Keeps the memory of an optimizer that will not step again, for the next client's."""
        self._spent = optimizer if isinstance(optimizer, MemoryOrder) else None

    def descend(
        self, optimizer: torch.optim.Optimizer, loss: Tensor, clipping: float | None = None
    ) -> None:
        """Takes one step down ``loss``, by its gradient alone, and lets the gradients go.

        Args:
            optimizer: any.
            loss: a scalar.
            clipping: greatest global norm of the gradients; None for any.
        """
        optimizer.zero_grad(set_to_none=True)
        with _inside_the_backward_pass(optimizer, clipping):
            loss.backward()  # type: ignore[no-untyped-call]
        self.step(optimizer, clipping)

    def step(self, optimizer: torch.optim.Optimizer, clipping: float | None = None) -> None:
        """Steps by the gradients that are there, clipped, and lets them go."""
        if clipping is not None:
            nn.utils.clip_grad_norm_(_parameters(optimizer), clipping)
        _step(optimizer)


def _step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)  # their memory serves the next forward pass


@contextmanager
def _inside_the_backward_pass(
    optimizer: torch.optim.Optimizer, clipping: float | None
) -> Iterator[None]:
    """Has the optimizer step whenever ``PENDING_BYTES`` of gradients have come in, where it may.

    By then nothing in the backward pass needs the old values of these parameters.
    """
    trained = _parameters(optimizer)
    watched = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    large = sum(_bytes(parameter) for parameter in trained) > PENDING_BYTES
    if not isinstance(optimizer, MemoryOrder) or clipping is not None or watched or not large:
        yield
        return
    pending = 0

    def come_in(parameter: Tensor) -> None:
        nonlocal pending
        pending += _bytes(parameter)
        if pending > PENDING_BYTES:
            pending = 0
            _step(optimizer)

    hooks = [parameter.register_post_accumulate_grad_hook(come_in) for parameter in trained]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _groups(network: nn.Module, train: TrainSettings) -> list[dict[str, Any]]:
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    if train.decay == "all" or not train.weight_decay:
        return [{"params": trained}]
    spared = {id(parameter) for parameter in norms_and_biases(network)}
    return [
        {"params": [p for p in trained if id(p) not in spared]},
        {"params": [p for p in trained if id(p) in spared], "weight_decay": 0.0},
    ]
