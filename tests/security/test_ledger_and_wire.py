"""No message without a row of the ledger, no row without a message, and the bytes that crossed."""

from collections import Counter

import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra")

from flwr.app import ConfigRecord, RecordDict

from hostile_grid import HostileFederation


def asks_again(honest):
    return RecordDict({"fields": ConfigRecord({"parts": "", "missing": "context"})})


def refuses(honest):
    return RecordDict({"fields": ConfigRecord({"parts": "", "refusal": "not today"})})


def unreadable(honest):
    honest["more"] = ConfigRecord({"x": 1})
    return honest


LIES = {
    "nobody": [],
    "one that asks again and again": [(0, "train", asks_again)],
    "one that refuses, and one that cannot be read": [
        (0, "train", refuses),
        (1, "train", unreadable),
    ],
    "one that cannot describe itself": [(2, "query.statistics", unreadable)],
    "one that registers as something else": [(3, "query.register", unreadable)],
}


@pytest.mark.parametrize("method", ["fedavg", "pardon"])
@pytest.mark.parametrize("who", LIES)
def test_the_ledger_is_what_crossed(who, method):
    federation = HostileFederation(method)
    for lie in LIES[who]:
        federation.lie(*lie)
    federation.run(2)
    federation.transport.registry.asked.clear()  # all of them register again
    federation.transport.registry.online(2)
    rows = [row for row in federation.rows if row.kind == "message"]
    assert Counter((row.direction, row.bytes) for row in rows) == Counter(federation.grid.wire)
    assert len(rows) == 2 * len(federation.grid.sent)
