"""The server: the round loop, for any transport."""

import logging
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from feddg.clients.sampling import drawn_clients, secret_clients
from feddg.diagnostics import Progress, arriving, silent, warn
from feddg.errors import BudgetSpent, ClientError, Diverged, NotEnoughUpdates, RunError
from feddg.federation import averages
from feddg.federation.transport import FROZEN, Ledger, Reply, Transport
from feddg.federation.validation import ChangeSizes, MessageChecks
from feddg.messages import Broadcast, Message, Refusal, Update, Weights, joined
from feddg.methods.base import Method, Round, RoundHook, State
from feddg.models.network import Network
from feddg.privacy.building import NO_DEFENCES, Defences
from feddg.records import RoundRow
from feddg.settings import ExperimentSettings
from feddg.text import counted

log = logging.getLogger("feddg")


class Hooks:
    """The hooks of a server's rounds, in order."""

    def __init__(self, hooks: Iterable[RoundHook]) -> None:
        self.all = tuple(hooks)

    def begun(self, state: State, round: Round) -> None:
        """Tells the hooks that round 1 is next."""
        for hook in self.all:
            hook.begun(state, round)

    def broadcast(self, broadcast: Broadcast, round: Round) -> Broadcast:
        """Returns the message to the round's clients."""
        for hook in self.all:
            broadcast = hook.broadcast(broadcast, round)
        return broadcast

    def received(self, replies: Iterator[Update | Refusal], round: Round) -> Iterator[Update]:
        """Returns the stream of good updates for the method, once there are enough."""
        updates: Iterator[Update]
        updates = round.replies = self._good(replies, round)
        for hook in self.all:
            updates = hook.collected(updates, round)
        return updates

    def _good(self, replies: Iterator[Update | Refusal], round: Round) -> Generator[Update]:
        """Yields the good updates; refuses bad ones and names their clients.

        Raises:
            NotEnoughUpdates: too few updates were good, or a mean of several unknown clients was
                bad.
        """
        good = 0
        for reply in replies:
            if isinstance(reply, Update):
                round.update = reply
                try:
                    for hook in self.all:
                        reply = hook.received(reply, round)
                except ClientError as error:
                    if reply.members:
                        raise round.mean_refused(str(error)) from None
                    reason = f"update refused: {error}"
                    reply = Refusal(reply.client, reason, isinstance(error, Diverged))
            if isinstance(reply, Refusal):
                round.refused.append(reply)
                for hook in self.all:
                    hook.refused(reply, round)
            else:
                good += len(reply.clients)
                round.add(reply)
                yield reply
            round.update = None
        if good < round.fewest:
            raise round.too_few(good)

    def completed(self, state: State, round: Round) -> State:
        """Returns the round's new state, from the aggregate."""
        for hook in self.all:
            state = hook.completed(state, round)
        return state


class FrozenWeights(RoundHook):
    """Removes frozen entries from the messages of a round."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = names

    def broadcast(self, broadcast: Broadcast, round: Round) -> Broadcast:
        """Removes frozen entries from the broadcast."""
        return replace(broadcast, weights=self.trained(broadcast.weights))

    def received(self, update: Update, round: Round) -> Update:
        """Adds the server's frozen entries to an update."""
        strange = sorted(update.weights.keys() & self.names)
        if strange:
            raise ClientError(f"holds {strange[0]!r}, which is not trained")
        if not update.weights:
            return update
        frozen = {name: old for name, old in round.state.weights.items() if name in self.names}
        return replace(update, weights=frozen | update.weights)

    def completed(self, state: State, round: Round) -> State:
        """Keeps frozen entries to the bit, whatever a method makes of them: clients have those."""
        state.weights = state.weights | {n: round.state.weights[n] for n in self.names}
        return state

    def trained(self, weights: Weights) -> Weights:
        """Returns the trained entries of the weights."""
        return {name: tensor for name, tensor in weights.items() if name not in self.names}

    def with_context(self, state: State) -> Message | None:
        """Returns what every client is sent once: the shared context and the frozen entries."""
        if not self.names:
            return state.context
        frozen = {FROZEN + n: state.weights[n].detach() for n in sorted(self.names)}
        return joined(state.context or Message(), Message(frozen))


class Refusals(RoundHook):
    """Reports refused updates in the ledger and the log."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self.last = ledger, "none answered"

    def refused(self, refusal: Refusal, round: Round) -> None:
        """See :class:`RoundHook`."""
        self.say(refusal, round.number)

    def say(self, refusal: Refusal, round: int, more: str = "") -> None:
        """Enters a refusal of a round; round 0 is the setup."""
        self._ledger.refusal(round, refusal.client, refusal.reason)
        self.last = f"client {refusal.client}: {refusal.reason}"
        log.warning("round %d, client %d: %s%s", round, refusal.client, refusal.reason, more)


class Alike(RoundHook):
    """Lets every client count the same in the mean: ``server.weighting: uniform``."""

    def collected(self, updates: Iterator[Update], round: Round) -> Iterator[Update]:
        """Yields the updates as if each were of one image."""
        return (replace(update, examples=len(update.clients)) for update in updates)


class Asking(RoundHook):
    """Lets the method ask the round's clients after aggregation."""

    def __init__(self, server: "Server") -> None:
        self._server = server

    def completed(self, state: State, round: Round) -> State:
        """See :meth:`Method.after_round`."""

        def ask(name: str, question: Message) -> Iterator[tuple[int, Message]]:
            refused = {refusal.client for refusal in round.refused}
            ids = [id for id in round.clients if id not in refused]
            weights = self._server.frozen.trained(state.weights)
            broadcast = Broadcast(round.number, weights, question)
            replies = self._server.transport.ask(ids, broadcast, name, question)
            return self._server.checked(replies, round.number, f"answer:{name}")

        method = self._server.method
        state = method.after_round(state, ask)
        round.left_out = {id: accuracy for id, (accuracy, _) in method.left_out(state).items()}
        return state


class Phase(NamedTuple):
    """Rounds of one method over all clients of a federation.

    Attributes:
        method: the method.
        network: the network it trains.
        settings: all else that an experiment says.
        defences: what updates pass through.
        hooks: what happens in rounds besides, after the server's own.
        classifies: whether the task is classification.
    """

    method: Method
    network: Network
    settings: ExperimentSettings
    defences: Defences = NO_DEFENCES
    hooks: Sequence[RoundHook] = ()
    classifies: bool = True


class Server:
    """Runs the setup phase and rounds of a method over a transport.

    Args:
        phase: the method, what it trains, and how.
        transport: the transport of messages.
        state: the start: round 0, or a checkpoint's state.
        ledger: the record of all messages.

    Attributes:
        hooks: all that happens in a round beside the method.
        per_round: clients sampled per round, K; None for all.
        carrier: trains the clients: the transport, or what a defence puts before it.
    """

    def __init__(self, phase: Phase, transport: Transport, state: State, ledger: Ledger) -> None:
        method, network, experiment, defences, hooks, classifies = phase
        settings, train = experiment.server, experiment.train
        checks = MessageChecks(
            method,
            network,
            len(transport.clients),
            experiment,
            defences=defences,
            registered=transport.registered,
            classifies=classifies,
        )
        self.method, self.state = method, state
        self.per_round, self.seed = experiment.clients.per_round, experiment.seed
        self.settings, self.ledger = settings, ledger
        self.checks, self.defences = checks, defences
        self.transport = transport
        self.carrier = defences.carrier(transport, settings.min_updates)
        self._secret_rate = defences.secret_rate
        # A secret draw may be of nobody, and nobody may know.
        self._fewest = 0 if self._secret_rate is not None else settings.min_updates
        self._refusals = Refusals(ledger)
        times = None if defences.sees_all else settings.largest_change
        rate = None if method.one_round else train.lr
        changes = ChangeSizes(times, train.head_rounds, rate, method.sums)
        self.frozen = FrozenWeights(frozenset(network.frozen))
        checked = [self.frozen, checks] if network.frozen else [checks]
        chain: list[RoundHook] = [self._refusals, *checked, changes]
        chain += reversed(defences.defences)
        if settings.weighting == "uniform" and not method.one_round:
            chain.append(Alike())
        if settings.optimizer != "none":
            chain.append(averages.ServerOptimizer(settings))
        if type(method).after_round is not Method.after_round:
            chain.append(Asking(self))
        self.hooks, self._own = Hooks([*chain, *hooks]), len(chain)
        self.transport.ledger = ledger
        self.transport.hand_out(self.frozen.with_context(state), again=True)

    def setup(self, progress: Progress = silent, round: Round | None = None) -> None:
        """Collects the clients' statistics; then hooks learn that round 1 begins.

        Args:
            progress: called while messages arrive.
            round: round 0, if a phase was before: clients have what is frozen, and more.

        Raises:
            RunError: no client sent statistics.
        """
        alone, round = round is None, round or Round(0, [*self.transport.clients], self.state)
        if self.method.has_setup and self.state.context is None:
            self._collect(round, progress)
        if alone or self.state.context is not None or not self.frozen.names:
            self.transport.hand_out(self.frozen.with_context(self.state))
        self.hooks.begun(self.state, round)

    def _collect(self, round: Round, progress: Progress) -> None:
        """Collects every client's statistics, which make the shared context.

        A client without statistics is left out with a warning.
        """
        ids = self.transport.clients
        for defence in self.defences.defences:
            defence.describing(ids)
        replies = self.transport.client_statistics(ids, Broadcast(0, {}))
        replies = arriving(replies, progress, "setup", len(ids))
        statistics = list(self.checked(replies, 0, "statistics"))
        if not statistics:
            raise RunError(f"setup: no client could send its statistics ({self._refusals.last})")
        self.state.context = self.method.aggregate_statistics(statistics) or Message()
        round.groups = self.method.groups(statistics)

    def checked(
        self, replies: Iterator[Reply], round: int, purpose: str
    ) -> Iterator[tuple[int, Message]]:
        """Yields client ids with their valid messages; refuses the others by name."""
        for id, reply in replies:
            if isinstance(reply, Message):
                fault = self.checks.message_fault(purpose, reply, id)
                if fault is None:
                    yield id, reply
                    continue
                reply = Refusal(id, f"{purpose} refused: {fault}")
            self._refusals.say(reply, round)

    def round(self) -> RoundRow:
        """Runs one round and returns its row; afterwards ``state`` is the completed round's.

        Raises:
            NotEnoughUpdates: too few good updates in every attempt; the state is unchanged.
        """
        for round in self._attempts():
            with round.attempted():
                sent = self.hooks.broadcast(self.method.broadcast(self.state), round)
                updates = self.hooks.received(self.carrier.train(round.clients, sent), round)
                self._complete(self.method.aggregate(self.state.next(), updates), round)
        return round.row

    def _complete(self, state: State, round: Round) -> None:
        """Makes the aggregate the state, which hooks that were given see as those before leave it.

        They and everybody else see none before the defences have noised it.
        """
        state = Hooks(self.hooks.all[: self._own]).completed(state, round)
        before, self.state = self.state, state
        try:
            for hook in self.hooks.all[self._own :]:
                self.state = hook.completed(self.state, round)
        except BaseException:
            self.state = before
            raise

    def forget(self, client: int, others: Sequence[int]) -> None:
        """Takes a client's part out of a model in closed form, in a round that all others answer.

        Args:
            client: its id; it is asked for its sums once more.
            others: ids of the clients whose part stays.

        Raises:
            NotEnoughUpdates: the client's sums cannot be used.
            RunError: they are not those of training, or the total was not kept.
        """
        number, before = self.state.round + 1, self.state
        asked = Round(number, [client], before, 1, self.ledger.bytes)
        sent = self.hooks.broadcast(self.method.broadcast(before), asked)
        updates = self.hooks.received(self.transport.train([client], sent), asked)
        (update,) = (update.keep() for update in updates)
        round = Round(number, [*others], before, 1, self.ledger.bytes, forgotten=(client,))
        state = self.method.without(before.next(), update)
        # The client is in averages over earlier rounds: they begin anew.
        kept = state.extras.items()
        state.extras = {n: t for n, t in kept if not n.startswith(averages.AVERAGES)}
        self._complete(replace(state, rounds=number), round)

    def _attempts(self) -> Iterator[Round]:
        """Yields attempts at the next round until one counts.

        A round is repeated without clients known to have broken it, and up to ``server.attempts``
        times if too few good updates arrive.
        """
        number, attempt = self.state.round + 1, 0
        left_out: list[Refusal] = []
        while True:
            out = {refusal.client for refusal in left_out}
            clients = [id for id in self.sample(number, attempt) if id not in out]
            round = Round(number, clients, self.state, self._fewest, self.ledger.bytes, [*left_out])
            if len(clients) < self._fewest:
                round.failure = round.too_few(0)
            else:
                yield round
            failure = round.failure
            if failure is None:
                return
            if isinstance(failure, NotEnoughUpdates):
                log.warning("%s", failure)
                attempt += 1
                if attempt == self.settings.attempts:
                    raise failure
            else:
                for refusal in failure:
                    self._refusals.say(refusal, number, "; the round is done again without it")
                left_out += failure

    def run(self) -> None:
        """Runs the remaining rounds while the privacy budget lasts.

        Nothing is released from a round that does not run.
        """
        while self.state.round < self.state.rounds:
            try:
                if self.affordable(self.state):
                    self.round()
                    continue
            except BudgetSpent as error:
                log.warning("%s", error)
            done, planned = self.state.round, self.state.rounds
            text = (
                f"The run ends after round {done} of {planned}: another one would cost more than "
                "its budget (privacy.epsilon or record_epsilon)."
            )
            plan = f"Plan {counted(done, 'round')}: a falling learning rate and SWA go by the plan."
            warn("budget-spent", text, plan if done else "")
            return

    def affordable(self, state: State) -> bool:
        """Whether the round after a state stays within the privacy budget."""
        round = state.round + 1
        clients = self.sample(round)
        return all(defence.affords(round, clients) for defence in self.defences.defences)

    def is_last(self, state: State) -> bool:
        """Whether a state is that of the last round."""
        return state.round == state.rounds or not self.affordable(state)

    def sample(self, round: int, attempt: int = 0) -> list[int]:
        """Returns the ids of a round's clients, ascending: see :mod:`feddg.clients.sampling`.

        A defence may bind a round that is repeated to the same clients.
        """
        for defence in self.defences.defences:
            bound = defence.bound_to(round)
            if bound is not None:
                return list(bound)
        if self._secret_rate is not None:
            return secret_clients(self.transport.clients, self._secret_rate)
        return drawn_clients(self.transport.clients, self.per_round, self.seed, round, attempt)
