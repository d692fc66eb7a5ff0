"""Messages, update checks and the ledger."""

import torch

from feddg.federation.transport import Ledger
from feddg.messages import Broadcast, Message


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


def test_the_ledger_writes_a_layout_once_and_counts_bytes():
    rows = []
    ledger = Ledger(rows.append)
    broadcast = Broadcast(1, {"w": torch.zeros(2, 2)}, Message({"p": torch.zeros(3)}, {"k": 2}))
    for client in (0, 1):
        ledger.broadcast(client, "train", broadcast)
    assert [row.kind for row in rows] == ["layout", "message", "message"]
    assert [t.name for t in rows[0].tensors] == ["p", "weights/w"]
    assert rows[1].bytes == 16 + 12 + 8
    assert ledger.bytes == {"up": 0, "down": 2 * 36}
    again = []
    Ledger(again.append, {rows[0].id}).broadcast(0, "train", broadcast)
    assert [row.kind for row in again] == ["message"]
