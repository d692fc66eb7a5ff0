"""What a hostile site may send in place of an honest reply, by kind of reply."""

import io
import json
from collections.abc import Callable
from typing import Any

import numpy
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from hostile_grid import Change


def field(key: str, value: Any) -> Change:
    """Sets an entry of the fields."""

    def change(records: RecordDict) -> RecordDict:
        records.config_records["fields"][key] = value
        return records

    return change


def without(key: str) -> Change:
    """Takes an entry of the fields out."""

    def change(records: RecordDict) -> RecordDict:
        del records.config_records["fields"][key]
        return records

    return change


def array(part: str, make: Callable[[Array], Array], name: str | None = None) -> Change:
    """Replaces an array of a part, the first if no name is given."""

    def change(records: RecordDict) -> RecordDict:
        record = records.array_records[part]
        key = name or next(iter(record))
        record[key] = make(record[key])
        return records

    return change


def numbers(part: str, make: Callable[[numpy.ndarray], numpy.ndarray]) -> Change:
    """Replaces the numbers of a part's first floating-point array."""

    def change(records: RecordDict) -> RecordDict:
        record = records.array_records[part]
        for key, old in record.items():
            values = old.numpy()
            if values.dtype.kind == "f":
                record[key] = Array(numpy.ascontiguousarray(make(values.copy())))
                break
        return records

    return change


def header(text: bytes) -> Callable[[Array], Array]:
    """An array whose header says what ``text`` says."""

    def make(old: Array) -> Array:
        padded = text + b" " * (-len(text) % 64) + b"\n"
        data = b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded + bytes(64)
        return Array(old.dtype, old.shape, old.stype, data)

    return make


def pickled(old: Array) -> Array:
    """An array of objects, which only unpickling could read."""
    stream = io.BytesIO()
    numpy.save(stream, numpy.array([{"a": print}], dtype=object), allow_pickle=True)
    return Array("object", (1,), old.stype, stream.getvalue())


def claimed(**facts: Any) -> Callable[[Array], Array]:
    """An array that says other things about itself than its content."""

    def make(old: Array) -> Array:
        known = {"dtype": old.dtype, "shape": old.shape, "stype": old.stype, "data": old.data}
        return Array(**{**known, **facts})

    return make


def cut(old: Array) -> Array:
    """Half an array."""
    return Array(old.dtype, old.shape, old.stype, old.data[: len(old.data) // 2])


def added(part: str, name: str, values: numpy.ndarray) -> Change:
    """One more array in a part."""

    def change(records: RecordDict) -> RecordDict:
        if part not in records.array_records:
            records[part] = ArrayRecord()
            listed = str(records.config_records["fields"]["parts"])
            records.config_records["fields"]["parts"] = ",".join(filter(None, (listed, part)))
        records.array_records[part][name] = Array(values)
        return records

    return change


def dropped(part: str) -> Change:
    """The first array of a part is missing."""

    def change(records: RecordDict) -> RecordDict:
        record = records.array_records[part]
        del record[next(iter(record))]
        return records

    return change


def only(records: RecordDict) -> Change:
    """Something else altogether."""
    return lambda honest: records


def second_config(records: RecordDict) -> RecordDict:
    """Two records of fields."""
    records["more"] = ConfigRecord({"a": 1})
    return records


def with_metrics(records: RecordDict) -> RecordDict:
    """A record of a kind that nobody asked for."""
    records["metrics"] = MetricRecord({"a": 1.0})
    return records


def renamed(records: RecordDict) -> RecordDict:
    """Names with control characters."""
    record = records.array_records["weights"]
    first = next(iter(record))
    record["\x1b[2J\nweights"] = record.pop(first)
    return records


DEEP = "[" * 100_000

ENVELOPE: dict[str, Change] = {
    "nothing at all": only(RecordDict()),
    "an empty record of fields": only(RecordDict({"fields": ConfigRecord()})),
    "two records of fields": second_config,
    "a record of metrics": with_metrics,
    "no list of parts": without("parts"),
    "parts that are a number": field("parts", 7),
    "parts that are a list": field("parts", ["weights", "reply"]),
    "a part that is not listed": field("parts", ""),
    "a thousand parts": field("parts", ",".join(f"part{i}" for i in range(1000))),
    "an unknown part": field("parts", "weights,reply,registration,scores,more"),
    "an unknown field": field("colour", "blue"),
    "a field that is a list": field("busy", [1.0, 2.0]),
    "a field of bytes": field("busy", b"\x80\x04."),
    "a busy time that is text": field("busy", "long"),
    "a negative busy time": field("busy", -1.0),
    "an endless busy time": field("busy", float("inf")),
    "a busy time that is none": field("busy", float("nan")),
    "an entry of an unlisted part": field("secret/number", 1),
    "a text of ten megabytes": field("refusal", "x" * 10_000_000),
    "a refusal with control characters": field("refusal", "\x1b[31mred\x00\r\nerror: forged"),
    "a refusal that is a number": field("refusal", 3),
    "missing something unknown": field("missing", "everything"),
    "missing a number": field("missing", 1),
}
"""For every kind of reply."""

UPDATE: dict[str, Change] = {
    "examples as text": field("examples", "ten"),
    "examples as a list": field("examples", [1, 2]),
    "examples as bytes": field("examples", b"10"),
    "examples as a fraction": field("examples", 3.5),
    "examples that are true": field("examples", True),
    "no examples": field("examples", 0),
    "negative examples": field("examples", -5),
    "1e18 examples": field("examples", 10**18),
    "more examples than registered": field("examples", 1000),
    "fewer examples than registered": field("examples", 1),
    "endless examples": field("examples", float("inf")),
    "examples left out": without("examples"),
    "seconds as text": field("seconds", "fast"),
    "negative seconds": field("seconds", -3.0),
    "seconds that are no number": field("seconds", float("nan")),
    "negative images": field("images", -1),
    "images as text": field("images", "many"),
    "a loss term as text": field("terms/cross_entropy", "low"),
    "a loss term that is no number": field("terms/cross_entropy", float("nan")),
    "an endless loss term": field("terms/cross_entropy", float("inf")),
    "a loss term that is true": field("terms/cross_entropy", True),
    "a loss term with a forged name": field("terms/\x1b[2Jerror", 1.0),
    "a thousand loss terms": lambda records: [
        field(f"terms/t{i}", 1.0)(records) for i in range(1000)
    ][-1],
    "a tensor among the loss terms": added("terms", "a", numpy.zeros(2, "float32")),
    "a weight left out": dropped("weights"),
    "an unknown weight": added("weights", "backdoor", numpy.zeros(2, "float32")),
    "a weight renamed with control characters": renamed,
    "a weight of another shape": array("weights", lambda old: Array(numpy.zeros((2, 2), "f4"))),
    "a weight in double precision": numbers("weights", lambda v: v.astype("float64")),
    "a weight in half precision": numbers("weights", lambda v: v.astype("float16")),
    "a complex weight": numbers("weights", lambda v: v.astype("complex64")),
    "a weight of whole numbers": numbers("weights", lambda v: v.astype("int32")),
    "a weight in the other byte order": numbers("weights", lambda v: v.astype(">f4")),
    "a weight that is no number": numbers("weights", lambda v: v * numpy.nan),
    "an endless weight": numbers("weights", lambda v: v + numpy.inf),
    "weights of 1e30": numbers("weights", lambda v: v + 1e30),
    "weights of 1e10": numbers("weights", lambda v: v + 1e10),
    "weights whose squares overflow": numbers("weights", lambda v: v + 3e38),
    "an array of objects": array("weights", pickled),
    "an array cut short": array("weights", cut),
    "an array without content": array("weights", claimed(data=b"")),
    "an array of noise": array("weights", claimed(data=bytes(range(256)) * 4)),
    "an array of another format": array("weights", claimed(stype="torch.pickle")),
    "an array that lies about its shape": array("weights", claimed(shape=(10**9,))),
    "a shape whose product takes hours": array("weights", claimed(shape=(2**31 - 1,) * 10**6)),
    "an array that lies about its type": array("weights", claimed(dtype="int64")),
    "an array that calls itself bfloat16": array("weights", claimed(dtype="bfloat16")),
    "a header of 1e15 elements": array(
        "weights", header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (10**15,)}")
    ),
    "a header of plain 1e15 elements": array(
        "weights",
        header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000000,)}"),
    ),
    "a header with a negative length": array(
        "weights", header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (-4,)}")
    ),
    "a header that is code": array("weights", header(b"__import__('os').system('true')")),
    "a header that is deep": array("weights", header(b"(" * 3000)),
    "a header with a structured type": array(
        "weights",
        header(b"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (16,)}"),
    ),
    "an entry with an endless name": field("terms/" + "n" * 100_000, 1.0),
    "an array with an endless name": added("weights", "n" * 100_000, numpy.zeros(2, "float32")),
    "an undeclared extra": added("extras", "more", numpy.zeros(3, "float32")),
    "an undeclared number among the extras": lambda records: field("extras/more", 1)(
        added("extras", "x", numpy.zeros(1, "float32"))(records)
    ),
    "no weights at all": only(
        RecordDict({"fields": ConfigRecord({"parts": "", "examples": 4, "seconds": 0.1})})
    ),
    "a refusal beside an update": field("refusal", "I would rather not"),
}

REGISTRATION: dict[str, Change] = {
    "another site's name": field("site", "site-1"),
    "an unknown name": field("site", "nobody"),
    "a name with a path": field("site", "../../etc/passwd"),
    "a name with control characters": field("site", "site-0\x1b[2J"),
    "a name that is a number": field("site", 0),
    "an endless name": field("site", "s" * 100_000),
    "no name": without("site"),
    "100,000 classes": field(
        "registration/classes", json.dumps({f"class {i}": 1 for i in range(100_000)})
    ),
    "100,000 domains": field(
        "registration/domains", json.dumps({f"domain {i}": 1 for i in range(100_000)})
    ),
    "names that are long as JSON": field(
        "registration/classes",
        json.dumps(
            {f"{i}" + "\U0001d51e" * 190: int(i < 4) for i in range(2000)}, ensure_ascii=False
        ),
    ),
    "1e30 images": field("registration/classes", json.dumps({"a": 10**30})),
    "a fraction of an image": field("registration/classes", json.dumps({"a": 3.5})),
    "negative images": field("registration/classes", json.dumps({"a": -4, "b": 8})),
    "counts that do not fit": field("registration/classes", json.dumps({"a": 3})),
    "no classes": field("registration/classes", "{}"),
    "classes as a list": field("registration/classes", json.dumps(["a"])),
    "classes as a number": field("registration/classes", 3),
    "a class with control characters": field("registration/classes", json.dumps({"\x1b[2J": 4})),
    "a class without a name": field("registration/classes", json.dumps({" ": 4})),
    "a class name of a megabyte": field("registration/classes", json.dumps({"a" * 10**6: 4})),
    "classes that are no JSON": field("registration/classes", "{'a': 4"),
    "classes nested deep": field("registration/classes", DEEP),
    "classes that are no number": field("registration/classes", '{"a": NaN}'),
    "an unknown entry": field("registration/patients", "Jane"),
    "a tensor": added("registration", "style", numpy.zeros(3, "float32")),
    "no registration": field("parts", ""),
    "missing what was agreed": field("missing", "context"),
}

STYLE: dict[str, Change] = {
    "no style": dropped("reply"),
    "a style of another length": array("reply", lambda old: Array(numpy.zeros((2, 3), "f4"))),
    "a flat style": numbers("reply", lambda v: v.reshape(-1)),
    "a style in double precision": numbers("reply", lambda v: v.astype("float64")),
    "a style that is no number": numbers("reply", lambda v: v * numpy.nan),
    "an endless style": numbers("reply", lambda v: v + numpy.inf),
    "a style of 1e30": numbers("reply", lambda v: v + 1e30),
    "an undeclared tensor": added("reply", "more", numpy.zeros(2, "float32")),
    "an undeclared number": field("reply/more", 1),
    "a text for a style": field("reply/style", "blue"),
    "a style of whole numbers": numbers("reply", lambda v: v.astype("int64")),
    "an array cut short": array("reply", cut),
    "an array of objects": array("reply", pickled),
}

LIES: dict[str, dict[str, Change]] = {
    "train": UPDATE,
    "query.register": REGISTRATION,
    "query.statistics": STYLE,
}
"""Lies by the kind of message that they answer; every kind takes those of ``ENVELOPE``, too."""
