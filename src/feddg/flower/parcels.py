"""What crosses the network, as Flower's records; every dtype, shape and scalar arrives as it left.

Flower's own conversions turn 0-dimensional arrays into scalars and know no bfloat16; ours keep
both. One message holds one ConfigRecord and as many ArrayRecords as it has parts with tensors, so
that FedAvg's training messages have exactly one of each.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from itertools import chain
from typing import Any

import numpy
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from feddg.federation.transport import Shape
from feddg.messages import Message, Scalar, Update, Weights, plain_text

FIELDS = "fields"
_PARTS = "parts"
_BFLOAT16 = "bfloat16"
_STYPE = "numpy.ndarray"
_COUNTS = ("examples", "images", "seconds")
DTYPES = frozenset(
    ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]
)
"""Types of numbers that may cross."""
MOST_PARTS, MOST_ENTRIES, MOST_CHARACTERS, MOST_HEADER = 16, 100_000, 4_000_000, 10_000
"""Limits of one message: parts, entries, characters of a text, bytes of an array's header."""
LONGEST_NAME = 300
"""Characters of an entry's name: the ledger keeps them."""


@dataclass
class Parcel:
    """One network message.

    Attributes:
        fields: what the transport itself needs (round, site, ...), by name without ``/``.
        parts: what server and method say to each other, by name without ``/`` and ``,``.
    """

    fields: dict[str, Scalar] = field(default_factory=dict)
    parts: dict[str, Message] = field(default_factory=dict)

    def to_records(self) -> RecordDict:
        """Returns Flower's form of it."""
        fields: dict[str, Scalar] = {**self.fields, _PARTS: ",".join(self.parts)}
        records = RecordDict()
        for part, message in self.parts.items():
            fields |= {f"{part}/{name}": value for name, value in message.scalars.items()}
            if message.tensors:
                records[part] = arrays(message.tensors)
        records[FIELDS] = ConfigRecord(dict(fields))
        return records

    @classmethod
    def from_records(cls, records: RecordDict) -> "Parcel":
        """Reads what :meth:`to_records` wrote; anything else is refused.

        Raises:
            ValueError: it is not one; says why in one harmless line.
        """
        configs, metrics = records.config_records, records.metric_records
        if list(configs) != [FIELDS] or metrics or len(records.array_records) > MOST_PARTS:
            raise ValueError("it is not laid out as a message of this federation")
        _require_short_names(records)
        config = configs[FIELDS]
        listed = config.get(_PARTS)
        if not isinstance(listed, str) or len(config) > MOST_ENTRIES:
            raise ValueError("its fields are not those of a message of this federation")
        names = [name for name in listed.split(",") if name]
        if len(names) > MOST_PARTS or not set(records.array_records) <= set(names):
            raise ValueError("its parts are not the ones it lists")
        parcel = cls(parts={name: Message() for name in names})
        for part, record in records.array_records.items():
            parcel.parts[part].tensors = tensors(record)
        for key, value in config.items():
            parcel._enter(key, value)
        return parcel

    def _enter(self, key: str, value: object) -> None:
        """Takes in one entry of the fields' record."""
        if key == _PARTS:
            return
        shown = plain_text(key, 40)
        if not isinstance(value, int | float | str | bool):
            raise ValueError(f"its entry {shown!r} is no number and no text")
        if isinstance(value, str) and len(value) > MOST_CHARACTERS:
            raise ValueError(f"its entry {shown!r} is longer than {MOST_CHARACTERS} characters")
        part, slash, name = key.partition("/")
        if not slash:
            self.fields[key] = value
        elif part in self.parts:
            self.parts[part].scalars[name] = value
        else:
            raise ValueError(f"its entry {shown!r} belongs to no part it lists")

    def part(self, name: str) -> Message:
        """Returns a part, empty if it was left out."""
        return self.parts.get(name, Message())


def update_parcel(update: Update) -> Parcel:
    """Returns an update as it leaves a site; its tensors are copied."""
    fields: dict[str, Scalar] = {
        "examples": update.examples,
        "seconds": update.seconds,
        "images": update.images,
    }
    parts = {"weights": Message(update.weights), "terms": Message({}, dict(update.terms))}
    return Parcel(fields, parts | ({"extras": update.extras} if update.extras else {}))


def contents(records: RecordDict) -> tuple[list[Shape], dict[str, Scalar]]:
    """Returns what a message holds, for the ledger: names, shapes and sizes; numbers and texts.

    Entries of the parts ``extras``, ``reply``, ``scores`` and ``introduction`` have no prefix, as
    in a ledger of the in-process transport; what the transport itself says is ``fields/...``.

    Raises:
        ValueError: its names are too many or too long to be kept.
    """
    _require_short_names(records)
    shapes = [
        (_entry(part, name), tuple(array.shape), array.dtype, len(array.data))
        for part, record in records.array_records.items()
        for name, array in record.items()
    ]
    scalars: dict[str, Scalar] = {}
    for record in records.config_records.values():
        for key, value in record.items():
            part, slash, name = key.partition("/")
            plain = value if isinstance(value, int | float | str | bool) else str(value)
            field = key if key in _COUNTS else f"fields/{key}"
            scalars[_entry(part, name) if slash else field] = plain
    return shapes, scalars


def _require_short_names(records: RecordDict) -> None:
    """Makes sure that what a message calls its entries is not the message.

    Raises:
        ValueError: they are too many, or their names too long.
    """
    held: list[Mapping[str, Any]] = [
        *records.array_records.values(),
        *records.config_records.values(),
    ]
    if sum(map(len, held)) > MOST_ENTRIES:
        raise ValueError(f"it has more than {MOST_ENTRIES} entries")
    for name in chain(records, *held):
        if len(name) > LONGEST_NAME:
            shown = plain_text(name, 40)
            raise ValueError(f"its entry {shown!r} has a name of {len(name)} characters")


def _entry(part: str, name: str) -> str:
    return name if part in ("extras", "reply", "scores", "introduction") else f"{part}/{name}"


def arrays(weights: Mapping[str, Tensor]) -> ArrayRecord:
    """Returns named tensors as Flower's arrays."""
    return ArrayRecord({name: _array(tensor) for name, tensor in weights.items()})


def tensors(record: ArrayRecord) -> Weights:
    """Returns Flower's arrays as named tensors."""
    return {name: _tensor(array) for name, array in record.items()}


def _array(tensor: Tensor) -> Array:
    own = tensor.detach().cpu().contiguous()
    if own.dtype != torch.bfloat16:
        return Array(numpy.asarray(own.numpy()))
    bits = Array(numpy.asarray(own.view(torch.int16).numpy()))
    return Array(_BFLOAT16, bits.shape, bits.stype, bits.data)


def _tensor(array: Array) -> Tensor:
    """Returns an array as a tensor. Its header is checked against its size before it is believed.

    Raises:
        ValueError: it is no whole array of a known type.
    """
    content, bfloat16 = array.data, array.dtype == _BFLOAT16
    if array.stype != _STYPE:
        raise ValueError("an array is not in numpy's format")
    stream = BytesIO(content)
    try:
        version = numpy.lib.format.read_magic(stream)
        read = {(1, 0): numpy.lib.format.read_array_header_1_0}.get(version)
        if read is None:
            raise ValueError("unknown version")
        shape, fortran, dtype = read(stream, max_header_size=MOST_HEADER)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError, OverflowError):
        raise ValueError("an array's header cannot be read") from None
    kind = numpy.dtype(numpy.int16).name if bfloat16 else str(array.dtype)
    if dtype.name not in DTYPES or dtype.name != kind or not dtype.isnative:
        shown = plain_text(dtype.str, 40)
        raise ValueError(
            f"an array's type is {shown!r}, which may not cross or is not what it says"
        )
    start = stream.tell()
    sizes = all(isinstance(length, int) and length >= 0 for length in shape)
    if not sizes or math.prod(shape) * dtype.itemsize != len(content) - start:
        raise ValueError("an array is not of the size its header says")
    if tuple(array.shape) != tuple(shape):
        raise ValueError("an array has another shape than it says")
    flat = numpy.frombuffer(content, dtype, offset=start).copy()
    found = torch.from_numpy(flat.reshape(shape, order="F" if fortran else "C"))
    return found.view(torch.bfloat16) if bfloat16 else found
