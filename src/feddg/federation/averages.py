"""Weight averages over rounds (SWA, EMA), and server optimizers."""

import math
from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from feddg.messages import Weights, copied
from feddg.methods.base import Method, Round, RoundHook, State, local_names, shared_entries
from feddg.models.network import Network
from feddg.records import EMA, SWA
from feddg.settings import ExperimentSettings, ServerSettings

MEANS = (SWA, EMA)
"""The averages that can be computed, by name."""
AVERAGES = "averages/"
_COUNT = f"{AVERAGES}rounds/"
MOMENTUM, SQUARES = "server_momentum/", "server_squares/"
"""Prefixes of the optimizer's tensors in the state's extras, where checkpoints keep them."""


def first_averaged_round(share: float, rounds: int) -> int:
    """Returns the first round that SWA averages: the last ``share`` of the rounds, at least one."""
    # 0.1 of 30 rounds is 3, whatever the last bit says.
    return rounds - max(1, math.ceil(share * rounds - 1e-9)) + 1


class Means(RoundHook):
    """Updates the averages in the state's extras, where checkpoints hold them.

    Args:
        method: the method; it says which entries stay with the clients.
        network: the network it trains.
        settings: SWA's share of the rounds and the EMA's decay.
        means: names of the averages to compute.
    """

    def __init__(
        self,
        method: Method,
        network: Network,
        settings: ServerSettings,
        means: Collection[str] = MEANS,
    ) -> None:
        local = local_names(method, network) | network.frozen
        self._names = averaged_names(network.state_dict(), local)
        self._settings, self._means = settings, means

    def completed(self, state: State, round: Round) -> State:
        """Adds the round's model to each average; the first model starts it."""
        first = first_averaged_round(self._settings.swa_fraction, state.rounds or state.round)
        new = [state.weights[name] for name in self._names]
        for mean in self._means:
            if mean == SWA and state.round < first:
                continue
            begun, names = rounds_in(state, mean), [prefix_of(mean) + name for name in self._names]
            if mean == SWA and begun > state.round - first:
                begun = 0  # it holds rounds from before: the run was to end earlier
            share = 1 / (begun + 1)
            if mean == EMA:
                share = 1 - min(self._settings.ema_decay, begun / (begun + 9))
            if begun:
                moved = mixed([state.extras[name] for name in names], new, share)
                state.extras.update(zip(names, moved))
            else:
                state.extras |= copied(dict(zip(names, new)))
            state.extras[_COUNT + mean] = torch.tensor(begun + 1)
        return state


def means_of(settings: ExperimentSettings, method: Method, network: Network) -> list[Means]:
    """Returns the hooks for the averages that an experiment uses or evaluates, if any."""
    averaging, all_measured = settings.server.averaging, settings.evaluate.averages != "never"
    wanted = [mean for mean in MEANS if all_measured or mean == averaging]
    return [Means(method, network, settings.server, wanted)] if wanted else []


def rounds_in(state: State, mean: str) -> int:
    """Returns how many rounds' models an average contains; 0 if it has not started."""
    return int(state.extras.get(_COUNT + mean, 0))


def averaged(state: State, which: str) -> Weights:
    """Returns the weights called ``which``: ``swa`` or ``ema``.

    Returns the last round's weights for any other name, or if the average has not started.
    """
    if not rounds_in(state, which):
        return state.weights
    extras, prefix = state.extras, prefix_of(which)
    return {name: extras.get(prefix + name, weight) for name, weight in state.weights.items()}


def wise_ft(start: Weights, end: Weights, share: float, local: Collection[str]) -> Weights:
    """Returns weights interpolated between ``start`` and ``end`` (WiSE-FT, Eq. 2).

    Args:
        start: the weights before training of the whole network.
        end: the averaged weights.
        share: how far towards ``end``, in [0, 1].
        local: entries that stay with the clients; these and integers are taken from ``end``.
    """
    if share == 1:
        return end
    names = averaged_names(end, local)
    first = [start[name].to(end[name]) for name in names]
    moved = mixed(first, [end[name] for name in names], share)
    return end | dict(zip(names, moved))


def mixed(start: Iterable[Tensor], end: Iterable[Tensor], share: float) -> list[Tensor]:
    """Returns new tensors, ``share`` of the way from each of ``start`` to its partner in ``end``.

    Uses three separate operations, each rounded by itself. A fused operation rounds differently
    depending on memory position, so a resumed run would differ in the last bit.
    """
    first = list(start)
    if not first:  # nothing is shared, as where every client has a model of its own
        return []
    steps = torch._foreach_mul(torch._foreach_sub(list(end), first), share)
    return list(torch._foreach_add(first, steps))


def averaged_names(weights: Weights, local: Collection[str]) -> list[str]:
    """Returns the entries to average: floats that do not stay with the clients."""
    return [n for n, tensor in weights.items() if tensor.is_floating_point() and n not in local]


def prefix_of(mean: str) -> str:
    """Returns the prefix of an average's entries in the state's extras."""
    return f"{AVERAGES}{mean}/"


# Server optimizers: the mean of a round's updates is a direction, not yet the new weights.
#
# The server takes the change D from its weights x to the method's mean as a pseudo-gradient and
# moves by momentum (FedAvgM) or with a step size of each coordinate's own (FedAdam, FedYogi,
# FedAdagrad). Works with every method: it acts on what the method's ``aggregate`` returns.
#
# Equations, with D = mean - x::
#
#     FedAvgM                u <- beta1 u - D;                    x <- x - lr u
#     the adaptive three     m <- beta1 m + (1 - beta1) D;        x <- x + lr m / (sqrt(v) + tau)
#         FedAdagrad         v <- v + D^2
#         FedAdam            v <- beta2 v + (1 - beta2) D^2
#         FedYogi            v <- v - (1 - beta2) D^2 sign(v - D^2)
#     from u = m = 0 and v = tau^2, without bias correction
#
# Sources: Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated
# Visual Classification" (2019); Reddi et al., "Adaptive Federated Optimization" (ICLR 2021),
# Algorithm 2.
#
# Decisions: only parameters that clients train and share are moved this way. Normalisation
# statistics take the method's mean: momentum could make a variance negative. Entries that stay
# with the clients (FedBN) take the mean as well, for theirs are not changes from the server's
# values.


def initial_extras(settings: ServerSettings, method: Method, network: Network) -> Weights:
    """Returns the optimizer's tensors before round 1; their names tell which entries it moves."""
    if settings.optimizer == "none":
        return {}
    moved = {name: p.detach().float() for name, p in shared_entries(method, network).items()}
    extras = {MOMENTUM + name: torch.zeros_like(p) for name, p in moved.items()}
    if settings.optimizer != "fedavgm":
        start = settings.tau**2
        extras |= {SQUARES + name: torch.full_like(p, start) for name, p in moved.items()}
    return extras


class ServerOptimizer(RoundHook):
    """Applies a server optimizer to the change from the sent weights to the mean.

    Args:
        settings: the optimizer and its constants.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings

    def completed(self, state: State, round: Round) -> State:
        """See :class:`RoundHook`; replaces weights and extras."""
        before, weights = round.state.weights, dict(state.weights)
        for name in [k.removeprefix(MOMENTUM) for k in state.extras if k.startswith(MOMENTUM)]:
            change = state.weights[name].float() - before[name].float()
            moved = before[name].float() + self._move(name, change, state.extras)
            weights[name] = moved.to(before[name].dtype)
        state.weights = weights
        return state

    def _move(self, name: str, change: Tensor, extras: Weights) -> Tensor:
        chosen, momentum = self._settings, extras[MOMENTUM + name]
        beta1, beta2 = chosen.beta1, chosen.beta2
        if chosen.optimizer == "fedavgm":
            momentum = extras[MOMENTUM + name] = beta1 * momentum - change
            return -(chosen.lr or 1.0) * momentum
        momentum = extras[MOMENTUM + name] = beta1 * momentum + (1 - beta1) * change
        squares, new = extras[SQUARES + name], change.square()
        if chosen.optimizer == "fedadagrad":
            squares = squares + new
        elif chosen.optimizer == "fedadam":
            squares = beta2 * squares + (1 - beta2) * new
        else:
            squares = squares - (1 - beta2) * new * torch.sign(squares - new)
        extras[SQUARES + name] = squares
        return (chosen.lr or 0.01) * momentum / (squares.sqrt() + chosen.tau)
