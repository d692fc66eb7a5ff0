"""Update privacy: sites clip what training changed, by Flower's mods; the server adds noise.

Every update becomes a change of bounded length, so that Gaussian noise on the mean hides whether a
site took part with it. What is protected is a site's whole contribution to the weights.

Equations, with m updates used in a round, norm C and noise multiplier z::

    D_k <- D_k min(1, C / |D_k|)                          at site k, Flower's mods
    x   <- x + (1/m) sum_k D_k + N(0, (z C / m)^2)        at the server; every site counts the same
    adaptive: C <- C exp(-rate (b - quantile)),           b = share of updates that were not clipped
              b gets noise N(0, s^2)/m, and z -> (z^-2 - (2s)^-2)^(-1/2), so that both cost z

Sources: McMahan et al., "Learning Differentially Private Recurrent Language Models" (ICLR 2018);
Andrew et al., "Differentially Private Learning with Adaptive Clipping" (NeurIPS 2021).

Decisions: s = max(m/20, z), which is Andrew et al.'s for many sites and possible for few. Flower's
own server half (1.41) lowers the norm when updates are clipped, the reverse of Andrew et al., so
the server half is ours. Noise comes from the operating system's entropy, the only draw that the
experiment's seed does not fix: sites know the seed and could take the noise away again.
"""

import logging
import math
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from flwr.app import ConfigRecord, Context, MetricRecord, RecordDict
from flwr.app import Message as Envelope
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from pydantic import Field
from torch import nn

from feddg.errors import ExperimentError
from feddg.experiment import Experiment
from feddg.flower.parcels import Parcel, arrays, tensors
from feddg.messages import Broadcast, Message, Update, Weights, joined
from feddg.methods.base import Method, State, local_names, shared_parameters
from feddg.models.network import Network
from feddg.models.norm import statistics_names
from feddg.settings import Fraction, Positive, Settings

log = logging.getLogger("feddg")

CLIPPING, CLIPPING_NORM, NORM_BIT = "clipping", "clipping_norm", "norm_bit"
"""Scalars among a broadcast's and an update's extras; the last two are Flower's names."""
_NORM = "privacy/norm"
_MODS = {"fixed": fixedclipping_mod, "adaptive": adaptiveclipping_mod}


class Privacy(Settings):
    """How updates are clipped, and how much noise their mean gets."""

    clipping: Literal["none", "fixed", "adaptive"] = "none"
    clipping_norm: Positive = Field(
        0.1, description="longest change of the weights; adaptive: at the start"
    )
    noise_multiplier: float = Field(0.0, ge=0, description="noise multiplier z; 0 clips only")
    clipping_quantile: Fraction = Field(
        0.5, description="adaptive: share of updates not to be clipped"
    )
    clipping_rate: Positive = Field(0.2, description="adaptive: learning rate of the norm")


def epsilon(rounds: int, noise: float, delta: float = 1e-5) -> float:
    """Returns the epsilon that ``rounds`` rounds cost a site at ``delta``; infinite without noise.

    Neighbours are the same rounds with one site's change set to zero, and all sites take part in
    every round: rho = rounds / (2 z^2), epsilon = rho + 2 sqrt(rho ln(1/delta)) (Bun and Steinke,
    "Concentrated Differential Privacy", TCC 2016, Propositions 1.3 and 1.6, Lemma 1.7).
    """
    if noise == 0:
        return math.inf
    rho = rounds / (2 * noise**2)
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))


# At a site


def clip_update(
    envelope: Envelope, context: Context, call_next: Callable[[Envelope, Context], Envelope]
) -> Envelope:
    """A mod for training messages: clips the update if the broadcast says so.

    Flower's mods want a message with nothing but arrays and the norm, and scale every array; they
    are shown the float entries alone. The means of the loss terms stay at the site.
    """
    sent = Parcel.from_records(envelope.content)
    scalars = sent.part("extras").scalars
    reply = call_next(envelope, context)
    if CLIPPING not in scalars or reply.has_error():
        return reply
    answer = Parcel.from_records(reply.content)
    if "weights" not in answer.parts:
        return reply
    mod, norm = _MODS[str(scalars[CLIPPING])], float(scalars[CLIPPING_NORM])
    received, trained = sent.part("weights").tensors, answer.parts["weights"].tensors
    names = [name for name, tensor in trained.items() if tensor.is_floating_point()]
    clipped = 0
    if any(not torch.equal(received[name], trained[name]) for name in names):  # else 0 / 0
        before, after = ({name: w[name] for name in names} for w in (received, trained))
        clipped = _through(mod, norm, before, after, envelope, context)
        trained.update(after)
    if mod is adaptiveclipping_mod:
        answer.parts["extras"] = joined(answer.part("extras"), Message({}, {NORM_BIT: clipped}))
    answer.parts["terms"] = Message()
    return Envelope(answer.to_records(), reply_to=envelope)


def _through(
    mod: Any, norm: float, before: Weights, after: Weights, envelope: Envelope, context: Context
) -> int:
    """Replaces ``after`` by what a mod of Flower's makes of it; returns whether it was clipped."""
    asked = RecordDict({"weights": arrays(before), "config": ConfigRecord({CLIPPING_NORM: norm})})
    told = RecordDict({"weights": arrays(after), "metrics": MetricRecord()})
    passed = mod(
        Envelope(asked, reply_to=envelope),
        context,
        lambda message, _: Envelope(told, reply_to=envelope),
    )
    if passed.has_error():
        raise RuntimeError(passed.error.reason)
    after.update(tensors(passed.content.array_records["weights"]))
    return int(passed.content.metric_records["metrics"].get(NORM_BIT, 0))  # type: ignore[arg-type]


# At the server


def private(method: Method, network: Network, privacy: Privacy, experiment: Experiment) -> Method:
    """Returns the method with its server's half of update privacy; itself if there is none.

    Raises:
        ExperimentError: the method or the network cannot be protected this way; says why.
    """
    if privacy.clipping == "none":
        if privacy.noise_multiplier:
            raise ExperimentError("noise without clipping protects nothing: set clipping, too")
        return method
    fault = unsoundness(method, network, experiment)
    if fault is not None:
        raise ExperimentError(
            f"clipping = {privacy.clipping!r} cannot protect what {method.name} sends: {fault}"
        )
    kind = type(method)
    released = frozenset(shared_parameters(method, network))
    members = {"privacy": privacy, "released": released, "__doc__": kind.__doc__}
    protected: type[Method] = type(kind.__name__, (_PrivateMean, kind), members)
    return protected(method.settings)


def unsoundness(method: Method, network: nn.Module, experiment: Experiment) -> str | None:
    """Says why clipped and noised weights would not protect a method's sites, or None.

    The rule reads what the method declares: whatever leaves a site must be weights, all of them
    changes of what the site was sent, and the server may do nothing but take their mean.
    """
    kind = type(method)
    for entry in sorted(kind.sends.keys() - Method.sends.keys()):
        return f"{entry} ({kind.sends[entry]}) would leave the site neither clipped nor noised"
    local = sorted(local_names(method, network))
    if local:
        return (
            f"{local[0]!r} and {len(local) - 1} more stay with each site, so that what it sends of "
            "them is no change of what it was sent"
        )
    for hook in ("aggregate", "share", "after_round"):
        if getattr(kind, hook) is not getattr(Method, hook):
            return f"it has its own {hook!r}, and the noise is made for a plain mean"
    if experiment.model.normalization == "train" and statistics_names(network):
        return (
            "running statistics of batch normalisation are taken from images, and noise would make "
            "variances negative; set model.normalization to frozen, or choose another backbone"
        )
    return None


@dataclass
class _Tally:
    """Counts the updates of a round as they pass."""

    updates: int = 0
    clipped: int = 0

    def watch(self, updates: Iterable[Update]) -> Iterator[Update]:
        for update in updates:
            self.updates += 1
            self.clipped += int(update.extras.scalars.get(NORM_BIT, 0))
            yield update


class _PrivateMean(Method):
    """A method's server, with a plain mean of clipped updates and noise on it."""

    privacy: Privacy
    released: frozenset[str]

    def initial_extras(self, network: Network, clients: int) -> Weights:
        """Adds the norm, which checkpoints keep."""
        own = {_NORM: torch.tensor(self.privacy.clipping_norm, dtype=torch.float64)}
        return super().initial_extras(network, clients) | own

    def broadcast(self, state: State) -> Broadcast:
        """Adds the norm."""
        broadcast = super().broadcast(state)
        norm = float(state.extras[_NORM])
        told = Message({}, {CLIPPING: self.privacy.clipping, CLIPPING_NORM: norm})
        broadcast.extras = joined(broadcast.extras, told)
        return broadcast

    def share(self, state: State, update: Update) -> float:
        """Every site counts the same, whatever it says of its number of images."""
        return 1.0

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """The mean of the clipped updates, with noise on all that was trained."""
        before, norm, tally = state.weights, float(state.extras[_NORM]), _Tally()
        state = super().aggregate(state, tally.watch(updates))
        noise, count_noise = self._noise(tally.updates)
        entropy = torch.Generator().manual_seed(secrets.randbits(63))
        for name, tensor in state.weights.items():
            if name not in self.released:
                state.weights[name] = before[name]
            elif noise:
                drawn = torch.randn(tensor.shape, generator=entropy) * (
                    noise * norm / tally.updates
                )
                state.weights[name] = tensor + drawn.to(tensor)
        if self.privacy.clipping == "adaptive":
            unclipped = tally.updates - tally.clipped
            drawn = torch.randn((), generator=entropy, dtype=torch.float64) * count_noise
            share = (unclipped + float(drawn)) / tally.updates
            norm *= math.exp(-self.privacy.clipping_rate * (share - self.privacy.clipping_quantile))
            state.extras[_NORM] = torch.tensor(norm, dtype=torch.float64)
        spent = epsilon(state.round + 1, self.privacy.noise_multiplier)
        log.info("updates clipped to %.4g; epsilon so far %.3g at delta 1e-5", norm, spent)
        return state

    def _noise(self, updates: int) -> tuple[float, float]:
        """Returns the noise multiplier of the mean, and the deviation of the count's noise."""
        noise = self.privacy.noise_multiplier
        if not noise or self.privacy.clipping == "fixed":
            return noise, 0.0
        count_noise = max(updates / 20, noise)
        return (noise**-2 - (2 * count_noise) ** -2) ** -0.5, count_noise
