"""What each message cost: seconds by where they went, bytes as Flower counts them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flwr.app import ConfigRecord, RecordDict

from feddg.flower.parcels import Parcel
from feddg.records import TrafficRow
from feddg.storage import append_text

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
