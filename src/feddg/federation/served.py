"""The weights a federation serves, beside those it trains: means over rounds.

Between one round and the next a federation's model moves by several points on an unseen domain. The
mean of its later models holds still, is better, and costs nothing: no message and no client's time.

Equations, with w_t the model after round t of R::

    tail   mean of w_t over the last ceil(share R) rounds, every round alike
    ema    e_1 = w_1,  e_t = d_t e_(t-1) + (1 - d_t) w_t,  d_t = min(d, (t - 1) / (t + 8))

Sources: Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization" (UAI
2018); Cha et al., "SWAD: Domain Generalization by Seeking Flat Minima" (NeurIPS 2021); Arpit et
al., "Ensemble of Averages" (NeurIPS 2022). Mixing with the starting point: Wortsman et al., "Robust
Fine-Tuning of Zero-Shot Models" (CVPR 2022).

Decisions: parameters and normalisation statistics alike are averaged, in their own type; integers
are those of the last round. Entries that stay with the clients (FedBN) are those of the last round:
no client uses their mean. The ema's decay grows with the rounds, so that the first, poor models are
soon forgotten; the untrained network is no part of it.
"""

import math
from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from feddg.messages import Weights
from feddg.methods.base import Method, State, local_names
from feddg.models.network import Network
from feddg.records import EMA, LAST, TAIL
from feddg.settings import ServerSettings

MEANS = (TAIL, EMA)
"""The means that can be kept, by name."""


def first_of_tail(share: float, rounds: int) -> int:
    """Returns the first round of the tail: the last ``share`` of the rounds, at least one."""
    # 0.1 of 30 rounds is 3, whatever the last bit says.
    return rounds - max(1, math.ceil(share * rounds - 1e-9)) + 1


class Means:
    """Keeps the means up to date among the state's extras, where checkpoints hold them.

    Args:
        method: whose weights they are; says which entries stay with the clients.
        network: what it trains.
        settings: the tail's share and the ema's decay.
        kept: which means are kept.
    """

    def __init__(
        self,
        method: Method,
        network: Network,
        settings: ServerSettings,
        kept: Collection[str] = MEANS,
    ) -> None:
        self._local = local_names(method, network)
        self._settings, self._kept = settings, kept

    def add(self, state: State) -> None:
        """Takes in the model of a round that was just completed.

        Args:
            state: the completed round's; entries of its extras are replaced, no tensor is changed.
        """
        last = state.rounds or state.round
        if TAIL in self._kept and state.round >= first_of_tail(self._settings.tail, last):
            self._move(TAIL, state, 1 / (rounds_in(state, TAIL) + 1))
        if EMA in self._kept:
            before = rounds_in(state, EMA)
            self._move(EMA, state, 1 - min(self._settings.ema, before / (before + 9)))

    def _move(self, mean: str, state: State, share: float) -> None:
        """Moves a mean by ``share`` of the way to the state's weights; the first model is it."""
        names = [n for n, t in state.weights.items() if _averaged(n, t, self._local)]
        new = [state.weights[name] for name in names]
        begun = rounds_in(state, mean)
        if begun:
            moved = mixed([state.extras[_entry(mean, name)] for name in names], new, share)
        else:
            moved = [tensor.detach().clone() for tensor in new]
        state.extras |= {_entry(mean, name): tensor for name, tensor in zip(names, moved)}
        state.extras[_count(mean)] = torch.tensor(begun + 1)


def rounds_in(state: State, mean: str) -> int:
    """Returns how many rounds' models a mean holds; 0 before it begins, or where it is not kept."""
    return int(state.extras.get(_count(mean), 0))


def served(state: State, which: str) -> Weights:
    """Returns the weights called ``which``: ``last``, ``tail`` or ``ema``.

    Those of a mean that has not begun are the last ones.
    """
    if which == LAST or not rounds_in(state, which):
        return state.weights
    extras = state.extras
    return {name: extras.get(_entry(which, name), own) for name, own in state.weights.items()}


def interpolated(start: Weights, end: Weights, share: float, local: Collection[str]) -> Weights:
    """Returns weights on the way from ``start`` to ``end`` (WiSE-FT, Eq. 2).

    Args:
        start: where the training of the whole network started.
        end: the served weights.
        share: how far along, in [0, 1]; 1 is ``end`` itself.
        local: entries that stay with the clients; these, and integers, are those of ``end``.
    """
    if share == 1:
        return end
    names = [name for name, tensor in end.items() if _averaged(name, tensor, local)]
    first = [start[name].to(end[name]) for name in names]
    moved = mixed(first, [end[name] for name in names], share)
    return end | dict(zip(names, moved))


def mixed(start: Iterable[Tensor], end: Iterable[Tensor], share: float) -> list[Tensor]:
    """Returns new tensors ``share`` of the way from each of ``start`` to its partner.

    In three plain operations, each rounded by itself: a fused one rounds numbers differently by
    where they lie in memory, and then a resumed run would differ in the last bit.
    """
    first = list(start)
    if not first:  # nothing is shared, as where every client has a model of its own
        return []
    steps = torch._foreach_mul(torch._foreach_sub(list(end), first), share)
    return list(torch._foreach_add(first, steps))


def _averaged(name: str, tensor: Tensor, local: Collection[str]) -> bool:
    return tensor.is_floating_point() and name not in local


def _entry(mean: str, name: str) -> str:
    return f"{prefix_of(mean)}{name}"


def prefix_of(mean: str) -> str:
    """Returns what the names of a mean's entries begin with, among the state's extras."""
    return f"served/{mean}/"


def _count(mean: str) -> str:
    return f"served/rounds/{mean}"
