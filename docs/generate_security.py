"""Writes the table of hostile replies in docs/security.md: plays every lie, notes what is said.

python docs/generate_security.py      (about a minute)
"""

import logging
import sys
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "security")]

from hostile_replies import ENVELOPE, LIES

from hostile_grid import HostileFederation

PAGE = HERE / "security.md"
MARK = "<!-- lies -->\n"
KINDS = {
    "train": "an update",
    "query.introduce": "an introduction",
    "query.describe": "a description before round 1 (PARDON's style)",
}


class _Last(logging.Handler):
    """Keeps what the log said of the hostile site."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.said.append(record.getMessage())


def what_happens(kind: str, name: str) -> str:
    """Plays a lie of site 0 in one round; returns what the log says of it first."""
    handler = _Last()
    log = logging.getLogger("feddg")
    log.addHandler(handler)
    try:
        federation = HostileFederation("pardon" if kind == "query.describe" else "fedavg")
        federation.lie(0, kind, {**ENVELOPE, **LIES[kind]}[name])
        federation.run()
    finally:
        log.removeHandler(handler)
    return handler.said[0]


def table() -> str:
    """Returns the table."""
    lines = ["| in place of | a site sends | the coordinator says, and goes on |\n|---|---|---|\n"]
    for kind, shown in KINDS.items():
        for name in (*LIES[kind], *ENVELOPE):
            said = what_happens(kind, name).replace("|", "\\|").replace("`", "'")
            lines.append(f"| {shown} | {name} | {said} |\n")
    return "".join(lines)


def main() -> None:
    """Rewrites the page below its mark."""
    head, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    PAGE.write_text(head + mark + "\n" + table(), encoding="utf-8")


if __name__ == "__main__":
    main()
