"""Messages, update checks and the ledger."""

import torch

from feddg.messages import Message


def test_a_message_survives_its_bytes_with_every_dtype():
    tensors = {
        "style": torch.rand(2, 4),
        "count": torch.tensor(3),
        "half": torch.rand(3).half(),
        "flags": torch.tensor([True, False]),
    }
    message = Message(tensors, {"examples": 7, "loss": 0.25, "name": "Köln", "ok": True})
    back = Message.from_bytes(message.to_bytes())
    assert back.scalars == message.scalars
    assert back.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back.tensors[name].dtype == tensor.dtype
        assert torch.equal(back.tensors[name], tensor)


def test_bytes_by_hand():
    message = Message({"a": torch.zeros(2, 3), "b": torch.zeros(5, dtype=torch.int64)}, {"n": 1})
    assert message.size == 2 * 3 * 4 + 5 * 8 + 8
    assert Message({}, {"name": "é"}).size == 2
