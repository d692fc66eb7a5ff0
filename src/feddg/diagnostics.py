"""A diagnostic: one thing to know about images, an experiment, a run, a model or a machine.

The check that finds it writes its sentence; whatever shows it (terminal, page, ``summary.json``,
model card, answer of a server, log of a site) shows that sentence.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Literal

from feddg.errors import DataError

Severity = Literal["note", "warning", "error"]
SEVERITIES: Final[tuple[Severity, ...]] = ("error", "warning", "note")
log = logging.getLogger("feddg")


@dataclass(frozen=True)
class Diagnostic:
    """One thing to know, and what to do about it.

    Attributes:
        code: what it is, for programs and tables, such as ``still-rising``; it never changes.
        severity: ``note``: worth knowing. ``warning``: a result may not mean what it seems to.
            ``error``: nothing goes on.
        text: one plain sentence with its numbers.
        advice: what to do; empty where there is nothing to do.
    """

    code: str
    severity: Severity
    text: str
    advice: str = ""

    @property
    def short(self) -> str:
        """The code in words, for tables and headings: ``still rising``."""
        return self.code.replace("-", " ")

    def __str__(self) -> str:
        return f"{self.text} {self.advice}".strip()


def gravest_first(found: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Returns errors, then warnings, then notes, each in the order they have."""
    return sorted(found, key=lambda one: SEVERITIES.index(one.severity))


def emit(*found: Diagnostic) -> None:
    """Logs diagnostics, a line each, and adds them to those of the run that goes on.

    Raises:
        DataError: the first error among them; how many more there are.
    """
    for one in found:
        if one.severity != "error":
            log.log(logging.INFO if one.severity == "note" else logging.WARNING, "%s", one)
    heard = _heard.get()
    if heard is not None:
        heard.extend(found)
    errors = [one for one in found if one.severity == "error"]
    if errors:
        more = f" ({len(errors) - 1} more: `feddg data inspect` lists them)" if errors[1:] else ""
        raise DataError(f"{errors[0]}{more}")


@contextmanager
def collected() -> Iterator[list[Diagnostic]]:
    """Gives a list of whatever is emitted within its block, and was in blocks around it before."""
    found = list(_heard.get() or ())
    token = _heard.set(found)
    try:
        yield found
    finally:
        _heard.reset(token)


_heard: ContextVar[list[Diagnostic] | None] = ContextVar("diagnostics", default=None)
