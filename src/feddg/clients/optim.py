"""How a client steps: the learning rate of a round, the optimizer, and the order of steps."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd

from feddg.errors import ClientError
from feddg.messages import copied
from feddg.models.normalization import norms_and_biases
from feddg.settings import TrainSettings

Group = dict[str, Any]
"""Parameters of an optimizer, and how they are stepped."""


def rate_share(train: TrainSettings, round: int, within: float = 0.0) -> float:
    """Returns the learning rate of a round, as a share of ``train.lr``.

    Args:
        train: rounds, schedule and warm-up.
        round: the round, from 1; 0 counts as the first, later than the last as the last.
        within: the share of the round that has passed, in [0, 1).
    """
    passed = max(0, min(round, train.rounds) - 1) + within
    if passed < train.warmup_rounds:
        return (passed + 1) / (train.warmup_rounds + 1)
    if train.schedule == "step":
        milestones = sum(passed / train.rounds >= share for share in train.schedule_steps)
        return float(train.schedule_gamma**milestones)
    progress = (passed - train.warmup_rounds) / (train.rounds - train.warmup_rounds)
    final = train.schedule_final
    if train.schedule == "cosine":
        return float(final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2)
    if train.schedule == "linear":
        return float(1 + (final - 1) * progress)
    return 1.0


def in_round(train: TrainSettings, round: int) -> TrainSettings:
    """Returns the settings of a round: ``lr`` is the round's learning rate."""
    share = rate_share(train, round)
    # A rate must stay above 0; the last round of a schedule never reaches its end.
    return train if share == 1.0 else train.model_copy(update={"lr": train.lr * share})


# Adam and SGD in memory order: as fast for channels-last weights as for contiguous ones.
#
# PyTorch's fused kernels walk through raw memory. They take two to three times as long for tensors
# that are not contiguous, and are silently wrong where a gradient lies in another order than its
# parameter. Both optimizers work on each number alone, so views in memory order change no result.


class MemoryOrder(torch.optim.Optimizer):
    """An optimizer that treats each number alone.

    Raises:
        ClientError: on a step that its kernel cannot do: memory has holes (:func:`_lay_out`).
    """

    moments: tuple[str, ...]

    # PyTorch's own import its compiler when they are first called, which nobody needs here: two
    # seconds of every start.

    def add_param_group(self, param_group: Group) -> None:
        """Adds parameters, with what is said of them beside the defaults."""
        group = {"params": list(param_group["params"])}
        self.param_groups.append({**self.defaults, **param_group, **group})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients."""
        for parameter in _parameters(self):
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Takes one step with the gradients that are there; see ``torch.optim.Optimizer.step``."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            gradients = [p.grad for p in parameters]
            self._move(group, parameters, gradients)

    def _move(self, group: Group, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        raise NotImplementedError

    def _moments(self, parameters: list[Tensor], kinds: Sequence[str]) -> list[list[Tensor]]:
        """Returns the moments of parameters by kind; those that are not there yet are zero."""
        fresh: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            state = self.state[parameter]
            for kind in kinds:
                if kind not in state:
                    of = torch.empty((), device=parameter.device) if kind == "step" else parameter
                    state[kind] = torch.empty_like(of)
                    fresh.setdefault(state[kind].dtype, []).append(state[kind])
        for alike in fresh.values():  # on a device a launch for all, not for each
            torch._foreach_zero_(alike)
        return [[self.state[parameter][kind] for parameter in parameters] for kind in kinds]

    def fix(self, lasting: Callable[[str, Tensor], Tensor]) -> list[Tensor]:
        """Puts rates and moments where they stay, so that its steps can be recorded.

        Args:
            lasting: returns the lasting tensor of a name that is like another.

        Returns:
            The moments, which are to be zeroed.
        """
        zeros: list[Tensor] = []
        for number, group in enumerate(self.param_groups):
            kinds = self.moments if group.get("momentum", True) else ()
            for place, parameter in enumerate(group["params"]):
                number_of_steps = torch.empty((), device=parameter.device)
                moments = {
                    kind: lasting(
                        f"{number}/{place}/{kind}",
                        number_of_steps if kind == "step" else parameter.detach(),
                    )
                    for kind in kinds
                }
                self.state[parameter] = moments
                zeros += moments.values()
            for parameter in group["params"][:1]:
                # CUDA's kernels read a float32; others, a double as without a tensor.
                kind = torch.float32 if parameter.device.type == "cuda" else torch.float64
                rate = torch.empty((), dtype=kind, device=parameter.device)
                rate = lasting(f"{number}/lr", rate).fill_(group["lr"])
                group |= {"lr": rate, "capturable": True}
        return zeros


class MemoryOrderAdam(MemoryOrder, torch.optim.Adam):  # type: ignore[misc]
    """PyTorch's fused Adam, applied to every tensor in the order of its memory."""

    moments = ("step", "exp_avg", "exp_avg_sq")

    def __init__(self, parameters: ParamsT, lr: float, *, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, lr, weight_decay=weight_decay, fused=True)

    def _move(self, group: Group, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        steps, averages, squares = self._moments(parameters, self.moments)
        _lay_out(parameters, gradients, averages, squares)
        names = ("lr", "weight_decay", "eps", "fused", "capturable", "amsgrad", "maximize")
        chosen = {name: group[name] for name in names}
        chosen["beta1"], chosen["beta2"] = group["betas"]
        adam(parameters, gradients, averages, squares, [], steps, **chosen)


class MemoryOrderSGD(MemoryOrder, torch.optim.SGD):  # type: ignore[misc]
    """PyTorch's fused SGD, applied to every tensor in the order of its memory.

    Without momentum and decay a step is one addition; PyTorch's plain kernel is as fast, for any
    memory order, with the same bits.

    The momentum of a parameter starts at zero, so its first step is the plain one. (PyTorch has no
    momentum buffer before that step, and its fused kernel fails if only some parameters have one.)
    """

    moments = ("momentum_buffer",)

    def __init__(
        self, parameters: ParamsT, lr: float, momentum: float = 0.0, *, weight_decay: float = 0.0
    ) -> None:
        super().__init__(parameters, lr, momentum, weight_decay=weight_decay, fused=True)

    def _move(self, group: Group, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        momenta = self._moments(parameters, self.moments) if group["momentum"] else []
        fixed = isinstance(group["lr"], Tensor)  # which only the fused kernel takes
        fused = bool(group["momentum"] or group["weight_decay"] or fixed)
        if fused:
            _lay_out(parameters, gradients, *momenta)
        names = ("lr", "weight_decay", "momentum", "dampening", "nesterov", "maximize")
        chosen = {name: group[name] for name in names}
        buffers: list[Any] = momenta[0] if momenta else []
        sgd(parameters, gradients, buffers, fused=fused or None, **chosen)


def _lay_out(parameters: list[Tensor], gradients: list[Tensor], *state: list[Tensor]) -> None:
    """Replaces tensors by contiguous views in the memory order of their parameter.

    A gradient in another order is copied into the parameter's.

    Args:
        parameters: of any shape; updated in place.
        gradients: of the same shapes.
        *state: lists of moments of the same shapes, updated in place.

    Raises:
        ClientError: a kernel on raw memory cannot be used: a gradient is sparse, a parameter's
            memory has holes or overlaps, or a moment lies in another order than its parameter.
    """
    for place, tensors in enumerate(zip(parameters, gradients, *state)):
        parameter, dense = tensors[0], tensors[1].layout == torch.strided
        views = [*tensors]
        if dense and not parameter.is_contiguous():
            order = sorted(range(parameter.dim()), key=parameter.stride().__getitem__, reverse=True)
            views = [tensor.permute(order) for tensor in tensors]
        if not dense or not all(view.is_contiguous() for view in (views[0], *views[2:])):
            raise ClientError(
                f"a trained parameter of shape {tuple(parameter.shape)} and strides "
                f"{parameter.stride()} cannot take a fused step: its gradient is sparse, its "
                "memory has holes or overlaps, or its optimizer's moments lie in another order. "
                "Make it a dense tensor of its own (.clone()) before Method.optimizer is called, "
                "or return another optimizer there"
            )
        views[1] = views[1].contiguous()
        for into, view in zip((parameters, gradients, *state), views):
            into[place] = view


def make_optimizer(network: nn.Module, train: TrainSettings) -> MemoryOrder:
    """Returns the optimizer that ``train`` names, for the parameters that need a gradient.

    All parameters are in one group, unless weight decay spares some of them.
    """
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    groups: list[Group] = [{"params": trained}]
    if train.decay != "all" and train.weight_decay:
        spared = {id(parameter) for parameter in norms_and_biases(network)}
        groups = [
            {"params": [p for p in trained if id(p) not in spared]},
            {"params": [p for p in trained if id(p) in spared], "weight_decay": 0.0},
        ]
    if train.optimizer == "sgd":
        return MemoryOrderSGD(groups, train.lr, train.momentum, weight_decay=train.weight_decay)
    return MemoryOrderAdam(groups, train.lr, weight_decay=train.weight_decay)


def take_step(optimizer: torch.optim.Optimizer, clipping: float | None = None) -> None:
    """Takes a step with the present gradients and clears them.

    Args:
        optimizer: any.
        clipping: the largest global norm of the gradients; None for no clipping.
    """
    if clipping is not None:
        nn.utils.clip_grad_norm_(_parameters(optimizer), clipping)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)  # their memory serves the next forward pass


_KEPT = "optimizer/"


def kept_moments(optimizer: torch.optim.Optimizer, network: nn.Module) -> dict[str, Tensor]:
    """Returns copies of an optimizer's moments of a network's parameters, for client memory.

    Raises:
        ClientError: one is a number, which would begin anew in every round.
    """
    moments = {}
    for name, parameter in network.named_parameters():
        for entry, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, (int, float)):
                raise ClientError(
                    f"train.keep_optimizer keeps tensors, and the optimizer's {entry!r} is a "
                    "number: make it a tensor, or leave keep_optimizer out"
                )
            if isinstance(value, Tensor):
                moments[f"{_KEPT}{entry}/{name}"] = value
    return copied(moments)


def take_up(
    optimizer: torch.optim.Optimizer, network: nn.Module, memory: Mapping[str, Tensor]
) -> None:
    """Gives a new optimizer the moments of :func:`kept_moments`, in its parameters' memory order.

    Memory that came from a file or over a network is contiguous, and a kernel would refuse it.
    """
    parameters = dict(network.named_parameters())
    for key, value in memory.items():
        entry, _, name = key.removeprefix(_KEPT).partition("/")
        if key.startswith(_KEPT) and name in parameters:
            like = parameters[name] if value.shape == parameters[name].shape else value
            fresh = torch.empty_like(like, dtype=value.dtype, device=parameters[name].device)
            optimizer.state[parameters[name]][entry] = fresh.copy_(value)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
