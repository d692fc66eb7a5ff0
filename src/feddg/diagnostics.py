"""Diagnostics: notes and warnings about images, experiments, runs, models and machines.

The check that finds a problem writes the sentence; terminal, page, ``summary.json``, model card,
server and site log all show this sentence.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from feddg.errors import DataError
from feddg.text import printable

T = TypeVar("T")
Severity = Literal["note", "warning", "error"]
SEVERITIES: Final[tuple[Severity, ...]] = ("error", "warning", "note")
log = logging.getLogger("feddg")


@dataclass(frozen=True)
class Diagnostic:
    """A note or warning, with advice.

    Attributes:
        code: identifier for programs and tables, such as ``still-rising``; it never changes.
        severity: ``note``: good to know. ``warning``: a result may be misleading. ``error``: the
            run cannot continue.
        text: one plain sentence with numbers; what cannot be printed or written is escaped, since
            names of files may be any bytes.
        advice: what to do; empty if there is nothing to do; likewise.
    """

    code: str
    severity: Severity
    text: str
    advice: str = ""

    def __post_init__(self) -> None:
        for name in ("text", "advice"):
            object.__setattr__(self, name, printable(getattr(self, name)))

    @property
    def short(self) -> str:
        """The code as words, for tables and headings: ``still rising``."""
        return self.code.replace("-", " ")

    def __str__(self) -> str:
        return f"{self.text} {self.advice}".strip()


def note(code: str, text: str, advice: str = "") -> Diagnostic:
    """Returns what is good to know."""
    return Diagnostic(code, "note", text, advice)


def warning(code: str, text: str, advice: str = "") -> Diagnostic:
    """Returns a warning."""
    return Diagnostic(code, "warning", text, advice)


def gravest_first(found: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Returns errors, then warnings, then notes, otherwise in the given order."""
    return sorted(found, key=lambda diagnostic: SEVERITIES.index(diagnostic.severity))


def emit(*found: Diagnostic) -> None:
    """Logs diagnostics, one line each, and adds them to those of the current run.

    Raises:
        DataError: there are errors: the first, with the number of others.
    """
    logged = _logged.get()
    logged = set[Diagnostic]() if logged is None else logged
    for message in found:
        if message.severity != "error" and message not in logged:
            log.log(logging.INFO if message.severity == "note" else logging.WARNING, "%s", message)
        logged.add(message)
    noted(*found)
    errors = [error for error in found if error.severity == "error"]
    if errors:
        more = f" ({len(errors) - 1} more: `feddg data inspect` lists them)" if errors[1:] else ""
        raise DataError(f"{errors[0]}{more}")


def warn(code: str, text: str, advice: str = "") -> None:
    """Emits a warning; see :class:`Diagnostic`."""
    emit(warning(code, text, advice))


@contextmanager
def collected() -> Iterator[list[Diagnostic]]:
    """Collects the diagnostics emitted in its block, after those heard before it."""
    diagnostics = list(_heard.get() or ())
    token = _heard.set(diagnostics)
    try:
        yield diagnostics
    finally:
        _heard.reset(token)


@contextmanager
def logged_once() -> Iterator[None]:
    """Logs a diagnostic only the first time that it is emitted in its block, or in one around."""
    token = _logged.set(set() if (logged := _logged.get()) is None else logged)
    try:
        yield
    finally:
        _logged.reset(token)


def noted(*found: Diagnostic) -> None:
    """Adds diagnostics to what the enclosing block collects, without telling anybody."""
    heard = _heard.get()
    if heard is not None:
        heard.extend(found)


_heard: ContextVar[list[Diagnostic] | None] = ContextVar("diagnostics", default=None)
_logged: ContextVar[set[Diagnostic] | None] = ContextVar("logged", default=None)

Progress = Callable[[str, int, int], None]
"""Called with what is done, how much of it is done, and how much there is."""


def silent(what: str, done: int, total: int) -> None:
    """Progress that nobody looks at."""


def arriving(items: Iterable[T], progress: Progress, what: str, total: int) -> Iterator[T]:
    """Yields what arrives, after saying how much of it has."""
    for done, item in enumerate(items, start=1):
        progress(what, done, total)
        yield item
