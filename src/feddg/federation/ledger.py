"""The ledger: one row for every message between the server and a client.

The list of a message's tensors is written once per distinct layout and referred to by its id, so
that fifty rounds of a large network stay a small file.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, Literal

from torch import Tensor

from feddg.messages import Broadcast, Message, Scalar, Update, scalar_bytes

Direction = Literal["up", "down"]
Row = dict[str, Any]


class Ledger:
    """Enters every message; hands finished rows to ``write``.

    Args:
        write: called with each row, in order.
        known_layouts: ids of layouts that an earlier part of this run already wrote.
    """

    def __init__(self, write: Callable[[Row], None], known_layouts: set[str] | None = None) -> None:
        self._write = write
        self._known = set(known_layouts or ())
        self.bytes: dict[Direction, int] = {"up": 0, "down": 0}

    def broadcast(self, client: int, purpose: str, broadcast: Broadcast) -> None:
        """Enters a message with weights to ``client``."""
        self._enter(broadcast.round, "down", client, purpose, broadcast.weights, broadcast.extras)

    def update(self, round: int, update: Update) -> None:
        """Enters a client's update."""
        extras = Message(
            update.extras.tensors, {**update.extras.scalars, "examples": update.examples}
        )
        self._enter(round, "up", update.client, "update", update.weights, extras)

    def message(
        self, round: int, direction: Direction, client: int, purpose: str, message: Message
    ) -> None:
        """Enters a message without weights."""
        self._enter(round, direction, client, purpose, {}, message)

    def refusal(self, round: int, client: int, reason: str) -> None:
        """Enters that ``client``'s update was not used, and why."""
        self._write({"kind": "refusal", "round": round, "client": client, "reason": reason})

    def _enter(
        self,
        round: int,
        direction: Direction,
        client: int,
        purpose: str,
        weights: Mapping[str, Tensor],
        message: Message,
    ) -> None:
        layout = _layout(weights, message.tensors, message.scalars)
        if layout["id"] not in self._known:
            self._known.add(layout["id"])
            self._write(layout)
        scalars = sum(scalar_bytes(scalar) for scalar in message.scalars.values())
        size = sum(tensor["bytes"] for tensor in layout["tensors"]) + scalars
        self.bytes[direction] += size
        row = {"kind": "message", "round": round, "direction": direction, "client": client}
        self._write({**row, "purpose": purpose, "layout": layout["id"], "bytes": size})


def _layout(
    weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], scalars: Mapping[str, Scalar]
) -> Row:
    rows = [_describe(f"weights/{name}", tensor) for name, tensor in weights.items()]
    rows += [_describe(name, tensor) for name, tensor in tensors.items()]
    # Sorted: a resumed run reads its tensors back in another order, and its ledger is the same.
    rows.sort(key=itemgetter("name"))
    content = {"tensors": rows, "scalars": sorted(scalars)}
    identity = hashlib.blake2b(json.dumps(content).encode(), digest_size=6).hexdigest()
    return {"kind": "layout", "id": identity, **content}


def _describe(name: str, tensor: Tensor) -> Row:
    dtype = str(tensor.dtype).removeprefix("torch.")
    size = tensor.numel() * tensor.element_size()
    return {"name": name, "shape": list(tensor.shape), "dtype": dtype, "bytes": size}
