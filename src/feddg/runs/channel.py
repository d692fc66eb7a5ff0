"""One federation on several processes: ``torch.distributed`` carries messages between them.

Process 0 is the server, and trains its share of a round's clients. Every other process, a worker,
trains its own share and sends each client's complete message to process 0, which handles them one
after the other, in the order of the clients, as if it had trained them all. So every bit is the
same as with one process, even if a method or defence looks at single updates. Process 0 keeps the
clients' memory and sends it along; checkpoints do not depend on workers.

Nothing is pickled: a message is sent as a header (JSON), one flat buffer for tensors on the CPU
(gloo), and another for those on the GPU (nccl; through the host's memory if processes share a GPU).
"""

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

from feddg.errors import WorkerLost
from feddg.evaluation.accuracy import Evaluation, sees_batches
from feddg.federation.inprocess import TRAIN, Answer, InProcess, Result
from feddg.messages import (
    Broadcast,
    Message,
    Refusal,
    Update,
    Weights,
    after,
    joined,
    prefixed,
    under,
    view_in,
)
from feddg.models.network import Network

AHEAD = 2**28
"""Most bytes of updates that a process may produce before the server takes them."""
SERVER = 0.2
"""The server's work per update, in batches: measured with a small CNN and ResNet-18."""
SECONDS_BETWEEN_LOOKS, SECONDS_BETWEEN_ASKING = 1.0, 0.0005
SECONDS_TO_LEAVE = 10.0
MINUTES_TO_JOIN = 10
CONTEXT, PREDICT = "context", "predict"
FAILED = "failed"
_COUNTS = ("examples", "images", "seconds", "moved")


def buffers_of(message: Message) -> list[Tensor]:
    """Returns a message as buffers: its sizes; its header and CPU tensors; its GPU tensors.

    Tensors keep their memory layout, because the order of sums may depend on it.
    """
    places: list[tuple[Tensor, Tensor, int]] = []
    ends, entries, device = [0, 0], [], torch.device("cpu")
    for name, tensor in message.tensors.items():
        like = torch.empty_like(tensor, device="meta")
        on_device = int(tensor.device.type != "cpu")
        device = tensor.device if on_device else device
        start = ends[on_device]
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append([name, dtype, list(like.shape), list(like.stride()), on_device, start])
        places.append((tensor.detach(), like, start))
        ends[on_device] = after(start, like.nbytes)
    header = json.dumps([message.scalars, entries]).encode()
    first = after(0, len(header))
    here = torch.empty(first + ends[0], dtype=torch.uint8)
    here[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    there = torch.empty(ends[1], dtype=torch.uint8, device=device)
    for tensor, like, start in places:
        flat = here[first:] if tensor.device.type == "cpu" else there
        view_in(flat, start, like.dtype, like.shape, like.stride()).copy_(tensor)
    sizes = torch.tensor([len(header), len(here), len(there)])
    return [sizes, here, *([there] if len(there) else [])]


def message_in(header_length: int, here: Tensor, there: Tensor | None) -> Message:
    """Reads what :func:`buffers_of` wrote; the tensors are views of the buffers."""
    scalars, entries = json.loads(here[:header_length].numpy().tobytes())
    flat = [here[after(0, header_length) :], there]
    tensors: Weights = {}
    for name, dtype, shape, stride, on_device, start in entries:
        part = cast(Tensor, flat[on_device])
        tensors[name] = view_in(part, start, getattr(torch, dtype), shape, stride)
    return Message(tensors, scalars)


class Channel:
    """Carries messages between the processes of a run.

    Args:
        watch: called while process 0 waits for others; raises WorkerLost when one is dead.

    Attributes:
        rank: number of this process; 0 is the server's.
        size: number of processes.
        device: where tensors arrive that were on a GPU.
        direct: whether these go from GPU to GPU; otherwise through the memory of the hosts.
        local: number of this process among those of its machine, and how many they are.
        store: where processes of several machines have met; None for those of one.
        expected: the workers whose replies to the last job are still to come, in their order.
    """

    def __init__(self, watch: Callable[[], None] = lambda: None) -> None:
        self._watch = watch
        self.rank, self.size, self.device = 0, 1, torch.device("cpu")
        self.direct, self.local = False, (0, 1)
        self.store: Any = None
        self.expected = deque[int]()
        self._under_way = deque[tuple[list[Any], int]]()
        self._bytes = 0
        self._waiting: threading.Thread | None = None

    def join(self, group: Callable[[], Mapping[str, Any]]) -> None:
        """Waits until all processes are there.

        Args:
            group: returns the options of ``torch.distributed.init_process_group``.

        Raises:
            WorkerLost: a process died meanwhile, or one is not there in :data:`MINUTES_TO_JOIN`.
        """
        late = f"not all workers came within {MINUTES_TO_JOIN} minutes"
        self._patiently(lambda: dist.init_process_group(**group()), 60 * MINUTES_TO_JOIN, late)
        self.rank, self.size = self.local = dist.get_rank(), dist.get_world_size()
        self.direct = "nccl" in str(dist.get_backend_config())

    def leave(self) -> None:
        """Leaves the process group, after giving an abandoned wait a moment to end."""
        if self._waiting is not None:
            self._waiting.join(SECONDS_TO_LEAVE)
        if dist.is_initialized():
            dist.destroy_process_group()

    # Process 0 gives all workers a job

    def tell(self, job: Message) -> None:
        """Sends a job to every worker; discards unread replies to the last job."""
        expected, self.expected = self.expected, deque()
        while expected:
            self.receive(expected.popleft())
        for tensor in self._buffers(job):
            with self._connected():
                self._end(dist.broadcast(tensor, 0, async_op=True), tensor)

    def hear(self) -> Message:
        """Returns the next job."""
        return self._arrived(lambda tensor: dist.broadcast(tensor, 0, async_op=True), None)

    # One process sends another a message

    def send(self, to: int, message: Message) -> None:
        """Sends a copy of a message; waits while more than ``AHEAD`` bytes are under way."""
        tensors = self._buffers(message)
        with self._connected(to):
            # Each is kept until it has left.
            works = [(dist.isend(tensor, to), tensor) for tensor in tensors]
        self._under_way.append((works, sum(tensor.nbytes for tensor in tensors)))
        self._bytes += self._under_way[-1][1]
        while self._bytes > AHEAD:
            self._settle()

    def flush(self) -> None:
        """Waits until all messages have been sent."""
        while self._under_way:
            self._settle()

    def receive(self, source: int) -> Message:
        """Returns the next message of a process.

        Raises:
            WorkerLost: it died, or reports why it cannot continue.
        """
        message = self._arrived(lambda tensor: dist.irecv(tensor, source), source)
        if FAILED in message.scalars:
            raise WorkerLost(f"worker {source}: {message.scalars[FAILED]}")
        return message

    def _arrived(self, start: Callable[[Tensor], object], source: int | None) -> Message:
        def arrived(count: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
            tensor = torch.empty(count, dtype=dtype, device=device)
            with self._connected(source):
                self._end(start(tensor), tensor)
            return tensor

        header, size_here, size_there = arrived(3, torch.int64).tolist()
        here = arrived(size_here, torch.uint8)
        way = self.device if self.direct else "cpu"
        there = arrived(size_there, torch.uint8, way).to(self.device) if size_there else None
        return message_in(header, here, there)

    def _buffers(self, message: Message) -> list[Tensor]:
        return [each if self.direct else each.cpu() for each in buffers_of(message)]

    def _settle(self) -> None:
        works, size = self._under_way.popleft()
        self._bytes -= size
        for work, tensor in works:
            with self._connected():
                self._end(work, tensor)

    def _end(self, work: Any, tensor: Tensor) -> None:
        """Waits until a tensor has arrived or left."""

        def there() -> None:  # for a GPU's, wait() would hold up the stream alone
            while tensor.device.type != "cpu" and not work.is_completed():
                time.sleep(SECONDS_BETWEEN_ASKING)
            work.wait()

        self._patiently(there)

    @contextmanager
    def _connected(self, other: int | None = None) -> Iterator[None]:
        """Raises WorkerLost with the lost process if a connection breaks inside the block."""
        try:
            yield
        except RuntimeError as error:
            if self.rank == 0:
                time.sleep(SECONDS_BETWEEN_LOOKS)  # who broke it may not be dead yet
                self._watch()
            who = "a worker" if other is None else f"worker {other}"
            text = " ".join(str(error).split())[:200]
            raise WorkerLost(f"{who} cannot be reached any more: {text}") from None

    def _patiently(
        self, wait: Callable[[], object], seconds: float = math.inf, late: str = ""
    ) -> None:
        """Waits in a thread, so that Ctrl-C or the death of any worker can end the wait.

        Raises:
            WorkerLost: a worker died, or the wait took longer than so many seconds.
        """
        end = time.monotonic() + seconds
        if self.rank:
            wait()
            return
        ended = Future[object]()

        def work() -> None:
            try:
                ended.set_result(wait())
            except BaseException as error:
                ended.set_exception(error)

        # No pool's thread: one that waits for ever must not hold the process back at its end.
        self._waiting = threading.Thread(target=work, daemon=True)
        self._waiting.start()
        while not wait_for([ended], SECONDS_BETWEEN_LOOKS).done:
            self._watch()
            if time.monotonic() > end:
                raise WorkerLost(late)
        ended.result()


class WorkerTransport(InProcess):
    """Process 0's side: trains its own share of clients, and receives the others' messages.

    Args:
        channel: to the workers.
        *clients: of :class:`InProcess`.
    """

    def __init__(self, channel: Channel, *clients: Any, **more: Any) -> None:
        super().__init__(*clients, **more)
        self._channel, self.processes = channel, channel.size
        self._dealt, self._homes = -1, dict[int, int]()

    def hand_out(self, context: Message | None, *, again: bool = False) -> None:
        """See :class:`feddg.federation.transport.Transport`."""
        super().hand_out(context, again=again)
        job = context or Message()
        named = prefixed("extras/", job)
        named.scalars |= {"job": CONTEXT, "given": context is not None}
        self._channel.tell(named)

    def results(
        self, clients: Sequence[int], broadcast: Broadcast, purpose: str
    ) -> Iterator[Result]:
        """See :meth:`InProcess.results`. Keeps what it trains while waiting for other processes.

        A client that was trained but never yielded leaves no trace.
        """
        channel, homes = self._channel, self._deal(clients, broadcast.round)
        shares = [[id for id in clients if homes[id] == rank] for rank in range(channel.size)]
        remembering = [id for id in clients if id in self.memories and homes[id]]
        job = _parts(weights=Message(broadcast.weights), extras=broadcast.extras)
        job.scalars |= {
            "job": purpose,
            "round": broadcast.round,
            "clients": json.dumps(shares),
            "remembering": json.dumps(remembering),
        }
        channel.tell(job)
        expected = channel.expected = deque(homes[id] for id in clients if homes[id])
        for id in remembering:
            channel.send(homes[id], Message(self.memories[id]))
        channel.flush()
        here, waiting = super().results(shares[0], broadcast, purpose), deque[Result]()
        room = AHEAD // max(1, Message(broadcast.weights).size)
        for id in clients:
            if not homes[id]:
                reply, memory = waiting.popleft() if waiting else next(here)
            else:
                while len(waiting) < room and (result := next(here, None)) is not None:
                    reply, memory = result
                    waiting.append((reply.keep() if isinstance(reply, Update) else reply, memory))
                reply, memory = _result(id, purpose, channel.receive(expected.popleft()))
            if isinstance(reply, Update):
                reply.seconds /= sum(map(bool, shares))
            yield reply, memory

    def _deal(self, clients: Sequence[int], round: int) -> dict[int, int]:
        """Returns each client's process, fixed within a round because it holds its secrets."""
        if round != self._dealt:
            self._dealt, self._homes = round, {}
        size = self.workers[0].train.batch_size
        batches = {id: -(-len(self.examples(id)) // size) for id in clients}
        self._homes |= dealt(batches, self._channel.size, self._homes)
        return self._homes


def dealt(batches: Mapping[int, int], size: int, homes: Mapping[int, int]) -> dict[int, int]:
    """Assigns clients to processes: the longest first, each to the process with the least work.

    Process 0 also does the server's work.

    Args:
        batches: number of batches of each client.
        size: number of processes.
        homes: processes of clients that already have one.
    """
    loads, home_of = [0.0] * size, {id: homes[id] for id in batches if id in homes}
    loads[0] = SERVER * len(batches)
    for id, home in home_of.items():
        loads[home] += batches[id]
    for id in sorted(batches.keys() - homes.keys(), key=lambda id: (-batches[id], id)):
        home_of[id] = min(range(size), key=loads.__getitem__)
        loads[home_of[id]] += batches[id]
    return home_of


def work_on(job: Message, clients: InProcess, channel: Channel) -> None:
    """A worker's side: carries out a job of :class:`WorkerTransport`."""
    extras = under("extras/", job)
    if job.scalars["job"] == CONTEXT:
        clients.hand_out(extras if job.scalars["given"] else None, again=True)
        return
    share = json.loads(str(job.scalars["clients"]))[channel.rank]
    for id in json.loads(str(job.scalars["remembering"])):
        if id in share:
            clients.memories[id] = channel.receive(0).tensors
    weights, purpose = under("weights/", job).tensors, str(job.scalars["job"])
    broadcast = Broadcast(int(job.scalars["round"]), weights, extras)
    results = clients.results(share, broadcast, purpose)
    for id, (reply, memory) in zip(share, results, strict=True):
        channel.send(0, _reply(reply, memory))
        clients.memories.pop(id, None)
    channel.flush()


def _reply(reply: Answer, memory: Weights | None) -> Message:
    """Returns the result of a client's work as one message."""
    parts = {"memory": Message(memory or {})}
    if isinstance(reply, Update):
        parts["weights"], parts["extras"] = Message(reply.weights), reply.extras
        counts = {name: getattr(reply, name) for name in _COUNTS}
        parts |= {"terms": Message({}, dict(reply.terms)), "counts": Message({}, counts)}
    elif isinstance(reply, Message):
        parts["extras"] = reply
    whole = _parts(**parts)
    whole.scalars["remembers"] = memory is not None
    if isinstance(reply, Refusal):
        whole.scalars |= {"refusal": reply.reason, "diverged": reply.diverged}
    return whole


def _result(id: int, purpose: str, message: Message) -> Result:
    """Reads what :func:`_reply` wrote."""
    memory = None
    if message.scalars["remembers"]:  # a copy: the buffer holds the weights, too
        memory = under("memory/", message).keep().tensors
    if "refusal" in message.scalars:
        return Refusal(
            id, str(message.scalars["refusal"]), bool(message.scalars["diverged"])
        ), memory
    extras = under("extras/", message)
    if purpose != TRAIN:
        return extras, memory
    counts: dict[str, Any] = dict(under("counts/", message).scalars)
    terms = {name: float(value) for name, value in under("terms/", message).scalars.items()}
    weights = under("weights/", message).tensors
    return Update(id, weights=weights, extras=extras, terms=terms, **counts), memory


def _parts(**parts: Message) -> Message:
    """Returns several messages as one, each under its name."""
    return joined(*(prefixed(f"{part}/", message) for part, message in parts.items()))


@dataclass(frozen=True)
class WorkerEvaluation(Evaluation):
    """Evaluation at process 0, with batches shared among all processes.

    Attributes:
        channel: to the workers.
        network: the predictor's network; its state is sent to workers.
    """

    channel: Channel = None  # type: ignore[assignment]
    network: Network = None  # type: ignore[assignment]

    def predictions(self, predictor: nn.Module) -> Iterator[Tensor]:
        """See :meth:`Evaluation.predictions`; adaptations to batches see all images here."""
        if sees_batches(predictor):
            yield from super().predictions(predictor)
            return
        job = prefixed("weights/", Message(self.network.state_dict()))
        job.scalars |= {"job": PREDICT, "splits": json.dumps(list(self.splits))}
        size = self.channel.size
        self.channel.tell(job)
        self.channel.expected = deque(range(1, size))
        parts = [iter(share_of_batches(self, predictor, 0, size))]
        for rank in range(1, size):
            self.channel.expected.popleft()
            logits = self.channel.receive(rank).tensors["logits"]
            lengths = [len(rows) for rows in batches_of(self)[rank::size]]
            parts.append(iter(logits.split(lengths)))
        yield from self.by_part(next(parts[n % size]) for n in range(len(batches_of(self))))


def batches_of(evaluation: Evaluation) -> list[numpy.ndarray]:
    """Returns the rows of every batch of an evaluation, in order."""
    return [
        rows[start : start + evaluation.batch_size]
        for rows in evaluation.passes()
        for start in range(0, len(rows), evaluation.batch_size)
    ]


def share_of_batches(
    evaluation: Evaluation, predictor: nn.Module, rank: int, size: int
) -> list[Tensor]:
    """Returns the logits of a process's share of batches."""
    return [evaluation.predict(predictor, rows) for rows in batches_of(evaluation)[rank::size]]
