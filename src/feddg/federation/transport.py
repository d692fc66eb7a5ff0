"""What carries messages between the server and its clients: the interface of every engine."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from feddg.messages import Broadcast, Message, Refusal, Update, Weights

Reply = tuple[int, Message | Refusal]
"""A client's id with what it says, or with why it has nothing usable to say."""


class Transport(Protocol):
    """What carries messages between the server and its clients.

    Replies come in the order of ``clients``, whatever the order in which they arrive, so that
    results do not depend on the network's mood. A client that fails answers with a Refusal.

    Attributes:
        memories: what clients remember, by id, for the checkpoint; empty where they keep it.
        remembered: clients whose memory changed since the set was last emptied.
    """

    memories: dict[int, Weights]
    remembered: set[int]

    @property
    def clients(self) -> Sequence[int]:
        """Ids of all clients of the federation, ascending."""
        ...

    def descriptions(self, clients: Sequence[int], broadcast: Broadcast) -> Iterator[Reply]:
        """Asks clients to describe themselves before round 1, and yields what they say."""
        ...

    def hand_out(self, agreed: Message | None) -> None:
        """Sees to it that every client has what was agreed whenever it trains."""
        ...

    def train(self, clients: Sequence[int], broadcast: Broadcast) -> Iterator[Update | Refusal]:
        """Has clients train; an update's tensors are valid until the next is drawn."""
        ...

    def ask(
        self, clients: Sequence[int], broadcast: Broadcast, name: str, question: Message
    ) -> Iterator[Reply]:
        """Asks clients a question under the broadcast's weights."""
        ...
