"""Processes of this machine that work for the one that starts them, and end with it."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from feddg.clients.threads import available_cores

Child = subprocess.Popen[str]


def threads_per_job(jobs: int) -> int:
    """Returns the threads for each of ``jobs`` processes; at most ``OMP_NUM_THREADS``."""
    share = max(1, available_cores() // max(1, jobs))
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(share, int(limit)) if limit.isdigit() and int(limit) else share


def child(
    module: str,
    *words: str,
    threads: int,
    environment: Mapping[str, str] = MappingProxyType({}),
    **streams: Any,
) -> Child:
    """Starts a module of this package in a process of its own, which never imports the caller's.

    It is detached from the terminal, so Ctrl-C reaches only this process. Its standard input ends
    when this process closes it, or dies, however it dies: see :func:`with_parent`.

    Args:
        module: dotted name; run as ``python -m``.
        words: its arguments.
        threads: for its tensor operations.
        environment: variables that it has besides this process's.
        streams: ``stdout`` and ``stderr``; this process's by default.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module, *words],
        stdin=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": str(threads)} | dict(environment),
        start_new_session=True,
        text=True,
        encoding="utf-8",
        **streams,
    )


def end(children: Iterable[Child], seconds: float) -> None:
    """Ends processes: closes their input, and kills those that are still there after a while."""
    ending, until = list(children), time.monotonic() + seconds
    for process in ending:
        with suppress(OSError, ValueError):  # it is dead, or was told before
            process.stdin.close()  # type: ignore[union-attr]
    for process in ending:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
        with suppress(OSError, ValueError), process:  # what it wrote is read
            pass


def with_parent(end: Callable[[], object], line: Callable[[str], None] = lambda line: None) -> None:
    """In a child: calls ``line`` with each line of its input, and ``end`` when there are no more.

    That is in another thread; the parent has closed the input then, or is dead.
    """

    def listen() -> None:
        with open(0, encoding="utf-8", closefd=False) as pipe:  # Python may end while it waits
            for each in pipe:
                line(each)
        end()

    threading.Thread(target=listen, daemon=True).start()


def death(status: int) -> str:
    """How a process ended that should not have: ``its process died (signal 11)``.

    Args:
        status: as :class:`subprocess.Popen` gives it: below 0 a signal's number.
    """
    if status == -9:
        return "its process was killed, perhaps for want of memory"
    return f"its process died ({'signal' if status < 0 else 'status'} {abs(status)})"
