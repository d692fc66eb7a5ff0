"""The in-process transport: many clients share a few workers."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from feddg.clients.client import Client, Examples, Worker
from feddg.clients.threads import share_of_client, share_of_process, side_by_side, threads
from feddg.clients.together import Together
from feddg.data.pixels import fits
from feddg.errors import ClientError, Diverged
from feddg.federation.local_training import answer, client_statistics, load_weights, train
from feddg.federation.transport import Ledger, Reply, Transport, without_frozen
from feddg.messages import Broadcast, Message, Refusal, Update, Weights, on_device
from feddg.methods.base import Method
from feddg.privacy.building import NO_DEFENCES, Defences

TRAIN, STATISTICS, ASK = "train", "statistics", "ask:"
Answer = Update | Message | Refusal
Result = tuple[Answer, Weights | None]
"""What a client answers, and what it remembers from now on; None where that stays as it is."""


class InProcess(Transport):
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
        self._count = count
        self._defences = defences
        self._context: Message | None = None
        self.ledger = Ledger(lambda row: None)
        self.registered: Mapping[int, int] = {id: len(examples(id)) for id in range(count)}
        self.memories: dict[int, Weights] = memories or {}
        self._round, self._of = 0, self.memories
        self._before: dict[int, Weights | None] = {}
        self._secrets: dict[int, Weights] = {}
        self.remembered: set[int] = set()
        """Clients whose memory changed since the set was last emptied."""

    @property
    def clients(self) -> Sequence[int]:
        """The ids of all clients."""
        return range(self._count)

    def hand_out(self, context: Message | None, *, again: bool = False) -> None:
        """See :class:`Transport`; a client gets the context when it trains."""
        if context is not None and not again:
            self.ledger.message(0, "down", self.clients, "context", context)
        self._before = {}  # a phase counts its rounds anew
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
            # Its own dictionary: training that fails leaves no trace. It may be on the CPU.
            memory=on_device(self.memories.get(id, {}), worker.device),
            context=self._context,
            received=broadcast.weights,
            extras=broadcast.extras,
            secrets=self._secrets.setdefault(id, {}),
        )

    def client_statistics(self, clients: Sequence[int], broadcast: Broadcast) -> Iterator[Reply]:
        """See :class:`Transport`."""
        return self._answers(clients, broadcast, STATISTICS, STATISTICS)

    def ask(
        self, clients: Sequence[int], broadcast: Broadcast, name: str, question: Message
    ) -> Iterator[Reply]:
        """See :class:`Transport`."""
        broadcast = replace(broadcast, extras=question)
        return self._answers(clients, broadcast, f"{ASK}{name}", f"answer:{name}")

    def train(self, clients: Sequence[int], broadcast: Broadcast) -> Iterator[Update | Refusal]:
        """See :class:`Transport`. The time of clients that train at once is divided among them.

        Where a round is done again, all begin with the memory that they had before it.
        """
        if broadcast.round == self._round and self._of is self.memories:
            for id, before in self._before.items():
                if before is not None:
                    self.memories[id] = before
                elif self.memories.pop(id, None) is not None:
                    self.remembered.discard(id)
        self._round, self._of = broadcast.round, self.memories
        self._before = {id: self.memories.get(id) for id in clients}
        for reply in self._replies(clients, broadcast, TRAIN):
            if isinstance(reply, Update):
                self.ledger.update(broadcast.round, reply)
            if not isinstance(reply, Message):
                yield reply

    def _answers(
        self, clients: Sequence[int], broadcast: Broadcast, purpose: str, reply_purpose: str
    ) -> Iterator[Reply]:
        replies = self._replies(clients, broadcast, purpose)
        for id, reply in zip(clients, replies, strict=True):
            if isinstance(reply, Message):
                self.ledger.message(broadcast.round, "up", [id], reply_purpose, reply)
            if not isinstance(reply, Update):
                yield id, reply

    def _replies(
        self, clients: Sequence[int], broadcast: Broadcast, purpose: str
    ) -> Iterator[Answer]:
        """Sends clients the broadcast and yields their answers in order."""
        sent = broadcast.extras, broadcast.weights
        self.ledger.message(broadcast.round, "down", clients, purpose, *sent)
        results = self.results(clients, broadcast, purpose)
        for id, (reply, memory) in zip(clients, results, strict=True):
            if memory is not None:
                self.memories[id] = memory
                self.remembered.add(id)
            yield reply

    def results(
        self, clients: Sequence[int], broadcast: Broadcast, purpose: str
    ) -> Iterator[Result]:
        """Has clients work, and yields what comes of it, in their order.

        Args:
            clients: their ids.
            broadcast: what they are sent.
            purpose: ``train``, ``statistics``, or ``ask:`` and a question's name.
        """
        work: Callable[[Client], Update | Message]
        if purpose == TRAIN:
            work = partial(train, method=self._method, defences=self._defences)
        elif purpose == STATISTICS:
            work = partial(client_statistics, method=self._method)
        else:
            name = purpose.removeprefix(ASK)
            work = partial(answer, method=self._method, name=name, defences=self._defences)
        first = side_by_side(len(clients), len(self.workers), self.workers[0].threads)
        others = Together(self.client(id, broadcast, self.workers[0]) for id in clients[first:])
        if first:
            yield from self._at_once(clients[:first], broadcast, work, others.shared)
        for client in others:
            yield self._result(client, partial(work, client))

    def _at_once(
        self,
        clients: Sequence[int],
        broadcast: Broadcast,
        work: Callable[[Client], Update | Message],
        shared: dict[str, str],
    ) -> Iterator[Result]:
        """Starts a worker's next client when the answer of its last one was consumed.

        Stops running clients if the caller leaves early, for example by Ctrl-C.
        """
        at_once = min(len(clients), len(self.workers))
        under_way: deque[tuple[Client, Callable[[], Update | Message]]] = deque()
        set_threads = partial(share_of_process, share_of_client(at_once))
        try:
            # Idle threads of this one would wait by spinning, on the cores that clients need.
            with ThreadPoolExecutor(at_once, initializer=set_threads) as pool, threads(1):

                def start(place: int) -> None:
                    worker = self.workers[place % at_once]
                    for id in clients[place : place + 1]:
                        client = self.client(id, broadcast, worker)
                        client.together.shared = shared
                        under_way.append((client, pool.submit(work, client).result))

                try:
                    for place in range(at_once):
                        start(place)
                    for place in range(len(clients)):
                        client, done = under_way.popleft()
                        reply, memory = self._result(client, done)
                        if isinstance(reply, Update):
                            reply.seconds /= at_once
                        yield reply, memory
                        start(place + at_once)
                except BaseException:
                    for worker in self.workers:
                        worker.stopped.set()
                    raise
        finally:
            for worker in self.workers:
                worker.stopped.clear()

    def _result(self, client: Client, done: Callable[[], Update | Message]) -> Result:
        try:
            reply = done()
        except ClientError as error:
            return Refusal(client.id, str(error), isinstance(error, Diverged)), None
        memory = client.memory
        # Of a hundred clients, memories may be larger than a GPU's.
        if client.device.type != "cpu" and not fits(
            Message(memory).size * self._count, client.device
        ):
            memory = on_device(memory, torch.device("cpu"))
        return reply, memory if memory or client.id in self.memories else None
