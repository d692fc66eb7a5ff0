"""The ledger: a layout once, every message with its bytes."""

import torch

from feddg.federation.transport import Ledger
from feddg.messages import Message
from federations import federation


def test_the_ledger_writes_a_layout_once_and_counts_bytes():
    rows = []
    ledger = Ledger(rows.append)
    sent = Message({"p": torch.zeros(3)}, {"k": 2}), {"w": torch.zeros(2, 2)}
    ledger.message(1, "down", [0, 1], "train", *sent)
    assert [row.kind for row in rows] == ["layout", "message", "message"]
    assert [t.name for t in rows[0].tensors] == ["p", "weights/w"]
    assert rows[1].bytes == 16 + 12 + 8
    assert ledger.bytes == {"up": 0, "down": 2 * 36}
    again = []
    Ledger(again.append, {rows[0].id}).message(1, "down", [0], "train", *sent)
    assert [row.kind for row in again] == ["message"]


def test_the_ledger_has_both_directions_of_every_client_and_the_exact_bytes():
    small = federation(per_round=2)
    record = small.server.round()
    messages = [row for row in small.ledger if row["kind"] == "message"]
    ways = [(row["direction"], row["client"]) for row in messages]
    assert sorted(ways) == sorted((way, id) for way in ("up", "down") for id in record.clients)
    model = sum(t.numel() * t.element_size() for t in small.server.state.weights.values())
    down = [row["bytes"] for row in messages if row["direction"] == "down"]
    up = [row["bytes"] for row in messages if row["direction"] == "up"]
    assert down == [model] * 2
    # How many images, how many went through, how long it took, and one term of the loss.
    assert up == [model + 4 * 8] * 2
    assert (record.bytes_down, record.bytes_up) == (2 * model, 2 * model + 64)
    assert sum(row["kind"] == "layout" for row in small.ledger) == 2
