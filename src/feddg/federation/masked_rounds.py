"""A transport whose updates come back as one sum: secure aggregation's side of the server.

It asks the questions of :mod:`feddg.guards.secure_aggregation` over any other transport, which
enters every one of them, with its keys and shares, in the ledger. What the server loop is given is
one update: the mean of those whose clients stayed, and a refusal for each that did not.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy
import torch
from torch import Tensor

from feddg.federation.ledger import Ledger
from feddg.federation.transport import Reply, Transport
from feddg.guards import masking
from feddg.guards.masking import SEALED, SECRET
from feddg.guards.secure_aggregation import (
    KEYS,
    MASKED,
    SHARES,
    UNMASK,
    SecureAggregation,
)
from feddg.guards.sums import decoded, unmasked
from feddg.messages import Broadcast, Message, Refusal, Update

log = logging.getLogger("feddg")
Form = tuple[tuple[int, ...], torch.dtype]


class MaskedRounds:
    """Carries rounds whose updates only their sum can be read of; see :class:`Transport`.

    Args:
        transport: what carries the messages.
        guard: secure aggregation, as the clients have it.
    """

    def __init__(self, transport: Transport, guard: SecureAggregation) -> None:
        self._inner, self._guard = transport, guard
        self.memories, self.remembered = transport.memories, transport.remembered
        self.introduced: Mapping[int, int] = transport.introduced

    @property
    def ledger(self) -> Ledger:
        """Where every message is entered."""
        return self._inner.ledger

    @ledger.setter
    def ledger(self, ledger: Ledger) -> None:
        self._inner.ledger = ledger

    @property
    def clients(self) -> Sequence[int]:
        """See :class:`Transport`."""
        return self._inner.clients

    def descriptions(self, clients: Sequence[int], broadcast: Broadcast) -> Iterator[Reply]:
        """See :class:`Transport`."""
        return self._inner.descriptions(clients, broadcast)

    def hand_out(self, agreed: Message | None, *, again: bool = False) -> None:
        """See :class:`Transport`."""
        self._inner.hand_out(agreed, again=again)

    def ask(
        self, clients: Sequence[int], broadcast: Broadcast, name: str, question: Message
    ) -> Iterator[Reply]:
        """See :class:`Transport`."""
        return self._inner.ask(clients, broadcast, name, question)

    def train(self, clients: Sequence[int], broadcast: Broadcast) -> Iterator[Update | Refusal]:
        """Yields a refusal for every client that is lost on the way, then the mean of the others.

        There is no mean where too few stayed.
        """
        round = _Round(self._inner, self._guard, broadcast)
        try:
            mean = round.mean(list(clients))
        except _TooFew as error:
            log.warning("round %d: %s", broadcast.round, error)
            yield from round.refusals
            gone = {refusal.client for refusal in round.refusals}
            yield from (Refusal(id, str(error)) for id in clients if id not in gone)
            return
        yield from round.refusals
        yield mean


class _TooFew(Exception):
    """Fewer clients than the threshold are left."""


class _Round:
    """One round of the protocol, at the server."""

    def __init__(
        self, transport: Transport, guard: SecureAggregation, broadcast: Broadcast
    ) -> None:
        self._transport, self._guard, self._broadcast = transport, guard, broadcast
        self.refusals: list[Refusal] = []

    def mean(self, clients: list[int]) -> Update:
        """Returns the mean of the updates of those that stay to the end.

        Raises:
            _TooFew: too few did.
        """
        needed = self._guard.needed(len(clients))
        keys = self._asked(clients, KEYS, Message(), {"keys": ((2, SECRET), torch.uint8)})
        ids = sorted(keys)
        needed = self._enough(ids, self._guard.needed(len(ids)) if ids else needed)
        public = {id: [bytes(k.tolist()) for k in keys[id].tensors["keys"]] for id in ids}
        told = Message(
            {
                "ids": torch.tensor(ids),
                "keys": torch.stack([keys[id].tensors["keys"] for id in ids]),
            }
        )
        forms: dict[str, Form] = {
            "shares": ((len(ids), SEALED), torch.uint8),
            "commitment": ((SECRET,), torch.uint8),
        }
        shared = self._asked(ids, SHARES, told, forms)
        members = sorted(shared)
        self._enough(members, needed)
        table = torch.stack([shared[id].tensors["shares"] for id in members])
        updates = self._trained(members, table)
        survivors = sorted(updates)
        self._enough(survivors, needed)
        question = Message({"survivors": torch.tensor(survivors)})
        forms = {"opened": ((len(members), SECRET), torch.uint8)}
        opened = self._asked(survivors, UNMASK, question, forms)
        self._enough(sorted(opened), needed)
        shares = {
            other: {
                ids.index(id): bytes(reply.tensors["opened"][row].tolist())
                for id, reply in opened.items()
            }
            for row, other in enumerate(members)
        }
        lost = [id for id in members if id not in updates]
        seeds = [masking.combined(shares[id], needed) for id in survivors]
        for id, seed in zip(survivors, seeds):
            if masking.commitment(seed) != bytes(shared[id].tensors["commitment"].tolist()):
                raise _TooFew(f"the shares of client {id}'s mask do not make it again")
        secret = [(id, masking.combined(shares[id], needed)) for id in lost]
        for id, private in secret:
            if masking.public_key(private) != public[id][0]:
                raise _TooFew(f"the shares of client {id}'s key do not make it again")
        sums = [_vector(updates[id]) for id in survivors]
        total = unmasked(sums, seeds, secret, [(id, public[id][0]) for id in survivors])
        return self._update(total, [updates[id] for id in survivors])

    def _update(self, total: numpy.ndarray, updates: list[Update]) -> Update:
        try:
            weights, count = decoded(total, self._broadcast.weights)
        except ValueError as error:
            raise _TooFew(str(error)) from None
        return Update(
            updates[0].client,
            count,
            weights,
            seconds=sum(update.seconds for update in updates),
            images=sum(update.images for update in updates),
            members=tuple(update.client for update in updates),
            passes=sum(update.passes for update in updates),
        )

    def _trained(self, members: list[int], table: Tensor) -> dict[int, Update]:
        extras = self._broadcast.extras
        own = {"members": torch.tensor(members), "shares": table}
        told = {f"{self._guard.name}/{name}": tensor for name, tensor in own.items()}
        broadcast = replace(self._broadcast, extras=Message(extras.tensors | told, extras.scalars))
        length = 1 + sum(tensor.numel() for tensor in broadcast.weights.values())
        updates: dict[int, Update] = {}
        for reply in self._transport.train(members, broadcast):
            if isinstance(reply, Update):
                fault = _fault(reply.extras, {MASKED: ((length,), torch.int64)})
                fault = fault or ("sent weights that are not masked" if reply.weights else None)
                if fault is None:
                    kept = Message({MASKED: reply.extras.tensors[MASKED].cpu().clone()})
                    updates[reply.client] = replace(reply, extras=kept, terms={})
                    continue
                reply = Refusal(reply.client, f"update refused: {fault}")
            self.refusals.append(reply)
        return updates

    def _asked(
        self, ids: list[int], name: str, question: Message, forms: Mapping[str, Form]
    ) -> dict[int, Message]:
        """Returns the well-formed answers to a step, by client."""
        answers: dict[int, Message] = {}
        broadcast = Broadcast(self._broadcast.round, {}, question)
        for id, reply in self._transport.ask(ids, broadcast, name, question):
            if isinstance(reply, Message):
                fault = _fault(reply, forms)
                if fault is None:
                    answers[id] = Message({n: t.cpu() for n, t in reply.tensors.items()})
                    continue
                reply = Refusal(id, f"{name} refused: {fault}")
            if all(known.client != id for known in self.refusals):
                self.refusals.append(reply)
        return answers

    def _enough(self, left: Sequence[int], needed: int) -> int:
        if len(left) < needed:
            raise _TooFew(f"secure aggregation needs {needed} clients, and {len(left)} are left")
        return needed


def _fault(message: Message, forms: Mapping[str, Form]) -> str | None:
    """Says what is not as declared, or None."""
    if message.scalars or message.tensors.keys() != forms.keys():
        return "it holds something else than was asked for"
    for name, (shape, dtype) in forms.items():
        tensor = message.tensors[name]
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            return f"its {name!r} has another form than was asked for"
    return None


def _vector(update: Update) -> numpy.ndarray:
    found: numpy.ndarray = update.extras.tensors[MASKED].numpy().view(numpy.uint64)
    return found


def carried(transport: Transport, guard: SecureAggregation | None) -> Transport:
    """Returns the transport by which rounds are carried: masked, where a guard asks for it."""
    return transport if guard is None else MaskedRounds(transport, guard)
