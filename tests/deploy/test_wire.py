"""What crosses the network arrives as it left."""

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is an optional extra")

from feddg.deploy.wire import MOST_CLASSES, TRAIN, Payload, Request, read_reply
from feddg.errors import ClientError
from feddg.messages import Message, Update

TENSORS = {
    "float": torch.randn(3, 4),
    "channels last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "half": torch.tensor([1.5, -2.25], dtype=torch.bfloat16),
    "counter": torch.tensor(7),
    "flag": torch.tensor(True),
    "flags": torch.tensor([True, False]),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "double": torch.tensor(1 / 3, dtype=torch.float64),
    "empty": torch.empty(0, 3),
    "nan": torch.tensor([float("nan"), float("inf")]),
}
SCALARS = {"whole": 3, "share": 0.5, "text": "a/b, c", "yes": True, "deep/name": 1}


def identical(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert other[name].dtype == tensor.dtype
        assert other[name].shape == tensor.shape
        torch.testing.assert_close(other[name], tensor, rtol=0, atol=0, equal_nan=True)


def test_a_payload_keeps_every_dtype_shape_and_scalar():
    sent = Payload({"round": 4, "site": "a"}, {"extras": Message(TENSORS, SCALARS)})
    found = Payload.from_records(sent.to_records())
    assert found.fields == sent.fields
    identical(TENSORS, found.parts["extras"].tensors)
    scalars = found.parts["extras"].scalars
    assert scalars == SCALARS
    assert [type(scalars[name]) for name in SCALARS] == [type(v) for v in SCALARS.values()]


def test_an_empty_part_is_not_an_absent_one():
    found = Payload.from_records(Payload(parts={"context": Message()}).to_records())
    assert found.parts == {"context": Message()}


def test_an_update_of_weights_alone_is_one_array_record_and_one_config_record():
    update = Update(2, 11, {"w": torch.ones(2)}, terms={"loss": 0.25}, seconds=1.5, images=22)
    records = Payload.of_update(update).to_records()
    assert (len(records.array_records), len(records.config_records)) == (1, 1)
    found = read_reply(TRAIN, records).to_update(2)
    assert (found.client, found.examples, found.images, found.seconds) == (2, 11, 22, 1.5)
    assert found.terms == {"loss": 0.25}
    assert not found.extras
    identical(update.weights, found.weights)


def test_what_is_no_update_is_refused():
    with pytest.raises(ValueError, match="no update"):
        Payload(parts={"reply": Message()}).to_update(0)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a", ""], "empty"),
        (["a\nb"], "not plain"),
        (["x" * 201], "too long"),
        ([str(i) for i in range(MOST_CLASSES + 1)], f"at most {MOST_CLASSES}"),
    ],
)
def test_odd_names_are_said(names, words):
    with pytest.raises(ClientError, match=words):
        Request.read(Payload({"run": "run", "classes": names}))
    assert Request.read(Payload({"run": "run", "classes": ["a", "b"]})).classes == ["a", "b"]
