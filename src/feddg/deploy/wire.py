"""The network format: Flower's records, and the schema of every request and reply."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from itertools import chain
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

import numpy
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)
from pydantic_core import from_json
from torch import Tensor

from feddg.errors import ClientError, DataError, schema_faults
from feddg.federation.transport import Shape
from feddg.messages import Message, Scalar, Update, Weights, plain_text
from feddg.settings import OneLine

SITE_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]*"
REGISTER, STATISTICS, ASK = "query.register", "query.statistics", "query.ask"
TRAIN, EVALUATE = "train", "evaluate"
CONTEXT = "context"
FIELDS = "fields"
_PARTS = "parts"
_BFLOAT16 = "bfloat16"
_STYPE = "numpy.ndarray"
_COUNTS = ("examples", "images", "seconds")
DTYPES = frozenset(
    ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]
)
"""Number types allowed in messages."""
TARGETS = "targets"
"""What stands for the classes of sites whose programs do not name any."""
MOST_PARTS, MOST_ENTRIES, MOST_CHARACTERS = 16, 100_000, 4_000_000
"""Limits per message: parts, entries, characters of a text."""
LONGEST_NAME = 300
"""Longest name of an entry in characters, because the ledger stores it."""
LONGEST_LABEL = 200
"""Most characters of the name of a class, a domain or a column."""
MOST_CLASSES, MOST_DOMAINS, MOST_IMAGES = 2_000, 2_000, 100_000_000
"""Limits for sites; a confusion matrix grows with the square of the number of classes."""
MOST_TERMS, MOST_FILES = 64, 16


@dataclass
class Payload:
    """One network message.

    Attributes:
        fields: the transport's own values (round, site, ...), by name without ``/``.
        parts: messages between server and method, by name without ``/`` and ``,``.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Message] = field(default_factory=dict)

    def part(self, name: str) -> Message:
        """Returns a part, or an empty message if it is missing."""
        return self.parts.get(name, Message())

    def to_records(self, ready: Mapping[str, ArrayRecord] = MappingProxyType({})) -> RecordDict:
        """Returns the payload as Flower's records.

        Args:
            ready: tensors of parts that are Flower's already, by part.
        """
        fields: dict[str, Scalar] = {**self.fields, _PARTS: ",".join(self.parts)}
        records = RecordDict()
        for part, message in self.parts.items():
            fields |= {f"{part}/{name}": value for name, value in message.scalars.items()}
            if message.tensors:
                records[part] = ready[part] if part in ready else arrays(message.tensors)
        records[FIELDS] = ConfigRecord(dict(fields))
        return records

    @classmethod
    def from_records(cls, records: RecordDict) -> "Payload":
        """Reads records written by :meth:`to_records`; anything else is refused.

        Raises:
            ValueError: the records are invalid; the message gives the reason in one safe line.
        """
        if list(records.config_records) != [FIELDS] or records.metric_records:
            raise ValueError("it is not laid out as a message of this federation")
        _require_short_names(records)
        fields = dict(records.config_records[FIELDS])
        listed = fields.pop(_PARTS, None)
        names = [name for name in listed.split(",") if name] if isinstance(listed, str) else None
        if names is None or len(names) > MOST_PARTS or not set(records.array_records) <= {*names}:
            raise ValueError("its parts are not the ones it lists")
        payload = cls(parts={name: Message() for name in names})
        for part, record in records.array_records.items():
            payload.parts[part].tensors = {name: _tensor(array) for name, array in record.items()}
        for key, value in fields.items():
            shown, (part, slash, name) = plain_text(key, 40), key.partition("/")
            if not isinstance(value, int | float | str | bool):
                raise ValueError(f"its entry {shown!r} is no number and no text")
            if isinstance(value, str) and len(value) > MOST_CHARACTERS:
                raise ValueError(f"its entry {shown!r} is longer than {MOST_CHARACTERS} characters")
            if slash and part not in payload.parts:
                raise ValueError(f"its entry {shown!r} belongs to no part it lists")
            if slash:
                payload.parts[part].scalars[name] = value
            else:
                payload.fields[key] = value
        return payload

    @classmethod
    def of_update(cls, update: Update) -> "Payload":
        """Returns an update as a payload; its tensors are copied when it is sent."""
        fields = {name: getattr(update, name) for name in _COUNTS}
        parts = {"weights": Message(update.weights), "terms": Message({}, dict(update.terms))}
        return cls(fields, parts | ({"extras": update.extras} if update.extras else {}))

    def to_update(self, client: int) -> Update:
        """Returns the update in a checked reply.

        Raises:
            ValueError: it contains no update.
        """
        if "examples" not in self.fields or "weights" not in self.parts:
            raise ValueError("it sent no update")
        fields = {name: self.fields[name] for name in (*_COUNTS, "terms")}
        return Update(
            client, weights=self.parts["weights"].tensors, extras=self.part("extras"), **fields
        )


def contents(records: RecordDict) -> tuple[list[Shape], dict[str, Scalar]]:
    """Returns a message's content for the ledger: names, shapes and sizes; numbers and texts.

    Entries of the parts ``extras``, ``reply``, ``scores`` and ``registration`` have no prefix, as
    in the in-process ledger; the transport's own values are ``fields/...``.

    Raises:
        ValueError: it has too many names, or names that are too long.
    """
    _require_short_names(records)
    shapes: list[Shape] = [
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


def _entry(part: str, name: str) -> str:
    return name if part in ("extras", "reply", "scores", "registration") else f"{part}/{name}"


def _require_short_names(records: RecordDict) -> None:
    """Checks that names of entries are few and short, so that they cannot carry data.

    Raises:
        ValueError: there are too many names, or they are too long.
    """
    groups: list[Mapping[str, object]] = [
        *records.array_records.values(),
        *records.config_records.values(),
    ]
    if sum(map(len, groups)) > MOST_ENTRIES:
        raise ValueError(f"it has more than {MOST_ENTRIES} entries")
    for name in chain(records, *groups):
        if len(name) > LONGEST_NAME:
            shown = plain_text(name, 40)
            raise ValueError(f"its entry {shown!r} has a name of {len(name)} characters")


def flower_bytes(records: RecordDict) -> int:
    """Returns a message's size as counted by Flower's ``message_size_mod``."""
    # Flower's count refuses what is empty: texts, bytes and lists.
    configs = [
        ConfigRecord({key: value for key, value in record.items() if value not in ("", b"", [])})
        for record in records.config_records.values()
    ]
    arrays = sum(record.count_bytes() for record in records.array_records.values())
    return arrays + sum(record.count_bytes() for record in configs)


def arrays(weights: Weights) -> ArrayRecord:
    """Returns named tensors as a Flower ArrayRecord."""
    return ArrayRecord({name: _array(tensor) for name, tensor in weights.items()})


def _array(tensor: Tensor) -> Array:
    plain = tensor.detach().cpu().contiguous()
    if plain.dtype != torch.bfloat16:
        return Array(numpy.asarray(plain.numpy()))
    bits = Array(numpy.asarray(plain.view(torch.int16).numpy()))
    return Array(_BFLOAT16, bits.shape, bits.stype, bits.data)


def _tensor(array: Array) -> Tensor:
    """Returns an array as a tensor; nothing is unpickled.

    Raises:
        Exception: it is not a complete array of a known type.
    """
    name = "int16" if array.dtype == _BFLOAT16 else array.dtype
    if array.stype != _STYPE or name not in DTYPES:
        shown = plain_text(array.dtype, 40)
        raise ValueError(f"an array's type {shown!r} may not cross, or it is not in numpy's format")
    stream = BytesIO(array.data)
    values = numpy.lib.format.read_array(stream, allow_pickle=False)
    same = values.dtype == numpy.dtype(name) and values.shape == tuple(array.shape)
    if not same or stream.read(1):
        raise ValueError("an array has another shape, type or size than it says")
    tensor = torch.from_numpy(values)
    return tensor.view(torch.bfloat16) if array.dtype == _BFLOAT16 else tensor


# The schemas of requests and replies. They take nothing that they do not know, and convert nothing
# but lists and tables, which cross as JSON.


def _plain(name: str) -> str:
    if not name.strip() or plain_text(name, LONGEST_LABEL) != name:
        raise ValueError("a name is empty, too long or not plain")
    return name


_AsJson = BeforeValidator(lambda text: from_json(text) if isinstance(text, str) else text)
_Name = Annotated[OneLine, Field(max_length=100)]
_Label = Annotated[str, AfterValidator(_plain)]
_Count = Annotated[int, Field(ge=0, le=MOST_IMAGES)]
_Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
_Finite = Annotated[float, Field(ge=-1e12, le=1e12)]
"""A loss term: larger ones would drown those of all others in a mean."""
_SettingName = Annotated[str, Field(max_length=100, pattern=r"^[a-z0-9_.]+$")]
_ContentHash = Annotated[str, Field(max_length=40, pattern=r"^[A-Za-z0-9_-]+$")]
RunKey = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,100}$")]


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Registration(_Schema):
    """A site's registration, before anything is trained.

    Attributes:
        classes: number of images by class name.
        domains: number of images by domain name.
        files: hashes of the files that the method reads at the site, by setting.
        features: names of the columns of a table of features, in order.
    """

    classes: Annotated[dict[_Label, _Count], _AsJson, Field(max_length=MOST_CLASSES)]
    domains: Annotated[dict[_Label, _Count], _AsJson, Field(max_length=MOST_DOMAINS)]
    files: Annotated[dict[_SettingName, _ContentHash], _AsJson] = Field(
        default_factory=dict, max_length=MOST_FILES
    )
    features: Annotated[list[_Label], _AsJson, Field(max_length=MOST_ENTRIES)] = []

    @model_validator(mode="after")
    def _plausible(self) -> "Registration":
        if not 1 <= self.images <= MOST_IMAGES or sum(self.domains.values()) != self.images:
            raise ValueError("its counts by class and by domain are not those of the same images")
        return self

    @classmethod
    def of(cls, **fields: object) -> "Registration":
        """Returns the registration of these fields.

        Raises:
            DataError: the coordinator would refuse it.
        """
        with schema_faults(DataError, "The coordinator would refuse this site's images: "):
            return cls.model_validate(fields)

    @property
    def images(self) -> int:
        """The number of images at the site."""
        return sum(self.classes.values())

    @property
    def message(self) -> Message:
        """The registration as a message."""
        given = {name: counts for name, counts in self if counts}
        return Message({}, {name: json.dumps(counts) for name, counts in given.items()})


class Reply(_Schema):
    """The transport's fields in every reply.

    Attributes:
        busy: seconds that the site worked on the message.
        refusal: why the site has no usable reply.
        diverged: whether that is because its training ran away.
        missing: what the site has not received, or has lost.
    """

    busy: _Seconds = 0.0
    refusal: Annotated[str, AfterValidator(plain_text)] | None = None
    diverged: bool = False
    missing: Literal["context"] | None = None


class UpdateReply(Reply):
    """Fields of a reply with an update; see :class:`feddg.messages.Update`."""

    examples: Annotated[int, Field(ge=1, le=MOST_IMAGES)] | None = None
    seconds: _Seconds = 0.0
    images: _Count = 0
    terms: dict[_Name, _Finite] = Field(default_factory=dict, max_length=MOST_TERMS)


class RegistrationReply(Reply):
    """Fields of a reply with a registration: the site's name, and what it holds."""

    site: Annotated[str, Field(max_length=100, pattern=f"^{SITE_NAME}$")] | None = None
    registration: Registration | None = None
    missing: None = None


class Kind(NamedTuple):
    """A kind of request.

    Attributes:
        schema: the schema of a reply.
        parts: parts of a reply that are checked elsewhere.
        answered: what a reply is called in the ledger.
    """

    schema: type[Reply]
    parts: tuple[str, ...]
    answered: str


KINDS = {
    REGISTER: Kind(RegistrationReply, (), "register"),
    STATISTICS: Kind(Reply, ("reply",), "statistics"),
    TRAIN: Kind(UpdateReply, ("weights", "extras"), "update"),
    ASK: Kind(Reply, ("reply",), "answer"),
    EVALUATE: Kind(Reply, ("scores",), "scores"),
}


def read_reply(kind: str, records: RecordDict) -> Payload:
    """Returns a checked reply, without fields that are missing or empty.

    Raises:
        ClientError: the reply does not fit its schema; the message gives the reason.
        ValueError: it is no message.
    """
    payload = Payload.from_records(records)
    schema = KINDS[kind].schema
    for name in sorted(payload.parts.keys() - set(KINDS[kind].parts)):
        message = payload.parts.pop(name)
        if message.tensors:
            raise ValueError(f"its part {plain_text(name, 40)!r} holds a tensor")
        payload.fields[name] = message.scalars
    with schema_faults(ClientError, "", schema.model_fields):
        fields = schema.model_validate(payload.fields)
    return Payload({name: value for name, value in fields if value is not None}, payload.parts)


class Request(BaseModel):
    """The fields of a message to a site; a registration request has ``run`` only.

    Attributes:
        run: key under which the site stores its memory of the run.
        round: the round; 0 before the first.
        client: the site's number.
        classes: the federation's classes, in the order of their numbers.
        domains: domains of the training sites, in the order of their numbers.
        context: digest of the shared context; empty for none.
        question: name of the method's question, if there is one.
        counted: the last round in which an update of the site counted; None if unknown.
    """

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    run: RunKey
    round: Annotated[int, Field(ge=0)] = 0
    client: Annotated[int, Field(ge=0)] = 0
    classes: Annotated[list[_Label], _AsJson, Field(max_length=MOST_CLASSES)] = []
    domains: Annotated[list[_Label], _AsJson, Field(max_length=MOST_DOMAINS)] = []
    context: Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}$")] = ""
    question: Annotated[str, Field(max_length=200)] = ""
    counted: Annotated[int, Field(ge=0)] | None = None

    @classmethod
    def read(cls, payload: Payload) -> "Request":
        """Reads the fields of a message.

        Raises:
            ClientError: the fields are invalid.
        """
        with schema_faults(ClientError, "the coordinator's message: ", cls.model_fields):
            return cls.model_validate(payload.fields)
