"""Batches across clients, of what is the same function of an image at all of them.

On an accelerator a batch of one client's twenty images costs as much as one of 256: the host
launches its kernels one by one. So where features of a fixed network, outputs of the global model,
styles or stylized copies are computed for a client, clients whose turn comes later join its batch,
and find their part when they ask. On a CPU nobody joins, nor at a site of a deployment, which has
no other clients.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from feddg.errors import ClientError
from feddg.styles.codec import images_at_once

if TYPE_CHECKING:
    from feddg.clients.client import Client

Parts = tuple[Tensor, ...]
"""Tensors with a row for each image."""


class Together:
    """Clients that have the same job, one after the other.

    Iterating takes one after the other out of it.

    Args:
        clients: in the order in which they work.

    Attributes:
        shared: what is equal for all of them, by name, such as a network's digest.
    """

    def __init__(self, clients: Iterable["Client"] = ()) -> None:
        self._later, self._next = iter(clients), deque["Client"]()
        self._known: dict[tuple[int, str], Parts] = {}
        self.shared: dict[str, str] = {}

    def __iter__(self) -> Iterator["Client"]:
        """Yields the clients whose turn it is."""
        while (client := next(self._coming(), None)) is not None:
            self._next.popleft()
            client.together = self
            yield client

    def _coming(self) -> Iterator["Client"]:
        """Yields the clients that are still to come, without taking them out."""
        yield from [*self._next]
        for client in self._later:
            self._next.append(client)
            yield client

    def by_image(
        self,
        client: "Client",
        name: Callable[["Client"], str],
        compute: Callable[[Sequence["Client"]], Parts],
        done: Callable[["Client"], bool] = lambda client: False,
    ) -> Parts:
        """Returns what is computed for a client's images, on the CPU.

        Args:
            client: whose turn it is.
            name: tells what is computed for a client: equal names mean the same function of the
                same images.
            compute: maps the images of clients, which follow each other, to tensors with a row for
                each image, each of which depends on this image alone.
            done: whether a client has its own already, and need not join.
        """
        known = self._known.pop((client.id, name(client)), None)
        if known is None:
            clients = [client, *self._joining(client, name, done)]
            whole = [part.cpu() for part in compute(clients)]
            counts = [len(each.examples) for each in clients]
            for each, parts in zip(clients, zip(*(part.split(counts) for part in whole))):
                self._known[each.id, name(each)] = parts
            known = self._known.pop((client.id, name(client)))
        return known

    def _joining(
        self, client: "Client", name: Callable[["Client"], str], done: Callable[["Client"], bool]
    ) -> Iterator["Client"]:
        """Yields the next clients whose images fit into a batch with this client's."""
        most = images_at_once(client.examples.side, client.device)
        room = 0 if client.device.type == "cpu" else most - len(client.examples)
        for other in self._coming() if room > 0 else ():
            room -= len(other.examples)
            if room < 0:
                break
            with suppress(ClientError):  # which it raises itself when its turn comes
                known = (other.id, name(other)) in self._known
                if len(other.examples) and not known and not done(other):
                    yield other


def whole(parts: Sequence[Tensor]) -> Tensor:
    """Returns parts as one tensor, without a copy of a single one."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])
