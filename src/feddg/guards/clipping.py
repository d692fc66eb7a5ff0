"""Update privacy: clients clip what training changed; the server verifies it and adds noise.

Every update becomes a change of bounded length, so that Gaussian noise on the mean hides whether a
client took part with it. What is protected is a client's whole contribution to the weights.

Equations, with m updates used in a round, norm C and noise multiplier z::

    D_k <- D_k min(1, C / |D_k|)                          at client k
    x   <- x + (1/m) sum_k D_k + N(0, (z C / m)^2)        at the server; all count the same
    adaptive: C <- C exp(-rate (b - quantile)),           b = share of updates that were not clipped
              b gets noise N(0, s^2)/m, and z -> (z^-2 - (2s)^-2)^(-1/2), so that both cost z

Sources: McMahan et al., "Learning Differentially Private Recurrent Language Models" (ICLR 2018);
Andrew et al., "Differentially Private Learning with Adaptive Clipping" (NeurIPS 2021).

Decisions: s = max(m/20, z), which is Andrew et al.'s for many clients and possible for few. The
noise is :mod:`feddg.secure_noise`'s, the only draw that the experiment's seed does not fix: clients
know the seed and could take the noise away again. The server knows the weights it sent and the
norm: a longer change, beyond rounding, is refused. Lengths are summed in float64.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch

from feddg.errors import ClientError
from feddg.forms import Sent
from feddg.guards.compatibility import DESCRIPTIONS, EXTRAS, FUSION, LOCAL, STATISTICS
from feddg.guards.distances import distance, length, shrunk
from feddg.guards.guard import Guard, Passage, WeightFacts, register
from feddg.messages import Message, Update, Weights
from feddg.methods.base import State
from feddg.secure_noise import add_noise
from feddg.settings import PrivacySettings

log = logging.getLogger("feddg")

NORM, NORM_BIT = "norm", "norm_bit"
_OPEN = "neither clipped nor noised"
_UPDATES, _CLIPPED, _ROUNDING = "updates", "clipped", "rounding"


@register
class Clipping(Guard):
    """Changes of bounded length, and noise on their mean."""

    name = "clipping"
    summary = "clipped updates, noise on their mean (McMahan et al. 2018, Andrew et al. 2021)"
    Settings = PrivacySettings
    breaks: ClassVar[dict[str, str]] = {
        DESCRIPTIONS: _OPEN,
        EXTRAS: _OPEN,
        LOCAL: "so that what it sends of them is no change of what it was sent",
        FUSION: "and the noise is made for a plain mean",
        STATISTICS: "which are taken from images, and noise would make variances negative; set "
        "model.normalization to frozen, or choose another backbone",
    }

    @property
    def plain_mean(self) -> str | None:
        """Noise is measured for the plain mean of all updates."""
        return "its noise is made for a plain mean" if self.settings.noise_multiplier else None

    @property
    def adaptive(self) -> bool:
        """Whether the norm moves."""
        return bool(self.settings.clipping == "adaptive")

    @property
    def sends(self) -> dict[str, Sent]:
        """Adaptive: whether the update was clipped."""
        bit = Sent("whether its update was clipped", integer=True, low=0, high=1)
        return {f"update/{NORM_BIT}": bit} if self.adaptive else {}

    def initial_memory(self) -> Weights:
        """The norm, which adaptive clipping moves."""
        return {NORM: torch.tensor(self.settings.clipping_norm, dtype=torch.float64)}

    def tell(self, memory: Weights) -> Message:
        """The norm."""
        return Message({}, {NORM: float(memory[NORM])})

    # At a client

    def protect(
        self, update: Update, received: Weights, told: Message, facts: WeightFacts
    ) -> Update:
        """Clips the change; the means of the loss terms stay at the client."""
        if NORM not in told.scalars:
            raise ClientError("was not told the norm to clip its update to")
        clipped = shrunk(update.weights, received, facts.fused, float(told.scalars[NORM]))
        update = replace(update, weights=clipped or update.weights, terms={})
        return self.add(update, NORM_BIT, int(clipped is not None)) if self.adaptive else update

    # At the server

    def receive(self, update: Update, passage: Passage) -> Update:
        """Refuses a change longer than the norm, and a bit that is none."""
        bit = update.extras.scalars.get(f"{self.name}/{NORM_BIT}")
        if self.adaptive and not (type(bit) is int and bit in (0, 1)):
            raise ClientError(f"{NORM_BIT} is {bit!r:.40}; it must be 0 or 1")
        norm, sent = float(passage.told.scalars[NORM]), passage.sent
        found = distance(update.weights, sent, passage.facts.fused)
        # x + D is rounded once more at the client: by half a unit in the last place of each entry.
        if _ROUNDING not in passage.scratch:
            passage.scratch[_ROUNDING] = 2**-23 * length(sent, passage.facts.fused)
        if not found <= norm * (1 + 1e-6) + passage.scratch[_ROUNDING]:
            raise ClientError(f"its change is {found:.6g} long; the norm is {norm:.6g}")
        return update

    def collect(self, updates: Iterator[Update], passage: Passage) -> Iterator[Update]:
        """Counts, and has every client count the same, whatever it says of its images."""
        passage.scratch |= {_UPDATES: 0, _CLIPPED: 0}
        for update in updates:
            passage.scratch[_UPDATES] += 1
            bit = update.extras.scalars.get(f"{self.name}/{NORM_BIT}", 0)
            passage.scratch[_CLIPPED] += int(bit)
            yield replace(update, examples=1)

    def finish(self, state: State, passage: Passage) -> State:
        """Adds noise on all that was trained, and moves the norm."""
        updates, clipped = passage.scratch[_UPDATES], passage.scratch[_CLIPPED]
        norm, sent = float(passage.memory[NORM]), passage.sent
        noise, count_noise = self.noise(updates)
        weights = dict(state.weights)
        for name, tensor in weights.items():
            if name not in passage.facts.trained:
                weights[name] = sent[name]
            elif noise:
                before = sent[name].double()
                change = add_noise(tensor.double() - before, noise * norm / updates)
                weights[name] = (before + change).to(tensor.dtype)
        state.weights = weights
        if self.adaptive:
            unclipped = torch.tensor(float(updates - clipped), dtype=torch.float64)
            counted = add_noise(unclipped, count_noise) if count_noise else unclipped
            chosen, share = self.settings, float(counted) / updates
            norm *= math.exp(-chosen.clipping_rate * (share - chosen.clipping_quantile))
            passage.memory = {NORM: torch.tensor(norm, dtype=torch.float64)}
        spent = epsilon(state.round + 1, self.settings.noise_multiplier)
        log.info("updates clipped to %.4g; epsilon so far %.3g at delta 1e-5", norm, spent)
        return state

    def noise(self, updates: int) -> tuple[float, float]:
        """Returns the noise multiplier of the mean, and the deviation of the count's noise."""
        noise = self.settings.noise_multiplier
        if not noise or not self.adaptive:
            return noise, 0.0
        count_noise = max(updates / 20, noise)
        return (noise**-2 - (2 * count_noise) ** -2) ** -0.5, count_noise


def epsilon(rounds: int, noise: float, delta: float = 1e-5) -> float:
    """Returns what ``rounds`` rounds cost a client at ``delta``: epsilon; infinite without noise.

    Neighbours are the same rounds with one client's change set to zero, and all clients take part
    in every round: rho = rounds / (2 z^2), epsilon = rho + 2 sqrt(rho ln(1/delta)) (Bun, Steinke,
    "Concentrated Differential Privacy", TCC 2016, Propositions 1.3 and 1.6, Lemma 1.7).
    """
    if noise == 0:
        return math.inf
    rho = rounds / (2 * noise**2)
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))
