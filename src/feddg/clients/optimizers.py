"""Adam in memory order, as fast for channels-last weights as for others, in memory used before."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

PENDING_BYTES = 4 * 2**20
"""Gradients that may wait for their step during a backward pass."""


class InPlaceAdam(torch.optim.Adam):
    """PyTorch's fused Adam, given every tensor in the order of its memory.

    The fused kernel takes about twice as long for tensors that are not contiguous, and is wrong if
    a gradient's memory order is not its parameter's. Adam works on each number alone, so a view in
    memory order changes no result.

    Args:
        parameters: what it trains.
        lr: learning rate.
        weight_decay: weight of the L2 penalty.
        spent: another one whose work is done. The memory of its moments is cleared
            and used again where it trained the same parameters: clients take turns on one network,
            and new memory for each costs time and leaves holes.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float,
        *,
        weight_decay: float = 0.0,
        spent: "InPlaceAdam | None" = None,
    ) -> None:
        super().__init__(parameters, lr, weight_decay=weight_decay, fused=True)
        if spent is None:
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                state = spent.state.pop(parameter, {})
                if state:
                    torch._foreach_zero_(list(state.values()))
                    self.state[parameter] = state

    def descend(self, loss: Tensor) -> None:
        """Takes one step down ``loss``, and lets the gradients go.

        A large network's parameters are updated in the middle of the backward pass, whenever
        ``PENDING_BYTES`` of gradients have come in: by then nothing in it needs their old values,
        so the numbers are the same, and the memory of most gradients is never needed.
        """
        trained = [p for group in self.param_groups for p in group["params"]]
        large = sum(p.numel() * p.element_size() for p in trained) > PENDING_BYTES
        pending = 0

        def come_in(parameter: Tensor) -> None:
            nonlocal pending
            pending += parameter.numel() * parameter.element_size()
            if pending > PENDING_BYTES:
                pending = 0
                self._step()

        hooks = [p.register_post_accumulate_grad_hook(come_in) for p in trained] if large else []
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            for hook in hooks:
                hook.remove()
        self._step()

    def _step(self) -> None:
        self.step()
        self.zero_grad(set_to_none=True)

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        complex_numbers: bool = super()._init_group(group, *lists)  # type: ignore[misc]
        parameters, gradients, means, squares, *_ = lists
        for place, parameter in enumerate(parameters):
            if parameter.is_contiguous() or not _is_channels_last(parameter):
                continue
            for tensors in (parameters, means, squares):
                tensors[place] = tensors[place].permute(0, 2, 3, 1)
            gradients[place] = gradients[place].permute(0, 2, 3, 1).contiguous()
        return complex_numbers


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
