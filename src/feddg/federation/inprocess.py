"""The in-process transport: many clients share a few workers."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import TypeVar

from feddg.clients.client import Client, Examples, Worker
from feddg.clients.threads import share_of_client, share_of_process, side_by_side, threads
from feddg.errors import ClientError
from feddg.federation.local_training import answer, client_statistics, load_weights, train
from feddg.federation.transport import Ledger, Reply, without_frozen
from feddg.messages import Broadcast, Message, Refusal, Update, Weights, on_device
from feddg.methods.base import Method
from feddg.privacy.building import NO_DEFENCES, Defences

T = TypeVar("T")


class InProcess:
    """Clients that take turns on the workers; an idle client needs no memory but its row numbers.

    With several workers, several clients train at once (:func:`side_by_side` says how many), each
    with its share of the threads. Results do not depend on the worker, and replies keep the
    clients' order.

    Args:
        method: the method of all clients.
        workers: networks and settings, all the same except for the memory they use.
        count: number of clients.
        examples: returns the images of a client.
        memories: what clients remember between rounds, by id, from a checkpoint.
        defences: applied to every update before it leaves its client.
    """

    def __init__(
        self,
        method: Method,
        workers: Sequence[Worker],
        count: int,
        examples: Callable[[int], Examples],
        memories: dict[int, Weights] | None = None,
        defences: Defences = NO_DEFENCES,
    ) -> None:
        self._method, self.workers, self.examples = method, workers, examples
        self.clients: Sequence[int] = range(count)
        self._defences = defences
        self._context: Message | None = None
        self.ledger = Ledger(lambda row: None)
        self.registered: Mapping[int, int] = {}
        self.memories: dict[int, Weights] = memories or {}
        self._secrets: dict[int, Weights] = {}
        self.remembered: set[int] = set()
        """Clients whose memory changed since the set was last emptied."""

    def hand_out(self, context: Message | None, *, again: bool = False) -> None:
        """See :class:`Transport`; a client gets the context when it trains."""
        if context is not None and not again:
            for id in self.clients:
                self.ledger.message(0, "down", id, "context", context)
        self._context, frozen = without_frozen(context)
        for worker in self.workers:
            load_weights(worker.network, frozen)

    def client(self, id: int, broadcast: Broadcast, worker: Worker) -> Client:
        """Returns client ``id`` on a worker, ready for a round."""
        return Client(
            id,
            self.examples(id),
            worker,
            round=broadcast.round,
            # Its own dictionary: training that fails leaves no trace. A checkpoint's is on the CPU.
            memory=on_device(self.memories.get(id, {}), worker.device),
            context=self._context,
            received=broadcast.weights,
            extras=broadcast.extras,
            secrets=self._secrets.setdefault(id, {}),
        )

    def client_statistics(self, clients: Sequence[int], broadcast: Broadcast) -> Iterator[Reply]:
        """See :class:`Transport`."""
        work = partial(client_statistics, method=self._method)
        return self._answers(clients, broadcast, ("statistics", "statistics"), work)

    def ask(
        self, clients: Sequence[int], broadcast: Broadcast, name: str, question: Message
    ) -> Iterator[Reply]:
        """See :class:`Transport`."""
        work = partial(
            answer, method=self._method, name=name, question=question, defences=self._defences
        )
        return self._answers(clients, broadcast, (f"ask:{name}", f"answer:{name}"), work)

    def train(self, clients: Sequence[int], broadcast: Broadcast) -> Iterator[Update | Refusal]:
        """See :class:`Transport`. The time of clients that train at once is divided among them."""
        work = partial(train, method=self._method, defences=self._defences)
        for reply in self._replies(clients, broadcast, "train", work):
            if isinstance(reply, Update):
                self.ledger.update(broadcast.round, reply)
            yield reply

    def _answers(
        self,
        clients: Sequence[int],
        broadcast: Broadcast,
        purposes: tuple[str, str],
        work: Callable[[Client], Message],
    ) -> Iterator[Reply]:
        replies = self._replies(clients, broadcast, purposes[0], work)
        for id, reply in zip(clients, replies, strict=True):
            if isinstance(reply, Message):
                self.ledger.message(broadcast.round, "up", id, purposes[1], reply)
            yield id, reply

    def _replies(
        self,
        clients: Sequence[int],
        broadcast: Broadcast,
        purpose: str,
        work: Callable[[Client], T],
    ) -> Iterator[T | Refusal]:
        """Sends clients the broadcast and yields their answers in order."""
        for id in clients:
            self.ledger.broadcast(id, purpose, broadcast)
        together = side_by_side(len(clients), len(self.workers), self.workers[0].threads)
        if together:
            yield from self._at_once(clients[:together], broadcast, work)
        for id in clients[together:]:
            client = self.client(id, broadcast, self.workers[0])
            yield self._settled(client, partial(work, client))

    def _at_once(
        self, clients: Sequence[int], broadcast: Broadcast, work: Callable[[Client], T]
    ) -> Iterator[T | Refusal]:
        """Starts a worker's next client when the answer of its last one was consumed.

        Stops running clients if the caller leaves early, for example by Ctrl-C.
        """
        coming, at_once = iter(clients), len(self.workers)
        under_way: deque[tuple[Client, Callable[[], T]]] = deque()
        set_threads = partial(share_of_process, share_of_client(at_once))
        try:
            # Idle threads of this one would wait by spinning, on the cores that clients need.
            with ThreadPoolExecutor(at_once, initializer=set_threads) as pool, threads(1):

                def start_next(worker: Worker) -> None:
                    for id in islice(coming, 1):
                        client = self.client(id, broadcast, worker)
                        under_way.append((client, pool.submit(work, client).result))

                try:
                    for worker in self.workers:
                        start_next(worker)
                    while under_way:
                        client, result = under_way.popleft()
                        reply = self._settled(client, result)
                        if isinstance(reply, Update):
                            reply.seconds /= at_once
                        yield reply
                        start_next(client.worker)
                except BaseException:
                    for worker in self.workers:
                        worker.stopped.set()
                    raise
        finally:
            for worker in self.workers:
                worker.stopped.clear()

    def _settled(self, client: Client, result: Callable[[], T]) -> T | Refusal:
        try:
            reply = result()
        except ClientError as error:
            return Refusal(client.id, str(error))
        if client.memory or client.id in self.memories:
            self.memories[client.id] = client.memory
            self.remembered.add(client.id)
        return reply
