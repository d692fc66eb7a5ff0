"""What crosses the network: Flower's records, and the declared form of every request and reply."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    ValidationError,
    field_validator,
    model_validator,
)
from torch import Tensor

from feddg.errors import ClientError, DataError, RunError
from feddg.federation.transport import Shape
from feddg.messages import Message, Scalar, Update, Weights, names_fault, plain_text
from feddg.records import JsonFile, TrafficRow
from feddg.storage import append_text

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


# What a site may reply: the declared form of every kind of reply, checked before it is used.


MOST_CLASSES, MOST_DOMAINS, MOST_IMAGES = 2_000, 2_000, 100_000_000
"""Limits of what sites hold: a table of true against predicted classes has the classes' square."""
MOST_TERMS = 64

MOST_FILES = 16

SettingName = Annotated[str, Field(max_length=100, pattern=r"^[a-z0-9_.]+$")]
ContentHash = Annotated[str, Field(max_length=40, pattern=r"^[A-Za-z0-9_-]+$")]
Count = Annotated[int, Field(ge=0, le=MOST_IMAGES)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class _Declared(BaseModel):
    """A form that takes nothing it does not know, and converts nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ReplyFields(_Declared):
    """What the transport itself reads in every reply.

    Attributes:
        busy: seconds that the site's code worked on the message.
        refusal: why the site has nothing usable to say.
        missing: what the site was not told, or has lost.
    """

    busy: Seconds = 0.0
    refusal: str | None = None
    missing: Literal["context"] | None = None

    @field_validator("refusal")
    @classmethod
    def _harmless(cls, text: str | None) -> str | None:
        return None if text is None else plain_text(text)


class UpdateFields(ReplyFields):
    """The fields of an update; see :class:`feddg.messages.Update`."""

    examples: Annotated[int, Field(ge=1, le=MOST_IMAGES)] | None = None
    seconds: Seconds = 0.0
    images: Count = 0


class IntroductionFields(ReplyFields):
    """The field of an introduction: which site it is."""

    site: Annotated[str, Field(max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")] | None = (
        None
    )
    missing: None = None


class Introduction(_Declared):
    """What a site says about itself before anything is trained.

    Attributes:
        classes: images by class name.
        domains: images by domain name.
        files: hashes of the files that the method reads there, by the setting that names them.
    """

    classes: dict[str, Count]
    domains: dict[str, Count]
    files: dict[SettingName, ContentHash] = Field(default_factory=dict, max_length=MOST_FILES)

    @model_validator(mode="before")
    @classmethod
    def _as_json(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        return {key: json.loads(v) if isinstance(v, str) else v for key, v in content.items()}

    @model_validator(mode="after")
    def _plausible(self) -> "Introduction":
        parts = (("class", self.classes, MOST_CLASSES), ("domain", self.domains, MOST_DOMAINS))
        for what, counts, most in parts:
            fault = names_fault(list(counts), what, most)
            if fault is not None:
                raise ValueError(fault)
        images = self.images
        if not 1 <= images <= MOST_IMAGES or sum(self.domains.values()) != images:
            raise ValueError("its counts by class and by domain are not those of the same images")
        return self

    @classmethod
    def of(
        cls,
        classes: Mapping[str, int],
        domains: Mapping[str, int],
        files: Mapping[str, str] | None = None,
    ) -> "Introduction":
        """Returns the introduction of a site that holds these images, and reads these files.

        Raises:
            DataError: its folders have names that cannot cross.
        """
        try:
            return cls(classes=dict(classes), domains=dict(domains), files=dict(files or {}))
        except ValidationError as error:
            raise DataError(
                f"This site's folder of images {explained(error)}; rename or empty it, "
                "as the coordinator would refuse it."
            ) from None

    @property
    def images(self) -> int:
        """How many images the site holds."""
        return sum(self.classes.values())

    @property
    def message(self) -> Message:
        """The introduction as it crosses."""
        parts: dict[str, Mapping[str, Any]] = {"classes": self.classes, "domains": self.domains}
        parts |= {"files": self.files} if self.files else {}
        return Message({}, {name: json.dumps(counts) for name, counts in parts.items()})


FORMS: dict[str, tuple[type[ReplyFields], frozenset[str]]] = {
    "query.introduce": (IntroductionFields, frozenset({"introduction"})),
    "query.statistics": (ReplyFields, frozenset({"reply"})),
    "train": (UpdateFields, frozenset({"weights", "extras", "terms"})),
    "query.ask": (ReplyFields, frozenset({"reply"})),
    "evaluate": (ReplyFields, frozenset({"scores"})),
}
"""The fields and the parts of a reply, by the kind of the message that it answers."""


def read_fields(kind: str, parcel: Parcel) -> dict[str, Scalar]:
    """Returns the checked fields of a reply; those that were left out or are empty are not there.

    Raises:
        ValueError: the reply has not the form of its kind; says why in one harmless line.
    """
    form, parts = FORMS[kind]
    strange = sorted(parcel.parts.keys() - parts)
    if strange:
        raise ValueError(f"it has an unknown part {plain_text(strange[0], 40)!r}")
    try:
        return form.model_validate(parcel.fields).model_dump(exclude_none=True)
    except ValidationError as error:
        raise ValueError(explained(error)) from None


def read_update(client: int, parcel: Parcel) -> Update:
    """Returns the update in a reply whose fields were checked.

    Raises:
        ValueError: the reply holds none, or its loss terms are not a few numbers.
    """
    fields = parcel.fields
    if "examples" not in fields or "weights" not in parcel.parts:
        raise ValueError("it sent no update")
    return Update(
        client,
        int(fields["examples"]),
        parcel.part("weights").tensors,
        parcel.part("extras"),
        _terms(parcel),
        float(fields.get("seconds", 0.0)),
        int(fields.get("images", 0)),
    )


def read_introduction(parcel: Parcel) -> Introduction:
    """Returns a site's checked introduction.

    Raises:
        ValueError: it has not the form of one.
    """
    message = parcel.part("introduction")
    if message.tensors:
        raise ValueError("its introduction holds a tensor")
    try:
        return Introduction.model_validate(message.scalars)
    except ValidationError as error:
        raise ValueError(f"its introduction: {explained(error)}") from None
    except (ValueError, RecursionError):
        raise ValueError("its introduction is not JSON") from None


def _terms(parcel: Parcel) -> dict[str, float]:
    message = parcel.part("terms")
    if message.tensors or len(message.scalars) > MOST_TERMS:
        raise ValueError(f"its loss terms are not {MOST_TERMS} or fewer numbers")
    terms: dict[str, float] = {}
    for name, value in message.scalars.items():
        known = isinstance(value, int | float) and not isinstance(value, bool)
        terms[name] = float(value) if known else math.nan
        if not math.isfinite(terms[name]) or plain_text(name, 100) != name:
            raise ValueError(f"its loss term {plain_text(name, 40)!r} is not a finite number")
    return terms


def explained(error: ValidationError) -> str:
    """Returns the first fault as one harmless line."""
    fault = error.errors(include_url=False)[0]
    where = plain_text(".".join(str(part) for part in fault["loc"]), 60)
    said = plain_text(fault["msg"].removeprefix("Value error, "), 200)
    return f"{where}: {said}" if where else said


# What a deployment knows of its sites from one start to the next: ``deployment.json``.


RunKey = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,100}$")]


class RunFile(JsonFile):
    """A run over Flower.

    Attributes:
        run: key under which sites keep their memory of it.
    """

    run: RunKey


class DeploymentFile(RunFile):
    """A deployment, and who joined it with what.

    Attributes:
        sites: names of the sites that train; a site's place is its number.
        classes: the federation's classes, in the order of their numbers.
        domains: domains that sites train on, in the order of their numbers.
        keys: fingerprint of the key that each site's name belongs to.
        images: how many images sites introduced themselves with, by their names.
    """

    sites: list[str]
    classes: list[str]
    domains: list[str]
    keys: dict[str, str] = Field(default_factory=dict)
    images: dict[str, NonNegativeInt] = Field(default_factory=dict)

    def require_sites(self, names: Sequence[str]) -> None:
        """Makes sure that the sites are those that the run was begun with.

        Raises:
            RunError: they are others, or in another order, which would exchange their numbers.
        """
        if list(names) != self.sites:
            raise RunError(
                f"this run was begun with the sites {', '.join(self.sites)}, in this order; the "
                f"app's config names {', '.join(names)}: put them back, or start a new run"
            )

    def joined(
        self, domains: Mapping[str, int], keys: Mapping[str, str], images: Mapping[str, int]
    ) -> "DeploymentFile":
        """Returns the deployment after a site joined.

        Args:
            domains: those that it trains on; new ones are numbered as they come.
            keys: of all names known by now.
            images: of all sites that joined by now.
        """
        numbered = list(dict.fromkeys([*self.domains, *domains]))
        new = {"domains": numbered, "keys": dict(keys), "images": dict(images)}
        return self.model_copy(update=new)


# What a site is told beside weights, and its declared form: checked before it is worked with.


class Order(BaseModel):
    """The fields of a message to a site; one that only introduces itself is told the run alone.

    Attributes:
        run: key under which the site keeps its memory of the run.
        round: the round, 0 before the first.
        client: the site's number.
        classes: the federation's classes, in the order of their numbers.
        domains: domains that sites train on, in the order of their numbers.
        agreed: digest of what was agreed before round 1; empty for nothing.
        question: name of the method's question, where there is one.
    """

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    run: RunKey
    round: Annotated[int, Field(ge=0)] = 0
    client: Annotated[int, Field(ge=0)] = 0
    classes: list[str] = Field(default_factory=list)
    domains: list[str] = Field(default_factory=list)
    context: Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}$")] = ""
    question: Annotated[str, Field(max_length=200)] = ""

    @field_validator("classes", "domains", mode="before")
    @classmethod
    def _from_json(cls, text: Any) -> Any:
        return json.loads(text) if isinstance(text, str) else text

    @field_validator("classes", "domains")
    @classmethod
    def _plain(cls, names: list[str], info: Any) -> list[str]:
        what, most = {"classes": ("class", MOST_CLASSES), "domains": ("domain", MOST_DOMAINS)}[
            info.field_name
        ]
        fault = names_fault(names, what, most) if names else None
        if fault is not None:
            raise ValueError(fault)
        return names

    @classmethod
    def read(cls, parcel: Parcel) -> "Order":
        """Reads the fields of a message.

        Raises:
            ClientError: they are not what a coordinator sends.
        """
        try:
            return cls.model_validate(parcel.fields)
        except ValidationError as error:
            raise ClientError(f"the coordinator's message: {explained(error)}") from None
        except RecursionError:
            raise ClientError("the coordinator's message: it is nested too deeply") from None


# What each message cost: seconds by where they went, bytes as Flower counts them.


BUSY = "busy"
"""Field of a reply: seconds that the site's code worked on the message."""


def flower_bytes(records: RecordDict) -> int:
    """Returns a message's size as Flower's ``message_size_mod`` counts it."""
    # Flower's count refuses what is empty: texts, bytes and lists.
    configs = [
        ConfigRecord({key: value for key, value in record.items() if value not in ("", b"", [])})
        for record in records.config_records.values()
    ]
    arrays = sum(record.count_bytes() for record in records.array_records.values())
    return arrays + sum(record.count_bytes() for record in configs)


@dataclass
class Crossing:
    """A message on its way.

    Attributes:
        at: when it was sent, seconds since 1970.
        kind: what it asks for.
        round: the round it belongs to.
        site: to whom it goes.
        bytes_down: its size.
        began: when it was sent, by a clock that only runs forwards.
    """

    at: float
    kind: str
    round: int
    site: str
    bytes_down: int
    began: float


class Traffic:
    """Writes one row for every message that was answered.

    Args:
        write: called with each row.
    """

    def __init__(self, write: Callable[[TrafficRow], None] = lambda row: None) -> None:
        self._write = write
        self._crossings: dict[str, Crossing] = {}

    def begin(self, kind: str, round: int, site: str, records: RecordDict) -> Crossing:
        """Says that a message is about to go out."""
        return Crossing(time.time(), kind, round, site, flower_bytes(records), time.monotonic())

    def sent(self, message: str, crossing: Crossing) -> None:
        """Enters the id under which it went."""
        self._crossings[message] = crossing

    def answered(self, message: str, records: RecordDict, parcel: Parcel) -> None:
        """Writes the row of a message that was answered."""
        crossing = self._crossings.pop(message, None)
        if crossing is None:
            return
        fields = parcel.fields
        row = TrafficRow(
            at=crossing.at,
            kind=crossing.kind,
            round=crossing.round,
            site=crossing.site,
            bytes_down=crossing.bytes_down,
            bytes_up=flower_bytes(records),
            seconds=time.monotonic() - crossing.began,
            busy=float(fields.get(BUSY, 0.0)),
            train=float(fields.get("seconds", 0.0)),
        )
        self._write(row)


def append_to(file: Path) -> Callable[[TrafficRow], None]:
    """Returns a writer that appends rows to a file of JSON lines."""

    def write(row: TrafficRow) -> None:
        append_text(file, row.to_json() + "\n")

    return write
