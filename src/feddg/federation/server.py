"""The server: the one round loop, under whatever carries the messages."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from feddg.clients.sampling import drawn_clients, secret_clients
from feddg.errors import ClientError, NotEnoughUpdates, RunError
from feddg.federation import averages as server_optimizer
from feddg.federation.averages import Means
from feddg.federation.masked_rounds import OpenedSums, carried
from feddg.federation.transport import Ledger, Reply, Transport
from feddg.federation.validation import (
    CHANGES,
    Attributed,
    ChangeSizes,
    MessageChecks,
    RoundSpoiled,
    state_fault,
)
from feddg.messages import Broadcast, Message, Refusal, Update, Weights
from feddg.methods.base import Method, State
from feddg.models.network import Network
from feddg.privacy.accounting import Account
from feddg.privacy.building import NO_GUARDS, GuardedRound, Guards
from feddg.privacy.secure_aggregation import clients_said
from feddg.records import Direction, Groups, RefusedUpdate, RoundRow
from feddg.settings import ExperimentSettings, ServerSettings
from feddg.styles.statistics import StyleNoise

# The server's state before the first round.


def initial_state(
    method: Method,
    network: Network,
    clients: int,
    *,
    rounds: int,
    settings: ServerSettings,
    guards: Guards = NO_GUARDS,
) -> State:
    """Returns the state before round 1 for a freshly built network.

    Args:
        method: what will be run.
        network: what it trains.
        clients: how many there are in all.
        rounds: how many there will be, for schedules.
        settings: the server's; its optimizer may keep tensors in the state.
        guards: may keep tensors in the state, too.
    """
    weights: Weights = {name: clone(t) for name, t in network.state_dict().items()}
    extras = method.initial_extras(network, clients)
    extras |= server_optimizer.initial_extras(settings, method, network)
    extras |= guards.initial_extras()
    return State(weights, extras, rounds=rounds)


def clone(tensor: Tensor) -> Tensor:
    """Returns an independent copy."""
    return tensor.detach().clone()


# What has happened in a round so far, and the row it becomes.


@dataclass
class Tally:
    """What has happened in a round so far; see :class:`RoundRow`."""

    round: int
    clients: list[int]
    refused: list[Refusal] = field(default_factory=list)
    terms: dict[str, float] = field(default_factory=dict)
    examples: int = 0
    images: int = 0
    passes: int = 0
    training: float = 0.0

    def add(self, update: Update) -> None:
        """Adds one used update to the means and counts."""
        self.examples += update.examples
        self.images += update.images
        self.passes += update.passes
        self.training += update.seconds
        share = update.examples / self.examples
        for name, value in update.terms.items():
            before = self.terms.get(name, value)
            self.terms[name] = before + (value - before) * share

    def row(self, seconds: float, sent: Mapping[Direction, int]) -> RoundRow:
        """Returns the row of the round, which took ``seconds`` and moved bytes ``sent``."""
        return RoundRow(
            round=self.round,
            clients=self.clients,
            refused=[RefusedUpdate(client=r.client, reason=r.reason) for r in self.refused],
            terms=self.terms,
            examples=self.examples,
            images=self.images,
            passes=self.passes,
            # Sites train side by side: their seconds may add up to more than the round took.
            seconds={"train": self.training, "aggregate": max(0.0, seconds - self.training)},
            bytes_up=sent["up"],
            bytes_down=sent["down"],
        )


log = logging.getLogger("feddg")


class Server:
    """Runs the setup phase and rounds of a method over a transport.

    Args:
        method: what is run.
        transport: what carries the messages.
        state: where to start: round 0, or a checkpoint's.
        per_round: clients sampled per round, K; None for all.
        settings: minimum of good updates, attempts, server optimizer.
        seed: the experiment's seed.
        ledger: where every message is entered.
        checks: what clients' messages are compared with.
        guards: what happens to updates on their way.
        account: what the run has spent on noised releases.
        opened: whose masked sums the run has opened.
        means: keeps means over the rounds beside the weights; None for none.
        probe: says what is wrong with weights that are about to become the global model, or None.
        on_client: called after each client of a round with the round and its update or refusal.
        on_setup: called with (done, total) while clients describe themselves.

    Attributes:
        groups: how the method grouped the clients in the setup phase, if it did.
    """

    def __init__(
        self,
        method: Method,
        transport: Transport,
        state: State,
        *,
        per_round: int | None,
        settings: ServerSettings,
        seed: int,
        ledger: Ledger,
        checks: MessageChecks,
        guards: Guards = NO_GUARDS,
        account: Account | None = None,
        opened: OpenedSums | None = None,
        means: Means | None = None,
        probe: Callable[[Weights], str | None] = lambda weights: None,
        on_client: Callable[[int, Update | Refusal], None] | None = None,
        on_setup: Callable[[int, int], None] | None = None,
    ) -> None:
        self.method, self.state = method, state
        self._opened = opened or OpenedSums()
        self.transport = carried(transport, guards.masking, self._opened, settings.min_updates)
        self.per_round, self.settings, self.seed = per_round, settings, seed
        self.ledger, self.checks, self.guards, self._probe = ledger, checks, guards, probe
        self.account, self.means = account or Account(), means
        self.groups: Groups = {}
        self._on_client = on_client or (lambda round, reply: None)
        self._on_setup = on_setup or (lambda done, total: None)
        self.transport.ledger = ledger
        self.transport.hand_out(state.agreed, again=True)

    def setup(self) -> Weights:
        """Has every client describe itself and sends all of them what the method agrees on.

        A client that cannot describe itself is left out of the agreement with a warning.

        Returns:
            The descriptions, stacked by name over the clients that gave one; for the records.

        Raises:
            RunError: no client could.
        """
        if not self.method.has_setup or self.state.agreed is not None:
            return {}
        ids = self.transport.clients
        self.guards.describing(ids, self.account)
        replies = self._counted(self.transport.descriptions(ids, Broadcast(0)), len(ids))
        descriptions = list(self._messages(replies, 0, "describe"))
        if not descriptions:
            raise RunError("setup: no client could describe itself; see the warnings above")
        self.state.agreed = self.method.agree(descriptions) or Message()
        self.groups = self.method.groups(descriptions)
        self.transport.hand_out(self.state.agreed)
        return _stacked([message for _, message in descriptions])

    def _counted(self, replies: Iterator[Reply], total: int) -> Iterator[Reply]:
        for done, reply in enumerate(replies, start=1):
            self._on_setup(done, total)
            yield reply

    def round(self) -> RoundRow:
        """Runs one round and returns its row; on return ``state`` is that of the completed round.

        Raises:
            NotEnoughUpdates: too few good updates in every attempt; the state is unchanged.
        """
        attempt, spoilers = 0, dict[int, Refusal]()
        while True:
            try:
                return self._attempt(attempt, spoilers)
            except RoundSpoiled as error:
                log.warning("%s; the round is done again without", error)
                for refusal in error.refusals:
                    self.ledger.refusal(self.state.round + 1, refusal.client, refusal.reason)
                    spoilers[refusal.client] = refusal
            except NotEnoughUpdates as error:
                log.warning("%s", error)
                attempt += 1
                if attempt == self.settings.attempts:
                    raise

    def _attempt(self, attempt: int, spoilers: Mapping[int, Refusal]) -> RoundRow:
        started = time.perf_counter()
        before = dict(self.ledger.bytes)
        round = self.state.round + 1
        clients = [id for id in self.sample(round, attempt) if id not in spoilers]
        tally = Tally(round, clients, refused=list(spoilers.values()))
        if len(clients) < self._fewest:
            raise NotEnoughUpdates(self._shortage(tally, 0))
        state = self._fused(tally)
        state.round = round
        if self.means is not None:
            self.means.add(state)
        self.state = state
        sent = {way: total - before[way] for way, total in self.ledger.bytes.items()}
        return tally.row(time.perf_counter() - started, sent)

    def _fused(self, tally: Tally) -> State:
        """Returns the state after the clients of a round trained; the server's own stays as it is.

        Raises:
            NotEnoughUpdates: too few good updates.
            RoundSpoiled: a client's update cannot be used, and was found out too late.
        """
        times = None if self.guards.sees_all else self.settings.largest_change
        changes = ChangeSizes(times, self.state.extras.get(CHANGES))
        changes.begin(self.state.weights)
        guarded = self.guards.open(self.state, self.account)
        guarded.asked(tally.clients)
        broadcast = guarded.address(self.method.broadcast(self.state))
        incoming = Attributed(self._updates(tally, broadcast, guarded, changes), tally.round)
        # Nothing is replaced before enough updates are in: a failed attempt leaves the state alone.
        state = replace(self.state, extras=dict(self.state.extras))
        with incoming.blamed():
            state = self.method.aggregate(state, guarded.collect(incoming))
        state = guarded.finish(state)
        state = server_optimizer.step(self.settings, self.state.weights, state)
        state = self.method.after_round(state, self._asker(tally, state))
        fault = state_fault(state.weights, state.extras) or self._probe(state.weights)
        if fault is not None and self.guards.noised:
            raise RunError(f"round {tally.round}: {fault}; the noise may be too large to train")
        if fault is not None:
            raise changes.spoiled(tally.round, fault)
        state.extras[CHANGES] = changes.end()
        return state

    @property
    def affordable(self) -> bool:
        """Whether the next round stays within what may be spent on it."""
        round = self.state.round + 1
        return self.guards.afford(round, self.sample(round), self.account)

    @property
    def is_last(self) -> bool:
        """Whether no round follows."""
        return self.state.round == self.state.rounds or not self.affordable

    @property
    def _fewest(self) -> int:
        """The fewest good updates; a secret draw may be of nobody, and nobody may know."""
        return 0 if self.guards.secret_rate is not None else self.settings.min_updates

    def sample(self, round: int, attempt: int = 0) -> list[int]:
        """Returns the ids of a round's clients, ascending: see :mod:`feddg.clients.sampling`.

        A round whose sum was opened is of the same clients whenever it is done again.
        """
        opened = self._opened.clients(round)
        if opened is not None:
            return list(opened)
        if self.guards.secret_rate is not None:
            return secret_clients(self.transport.clients, self.guards.secret_rate)
        return drawn_clients(self.transport.clients, self.per_round, self.seed, round, attempt)

    def _updates(
        self, tally: Tally, broadcast: Broadcast, guarded: GuardedRound, changes: ChangeSizes
    ) -> Iterator[Update]:
        """Yields the good updates; refuses bad ones by name.

        Raises:
            NotEnoughUpdates: too few were good.
            RoundSpoiled: some turned out to be too far from the others.
        """
        good = 0
        for reply in self.transport.train(tally.clients, broadcast):
            reply = self._checked(tally.round, reply, guarded, changes)
            self._on_client(tally.round, reply)
            if isinstance(reply, Refusal):
                tally.refused.append(reply)
                self._refuse(tally.round, reply)
                continue
            good += len(reply.clients)
            tally.add(reply)
            yield reply
        if good < self._fewest:
            raise NotEnoughUpdates(self._shortage(tally, good))
        outliers = changes.outliers()
        if outliers:
            raise RoundSpoiled(tally.round, outliers)

    def _checked(
        self, round: int, reply: Update | Refusal, guarded: GuardedRound, changes: ChangeSizes
    ) -> Update | Refusal:
        """Returns the update as it may be used, or why it may not.

        Raises:
            NotEnoughUpdates: it is the mean of several, of whom nobody can be named.
        """
        if isinstance(reply, Refusal):
            return reply
        fault = self.checks.update_fault(reply, self.state) or changes.fault(
            reply, self.checks.sizes(reply)
        )
        if fault is None:
            try:
                return guarded.receive(reply)
            except ClientError as error:
                fault = str(error)
                changes.forget(reply.client)
        if reply.members:
            raise NotEnoughUpdates(
                f"round {round}: no update is used; the mean of {clients_said(reply.members)} is "
                f"refused: {fault}; whose update is wrong cannot be told, since only their sum can "
                "be read"
            )
        return Refusal(reply.client, f"update refused: {fault}")

    def _refuse(self, round: int, refusal: Refusal) -> None:
        self.ledger.refusal(round, refusal.client, refusal.reason)
        log.warning("round %d, client %d: %s", round, refusal.client, refusal.reason)

    def _shortage(self, tally: Tally, good: int) -> str:
        reason = (
            f"; client {tally.refused[0].client}: {tally.refused[0].reason}"
            if tally.refused
            else ""
        )
        return (
            f"round {tally.round}: {good} good updates of {len(tally.clients)}, but "
            f"server.min_updates is {self.settings.min_updates}{reason}"
        )

    def _asker(
        self, tally: Tally, state: State
    ) -> Callable[[str, Message], Iterator[tuple[int, Message]]]:
        def ask(name: str, question: Message) -> Iterator[tuple[int, Message]]:
            refused = {refusal.client for refusal in tally.refused}
            ids = [id for id in tally.clients if id not in refused]
            broadcast = Broadcast(tally.round, state.weights, question)
            replies = self.transport.ask(ids, broadcast, name, question)
            return self._messages(replies, tally.round, f"answer:{name}")

        return ask

    def _messages(
        self, replies: Iterator[Reply], round: int, purpose: str
    ) -> Iterator[tuple[int, Message]]:
        for id, reply in replies:
            if isinstance(reply, Message):
                fault = self.checks.message_fault(purpose, reply, id)
                if fault is None:
                    yield id, reply
                    continue
                reply = Refusal(id, f"{purpose} refused: {fault}")
            self._refuse(round, reply)


def _stacked(messages: list[Message]) -> Weights:
    """Stacks tensors that every message holds in the same shape."""
    first = messages[0].tensors
    alike = [
        name
        for name, tensor in first.items()
        if all(m.tensors.get(name, _NOTHING).shape == tensor.shape for m in messages)
    ]
    return {name: torch.stack([m.tensors[name].cpu() for m in messages]) for name in alike}


_NOTHING = torch.empty(0, 0, 0, 0, 0)


def build_server(
    method: Method,
    transport: Transport,
    network: Network,
    settings: ExperimentSettings,
    *,
    guards: Guards = NO_GUARDS,
    style_noise: StyleNoise | None = None,
    ledger: Ledger | None = None,
    state: State | None = None,
    **more: Any,
) -> Server:
    """Returns a server whose messages are checked against what the settings lead to expect.

    Args:
        method: what is run.
        transport: what carries the messages.
        network: what is trained.
        settings: an experiment's.
        guards: what happens to updates on their way.
        style_noise: how styles are noised before they leave a client, if they are.
        ledger: where every message is entered; nowhere by default.
        state: where to start; before round 1 by default.
        **more: of :class:`Server`.
    """
    count = len(transport.clients)
    return Server(
        method,
        transport,
        state
        or initial_state(
            method,
            network,
            count,
            rounds=settings.train.rounds,
            settings=settings.server,
            guards=guards,
        ),
        per_round=settings.clients.per_round,
        settings=settings.server,
        seed=settings.seed,
        ledger=ledger or Ledger(lambda row: None),
        checks=MessageChecks(
            method,
            network,
            count,
            image_size=settings.data.image_size,
            also=guards.sends,
            introduced=transport.introduced,
            train=settings.train,
            style_noise=style_noise,
        ),
        guards=guards,
        **more,
    )
