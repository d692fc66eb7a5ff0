"""Messages: named tensors and scalars, the only thing that crosses between client and server."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

Scalar = int | float | str | bool
Weights = dict[str, Tensor]
T = TypeVar("T")

SCALAR_BYTES = 8
"""Bytes of a number or flag in the ledger; a text counts its UTF-8 length."""


ALIGNED = 64
"""Bytes between whose multiples tensors begin in a shared buffer."""
MOST_ROWS = 1_000_000
"""Largest dimension that only the sender knows (a number of images or styles)."""
MOST_NUMBERS = 2**28
"""Largest number of entries of one declared tensor: 1 GB in float32."""
MOST_TEXT = 500
"""Most characters kept of a text from outside."""
_NOT_FINITE = "is not finite (NaN or infinite)"
LARGEST = 1e6
"""Largest absolute value of a number whose schema has no range.

Sums, squares and products over a million clients stay finite in float32.
"""


def view_in(
    buffer: Tensor, start: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """Returns the tensor that lies in a buffer of bytes from ``start`` on."""
    size = math.prod(shape) * dtype.itemsize
    return buffer[start : start + size].view(dtype).as_strided(shape, stride)


def after(start: int, size: int) -> int:
    """Returns where the next tensor may begin in a buffer after one of ``size`` bytes."""
    return -(-(start + size) // ALIGNED) * ALIGNED


def on_device(tensors: Weights, device: torch.device) -> Weights:
    """Returns named tensors on ``device``, in a new dictionary.

    Those from the host's memory go to an accelerator together, in one copy from pinned memory: the
    host waits for every copy from ordinary memory until the device has nothing left to do. They
    keep their order in memory, and are views of one buffer there.
    """
    if device.type == "cpu" or all(tensor.device.type != "cpu" for tensor in tensors.values()):
        return {name: tensor.to(device) for name, tensor in tensors.items()}
    packed = Packed({name: t for name, t in tensors.items() if t.device.type == "cpu"})
    there = packed.parts(packed.buffer.pin_memory().to(device, non_blocking=True))
    return {name: there[name] if name in there else t.to(device) for name, t in tensors.items()}


class Packed:
    """Named tensors of one device, one after the other in one buffer there.

    Attributes:
        buffer: ``(bytes,)`` uint8.
        layout: name, place, type, shape and order in memory of each.
    """

    def __init__(self, tensors: Weights) -> None:
        layout: list[tuple[str, int, torch.dtype, torch.Size, tuple[int, ...]]] = []
        end, device = 0, torch.device("cpu")
        for name, tensor in tensors.items():
            like, device = torch.empty_like(tensor, device="meta"), tensor.device
            layout.append((name, end, like.dtype, like.shape, like.stride()))
            end = after(end, like.nbytes)
        self.layout = tuple(layout)
        self.buffer = torch.empty(end, dtype=torch.uint8, device=device)
        for name, part in self.parts(self.buffer).items():
            part.copy_(tensors[name].detach())

    def parts(self, buffer: Tensor) -> Weights:
        """Returns the tensors as views of the buffer, or of a copy of it elsewhere."""
        return {
            name: view_in(buffer, start, dtype, shape, stride)
            for name, start, dtype, shape, stride in self.layout
        }


# Whole states at once: on a device that is a launch for each type, not for each tensor.


@torch.no_grad()
def copy_all(places: Iterable[Tensor], tensors: Iterable[Tensor]) -> None:
    """Copies tensors into others of the same shapes, in place."""
    alike: dict[tuple[torch.dtype, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for pair in zip(places, tensors, strict=True):
        alike.setdefault((pair[0].dtype, pair[1].dtype), []).append(pair)
    for pairs in alike.values():
        torch._foreach_copy_([place for place, _ in pairs], [tensor for _, tensor in pairs])


def copied(tensors: Weights) -> Weights:
    """Returns copies of named tensors, each in its order in memory."""
    copies = {name: torch.empty_like(tensor.detach()) for name, tensor in tensors.items()}
    copy_all(copies.values(), tensors.values())
    return copies


@torch.no_grad()
def differences(ones: Weights, others: Weights, names: Iterable[str]) -> Weights:
    """Returns tensors less others of the same names, in the types and places of the first ones."""
    names = list(names)
    first = [ones[name] for name in names]
    second = [others[name].to(one) for name, one in zip(names, first)]
    return dict(zip(names, torch._foreach_sub(first, second))) if names else {}


def add_to(totals: Weights, tensors: Weights) -> None:
    """Adds tensors to totals of the same names, in place; the first of a name is copied."""
    if begun := [name for name in tensors if name in totals]:
        torch._foreach_add_([totals[name] for name in begun], [tensors[name] for name in begun])
    totals |= copied({name: tensor for name, tensor in tensors.items() if name not in totals})


def sent_together(groups: Sequence[Weights], device: torch.device) -> list[Weights]:
    """Returns groups of named tensors on ``device``, sent in one copy (:func:`on_device`)."""
    named = {f"{place}/{n}": t for place, group in enumerate(groups) for n, t in group.items()}
    sent = on_device(named, device)
    return [{name: sent[f"{place}/{name}"] for name in names} for place, names in enumerate(groups)]


def on_host(figures: Sequence[Tensor | float]) -> list[float]:
    """Returns figures as floats; the host waits only once for those on a device."""
    away: dict[torch.dtype, dict[int, Tensor]] = {}
    for place, figure in enumerate(figures):
        if isinstance(figure, Tensor) and figure.device.type != "cpu":
            away.setdefault(figure.dtype, {})[place] = figure.detach()
    fetched: dict[int, float] = {}
    if away:  # a launch for each type, not for each number; together they would lose digits
        alike = [torch.stack(list(group.values())).double() for group in away.values()]
        places = [place for group in away.values() for place in group]
        whole = alike[0] if len(alike) == 1 else torch.cat(alike)
        fetched = dict(zip(places, whole.tolist()))
    return [fetched[n] if n in fetched else float(f) for n, f in enumerate(figures)]


@dataclass
class Message:
    """Named tensors and scalars.

    Attributes:
        tensors: tensors by name.
        scalars: numbers, flags and short texts by name.
    """

    tensors: Weights = field(default_factory=dict)
    scalars: dict[str, Scalar] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.tensors or self.scalars)

    @property
    def size(self) -> int:
        """Bytes of the content: tensor bytes, 8 per number or flag, UTF-8 length per text."""
        tensors = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())
        return tensors + sum(scalar_bytes(scalar) for scalar in self.scalars.values())

    def to_bytes(self) -> bytes:
        """Serialises to safetensors, with the scalars as JSON in its metadata."""
        tensors = {
            name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()
        }
        return save_tensors(tensors, metadata={"scalars": json.dumps(self.scalars)})

    @classmethod
    def from_bytes(cls, content: bytes) -> "Message":
        """Reads what :meth:`to_bytes` wrote."""
        header_length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + header_length])
        scalars = json.loads(header.get("__metadata__", {}).get("scalars", "{}"))
        return cls(load_tensors(content), scalars)

    def keep(self) -> "Message":
        """Returns a copy that stays valid when the sender changes its tensors."""
        return Message(copied(self.tensors), dict(self.scalars))


def joined(*messages: Message | None) -> Message:
    """Returns one message with the contents of several messages.

    Raises:
        ValueError: two of them use the same name.
    """
    whole = Message()
    for message in filter(None, messages):
        for mine, other in ((whole.tensors, message.tensors), (whole.scalars, message.scalars)):
            taken = mine.keys() & other.keys()
            if taken:
                raise ValueError(f"two messages to be joined both hold {sorted(taken)[0]!r}")
            mine.update(other)  # type: ignore[arg-type]
    return whole


def prefixed(prefix: str, message: Message) -> Message:
    """Returns the entries of a message under longer names."""
    return Message(
        {prefix + name: tensor for name, tensor in message.tensors.items()},
        {prefix + name: scalar for name, scalar in message.scalars.items()},
    )


def under(prefix: str, message: Message) -> Message:
    """Returns the entries whose names begin with a prefix, with the prefix removed."""
    cut = len(prefix)
    return Message(
        {name[cut:]: t for name, t in message.tensors.items() if name.startswith(prefix)},
        {name[cut:]: s for name, s in message.scalars.items() if name.startswith(prefix)},
    )


def scalar_bytes(scalar: Scalar) -> int:
    """Returns the bytes of ``scalar`` for the ledger."""
    return len(scalar.encode()) if isinstance(scalar, str) else SCALAR_BYTES


@dataclass
class Broadcast:
    """The message to a client for training, or for a question.

    Attributes:
        round: the round it belongs to, from 1; 0 is the setup before training.
        weights: entries of the network's state.
        extras: whatever else the method sends (control variates, prototypes, ...).
    """

    round: int
    weights: Weights = field(default_factory=dict)
    extras: Message = field(default_factory=Message)


@dataclass
class Update:
    """The message of a client after training.

    Its tensors may be the client's live weights: they are valid until the next update is drawn.
    A method that collects updates calls :meth:`keep`.

    Attributes:
        client: the client's id.
        examples: number of training images, at least 1.
        weights: entries of the network's state after local training.
        extras: what the method reports besides the weights.
        terms: mean of each named loss term over the client's steps; a log, not a message.
        seconds: time the client spent training; a log, not a message.
        images: images of its training steps, each counted once per step; a log, not a message.
        members: the clients whose mean this update is; empty for one client's own update.
        moved: how far the weights lie from those that were sent, if the process that trained the
            client and the server's are one run's (:func:`feddg.privacy.robust.moved`); None from
            outside, where the server measures it. A site cannot set it.
    """

    client: int
    examples: int
    weights: Weights
    extras: Message = field(default_factory=Message)
    terms: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    images: int = 0
    members: tuple[int, ...] = ()
    moved: float | None = None

    @property
    def clients(self) -> tuple[int, ...]:
        """The clients of the update."""
        return self.members or (self.client,)

    def keep(self) -> "Update":
        """Returns a copy whose tensors stay valid after the next update is drawn.

        It may be changed, so it does not know how far it moved.
        """
        return replace(self, weights=copied(self.weights), extras=self.extras.keep(), moved=None)


@dataclass(frozen=True)
class Refusal:
    """A client without a usable message, the reason, and whether its training ran away."""

    client: int
    reason: str
    diverged: bool = False


def first_not_finite(tensors: Weights) -> str | None:
    """Returns the first name whose float tensor holds a NaN or infinity, or None."""
    return first_fault([not_finite(tensors)])


Read = tuple[Sequence[Tensor], Callable[[list[float]], T]]
"""Figures of tensors, of one entry each, and what is made of their numbers."""
Check = Read[str | None]
"""What says by the numbers what is wrong, or None."""


def read(wanted: Iterable[Read[T]]) -> list[T]:
    """Returns what is made of figures; the host waits for a device once for all."""
    wanted = list(wanted)
    numbers = iter(on_host([figure for figures, _ in wanted for figure in figures]))
    return [make(list(islice(numbers, len(figures)))) for figures, make in wanted]


def not_finite(tensors: Weights) -> Check:
    """Returns the check of :func:`first_not_finite`."""
    named = {n: t for n, t in tensors.items() if t.is_floating_point() and t.numel()}

    def first(norms: list[float]) -> str | None:
        if all(math.isfinite(norm) for norm in norms):
            return None
        # The norm of finite float32 entries can overflow: a bad one is confirmed entry by entry.
        return next((name for name, tensor in named.items() if not tensor.isfinite().all()), None)

    norms = torch._foreach_norm([tensor.detach() for tensor in named.values()]) if named else ()
    return [torch.linalg.vector_norm(torch.stack(norms))] if norms else [], first


def first_fault(checks: Iterable[Check]) -> str | None:
    """Returns the first fault that checks find; the host waits for a device once for all."""
    return next((fault for fault in read(checks) if fault is not None), None)


def found(fault: str | None) -> Check:
    """Returns a check whose outcome is known."""
    return (), lambda _: fault


# Declared schemas: what a value from outside must be, checked before anybody works with it.
#
# A site may be broken, or hostile. Whatever it says is compared with what was declared: names,
# shapes, types, ranges and sizes. A fault is one sentence that says what is wrong; it holds
# nothing of the value but short, harmless text.


Dimension = int | str
"""A length, or the name of a known dimension or of one that only the sender knows."""
Shape = tuple[Dimension, ...]


@dataclass(frozen=True)
class SchemaContext:
    """What the receiver knows about the federation, for schemas that depend on it.

    Attributes:
        classes: number of classes.
        clients: number of clients.
        features: length of an embedding.
        image_size: side of the training images in pixels; 0 if unknown.
        shapes: shapes of the network's entries by name.
        images: number of the sender's images; None if it did not register.
        noise: how styles are noised before they leave a client; None for no noise.
        server_extras: the server's extras in an update's round.
        classifies: whether the task is classification; the loss of another may be below 0.
        whole: whether all that is trained at all is trained in an update's round; not so in head
            rounds.
        gradients: for an update: returns the largest changes of network entries, by their names,
            per step and learning rate; None if unknown.
    """

    classes: int
    clients: int
    features: int
    image_size: int = 0
    shapes: Mapping[str, torch.Size] | None = None
    images: int | None = None
    noise: Any = None
    server_extras: Mapping[str, Tensor] = field(default_factory=dict)
    classifies: bool = True
    whole: bool = True
    gradients: Callable[[Iterable[str]], list[Tensor]] | None = None

    @property
    def dimensions(self) -> dict[str, int]:
        """The known dimensions by name."""
        return {"classes": self.classes, "clients": self.clients, "features": self.features}


Range = tuple[float | Tensor, float | Tensor]
"""Smallest and largest value: for all values, or as tensors with one for each."""


@dataclass(frozen=True)
class EntrySchema:
    """The schema of one entry of a message.

    Attributes:
        what: its meaning, for people.
        shape: shape of a tensor: lengths, names of known dimensions (``classes``, ``clients``,
            ``features``), or other names, which are free but equal throughout a message; or a
            function of the method and the context. None for a number.
        dtype: dtype of a tensor.
        integer: whether a number is whole.
        distinct: whether the values of a tensor must all differ.
        low: smallest value.
        high: largest value, or the name of a known dimension as exclusive limit.
        within: returns the range instead, from the method, the context and the entry's name.
        rows: largest length of a dimension that only the sender knows: ``images`` for the sender's
            number of images, or a known dimension.
        entry_of: prefix before the name of a network entry with the same shape.
        beyond: for all network entries of a message together, in place of a range: returns how far
            every value lies outside what is possible, at most 0 inside, by the names it knows.
        when: whether a method with its settings sends the entry; by default always.
    """

    what: str
    shape: Shape | Callable[[Any, SchemaContext], Shape] | None = None
    dtype: torch.dtype = torch.float32
    integer: bool = False
    distinct: bool = False
    low: float = -LARGEST
    high: float | str = LARGEST
    within: Callable[[Any, SchemaContext, str], Range] | None = None
    rows: str = "images"
    entry_of: str | None = None
    beyond: Callable[[Any, SchemaContext, Weights], Weights] | None = None
    when: Callable[[Any], bool] | None = None

    def __str__(self) -> str:
        return self.what

    def sent_by(self, method: Any) -> bool:
        """Whether a method with its settings sends the entry."""
        return self.when is None or bool(self.when(method))

    def tensor_check(
        self, method: Any, context: SchemaContext, name: str, tensor: Tensor, bound: dict[str, int]
    ) -> Check:
        """Returns a check that says what is wrong with a tensor, if anything.

        Args:
            method: the method with this schema.
            context: what is known of the federation.
            name: the entry's name.
            tensor: its content.
            bound: free dimensions seen so far in this message; extended.
        """
        fault = self._form_fault(method, context, name, tensor, bound)
        if fault or self.beyond:  # which :meth:`possible` asks for all entries at once
            return found(fault)
        return _range_check(tensor, *self._range(method, context, name))

    def possible(self, method: Any, context: SchemaContext, tensors: Weights) -> Check:
        """Returns a check that says which entries of the right form are impossible."""
        beyond = self.beyond(method, context, tensors) if self.beyond else {}
        if unknown := tensors.keys() - beyond.keys():
            return found(f"has the unknown entry {plain_text(min(unknown), 60)!r}")

        def first(most: list[float]) -> str | None:
            if all(number <= 0 for number in most):
                return None
            name = next(n for n, each in beyond.items() if not (each <= 0).all())
            value = float(tensors[name][~(beyond[name] <= 0)][0])
            shown = f"has an impossible value of {value:g}" if math.isfinite(value) else _NOT_FINITE
            return f"its {plain_text(name, 60)!r} {shown}"

        filled = [tensor for tensor in beyond.values() if tensor.numel()]
        return [torch.stack(torch._foreach_max(filled)).amax()] if filled else [], first

    def _form_fault(
        self, method: Any, context: SchemaContext, name: str, tensor: Tensor, bound: dict[str, int]
    ) -> str | None:
        shape = self._shape(method, context, name)
        if shape is None:
            return "must be a number, not a tensor"
        if tensor.dtype != self.dtype:
            return f"is {_name(tensor.dtype)}, expected {_name(self.dtype)}"
        if tensor.dim() != len(shape):
            return f"has shape {_short(tensor.shape)}, expected {_short(shape)}"
        for length, wanted in zip(tensor.shape, shape):
            if not _fits(length, wanted, context, bound, self._most_rows(context)):
                return f"has shape {_short(tensor.shape)}, expected {_short(shape)}"
        if tensor.numel() > MOST_NUMBERS:
            return f"has {tensor.numel()} numbers, more than {MOST_NUMBERS}"
        if self.distinct and len(tensor.unique()) < tensor.numel():
            return "holds a number twice"
        return None

    def number_fault(
        self, method: Any, context: SchemaContext, name: str, value: object
    ) -> str | None:
        """Returns what is wrong with a number, or None; see :meth:`tensor_check`."""
        if self.shape is not None:
            return "must be a tensor, not a number"
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"is {type(value).__name__}, expected a number"
        if self.integer and not isinstance(value, int):
            return "must be a whole number"
        if isinstance(value, float) and not math.isfinite(value):
            return _NOT_FINITE
        low, high = self._range(method, context, name)
        # A whole number may be too large to be written as a fraction, or to be read at all.
        shown = f"{value:g}" if abs(value) < 1e300 else "enormous"
        return None if low <= value <= high else f"is {shown}, outside {low:g} .. {high:g}"

    def _shape(self, method: object, context: SchemaContext, name: str) -> Shape | None:
        if self.entry_of is not None:
            shape = (context.shapes or {}).get(name.removeprefix(self.entry_of))
            return None if shape is None else tuple(shape)
        return self.shape(method, context) if callable(self.shape) else self.shape

    def _range(self, method: object, context: SchemaContext, name: str) -> Range:
        if self.within is not None:
            return self.within(method, context, name)
        if isinstance(self.high, str):
            return self.low, context.dimensions[self.high] - 1
        return self.low, self.high

    def _most_rows(self, context: SchemaContext) -> int:
        most = context.images if self.rows == "images" else context.dimensions[self.rows]
        return MOST_ROWS if most is None else min(most, MOST_ROWS)


def _range_check(tensor: Tensor, low: float | Tensor, high: float | Tensor) -> Check:
    """Returns what finds values outside their range; NaN is outside."""
    if not tensor.numel():
        return found(None)
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        lows, highs = (_like(tensor, bound) for bound in (low, high))
        bad = ~((tensor >= lows) & (tensor <= highs) & torch.isfinite(tensor))

        def first(any_bad: list[float]) -> str | None:
            if not any(any_bad):
                return None
            value, least, most = (float(each[bad][0]) for each in (tensor, lows, highs))
            if not math.isfinite(value):
                return _NOT_FINITE
            return f"has a value of {value:g}, outside {least:g} .. {most:g}"

        return [bad.any()], first

    # A number at a limit may be rounded beyond it, and the limit is then rounded as it is.
    kind = tensor.dtype if tensor.is_floating_point() else torch.float64
    least, most = (float(torch.tensor(bound, dtype=kind)) for bound in (low, high))

    def outside(ends: list[float]) -> str | None:
        smallest, largest = ends
        if not (math.isfinite(smallest) and math.isfinite(largest)):
            return _NOT_FINITE
        if smallest >= least and largest <= most:
            return None
        return f"has values from {smallest:g} to {largest:g}, outside {low:g} .. {high:g}"

    return torch.aminmax(tensor), outside


def _like(tensor: Tensor, bound: float | Tensor) -> Tensor:
    sent = on_device({"bound": torch.as_tensor(bound, dtype=tensor.dtype)}, tensor.device)
    return sent["bound"].expand_as(tensor)


def plain_text(value: object, most: int = MOST_TEXT) -> str:
    """Returns a text from outside as one safe line: no control characters, limited length."""
    text = str(value)[: most + 1]
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= most else line[: most - 1] + "…"


def _fits(
    length: int, wanted: Dimension, context: SchemaContext, bound: dict[str, int], most: int
) -> bool:
    if isinstance(wanted, int):
        return length == wanted
    if wanted in context.dimensions:
        return length == context.dimensions[wanted]
    return 1 <= length <= most and bound.setdefault(wanted, length) == length


def _short(shape: Sequence[object]) -> str:
    return "(" + ", ".join(str(length) for length in list(shape)[:8]) + ")"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
