"""Which methods survive which guards, and which guards each other: the one place that decides.

A method's traits are read from what it declares and overrides; a guard says which it breaks.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from feddg.errors import ExperimentError
from feddg.guards.guard import Guard
from feddg.methods.base import Method, local_names
from feddg.models.normalization import statistics_names
from feddg.settings import PrivacySettings

DESCRIPTIONS, EXTRAS, LOCAL = "descriptions", "extras", "local entries"
FUSION, STATISTICS, TRAINING = "own fusion", "trained statistics", "own training"


@dataclass(frozen=True)
class Circumstances:
    """What decides beside the method and its network.

    Attributes:
        trains_statistics: whether batch normalisation's running statistics are trained.
        covered: entries of what the method sends that are seen to otherwise.
    """

    trains_statistics: bool = False
    covered: frozenset[str] = frozenset()


Trait = Callable[[Method, nn.Module, Circumstances], str | None]


def _sent(method: Method, *, in_update: bool, covered: frozenset[str] = frozenset()) -> str | None:
    more = sorted(type(method).sends.keys() - Method.sends.keys() - covered)
    found = [entry for entry in more if entry.startswith("update/") == in_update]
    if not found:
        return None
    return f"{found[0]} ({type(method).sends[found[0]]}) leaves the client as well"


def _local(method: Method, network: nn.Module) -> str | None:
    names = sorted(local_names(method, network))
    return f"{names[0]!r} and {len(names) - 1} more stay with each client" if names else None


def _fusion(method: Method) -> str | None:
    for hook in ("aggregate", "share", "after_round"):
        if getattr(type(method), hook) is not getattr(Method, hook):
            return f"it has its own {hook!r}, which is made for every client's own update"
    return None


def _training(method: Method) -> str | None:
    for hook in ("network", "begin", "loss", "head_loss", "step", "optimizer"):
        if getattr(type(method), hook) is not getattr(Method, hook):
            return f"it trains in its own way ({hook!r})"
    return None


TRAITS: dict[str, Trait] = {
    TRAINING: lambda method, network, at: _training(method),
    DESCRIPTIONS: lambda method, network, at: _sent(method, in_update=False, covered=at.covered),
    EXTRAS: lambda method, network, at: _sent(method, in_update=True),
    LOCAL: lambda method, network, at: _local(method, network),
    FUSION: lambda method, network, at: _fusion(method),
    STATISTICS: lambda method, network, at: (
        "it trains running statistics of batch normalisation"
        if at.trains_statistics and statistics_names(network)
        else None
    ),
}
"""What a guard may break, with the finding in a method, network and normalisation, or None."""


def require_compatible(
    guards: Sequence[Guard],
    method: Method,
    network: nn.Module,
    *,
    circumstances: Circumstances,
    updates: int,
) -> None:
    """Raises ExperimentError, with the reason, if the guards cannot do what they promise.

    Args:
        guards: in their order.
        method: whose updates pass.
        network: what it trains.
        circumstances: what else decides.
        updates: clients of a round.
    """
    for one, other in itertools.combinations(guards, 2):
        fault = _conflict(one, other) or _conflict(other, one)
        if fault is not None:
            raise ExperimentError(fault)
    for guard in guards:
        for trait, reason in guard.breaks.items():
            found = TRAITS[trait](method, network, circumstances)
            if found:
                raise ExperimentError(
                    f"{guard.name} does not go with {method.name}: {found}, {reason}"
                )
        if updates < guard.least:
            raise ExperimentError(
                f"{guard.name} needs {guard.least} updates in a round, and there are {updates} "
                "clients in one; ask for more clients, or lower what it should withstand"
            )


def _conflict(one: Guard, other: Guard) -> str | None:
    if one.name == other.name:
        return f"guard {one.name} is named twice; once is enough"
    if one.fuses and other.fuses:
        return f"guards {one.name} and {other.name} each replace the mean; choose one"
    if one.sums and (other.fuses or other.looks):
        return (
            f"{one.name} and {other.name} exclude each other: {other.name} looks at single "
            "updates, and the server sees nothing but their sum"
        )
    if one.sums and other.secret_rate is not None:
        return (
            f"{one.name} and sampling: secret exclude each other: a draw of too few fails, which "
            "tells who was drawn; set privacy.sampling to public"
        )
    if one.sums and other.sends:
        return (
            f"{one.name} and adaptive clipping exclude each other: the server would see which "
            "client's update was clipped; set privacy.clipping to fixed"
        )
    if one.plain_mean is not None and other.fuses:
        return f"{one.name} and {other.name} exclude each other: {one.plain_mean}"
    return None


def require_styles(privacy: PrivacySettings, method: Method) -> None:
    """Raises ExperimentError if styles are to be noised, and the method sends none that can be."""
    if privacy.style_epsilon is None or (type(method).noises and method.has_setup):
        return
    more = [entry for entry in type(method).sends if not entry.startswith("update/")]
    sent = f"{more[0]} ({type(method).sends[more[0]]}) cannot be noised" if more else "sends none"
    raise ExperimentError(
        f"privacy.style_epsilon is for methods whose styles can be noised, such as pardon and "
        f"ccst; {method.name}: {sent}"
    )
