"""A run's guards, built from what its experiment says, and refused where they cannot hold."""

from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError
from torch import nn

from feddg.clients.sampling import Schedule
from feddg.errors import ExperimentError, nearest
from feddg.guards.chain import Guards
from feddg.guards.clipping import Clipping
from feddg.guards.compatibility import Circumstances, require_compatible, require_styles
from feddg.guards.guard import GUARDS, Guard, WeightFacts
from feddg.guards.noised_records import NoisedRecords
from feddg.guards.noised_styles import NoisedStyles
from feddg.guards.promises import require_meaning
from feddg.guards.secure_aggregation import SecureAggregation
from feddg.methods.base import Method, local_names, shared_parameters
from feddg.settings import GuardChoice, PrivacySettings


def build_guards(
    privacy: PrivacySettings,
    choices: Iterable[GuardChoice],
    method: Method,
    network: nn.Module,
    *,
    trains_statistics: bool,
    updates: int,
    schedule: Schedule | None = None,
    epochs: int = 1,
) -> Guards:
    """Returns a run's guards: clipping first, if asked for, then those named.

    Args:
        privacy: how updates are clipped and noised.
        choices: guards by name.
        method: whose updates pass.
        network: what it trains.
        trains_statistics: whether batch normalisation's running statistics are trained.
        updates: clients of a round.
        schedule: who is planned to take part; all clients in one round by default.
        epochs: passes over a client's images in a round.

    Raises:
        ExperimentError: they cannot protect what the method sends; says why.
    """
    planned = schedule or Schedule(updates)
    require_meaning(privacy, planned.clients)
    guards: list[Guard] = [guard_of(choice) for choice in choices]
    if privacy.clipping != "none":
        guards.insert(0, Clipping(privacy, planned))
    # What is masked last can still be changed before.
    guards.sort(key=lambda guard: guard.sums)
    for guard in guards:
        if isinstance(guard, SecureAggregation):
            guard.alike = privacy.clipping != "none"
    require_styles(privacy, method)
    if privacy.style_epsilon is not None:
        guards.insert(0, NoisedStyles(privacy))
    if privacy.record_epsilon is not None:
        guards.insert(0, NoisedRecords(privacy, planned, epochs))
    seen_to = privacy.style_epsilon is not None or privacy.open_styles
    covered = type(method).noises if seen_to else frozenset[str]()
    circumstances = Circumstances(trains_statistics, covered)
    require_compatible(guards, method, network, circumstances=circumstances, updates=updates)
    return Guards(guards, facts_of(method, network))


def guard_of(choice: GuardChoice) -> Guard:
    """Returns the guard that an experiment names.

    Raises:
        ExperimentError: it is unknown, or a setting is unknown or out of range.
    """
    guard = GUARDS.find(choice.name)
    try:
        return guard(guard.Settings(**choice.settings))
    except ValidationError as error:
        fault = error.errors()[0]
        field = ".".join(str(part) for part in fault["loc"])
        known = list(guard.Settings.model_fields)
        wrong = f": {fault['msg']} (got {fault['input']!r})"
        if fault["type"] == "extra_forbidden":
            listing = ", ".join(known) or "none at all"
            wrong = f" is unknown{nearest(field, known)}; it has: {listing}"
        raise ExperimentError(f"guard {guard.name}, setting {field!r}{wrong}") from None


def resolved_choice(said: Any) -> dict[str, Any]:
    """Returns a guard's name with all its settings, from what an experiment says of it.

    Raises:
        ExperimentError: it names no guard that can be had this way.
    """
    try:
        choice = GuardChoice.model_validate(said)
    except ValidationError:
        raise ExperimentError(
            f"guards: write names, or a name with settings, not {said!r}; there are: "
            f"{GUARDS.names()}"
        ) from None
    if choice.name == Clipping.name:
        raise ExperimentError(
            "guards: clipping is asked for as `privacy: {clipping: fixed}` (or adaptive)"
        )
    settings = guard_of(choice).settings.model_dump(mode="json")
    return {"name": choice.name, "settings": settings}


def facts_of(method: Method, network: nn.Module) -> WeightFacts:
    """Returns what guards need to know of a method's weights."""
    local, state = local_names(method, network), network.state_dict()
    floats = {name for name, tensor in state.items() if tensor.is_floating_point()}
    return WeightFacts(frozenset(floats - local), frozenset(shared_parameters(method, network)))
