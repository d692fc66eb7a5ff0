"""The weights a federation serves, beside those it trains: means over rounds.

Between one round and the next a federation's model moves by several points on an unseen domain. The
mean of its later models holds still, is better, and costs nothing: no message and no client's time.

Equations, with w_t the model after round t of R::

    tail   mean of w_t over t > (1 - share) R, every round alike
    ema    e_t = d e_(t-1) + (1 - d) w_t, from e_0 = w_0, divided by nothing: d_t = min(d, t/(t+9))

Sources: Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization" (UAI
2018); Cha et al., "SWAD: Domain Generalization by Seeking Flat Minima" (NeurIPS 2021); Arpit et al.,
"Ensemble of Averages" (NeurIPS 2022). The ema's decay grows with the rounds, so that the untrained
network is soon forgotten.

Decisions: parameters and normalisation statistics alike are averaged, in float32 or their own wider
type; integers are those of the last round. Entries that stay with the clients (FedBN) are those of
the last round: their mean over clients means nothing. The tail of a run whose tail has not begun is
its last model.
"""

import math

import torch

from feddg.messages import Weights
from feddg.methods.base import Method, State, local_names
from feddg.models.network import Network
from feddg.settings import ServerSettings

TAIL, EMA = "tail", "ema"
MEANS = (TAIL, EMA)
"""The means that are kept, by name."""
_COUNT = "count"


def first_of_tail(share: float, rounds: int) -> int:
    """Returns the first round of the tail: of ``rounds`` rounds the last ``share``, at least one."""
    return rounds - max(1, math.ceil(share * rounds)) + 1


class Served:
    """Keeps the means up to date in the server's state, where checkpoints hold them.

    Args:
        method: whose weights they are; says which entries stay with the clients.
        network: what it trains.
        settings: the tail's share and the ema's decay.
    """

    def __init__(self, method: Method, network: Network, settings: ServerSettings) -> None:
        self._local = local_names(method, network)
        self._settings = settings

    def add(self, before: Weights, state: State) -> None:
        """Takes in the model of a round that was just completed.

        Args:
            before: the weights that the round started from.
            state: the completed round's; its extras are renewed, none is changed in place.
        """
        names = self._averaged(state.weights)
        if state.round >= first_of_tail(self._settings.tail, state.rounds or state.round):
            count = int(state.extras.get(f"{TAIL}/{_COUNT}", torch.tensor(0))) + 1
            self._move(TAIL, names, state.weights if count == 1 else None, state, 1 / count)
            state.extras[f"{TAIL}/{_COUNT}"] = torch.tensor(count)
        decay = min(self._settings.ema, state.round / (state.round + 9))
        start = before if f"{EMA}/{_COUNT}" not in state.extras else None
        self._move(EMA, names, start, state, 1 - decay)
        state.extras[f"{EMA}/{_COUNT}"] = torch.tensor(state.round)

    def _averaged(self, weights: Weights) -> list[str]:
        return [n for n, t in weights.items() if t.is_floating_point() and n not in self._local]

    def _move(
        self, mean: str, names: list[str], start: Weights | None, state: State, share: float
    ) -> None:
        """Moves a mean by ``share`` of the way to the state's weights."""
        kept = [start[n] if start else state.extras[f"{mean}/{n}"] for n in names]
        moved = torch._foreach_lerp(kept, [state.weights[n] for n in names], share)
        state.extras |= {f"{mean}/{name}": tensor for name, tensor in zip(names, moved)}


def served(state: State, which: str) -> Weights:
    """Returns the weights called ``which``: ``last``, ``tail`` or ``ema``.

    Those of a mean that has not begun are the last ones.
    """
    prefix = f"{which}/"
    own = {
        key.removeprefix(prefix): tensor
        for key, tensor in state.extras.items()
        if key.startswith(prefix) and key != prefix + _COUNT
    }
    return {name: own.get(name, tensor) for name, tensor in state.weights.items()}
