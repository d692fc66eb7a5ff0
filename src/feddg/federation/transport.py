"""The transport between the server and its clients, and the ledger of messages."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from feddg.messages import Broadcast, Message, Refusal, Scalar, Update, Weights, scalar_bytes, under
from feddg.records import Direction, LayoutRow, LedgerRow, MessageRow, RefusalRow, TensorEntry

# The ledger: one row for every message between the server and a client.
#
# The list of a message's tensors is written once per distinct layout and referred to by its id, so
# that fifty rounds of a large network stay a small file.


Shape = tuple[str, tuple[int, ...], torch.dtype | str, int]
FROZEN = "frozen/"
"""Prefix of frozen weights in the message that carries the shared context."""


class Ledger:
    """Records every message; passes each row to ``write``.

    Args:
        write: called with each row, in order.
        written_layouts: ids of layouts already written in an earlier part of this run.
    """

    def __init__(
        self, write: Callable[[LedgerRow], None], written_layouts: set[str] | None = None
    ) -> None:
        self._write = write
        self._written = set(written_layouts or ())
        self.bytes: dict[Direction, int] = {"up": 0, "down": 0}

    def update(self, round: int, update: Update) -> None:
        """Records a client's update."""
        logs: dict[str, Scalar] = {f"terms/{name}": value for name, value in update.terms.items()}
        logs |= {"examples": update.examples, "images": update.images, "seconds": update.seconds}
        extras = Message(update.extras.tensors, {**update.extras.scalars, **logs})
        self.message(round, "up", [update.client], "update", extras, update.weights)

    def message(
        self,
        round: int,
        direction: Direction,
        clients: Iterable[int],
        purpose: str,
        message: Message,
        weights: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Records a message of each of some clients, and the weights that come with it."""
        whole = [(f"weights/{name}", tensor) for name, tensor in weights.items()]
        shapes = [
            (name, tensor.shape, tensor.dtype, tensor.nbytes)
            for name, tensor in (*whole, *message.tensors.items())
        ]
        self.enter(round, direction, clients, purpose, shapes, message.scalars)

    def refusal(self, round: int, client: int, reason: str) -> None:
        """Records that ``client``'s update was not used, and why."""
        self._write(RefusalRow(round=round, client=client, reason=reason))

    def enter(
        self,
        round: int,
        direction: Direction,
        clients: Iterable[int],
        purpose: str,
        shapes: Iterable[Shape],
        scalars: Mapping[str, Scalar],
        size: int | None = None,
    ) -> None:
        """Records a message by its content, once for each client.

        Args:
            round: the round it belongs to; 0 before the first.
            direction: ``up`` leaves the client.
            clients: their ids; -1 for a node that is not a client.
            purpose: kind of message.
            shapes: name, shape, dtype and bytes of its tensors.
            scalars: its numbers and texts.
            size: its bytes, if they do not follow from its content.
        """
        # Sorted: a resumed run reads its tensors back in another order, and its ledger is the same.
        layout = _layout(tuple(sorted(shapes, key=itemgetter(0))), tuple(sorted(scalars)))
        if layout.id not in self._written:
            self._written.add(layout.id)
            self._write(layout)
        if size is None:
            size = sum(tensor.bytes for tensor in layout.tensors)
            size += sum(map(scalar_bytes, scalars.values()))
        for client in clients:
            self.bytes[direction] += size
            self._write(
                MessageRow(
                    round=round,
                    direction=direction,
                    client=client,
                    purpose=purpose,
                    layout=layout.id,
                    bytes=size,
                )
            )


@lru_cache(256)
def _layout(shapes: tuple[Shape, ...], scalars: tuple[str, ...]) -> LayoutRow:
    tensors = tuple(
        TensorEntry(name=n, shape=tuple(s), dtype=str(dtype).removeprefix("torch."), bytes=size)
        for n, s, dtype, size in shapes
    )
    content = {"tensors": [tensor.model_dump() for tensor in tensors], "scalars": scalars}
    identity = hashlib.blake2b(json.dumps(content).encode(), digest_size=6).hexdigest()
    return LayoutRow(id=identity, tensors=tensors, scalars=scalars)


Reply = tuple[int, Message | Refusal]
"""A client's id with its message, or with the reason why there is none."""


def without_frozen(message: Message | None) -> tuple[Message | None, Weights]:
    """Splits a message into the shared context (or None) and the frozen weights."""
    if message is None:
        return None, {}
    frozen = under(FROZEN, message).tensors
    if not frozen:
        return message, {}
    rest = {n: t for n, t in message.tensors.items() if not n.startswith(FROZEN)}
    return Message(rest, message.scalars), frozen


class Transport(Protocol):
    """Carries messages between the server and its clients.

    Replies come in the order of ``clients``, whatever the order of arrival, so that results do not
    depend on network delays. A client that fails is answered for by a Refusal.

    Attributes:
        memories: what clients remember between rounds, by id, for the checkpoint; empty if they
            store it themselves.
        ledger: records every message that is really sent, both ways.
        registered: number of images each client registered with, if it did.
        domains: number of domains each client elsewhere registered with, if it did.
        remembered: clients whose memory changed since the set was last emptied.
        class_names: the classes of clients elsewhere, in the order of their numbers; none without
            names.
        processes: how many of this program train.
    """

    processes: int = 1
    class_names: tuple[str, ...] = ()
    memories: dict[int, Weights]
    remembered: set[int]
    ledger: Ledger
    registered: Mapping[int, int]
    domains: Mapping[int, int] = MappingProxyType({})

    @property
    def clients(self) -> Sequence[int]:
        """The ids of all clients of the federation, ascending."""
        ...

    def client_statistics(self, clients: Sequence[int], broadcast: Broadcast) -> Iterator[Reply]:
        """Asks clients for their statistics before round 1, and yields the replies."""
        ...

    def hand_out(self, context: Message | None, *, again: bool = False) -> None:
        """Makes sure that every client has the shared context when it trains.

        ``again``: whether clients already got it in an earlier part of the run.
        """
        ...

    def train(self, clients: Sequence[int], broadcast: Broadcast) -> Iterator[Update | Refusal]:
        """Makes clients train; an update's tensors are valid until the next one is drawn."""
        ...

    def ask(
        self, clients: Sequence[int], broadcast: Broadcast, name: str, question: Message
    ) -> Iterator[Reply]:
        """Asks clients a question under the broadcast's weights."""
        ...
