"""Steps that are recorded once and replayed, on a device: one launch instead of hundreds.

A batch arrives in one buffer, and from there to the end of the step nothing needs the host: so the
device's work can be recorded (a CUDA graph) and replayed for other batches, clients and rounds.
What a client's turn brings besides, such as what a method keeps in ``client.scratch``, rates and
moments, is put into tensors that stay where they are.

A method says nothing of this; its steps are watched. Two steps of the same shape, of two rounds
and two clients, must launch the same operations with the same numbers on the same tensors, read
nothing of the host and draw nothing. Then a step is recorded, tried from the same state beside the
ordinary step, and used if it does the same. Whatever else takes the ordinary step, as all do on a
CPU. On the pretended device (:mod:`feddg.testing.device`) the operations of a step are recorded.
"""

import logging
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from feddg.clients.optim import MemoryOrder
from feddg.diagnostics import warn
from feddg.messages import Packed, Weights, copy_all

if TYPE_CHECKING:
    from feddg.clients.client import Client, Prepared

MOST_RECORDS, MOST_TRIES = 96, 3
"""Shapes of steps that a worker remembers; how many steps of one may be unlike others."""
CLOSE = 1e-6
"""How far a replay may be from a step, relative to a tensor's length, if steps differ as well."""
OF_THE_HOST = frozenset(
    {"id", "round", "steps", "terms", "train", "examples", "training", "memory"}
    | {"context", "received", "extras", "secrets", "views", "features"}
    | {"stream", "numpy_stream", "lasting_stream", "cached", "batches", "plain_batches"}
    | {"of_images", "kept_features", "frozen_features"}
)
"""What a recorded step may not ask of its client: at the next one it would be something else."""
MUCH = 10
"""So many times farther than steps are from each other, it is not chance: that has long tails."""
TINY = 1e-30
aten = torch.ops.aten
ANSWERS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten._unique.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.unique_dim_consecutive.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
    aten._linalg_check_errors.default,
    aten._linalg_eigh.default,
    aten._linalg_svd.default,
    aten.equal.default,
    aten.masked_select.default,
}
"""Operations whose result, or its shape, the host waits for."""
SENT = {aten._to_copy.default, aten.copy_.default, aten.where.self}
SENT |= {aten.index_put.default, aten.index_put_.default}
"""Operations that copy a number of the host to the device, and wait for that."""
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
"""Operations that wait, too, where they are given a mask."""

log = logging.getLogger("feddg")


class HostValue(Exception):
    """A step has asked for a value of the host."""


class _Absent:
    """Stands for a value of the host; whatever is done with it raises :class:`HostValue`."""

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name

    def _raise(self, *_: Any, **__: Any) -> Any:
        raise HostValue(f"reads {self.__dict__['name']}")

    __getattr__ = __getitem__ = __len__ = __iter__ = __bool__ = __eq__ = __index__ = _raise
    __array__ = __float__ = __setattr__ = _raise
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> None:
        """Raises :class:`HostValue`."""
        given = leaves_of([args, kwargs or {}])
        next(leaf for leaf in given if isinstance(leaf, cls))._raise()


class _Guarded:
    """A client as a recorded step sees it: without what changes from step to step.

    A step that is only watched gets that, too, and ``asked`` is told what it was.
    """

    def __init__(self, client: "Client", asked: list[str] | None) -> None:
        self.__dict__.update(client=client, asked=asked)

    def __getattr__(self, name: str) -> object:
        if name in OF_THE_HOST:
            if self.__dict__["asked"] is None:
                raise HostValue(f"reads client.{name}")
            self.__dict__["asked"].append(f"reads client.{name}")
        return getattr(self.__dict__["client"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.__dict__["client"], name, value)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _span(tensor: Tensor) -> tuple[Any, ...]:
    """Returns from where to where a tensor lies, and what else tells it apart."""
    start = _place(tensor) + tensor.storage_offset() * tensor.itemsize
    return start, start + tensor.nbytes, str(tensor.dtype), tensor.shape, tensor.stride()


def _without_repeats(tensor: Tensor) -> Tensor:
    """Returns a view of a tensor that has each of its numbers once, where it was expanded."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def leaves_of(value: object) -> Iterator[Any]:
    """Yields what containers hold; PyTorch's own trees take far longer."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple, set, deque)):
        for item in value:
            yield from leaves_of(item)
    else:
        yield value


def _numbers(value: object) -> Iterator[Any]:
    """Yields numbers and words of the host, which a recorded step would keep as they were."""
    return (leaf for leaf in leaves_of(value) if isinstance(leaf, (int, float, str, bool)))


def _kept(value: object) -> object:
    """Returns what shows that a step changed something of the host, or took something new."""
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, numpy.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, random.Random):
        return value.getstate()
    return id(value), *_numbers([*getattr(value, "__dict__", {}).values()])


def _tensors(value: object) -> Iterator[Tensor]:
    return (leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor))


class Trace(TorchDispatchMode):
    """Notes what operations a step launches, with which numbers and on which tensors.

    Attributes:
        steps: one entry an operation. Tensors are numbered as they are made; one from before the
            step is told by its place in memory.
        outside: the tensors from before the step, except for its inputs, by where they lie.
        fault: why such a step cannot be recorded; None so far.
    """

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self.steps: list[Any] = []
        self.outside: dict[int, list[Tensor]] = {}
        self.fault: str | None = None
        self._known: dict[int, object] = {_place(t): f"input {n}" for n, t in enumerate(inputs)}
        self._made = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Notes one operation and carries it out."""
        kwargs = kwargs or {}
        if operation.namespace == "profiler":  # marks of optimizers
            return operation(*args, **kwargs)
        given = [*leaves_of([args, kwargs])]
        noted = [self._noted(operation, value) for value in given]
        masks = operation in INDEXED and any(t.dtype == torch.bool for t in _tensors(args[1]))
        away = any(t.device.type != "cpu" for t in _tensors(given))
        if operation in ANSWERS or masks:
            self._refuse(operation, "waits for its answer")
        goes = away or torch.device(kwargs.get("device") or "cpu").type != "cpu"
        sent = operation in SENT and any(t.device.type == "cpu" for t in _tensors(given))
        if goes and (sent or operation is aten.lift_fresh.default):  # torch.tensor(..., device=...)
            self._refuse(operation, "sends a number of the host")
        result = operation(*args, **kwargs)
        places = {_place(t) for t in _tensors(given) if t.numel()}
        for made in (t for t in _tensors(result) if t.numel()):
            if made.device.type == "cpu" and (away or made.dim()):
                self._refuse(operation, "is not done by the device")
            elif _place(made) not in places:
                self._known[_place(made)] = self._made = self._made + 1
        self.steps.append((str(operation), tuple(noted)))
        return result

    def _refuse(self, operation: object, why: str) -> None:
        self.fault = self.fault or f"{operation} {why}"

    def _noted(self, operation: object, value: object) -> object:
        if not isinstance(value, Tensor):
            return value if isinstance(value, (int, float, bool, str)) else repr(value)
        if value.device.type == "cpu" and value.dim() == 0:
            return value.item()
        shape = (*value.shape,)
        if value.device.type == "cpu":
            self._refuse(operation, "reads the host's memory")
            return shape
        if not value.numel():
            return shape
        place = _place(value)
        if self._known.setdefault(place, f"at {place}") == f"at {place}":
            whole = _without_repeats(value)
            parts, (start, end, *_) = self.outside.setdefault(place, []), _span(whole)
            if not any(own[0] <= start and end <= own[1] for own in map(_span, parts)):
                parts.append(whole)
        return self._known[place], value.dtype, value.storage_offset(), shape

    def difference(self, other: "Trace") -> str | None:
        """Returns where another step is not like this one, or None."""
        for ours, theirs in zip(self.steps, other.steps):
            if ours[0] != theirs[0]:
                return f"launches {ours[0]}, then {theirs[0]}"
            for a, b in zip(ours[1], theirs[1]):
                if isinstance(a, tuple) and isinstance(b, tuple) and a != b and a[1:] == b[1:]:
                    return f"has {ours[0]} work on a tensor of its own turn"
                if a != b:
                    return f"launches {ours[0]} with {a}, then {b}"
        counts = len(self.steps), len(other.steps)
        return None if counts[0] == counts[1] else "launches {} operations, then {}".format(*counts)


@dataclass
class Record:
    """What is known of the steps of one shape.

    Attributes:
        met: how many steps there were before they were recorded.
        seen: clients and rounds of the steps that were alike, and whether they began a turn: what
            a first step makes, later ones may use.
        trace: one of them.
        tries: how many were not.
        refused: why they are not recorded.
        replay: does the step again, with what the inputs hold now; None if none is recorded.
        buffer: where batches are put.
        parts: the tensors that lie there.
        copies: what is put beside it: what was made on the device, before the step.
        counted: steps that the client counts in it.
        terms: the sums of its loss terms.
        passes: what its layers drew.
    """

    met: int = 0
    seen: set[tuple[int, int, bool]] = field(default_factory=set)
    trace: Trace | None = None
    tries: int = 0
    refused: str = ""
    replay: Callable[[], None] | None = None
    buffer: Tensor | None = None
    parts: Weights = field(default_factory=dict)
    copies: list[Tensor] = field(default_factory=list)
    counted: int = 0
    terms: Weights = field(default_factory=dict)
    passes: list[Any] = field(default_factory=list)

    def refuse(self, why: str) -> None:
        """Gives it up."""
        self.refused, self.replay, self.trace, self.buffer, self.copies = why, None, None, None, []

    def known(self, first: bool) -> tuple[set[int], set[int]]:
        """Returns clients and rounds of the steps that were alike: turns' first ones, or others."""
        pairs = [(client, round) for client, round, began in self.seen if began == first]
        return {client for client, _ in pairs}, {round for _, round in pairs}


class Graphs:
    """What a worker keeps between turns.

    Attributes:
        refused: why some or all steps of a method are not, by its name.
        replayed: how many steps were replayed.
        lasting: tensors that stay where they are, by name and shape.
        records: what is known of steps, the last used one last.
        kinds: a number for each kind of turn.
        broken: whether a recording of this process has failed: then CUDA's allocator stays in it,
            and no other begins.
        recorders: record a step on other devices than CUDA's, by their type, and return what does
            it again.
    """

    broken: ClassVar[bool] = False
    recorders: ClassVar[dict[str, Callable[[Callable[[], None]], Callable[[], None]]]] = {}

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}
        self.replayed = 0
        self.records: OrderedDict[object, Record] = OrderedDict()
        self.kinds: dict[object, int] = {}
        self.lasting: dict[Any, Tensor] = {}
        self._pool: Any = None
        self._stream: Any = None

    def like(self, name: str, tensor: Tensor) -> Tensor:
        """Returns the lasting tensor of a name and of a tensor's shape, type and order."""
        key = name, tensor.shape, tensor.stride(), tensor.dtype
        if key not in self.lasting:
            made = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
            self.lasting[key] = made.zero_()
        return self.lasting[key]

    def record(self, key: object) -> Record:
        """Returns the record of a shape; the longest unused ones are given up."""
        record = self.records.setdefault(key, Record())
        self.records.move_to_end(key)
        while len(self.records) > MOST_RECORDS:
            self.records.popitem(last=False)
        return record

    @contextmanager
    def aside(self, device: torch.device) -> Iterator[None]:
        """Opens the stream on which steps are tried and recorded."""
        if device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def recorded(self, step: Callable[[], None], device: torch.device) -> Callable[[], None]:
        """Records a step, and returns what does it again."""
        if device.type != "cuda":
            return self.recorders[device.type](step)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                step()
        except Exception:
            Graphs.broken = True
            raise
        return graph.replay

    def refuse(self, name: str, why: str) -> None:
        """Says once why steps of a method are ordinary ones."""
        if name not in self.refused:
            log.info("Steps of %s are not recorded: one %s.", name, why)
        self.refused.setdefault(name, why)


class Turn:
    """A client's turn whose steps are replayed as far as they can be.

    Args:
        client: ready for its first step.
        method: takes the steps.
    """

    def __init__(self, client: "Client", method: Any) -> None:
        self.client, self.method, self.name = client, method, str(method.name)
        self.graphs, self.device = client.worker.graphs, client.device
        self.ahead = client.ahead
        network = client.network
        self._state = [*network.parameters(), *network.buffers()]
        self._own = {_place(tensor) for tensor in self._state}
        self._layout: list[object] = []
        self._began = False
        self._alike: dict[object, Tensor] = {}
        self._filled: list[tuple[Tensor, Tensor]] = []
        zeros = [
            tensor for key, tensor in self.graphs.lasting.items() if key[0].startswith("term/")
        ]
        spans = sorted({_span(tensor) for tensor in _tensors(client.scratch) if tensor.numel()})
        if all(span[1] <= other[0] for span, other in pairwise(spans)):  # no part of another
            client.scratch = self._fix("scratch", client.scratch, zeros)
        client.optimizer = self._fix("optimizer", client.optimizer, zeros)
        with torch.no_grad():
            if zeros:
                torch._foreach_zero_(zeros)
        copy_all((into for into, _ in self._filled), (taken for _, taken in self._filled))
        own = (m for m in network.modules() if not type(m).__module__.startswith("torch."))
        said = (value for module in own for value in _numbers([*vars(module).values()]))
        flags = client.trains_heads_only, *(m.training for m in network.modules()), *said
        trained = tuple((_place(p), p.requires_grad) for p in self._state)
        key = (method, network, flags, trained, *self._layout)
        self.kind = self.graphs.kinds.setdefault(key, len(self.graphs.kinds))

    def _fix(self, path: str, value: object, zeros: list[Tensor]) -> Any:
        """Returns a value with lasting tensors, which are filled, or zeroed, when all are known."""
        if isinstance(value, MemoryOrder):
            zeros += value.fix(lambda name, like: self._lasting(f"{path}/{name}", like))
        elif isinstance(value, Tensor):
            trained = isinstance(value, nn.Parameter) or value.requires_grad
            if value.device.type != "cpu" and not trained and _place(value) not in self._own:
                if _span(value) not in self._alike:
                    self._alike[_span(value)] = lasting = self._lasting(path, value)
                    self._filled.append((lasting, value))
                return self._alike[_span(value)]
        elif isinstance(value, dict):
            for place, (name, part) in enumerate(value.items()):
                value[name] = self._fix(f"{path}/{place}", part, zeros)
        elif isinstance(value, list):
            value[:] = [self._fix(f"{path}/{n}", part, zeros) for n, part in enumerate(value)]
        elif isinstance(value, tuple):
            parts = [self._fix(f"{path}/{n}", part, zeros) for n, part in enumerate(value)]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        elif isinstance(value, (int, float, str, bool)):
            self._layout.append((path, value))
        return value

    def _lasting(self, path: str, like: Tensor) -> Tensor:
        self._layout.append((path, like.dtype, like.shape, like.stride()))
        return self.graphs.like(path, like)

    def total(self, name: str, value: Tensor) -> Tensor:
        """Adds to the turn's sum of a loss term, and returns the sum."""
        return self.graphs.like(f"term/{name}", value).add_(value)

    def released(self, tensors: Weights) -> Weights:
        """Returns tensors of which none is a lasting one, which the next turn overwrites."""
        places = {_place(tensor) for tensor in self.graphs.lasting.values()}
        return {n: t.clone() if _place(t) in places else t for n, t in tensors.items()}

    def step(self, prepared: "Prepared") -> None:
        """Takes a step: replays one that is recorded, or takes it and watches."""
        client, graphs = self.client, self.graphs
        first, self._began = not self._began, True
        if graphs.broken:
            self.method.step(client, prepared.batch())
            return
        named = {f"{n}/{k}": t for n, group in enumerate(prepared.groups) for k, t in group.items()}
        packed = Packed({n: t for n, t in named.items() if t.device.type == "cpu"})
        there = {n: _place(t) for n, t in named.items() if t.device.type != "cpu"}
        expected = tuple(source.expected for source in self.ahead)
        record = graphs.record(
            (self.kind, packed.layout, *there.items(), *expected, self._host_numbers())
        )
        record.met += 1
        clients, rounds = record.known(first)
        # From two rounds and two clients; one that nobody joined is compared with itself alone.
        sure = len(rounds) > 1 and (len(clients) > 1 or clients == {client.id})
        groups, inputs = self._sent(prepared, named, packed, record if sure else None)
        if sure and record.replay is None and not record.refused:
            self._record(prepared, groups, record)
        if sure and record.replay is not None:
            self._replay(record)
        elif (
            # Few shapes have a second step; and a first one may make what lasts.
            record.met > 1
            and not (sure or record.refused)
            and (client.id not in clients or client.round not in rounds)
        ):
            self._watch(prepared, groups, inputs, record, first)
        else:
            self.method.step(client, prepared.make(groups))

    def _sent(
        self, prepared: "Prepared", named: Weights, packed: Packed, record: Record | None
    ) -> tuple[list[Weights], list[Tensor]]:
        """Returns a batch's tensors on the device, and which are a step's inputs: the buffer first.

        Args:
            prepared: the step's batch.
            named: its tensors.
            packed: those that are on the host.
            record: of the step, if it is recorded; its inputs are used again.
        """
        pinned = packed.buffer.pin_memory()
        if record is None or record.buffer is None:
            buffer = pinned.to(self.device, non_blocking=True)
            parts = packed.parts(buffer)
        else:
            buffer = record.buffer.copy_(pinned, non_blocking=True)
            parts = record.parts
        there = named | parts
        groups = [{k: there[f"{n}/{k}"] for k in keys} for n, keys in enumerate(prepared.groups)]
        prepared.arrive(groups)
        made = [
            (group, key)
            for n, group in enumerate(groups)
            for key, tensor in group.items()
            if tensor is not there[f"{n}/{key}"]
        ]
        if record is not None:
            for place, (group, key) in enumerate(made):
                if record.buffer is None:
                    record.copies.append(group[key].clone())
                group[key] = record.copies[place].copy_(group[key])
            record.buffer, record.parts = buffer, parts
        return groups, [buffer, *(group[key] for group, key in made)]

    def _taken(
        self, prepared: "Prepared", groups: list[Weights], asked: list[str] | None = None
    ) -> None:
        """Takes a step for which values of the host are absent, or are told to ``asked``."""
        batch = prepared.make([dict(group) for group in groups])
        if asked is None:
            batch.positions = _Absent("batch.positions")  # type: ignore[assignment]
            batch.host_labels = _Absent("batch.host_labels")  # type: ignore[assignment]
        self.method.step(_Guarded(self.client, asked), batch)

    def _watch(
        self,
        prepared: "Prepared",
        groups: list[Weights],
        inputs: list[Tensor],
        record: Record,
        first: bool,
    ) -> None:
        """Takes a step and notes what it does."""
        globals_, scratch, asked = _global_numbers(), self._scratch(), list[str]()
        with Trace(inputs) as trace:
            self._taken(prepared, groups, asked)
        fault = asked[0] if asked else trace.fault
        if globals_ != _global_numbers():
            fault = "draws from a global generator"
        elif self._scratch() != scratch:
            fault = "keeps something new in client.scratch"
        elif any(source.expected for source in self.ahead):
            fault = "leaves out passes that were drawn for"
        differs = None if record.trace is None else record.trace.difference(trace)
        if fault or differs:
            record.tries, record.seen, record.replay = record.tries + 1, set(), None
            if record.tries == MOST_TRIES:
                record.refuse(fault or str(differs))
                self.graphs.refuse(self.name, record.refused)
        record.trace = None if fault or record.refused else trace
        if not fault:
            record.seen.add((self.client.id, self.client.round, first))

    def _record(self, prepared: "Prepared", groups: list[Weights], record: Record) -> None:
        """Records a step if two replays do what two steps do, from the same state."""
        assert record.trace is not None
        there = {_place(t) for t in _tensors(prepared.groups) if t.device.type != "cpu"}
        outside = record.trace.outside.items()
        changed = [part for place, parts in outside if place not in there for part in parts]
        before, host, terms = list[tuple[Tensor, Tensor]](), self._host(), self.client.terms

        def step() -> None:
            self._taken(prepared, groups)

        def twice(once: Callable[[], None]) -> list[Tensor]:
            for _ in range(2):
                self._restore([], host)
                once()
            left = [t.detach().clone() for t in changed]
            self._restore(before, host)
            return left

        try:
            before += [(t, t.detach().clone()) for t in changed]  # may not fit
            with self.graphs.aside(self.device):
                self.client.terms = {}
                step()
                record.counted = self.client.steps - host[0]
                record.terms = self.client.terms
                record.passes = [source.mark() for source in self.ahead]
                self._restore(before, host)
                expected = twice(step)
                # Where a GPU adds in another order, two may be alike by chance.
                others = [twice(step) for _ in range(3 if self.device.type == "cuda" else 1)]
                self._restore([], host)
                replay = self.graphs.recorded(step, self.device)
                self._restore(before, host)
                replayed = twice(replay)
            fault = _apart(expected, others, replayed)
        except Exception as error:  # whatever is wrong with it, the ordinary step will say
            fault = f"cannot be recorded: {type(error).__name__}: {str(error).splitlines()[0]}"
            self._restore(before, host)
        self.client.terms = terms
        if fault:
            record.refuse(fault)
            self.graphs.refuse(self.name, fault)
            warn("not-recorded", f"A step of {self.name} {fault}; it is not replayed.")
        else:
            record.replay = replay

    def _replay(self, record: Record) -> None:
        client, steps = self.client, self.client.steps
        assert record.replay is not None
        record.replay()
        client.steps = steps + record.counted
        for source, passes in zip(self.ahead, record.passes):
            source.rewind(passes)
        client.terms |= record.terms
        self.graphs.replayed += 1

    def _host_numbers(self) -> tuple[object, ...]:
        """Returns what the host has now: a method may write it between steps, a schedule in one."""
        optimizer = self.client.optimizer
        groups = optimizer.param_groups if optimizer is not None else []
        said = [value for group in groups for name, value in group.items() if name != "params"]
        return (*_numbers(self.client.scratch), *_numbers(said))

    def _scratch(self) -> list[object]:
        return [_kept(leaf) for leaf in leaves_of(self.client.scratch)]

    def _host(self) -> tuple[int, list[object]]:
        return self.client.steps, [source.mark() for source in self.ahead]

    def _restore(self, saved: list[tuple[Tensor, Tensor]], host: tuple[int, list[Any]]) -> None:
        client = self.client
        client.steps, marks = host
        for source, mark in zip(self.ahead, marks):
            source.rewind(mark)
        with torch.no_grad():
            for tensor, kept in saved:
                tensor.copy_(kept)
        for parameter in client.network.parameters():
            parameter.grad = None


def _global_numbers() -> object:
    drawn = numpy.random.get_state()  # noqa: NPY002 - what a step may use
    there = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    states = [state.tolist() for state in (torch.get_rng_state(), *there)]
    return random.getstate(), str(drawn), states


def _apart(expected: list[Tensor], others: list[list[Tensor]], replayed: list[Tensor]) -> str:
    """Returns what is wrong with a replay, or nothing.

    Args:
        expected: what two steps leave.
        others: what the same steps leave, from the same state.
        replayed: what two replays leave.
    """

    def apart(tensors: list[Tensor]) -> float:
        pairs = [(one.double(), other.double()) for one, other in zip(expected, tensors)]
        alike = [(one == two) | (one.isnan() & two.isnan()) for one, two in pairs]
        shares = [
            torch.where(same, 0.0, two - one).norm() / one.nan_to_num().norm().clamp_min(TINY)
            for same, (one, two) in zip(alike, pairs)
        ]
        return float(torch.stack(shares).nan_to_num(torch.inf).max())

    steps, replays = max(map(apart, others)), apart(replayed)
    if replays > (max(CLOSE, MUCH * steps) if steps else 0.0):
        return f"is {replays:.1e} apart from its replay, relatively, and {steps:.1e} from itself"
    return ""
