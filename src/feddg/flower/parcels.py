"""What crosses the network, as Flower's records; every dtype, shape and scalar arrives as it left.

Flower's own conversions turn 0-dimensional arrays into scalars and know no bfloat16; ours keep
both. One message holds one ConfigRecord and as many ArrayRecords as it has parts with tensors, so
that FedAvg's training messages have exactly one of each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from feddg.messages import Message, Scalar, Update, Weights

FIELDS = "fields"
_PARTS = "parts"
_BFLOAT16 = "bfloat16"


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
        """Reads what :meth:`to_records` wrote."""
        config = records.config_records[FIELDS]
        names = [name for name in str(config[_PARTS]).split(",") if name]
        parcel = cls(parts={name: Message() for name in names})
        for part, record in records.array_records.items():
            parcel.parts[part].tensors = tensors(record)
        for key, value in config.items():
            part, slash, name = key.partition("/")
            if slash:
                parcel.parts[part].scalars[name] = value  # type: ignore[assignment]
            elif key != _PARTS:
                parcel.fields[key] = value  # type: ignore[assignment]
        return parcel

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


def parcel_update(client: int, parcel: Parcel) -> Update:
    """Returns the update that a site sent.

    Raises:
        ValueError: the parcel is not an update.
    """
    fields = parcel.fields
    if "examples" not in fields or "weights" not in parcel.parts:
        raise ValueError("it sent no update")
    return Update(
        client,
        int(fields["examples"]),
        parcel.part("weights").tensors,
        parcel.part("extras"),
        {name: float(value) for name, value in parcel.part("terms").scalars.items()},
        float(fields.get("seconds", 0.0)),
        int(fields.get("images", 0)),
    )


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
    found = torch.from_numpy(numpy.asarray(array.numpy()))
    return found.view(torch.bfloat16) if array.dtype == _BFLOAT16 else found
