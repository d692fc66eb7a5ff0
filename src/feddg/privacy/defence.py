"""A defence changes or checks updates between the client and the aggregating server.

At the client::

    protect                               sees the update and the weights it started from

At the server it is a hook of the round (:class:`feddg.methods.base.RoundHook`)::

    broadcast                             what this round's clients are told
    received                              sees each update as it comes; may refuse it
    collected                             sees the stream of those accepted; may wait for all
    completed                             sees the method's aggregate and what it started from

A defence keeps no state but what is in its run's folder (:meth:`Defence.keep_in`) and, in
checkpoints, in :meth:`Defence.memory`. So one object serves every transport and several threads.
Hooks at both sides that every method goes through are after pfl-research (Granqvist et al., NeurIPS
2024).
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pydantic import BaseModel
from torch import nn

from feddg.clients.client import RecordNoise
from feddg.clients.sampling import Schedule
from feddg.diagnostics import Diagnostic
from feddg.errors import ClientError, ExperimentError
from feddg.messages import Broadcast, EntrySchema, Message, Update, Weights, joined, under
from feddg.methods.base import Method, RoundHook, State, local_names
from feddg.models.normalization import statistics_names
from feddg.registry import Registry
from feddg.settings import PrivacySettings, Settings
from feddg.styles.statistics import StyleNoise

MEMORY = "defences/"
"""Prefix of all defences' tensors in the state's extras, where checkpoints keep them."""
CLIENT_STATISTICS, EXTRAS, LOCAL = "client statistics", "extras", "local entries"
LOCAL_LAYERS = "local layers"
AGGREGATION, STATISTICS, TRAINING = "own aggregation", "trained statistics", "own training"
TRAITS = (TRAINING, CLIENT_STATISTICS, EXTRAS, LOCAL, LOCAL_LAYERS, AGGREGATION, STATISTICS)
"""Features of a method that a defence may not work with."""


@dataclass(frozen=True)
class WeightNames:
    """Names of the weights that defences work on, at clients and server.

    Attributes:
        aggregated: float entries that clients send and the server aggregates: all that do not
            stay with the clients.
        trained: the parameters among them.
    """

    aggregated: frozenset[str] = frozenset()
    trained: frozenset[str] = frozenset()


class Defence(RoundHook):
    """Base class of all defences; changes nothing.

    Attributes:
        name: registry name, and prefix of everything it sends or stores.
        Settings: the pydantic model of its settings.
        breaks: features of a method (:data:`TRAITS`) that it does not work with, and why.
        sees_updates: whether it reads single updates at the server, without aggregating them.
        sums: whether the server sees only sums of updates; it then has :meth:`mask` and
            :meth:`answer`.
        aggregates: whether it replaces the aggregation of updates; only one defence can.
        clips: whether clients bound what anything at them changes: then no failure of one may show.
        noised: whether it gives differential privacy: then no update may affect another's use.
        plain_mean: why the server must take the plain mean of all updates, or None.
        secret_rate: the probability that a client takes part, if participation is secret.
        extra: the extra of this package that brings what it needs; empty if it needs none.
        style_noise: how clients noise styles before they send them; None for not at all.
        record_noise: how clients noise the gradients of single images; None for not at all.
        facts: names of the weights; set when a run's defences are built.
    """

    name: ClassVar[str]
    Settings: ClassVar[type[BaseModel]] = Settings
    breaks: ClassVar[dict[str, str]] = {}
    aggregates: ClassVar[bool] = False
    sees_updates: ClassVar[bool] = False
    sums: ClassVar[bool] = False
    clips: ClassVar[bool] = False
    extra: ClassVar[str] = ""
    noised: bool = False
    plain_mean: str | None = None
    secret_rate: float | None = None
    style_noise: StyleNoise | None = None
    record_noise: RecordNoise | None = None

    def __init__(self, settings: BaseModel | None = None) -> None:
        self.settings: Any = settings if settings is not None else self.Settings()
        self.facts = WeightNames()

    @classmethod
    def asked_for(
        cls, privacy: PrivacySettings, method: Method, schedule: Schedule, epochs: int
    ) -> "Sequence[Defence]":
        """Returns what ``privacy`` asks for, which needs no name of its own in an experiment.

        Args:
            privacy: what an experiment says of clipping and noise.
            method: whose updates and styles are protected.
            schedule: how often clients take part.
            epochs: passes over a client's images per round.

        Raises:
            ExperimentError: it cannot be met.
        """
        return ()

    def fit(self, privacy: PrivacySettings, method: Method) -> None:
        """Learns with which settings and method it goes together; once, before round 1."""

    def keep_in(self, folder: Any) -> None:
        """Reads what it has kept in the folder of a run, and keeps what follows there.

        Args:
            folder: the run's: its ``path``, ``append`` and ``replace_rows`` of a file's rows.

        Raises:
            RunError: a row is damaged.
        """

    @property
    def least(self) -> int:
        """Minimum number of updates in a round."""
        return 1

    @property
    def sends(self) -> dict[str, EntrySchema]:
        """Schemas of what it adds to a client's messages, by ``update/name`` as in the ledger.

        Names are without the defence's prefix.
        """
        return {}

    @property
    def diagnostic(self) -> Diagnostic | None:
        """A note on what it guarantees with these settings, or None."""
        return None

    def carrier(self, transport: Any, fewest: int) -> Any:
        """At the server: returns what trains the clients: the transport, or what lies before it.

        Args:
            transport: see :class:`feddg.federation.transport.Transport`.
            fewest: minimum number of updates of a round.
        """
        return transport

    def bound_to(self, round: int) -> Sequence[int] | None:
        """At the server: returns the clients that a round must be done with; None for any."""
        return None

    def affords(self, round: int, clients: Sequence[int]) -> bool:
        """At the server: whether a round with these clients stays within the privacy budget."""
        return True

    def describing(self, clients: Sequence[int]) -> None:
        """At the server: called before these clients send statistics, before round 1.

        Raises:
            BudgetSpent: they must not send them.
        """

    def initial_memory(self) -> Weights:
        """Returns the defence's initial tensors."""
        return {}

    def memory(self, state: State) -> Weights:
        """Returns the defence's tensors from a state."""
        return under(f"{MEMORY}{self.name}/", Message(state.extras)).tensors

    def remember(self, state: State, memory: Weights) -> None:
        """Replaces the defence's tensors in a state that is not used yet."""
        state.extras |= {f"{MEMORY}{self.name}/{name}": t for name, t in memory.items()}

    def tell(self, broadcast: Broadcast, **scalars: int | float | str) -> Broadcast:
        """Returns a broadcast with values for the clients, under the defence's prefix."""
        told = Message({}, {f"{self.name}/{name}": value for name, value in scalars.items()})
        return replace(broadcast, extras=joined(broadcast.extras, told))

    def protect(self, update: Update, received: Weights, message: Message) -> Update:
        """At the client: returns the update as it is sent.

        Args:
            update: the trained update; its tensors may be the network's own, so do not change them.
            received: the weights the client was sent.
            message: the server's values for this defence.

        Raises:
            ClientError: it must not be sent.
        """
        return update

    def mask(self, update: Update, received: Weights, message: Message, secrets: Weights) -> Update:
        """At the client, after all other defences: returns the update as the server may see it.

        Args:
            update: the update after the other defences.
            received: the weights the client was sent.
            message: the server's values for this defence.
            secrets: what the client keeps secret in this round; changed in place.
        """
        return update

    def answer(
        self, id: int, round: int, name: str, question: Message, secrets: Weights
    ) -> Message:
        """At client ``id``: returns the answer to a question of this defence.

        Raises:
            ClientError: the client does not answer.
        """
        raise ClientError(f"was asked {name!r}, which {self.name} does not know")

    def add(self, update: Update, name: str, value: int | float | str) -> Update:
        """Adds a value to an update under the defence's prefix; returns the update."""
        scalars = {**update.extras.scalars, f"{self.name}/{name}": value}
        update.extras = Message(update.extras.tensors, scalars)
        return update


DEFENCES: Registry[type[Defence]] = Registry(
    "defence", "feddg.privacy", group="feddg.defences", error=ExperimentError
)
register = DEFENCES.register
"""Class decorator that adds a defence under its name."""
NOISED_RECORDS = "noised_records"
"""A defence of which clients are told, though an experiment cannot choose it by its name."""


def sent_by(method: Method) -> dict[str, EntrySchema]:
    """Returns the schemas of what leaves a client under a method's settings, by entry."""
    return {entry: schema for entry, schema in method.sends.items() if schema.sent_by(method)}


def traits_of(
    method: Method,
    network: nn.Module,
    *,
    trains_statistics: bool,
    covered: frozenset[str],
) -> dict[str, str | None]:
    """Returns for each of :data:`TRAITS` what the method has of it, or None.

    Args:
        method: the method whose updates are protected.
        network: the network it trains.
        trains_statistics: whether batch normalisation's running statistics are trained.
        covered: entries of the method's messages that are protected otherwise.
    """
    kind, sends = type(method), sent_by(method)
    facts: dict[str, str | None] = dict.fromkeys(TRAITS)

    owners = [c for c in kind.__mro__ if c not in (Method, object) and not vars(c).get("one_round")]

    def first_own(owners: list[type], *hooks: str) -> str | None:
        return next((h for h in hooks if any(h in vars(owner) for owner in owners)), None)

    def is_idle(part: type) -> bool:
        """Whether a part has messages of its own, and none is sent."""
        own = vars(part).get("sends", {}).keys() - Method.sends.keys()
        return bool(own) and not own & sends.keys()

    about_sums = {
        entry
        for c in kind.__mro__
        if vars(c).get("one_round")
        for entry in vars(c)["sends"]
        if entry.startswith("answer:")
    }
    for entry in sorted(sends.keys() - Method.sends.keys() - about_sums, reverse=True):
        trait = EXTRAS if entry.startswith("update/") else CLIENT_STATISTICS
        if trait == EXTRAS or entry not in covered:
            facts[trait] = f"{entry} ({sends[entry]}) leaves the client as well"
    local = sorted(local_names(method, network))
    if local:
        facts[LOCAL] = f"{local[0]!r} and {len(local) - 1} more stay with each client"
        if not all(name.startswith("heads.") for name in local):  # which train, and predict nothing
            facts[LOCAL_LAYERS] = facts[LOCAL]
    at_server = [owner for owner in owners if not is_idle(owner)]
    hook = first_own(at_server, "aggregate", "share", "after_round")
    if hook is not None:
        facts[AGGREGATION] = f"it has its own {hook!r}, which is made for every client's own update"
    training = "network", "begin", "loss", "head_loss", "output_loss", "step", "optimizer"
    hook = first_own(owners, *training)
    if hook is not None:
        facts[TRAINING] = f"it trains in its own way ({hook!r})"
    if trains_statistics and statistics_names(network) - getattr(network, "frozen", frozenset()):
        facts[STATISTICS] = "it trains running statistics of batch normalisation"
    return facts


def require_compatible(
    defences: Sequence[Defence], traits: Mapping[str, str | None], method: Method, *, updates: int
) -> None:
    """Raises ExperimentError, with the reason, if the defences cannot give their guarantee.

    Args:
        defences: in their order.
        traits: the method's features that defences may not work with, see :func:`traits_of`.
        method: the method whose updates are protected.
        updates: number of clients in a round.
    """
    for first, other in itertools.combinations(defences, 2):
        fault = _conflict(first, other) or _conflict(other, first)
        if fault is not None:
            raise ExperimentError(fault)
    for defence in defences:
        if type(method).one_round and (defence.aggregates or defence.sees_updates):
            raise ExperimentError(
                f"{defence.name} cannot be combined with {method.name}: clients send sums over "
                f"their images, which {method.name} checks itself; after a robust rule they would "
                "no longer be the sums of any images"
            )
        for trait, reason in defence.breaks.items():
            if traits[trait]:
                raise ExperimentError(
                    f"{defence.name} cannot be combined with {method.name}: {traits[trait]}, "
                    f"{reason}"
                )
        if updates < defence.least:
            raise ExperimentError(
                f"{defence.name} needs {defence.least} updates in a round, and there are {updates} "
                "clients in one; ask for more clients, or lower what it should withstand"
            )


def _conflict(first: Defence, other: Defence) -> str | None:
    if first.name == other.name:
        return f"defence {first.name} is named twice; once is enough"
    if first.aggregates and other.aggregates:
        return f"defences {first.name} and {other.name} each replace the mean; choose one"
    if first.sums and (other.aggregates or other.sees_updates):
        return (
            f"{first.name} and {other.name} exclude each other: {other.name} looks at single "
            "updates, and the server sees nothing but their sum"
        )
    if first.sums and other.secret_rate is not None:
        return (
            f"{first.name} and sampling: secret exclude each other: a draw of too few fails, which "
            "tells who was drawn; set privacy.sampling to public"
        )
    if first.sums and other.sends:
        return (
            f"{first.name} and adaptive clipping exclude each other: the server would see which "
            "client's update was clipped; set privacy.clipping to fixed"
        )
    if first.plain_mean is not None and (other.aggregates or other.sees_updates):
        return f"{first.name} and {other.name} exclude each other: {first.plain_mean}"
    return None
