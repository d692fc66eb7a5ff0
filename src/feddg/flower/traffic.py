"""What each message cost: seconds by where they went, bytes as Flower counts them."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from feddg.flower.parcels import Parcel

BUSY = "busy"
"""Field of a reply: seconds that the site's code worked on the message."""


def flower_bytes(records: RecordDict) -> int:
    """Returns a message's size as Flower's ``message_size_mod`` counts it."""
    # Flower's count refuses empty texts.
    configs = [
        ConfigRecord({key: value for key, value in record.items() if value != ""})
        for record in records.config_records.values()
    ]
    arrays = sum(record.count_bytes() for record in records.array_records.values())
    return arrays + sum(record.count_bytes() for record in configs)


@dataclass
class Crossing:
    """A message on its way: its row so far, and when it began."""

    row: dict[str, Any]
    began: float


class Traffic:
    """Writes one row for every message that was answered.

    A row holds ``at`` (when it was sent, seconds since 1970), ``kind``, ``round``, ``site``;
    ``seconds`` from sending to fetching the reply, ``busy`` of these in our code at the site and
    ``train`` of those in training (the rest is Flower's: starting a process, looking into
    mailboxes, carrying bytes); ``bytes_down`` and ``bytes_up`` as Flower counts them.

    Args:
        write: called with each row.
    """

    def __init__(self, write: Callable[[dict[str, Any]], None] = lambda row: None) -> None:
        self._write = write
        self._crossings: dict[str, Crossing] = {}

    def begin(self, kind: str, round: int, site: str, records: RecordDict) -> Crossing:
        """Says that a message is about to go out."""
        row = {"at": time.time(), "kind": kind, "round": round, "site": site}
        row |= {"bytes_down": flower_bytes(records)}
        return Crossing(row, time.monotonic())

    def sent(self, message: str, crossing: Crossing) -> None:
        """Enters the id under which it went."""
        self._crossings[message] = crossing

    def answered(self, message: str, records: RecordDict, parcel: Parcel) -> None:
        """Writes the row of a message that was answered."""
        crossing = self._crossings.pop(message, None)
        if crossing is None:
            return
        fields = parcel.fields
        seconds = {
            "seconds": time.monotonic() - crossing.began,
            "busy": float(fields.get(BUSY, 0.0)),
            "train": float(fields.get("seconds", 0.0)),
        }
        self._write({**crossing.row, "bytes_up": flower_bytes(records), **seconds})


def append_to(file: Path) -> Callable[[dict[str, Any]], None]:
    """Returns a writer that appends rows to a file of JSON lines."""

    def write(row: dict[str, Any]) -> None:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")

    return write
