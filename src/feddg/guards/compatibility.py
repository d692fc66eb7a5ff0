"""Which methods survive which guards, and which guards each other: the one place that decides.

A method's traits are read from what it declares and overrides; a guard says which it breaks.
"""

import itertools
from collections.abc import Callable, Sequence

from torch import nn

from feddg.errors import ExperimentError
from feddg.guards.guard import Guard
from feddg.methods.base import Method, local_names
from feddg.models.norm import statistics_names

DESCRIPTIONS, EXTRAS, LOCAL = "descriptions", "extras", "local entries"
FUSION, STATISTICS = "own fusion", "trained statistics"

Trait = Callable[[Method, nn.Module, bool], str | None]


def _sent(method: Method, *, in_update: bool) -> str | None:
    more = sorted(type(method).sends.keys() - Method.sends.keys())
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


TRAITS: dict[str, Trait] = {
    DESCRIPTIONS: lambda method, network, trains: _sent(method, in_update=False),
    EXTRAS: lambda method, network, trains: _sent(method, in_update=True),
    LOCAL: lambda method, network, trains: _local(method, network),
    FUSION: lambda method, network, trains: _fusion(method),
    STATISTICS: lambda method, network, trains: (
        "it trains running statistics of batch normalisation"
        if trains and statistics_names(network)
        else None
    ),
}
"""What a guard may break, with the finding in a method, network and normalisation, or None."""


def require_compatible(
    guards: Sequence[Guard],
    method: Method,
    network: nn.Module,
    *,
    trains_statistics: bool,
    updates: int,
) -> None:
    """Raises ExperimentError, with the reason, if the guards cannot do what they promise.

    Args:
        guards: in their order.
        method: whose updates pass.
        network: what it trains.
        trains_statistics: whether batch normalisation's running statistics are trained.
        updates: clients of a round.
    """
    for one, other in itertools.combinations(guards, 2):
        fault = _conflict(one, other) or _conflict(other, one)
        if fault is not None:
            raise ExperimentError(fault)
    for guard in guards:
        for trait, reason in guard.breaks.items():
            found = TRAITS[trait](method, network, trains_statistics)
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
    if one.plain_mean is not None and other.fuses:
        return f"{one.name} and {other.name} exclude each other: {one.plain_mean}"
    return None
