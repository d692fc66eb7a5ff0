"""All guards of a run, as the round loop and the clients call them.

Guards compose like layers: at the client in the order they are declared, the first nearest to the
training; at the server the other way round. What a guard says travels among a message's extras
under its name, so the ledger lists it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from feddg.guards.account import Account
from feddg.guards.guard import Guard, Passage, WeightFacts
from feddg.guards.secure_aggregation import SecureAggregation
from feddg.messages import Broadcast, Message, Sent, Update, Weights, joined
from feddg.methods.base import State

MEMORY = "guards/"
"""Prefix of all guards' tensors among the state's extras, where checkpoints keep them."""


class Guards:
    """The guards of a run, in their order.

    Args:
        guards: none lets everything pass.
        facts: about the weights.
    """

    def __init__(self, guards: Sequence[Guard] = (), facts: WeightFacts | None = None) -> None:
        self.guards, self.facts = tuple(guards), facts or WeightFacts()

    @property
    def sends(self) -> dict[str, Sent]:
        """The forms of all that the guards add to what leaves a client."""
        return {
            f"{purpose}/{guard.name}/{name}": form
            for guard in self.guards
            for purpose, _, name, form in ((*k.partition("/"), v) for k, v in guard.sends.items())
        }

    def initial_extras(self) -> Weights:
        """Returns the guards' tensors before round 1, under their names among the extras."""
        return {
            _memory(guard) + name: tensor
            for guard in self.guards
            for name, tensor in guard.initial_memory().items()
        }

    def protect(
        self, update: Update, received: Weights, extras: Message, secrets: Weights | None = None
    ) -> Update:
        """At the client: returns the update as it may leave.

        Args:
            update: as trained.
            received: the weights of the broadcast.
            extras: the extras of the broadcast.
            secrets: what the client keeps to itself in this round.

        Raises:
            ClientError: it may not leave.
        """
        for guard in self.guards:
            told = _under(f"{guard.name}/", extras)
            update = guard.protect(update, received, told, self.facts)
            if guard.sums:
                secrets = {} if secrets is None else secrets
                update = guard.mask(update, received, told, self.facts, secrets)
        return update

    @property
    def masking(self) -> SecureAggregation | None:
        """What hides single updates from the server, if anything does."""
        return next((g for g in self.guards if isinstance(g, SecureAggregation)), None)

    def answer(
        self, id: int, round: int, name: str, question: Message, secrets: Weights
    ) -> Message | None:
        """At a client: answers a question of a guard's; None where it is no guard's.

        Raises:
            ClientError: it does not.
        """
        for guard in self.guards:
            if name.startswith(f"{guard.name}:"):
                return guard.answer(id, round, name, question, secrets)
        return None

    @property
    def noised(self) -> bool:
        """Whether one of them promises differential privacy of updates."""
        return any(guard.noised for guard in self.guards)

    @property
    def sees_all(self) -> bool:
        """Whether no update may be left out for being unlike the others.

        A guard that withstands bad updates must see them all: it counts on their number. And under
        noise no client's update may decide whether another's is used.
        """
        return self.noised or any(guard.fuses for guard in self.guards)

    @property
    def secret_rate(self) -> float | None:
        """With which probability each client takes part, if nobody may know who does."""
        return next((g.secret_rate for g in self.guards if g.secret_rate is not None), None)

    @property
    def promises(self) -> list[str]:
        """What they promise, a sentence each."""
        return [guard.promise for guard in self.guards if guard.promise]

    def afford(self, round: int, clients: Sequence[int], account: Account) -> bool:
        """Whether a round with these clients stays within what may be spent."""
        return all(guard.affords(round, clients, account) for guard in self.guards)

    def describing(self, clients: Sequence[int], account: Account) -> None:
        """These clients are about to describe themselves.

        Raises:
            BudgetSpent: they may not.
        """
        for guard in self.guards:
            guard.describing(clients, account)

    def open(self, state: State, account: Account | None = None) -> "GuardedRound":
        """Begins a round from the state that its clients are sent.

        Args:
            state: the server's.
            account: what the run has spent.
        """
        passages = []
        for guard in self.guards:
            memory = _under(_memory(guard), Message(state.extras)).tensors
            told = guard.tell(memory)
            spent, next_round = account or Account(), state.round + 1
            passages.append(Passage(self.facts, state.weights, told, memory, next_round, spent))
        return GuardedRound(list(zip(self.guards, passages)))


NO_GUARDS = Guards()


class GuardedRound:
    """One round at the server, past all guards."""

    def __init__(self, stations: list[tuple[Guard, Passage]]) -> None:
        self._stations = stations

    def asked(self, clients: Sequence[int]) -> None:
        """These clients are about to be asked to train.

        Raises:
            BudgetSpent: they may not be.
        """
        for guard, passage in self._stations:
            guard.asked(clients, passage)

    def address(self, broadcast: Broadcast) -> Broadcast:
        """Returns the broadcast with what the guards tell the clients."""
        if not self._stations:
            return broadcast
        told = [_prefixed(f"{guard.name}/", passage.told) for guard, passage in self._stations]
        return replace(broadcast, extras=joined(broadcast.extras, *told))

    def receive(self, update: Update) -> Update:
        """Returns one update as it may be used.

        Raises:
            ClientError: a guard refuses it.
        """
        for guard, passage in reversed(self._stations):
            update = guard.receive(update, passage)
        return update

    def collect(self, updates: Iterator[Update]) -> Iterator[Update]:
        """Returns what the method's ``aggregate`` is given for the accepted updates."""
        for guard, passage in reversed(self._stations):
            updates = guard.collect(updates, passage)
        return updates

    def finish(self, state: State) -> State:
        """Returns the aggregate as it may be released, with the guards' memory in it."""
        for guard, passage in reversed(self._stations):
            state = guard.finish(state, passage)
            own = {_memory(guard) + name: t for name, t in passage.memory.items()}
            state.extras = state.extras | own
        return state


def _memory(guard: Guard) -> str:
    return f"{MEMORY}{guard.name}/"


def _under(prefix: str, message: Message) -> Message:
    cut = len(prefix)
    return Message(
        {name[cut:]: t for name, t in message.tensors.items() if name.startswith(prefix)},
        {name[cut:]: s for name, s in message.scalars.items() if name.startswith(prefix)},
    )


def _prefixed(prefix: str, message: Message) -> Message:
    return Message(
        {prefix + name: tensor for name, tensor in message.tensors.items()},
        {prefix + name: scalar for name, scalar in message.scalars.items()},
    )
