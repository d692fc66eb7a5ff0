"""The server's side of secure aggregation: rounds whose updates arrive as one sum.

It asks the questions of :mod:`feddg.privacy.secure_aggregation` over any transport, which enters
each of them, with keys and shares, in the ledger. The server loop gets one update, the mean over
the clients that stayed, and a refusal for each client that dropped out. If a sum is missing or
implausible, the error says whose fault it is, if that is known.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy
import torch
from torch import Tensor

from feddg.errors import NotEnoughUpdates
from feddg.federation.transport import Transport
from feddg.messages import Broadcast, Message, Refusal, Update
from feddg.methods.base import name_clients
from feddg.privacy import secure_aggregation as masking
from feddg.privacy.secure_aggregation import (
    CHECK,
    KEYS,
    MASKED,
    SEALED,
    SECRET,
    SHARES,
    UNMASK,
    SecureAggregation,
    decoded,
    unmasked,
)
from feddg.records import OpenedSumRow

_Schema = tuple[tuple[int, ...], torch.dtype]


class OpenedSums:
    """The clients whose sums were opened, by round; stored before clients are asked to unmask.

    Args:
        rows: rows from earlier parts of the run.
        write: stores a row; it is on disk when the call returns.
    """

    def __init__(
        self,
        rows: Iterable[OpenedSumRow] = (),
        write: Callable[[OpenedSumRow], None] = lambda row: None,
    ) -> None:
        self._write = write
        self._clients = {row.round: row.clients for row in rows}

    def clients(self, round: int) -> list[int] | None:
        """Returns the clients whose sum in a round may have been opened, ascending, or None."""
        return self._clients.get(round)

    def keep(self, round: int, clients: list[int]) -> None:
        """Stores that the sum of these clients is about to be opened."""
        if round not in self._clients:
            self._write(OpenedSumRow(round=round, clients=clients))
            self._clients[round] = clients


class MaskedRounds:
    """Trains clients so that only the sum of their updates can be read.

    Args:
        transport: the transport of messages.
        defence: the clients' secure aggregation.
        opened: sums that were opened before.
        fewest: minimum number of updates; with fewer no sum is opened.
    """

    def __init__(
        self,
        transport: Transport,
        defence: SecureAggregation,
        opened: OpenedSums,
        fewest: int = 1,
    ) -> None:
        self.transport, self.defence = transport, defence
        self.opened, self.fewest = opened, fewest

    def train(self, clients: Sequence[int], broadcast: Broadcast) -> Iterator[Update | Refusal]:
        """Yields a refusal for every client that drops out, then the mean of the others.

        Raises:
            NotEnoughUpdates: there is no usable mean; the message says why.
        """
        round = _Round(self, broadcast)
        try:
            mean = round.mean(list(clients))
        except _NoSum as error:
            yield from round.refusals
            raise NotEnoughUpdates(f"round {broadcast.round}: no update is used; {error}") from None
        yield from round.refusals
        yield mean


class _NoSum(Exception):
    """Raised if there is no usable sum; says why, and whose fault it is if that is known."""


class _Round:
    """One round of the protocol, at the server."""

    def __init__(self, rounds: MaskedRounds, broadcast: Broadcast) -> None:
        self._transport, self._defence = rounds.transport, rounds.defence
        self._opened, self._fewest = rounds.opened, rounds.fewest
        self._broadcast, self._needed = broadcast, 0
        self._held: Mapping[int, Mapping[int, bool]] = {}
        self.refusals: list[Refusal] = []

    def mean(self, clients: list[int]) -> Update:
        """Returns the mean of the updates of all clients that stay to the end.

        Raises:
            _NoSum: there is no usable mean.
        """
        self._needed = self._defence.needed(len(clients))
        ids, keys = self._keys(clients)
        shared = self._shared(ids, keys)
        members = self._checked(sorted(shared), shared, ids)
        updates = self._trained(members)
        survivors = self._enough(updates)
        before = self._opened.clients(self._broadcast.round)
        self._opened.keep(self._broadcast.round, before or survivors)
        opened = self._unmasked(members, survivors, shared, ids)
        lost = [id for id in members if id not in updates]
        seeds = [masking.combined(opened[id], self._needed) for id in survivors]
        secret = [(id, masking.combined(opened[id], self._needed)) for id in lost]
        public = {id: bytes(keys[place, 0].tolist()) for place, id in enumerate(ids)}
        liars = [
            id
            for id, seed in zip(survivors, seeds)
            if masking.commitment(seed) != bytes(shared[id].tensors["commitment"].tolist())
        ]
        liars += [id for id, private in secret if masking.public_key(private) != public[id]]
        for id in liars:
            self._refuse(id, "shared another secret than it committed itself to")
        masked = [updates[id].extras.tensors[MASKED] for id in survivors]
        sums = [tensor.numpy().view(numpy.uint64) for tensor in masked]
        total = unmasked(sums, seeds, secret, [(id, public[id]) for id in survivors])
        return self._update(total, [updates[id] for id in survivors], liars)

    def _keys(self, clients: list[int]) -> tuple[list[int], Tensor]:
        """Returns the ids of clients with valid keys, ascending, and the keys ``(n, 2, 32)``."""
        replies = self._asked(clients, KEYS, Message(), {"keys": ((2, SECRET), torch.uint8)})
        pairs = {id: [bytes(k.tolist()) for k in m.tensors["keys"]] for id, m in replies.items()}
        times = Counter(key for pair in pairs.values() for key in set(pair))
        for id, pair in pairs.items():
            if len(set(pair)) < 2:
                self._refuse(id, "sent one public key twice")
            elif not all(map(masking.is_public_key, pair)):
                self._refuse(id, "sent a public key that is none")
            elif max(times[key] for key in pair) > 1:
                self._refuse(id, "sent a public key that another client sent, too")
            else:
                continue
            del replies[id]
        ids = self._enough(replies, self._defence.needed(len(replies)))
        return ids, torch.stack([replies[id].tensors["keys"] for id in ids])

    def _shared(self, ids: list[int], keys: Tensor) -> dict[int, Message]:
        """Returns the messages that clients encrypted for each other, by client."""
        question = Message({"ids": torch.tensor(ids), "keys": keys})
        schemas: dict[str, _Schema] = {
            "shares": ((len(ids), SEALED), torch.uint8),
            "commitments": ((len(ids), 2, SECRET), torch.uint8),
            "commitment": ((SECRET,), torch.uint8),
        }
        shared = self._asked(ids, SHARES, question, schemas)
        self._enough(shared)
        return shared

    def _checked(
        self, members: list[int], shared: Mapping[int, Message], ids: list[int]
    ) -> list[int]:
        """Returns the clients whose secrets can be recovered from others' shares, ascending.

        If two clients contradict each other, one is wrong, but not which one is known. A client
        that contradicts more clients than may drop out must be wrong; otherwise the round fails
        anyway.
        """
        question = {
            "members": torch.tensor(members),
            "shares": torch.stack([shared[id].tensors["shares"] for id in members]),
            "commitments": torch.stack([shared[id].tensors["commitments"] for id in members]),
        }
        schemas: dict[str, _Schema] = {"held": ((len(members),), torch.bool)}
        replies = self._asked(members, CHECK, Message(question), schemas)
        held = {
            id: dict(zip(members, reply.tensors["held"].tolist())) for id, reply in replies.items()
        }
        self._held, left = held, set(held)
        while self._enough(left):
            at_odds = {
                id: [k for k in sorted(left) if k != id and not (held[id][k] and held[k][id])]
                for id in sorted(left)
            }
            most = max(map(len, at_odds.values()))
            if most <= len(left) - self._needed:
                break
            for id, others in at_odds.items():
                if len(others) == most:
                    self._refuse(
                        id,
                        f"its shares and those of {name_clients(others)} do not fit"
                        + ("; which of the two is wrong cannot be told" if most == 1 else ""),
                    )
                    left.remove(id)
        return sorted(left)

    def _unmasked(
        self,
        members: list[int],
        survivors: list[int],
        shared: Mapping[int, Message],
        ids: list[int],
    ) -> dict[int, dict[int, bytes]]:
        """Returns enough shares of each member's secret, by member and index of the holder."""
        question = Message({"survivors": torch.tensor(survivors)})
        schemas: dict[str, _Schema] = {"opened": ((len(members), SECRET), torch.uint8)}
        shares: dict[int, dict[int, bytes]] = {id: {} for id in members}
        replies = self._asked(survivors, UNMASK, question, schemas)
        if len(replies) < self._needed:
            raise self._too_few(self._needed, len(replies))
        for id, reply in replies.items():
            rows = {
                other: bytes(row.tolist()) for other, row in zip(members, reply.tensors["opened"])
            }
            place, wrong = ids.index(id), []
            for other, share in rows.items():
                proof = shared[other].tensors["commitments"][place, int(other in survivors)]
                if not self._held[id][other]:
                    continue
                if masking.commitment(share) == bytes(proof.tolist()):
                    shares[other][place] = share
                else:
                    wrong.append(other)
            if wrong:
                self._refuse(id, f"opened other shares of {name_clients(wrong)} than it was given")
        for id, found in shares.items():
            if len(found) < self._needed:
                raise _NoSum(
                    f"secure aggregation needs {self._needed} shares of client {id}'s secret, and "
                    f"{len(found)} are left"
                )
        return shares

    def _update(self, total: numpy.ndarray, updates: list[Update], liars: list[int]) -> Update:
        ids = [update.client for update in updates]
        expected = len(ids) if self._defence.alike else sum(update.examples for update in updates)
        try:
            weights, count = decoded(total, self._broadcast.weights)
        except ValueError:
            count = 0
        if count != expected:
            whose = (
                f"{name_clients(liars)} shared another secret than was committed to"
                if liars
                else "whose update is wrong cannot be told, since only their sum can be read"
            )
            raise _NoSum(f"the sum of {name_clients(ids)} does not count their images; {whose}")
        return Update(
            updates[0].client,
            count,
            weights,
            seconds=sum(update.seconds for update in updates),
            images=sum(update.images for update in updates),
            members=tuple(ids),
            forwards=sum(update.forwards for update in updates),
        )

    def _trained(self, members: list[int]) -> dict[int, Update]:
        extras = self._broadcast.extras
        named = {f"{self._defence.name}/members": torch.tensor(members)}
        broadcast = replace(self._broadcast, extras=Message(extras.tensors | named, extras.scalars))
        length = 1 + sum(tensor.numel() for tensor in broadcast.weights.values())
        updates: dict[int, Update] = {}
        for reply in self._transport.train(members, broadcast):
            if isinstance(reply, Update):
                fault = _fault(reply.extras, {MASKED: ((length,), torch.int64)})
                fault = fault or ("sent weights that are not masked" if reply.weights else None)
                registered = self._transport.registered.get(reply.client, reply.examples)
                if not fault and reply.examples != registered:
                    fault = f"reports {reply.examples} examples, but registered with {registered}"
                if fault is None:
                    masked = Message({MASKED: reply.extras.tensors[MASKED].cpu().clone()})
                    updates[reply.client] = replace(reply, extras=masked, terms={})
                    continue
                reply = Refusal(reply.client, f"update refused: {fault}")
            self.refusals.append(reply)
        return updates

    def _asked(
        self, ids: list[int], name: str, question: Message, schemas: Mapping[str, _Schema]
    ) -> dict[int, Message]:
        """Returns the valid answers to a protocol step, by client."""
        answers: dict[int, Message] = {}
        broadcast = Broadcast(self._broadcast.round, {}, question)
        for id, reply in self._transport.ask(ids, broadcast, name, question):
            if isinstance(reply, Message):
                fault = _fault(reply, schemas)
                if fault is None:
                    answers[id] = Message({n: t.cpu() for n, t in reply.tensors.items()})
                    continue
                reply = Refusal(id, f"{name} refused: {fault}")
            self._refuse(id, reply.reason)
        return answers

    def _refuse(self, id: int, reason: str) -> None:
        if all(refusal.client != id for refusal in self.refusals):
            self.refusals.append(Refusal(id, reason))

    def _enough(self, left: Iterable[int], needed: int | None = None) -> list[int]:
        """Returns the remaining clients, ascending, if their sum may be opened and used."""
        ids = sorted(left)
        self._needed = self._needed if needed is None else needed
        least = max(self._needed, self._fewest)
        before = self._opened.clients(self._broadcast.round)
        if before is not None and ids != before:
            other = sorted(set(before) ^ set(ids))
            raise _NoSum(
                f"its sum of {name_clients(before)} was opened before, which may be done again for "
                f"the same clients only, and {name_clients(other)} make it another; if that stays "
                "so, begin a new run with another seed"
            )
        if len(ids) < least:
            raise self._too_few(least, len(ids))
        return ids

    def _too_few(self, least: int, left: int) -> _NoSum:
        refused = [f"client {refusal.client}: {refusal.reason}" for refusal in self.refusals[:3]]
        why = f"secure aggregation needs {least} clients, and {left} are left"
        return _NoSum("; ".join([why, *refused]))


def _fault(message: Message, schemas: Mapping[str, _Schema]) -> str | None:
    """Returns how a message differs from its schema, or None."""
    if message.scalars or message.tensors.keys() != schemas.keys():
        return "it holds something else than was asked for"
    for name, (shape, dtype) in schemas.items():
        tensor = message.tensors[name]
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            return f"its {name!r} has another form than was asked for"
    return None
