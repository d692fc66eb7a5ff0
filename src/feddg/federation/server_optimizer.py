"""Server optimizers: the mean of a round's updates is a direction, not yet the new weights.

The server takes the change D from its weights x to the method's mean as a pseudo-gradient and moves
by momentum (FedAvgM) or with a step size of each coordinate's own (FedAdam, FedYogi, FedAdagrad).
Works with every method: it acts on what the method's ``aggregate`` returns.

Equations, with D = mean - x::

    FedAvgM                u <- beta1 u - D;                    x <- x - lr u
    the adaptive three     m <- beta1 m + (1 - beta1) D;        x <- x + lr m / (sqrt(v) + tau)
        FedAdagrad         v <- v + D^2
        FedAdam            v <- beta2 v + (1 - beta2) D^2
        FedYogi            v <- v - (1 - beta2) D^2 sign(v - D^2)
    from u = m = 0 and v = tau^2, without bias correction

Sources: Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification" (2019); Reddi et al., "Adaptive Federated Optimization" (ICLR 2021), Algorithm 2.

Decisions: only parameters that clients train and share are moved this way. Normalisation statistics
take the method's mean: momentum could make a variance negative. Entries that stay with the clients
(FedBN) take the mean as well, for theirs are not changes from the server's values.
"""

import torch
from torch import Tensor

from feddg.messages import Weights
from feddg.methods.base import Method, State, shared_parameters
from feddg.models.network import Network
from feddg.settings import ServerSettings

MOMENTUM, SQUARES = "server_momentum/", "server_squares/"
"""Prefixes of the optimizer's tensors among the state's extras, where checkpoints keep them."""


def initial_extras(settings: ServerSettings, method: Method, network: Network) -> Weights:
    """Returns the optimizer's tensors before round 1; their names say which entries it moves."""
    if settings.optimizer == "none":
        return {}
    moved = {name: p.detach().float() for name, p in shared_parameters(method, network).items()}
    extras = {MOMENTUM + name: torch.zeros_like(p) for name, p in moved.items()}
    if settings.optimizer != "fedavgm":
        start = settings.tau**2
        extras |= {SQUARES + name: torch.full_like(p, start) for name, p in moved.items()}
    return extras


def step(settings: ServerSettings, before: Weights, state: State) -> State:
    """Replaces the mean in ``state.weights`` by the optimizer's move from ``before``.

    Args:
        settings: which optimizer, and its constants.
        before: the weights that the round's clients were sent.
        state: what the method's ``aggregate`` returned; its weights and extras are renewed.
    """
    if settings.optimizer == "none":
        return state
    names = [key.removeprefix(MOMENTUM) for key in state.extras if key.startswith(MOMENTUM)]
    weights = dict(state.weights)
    for name in names:
        change = state.weights[name].float() - before[name].float()
        moved = before[name].float() + _move(settings, name, change, state.extras)
        weights[name] = moved.to(before[name].dtype)
    state.weights = weights
    return state


def _move(settings: ServerSettings, name: str, change: Tensor, extras: Weights) -> Tensor:
    momentum, beta1 = extras[MOMENTUM + name], settings.beta1
    if settings.optimizer == "fedavgm":
        momentum = extras[MOMENTUM + name] = beta1 * momentum - change
        return -(settings.lr or 1.0) * momentum
    momentum = extras[MOMENTUM + name] = beta1 * momentum + (1 - beta1) * change
    squares = extras[SQUARES + name] = _squares(settings, extras[SQUARES + name], change.square())
    return (settings.lr or 0.01) * momentum / (squares.sqrt() + settings.tau)


def _squares(settings: ServerSettings, squares: Tensor, new: Tensor) -> Tensor:
    if settings.optimizer == "fedadagrad":
        return squares + new
    if settings.optimizer == "fedadam":
        return settings.beta2 * squares + (1 - settings.beta2) * new
    return squares - (1 - settings.beta2) * new * torch.sign(squares - new)
