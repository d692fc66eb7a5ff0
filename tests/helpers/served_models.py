"""A server in a thread of the test's process, and a client that speaks to it over a socket."""

import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from feddg.prediction.classifier import ImageClassifier
from feddg.serving.application import create_application
from feddg.serving.server import ServeLimits, server_for


@contextmanager
def serving(
    classifier: ImageClassifier, limits: ServeLimits | None = None
) -> Iterator[httpx.Client]:
    """Serves a model on a free port."""
    limits = limits or ServeLimits()
    server = server_for(create_application(classifier, limits), limits)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        port = listening.getsockname()[1]
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join()


@dataclass(frozen=True)
class ServerProcess:
    """``feddg serve`` in a process of its own."""

    address: str
    id: int

    @property
    def resident_bytes(self) -> int:
        """Memory that it holds now."""
        lines = Path(f"/proc/{self.id}/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


@contextmanager
def served_by_a_process(run: Path, *flags: str) -> Iterator[ServerProcess]:
    """Starts ``feddg serve`` on a free port; ends it as Ctrl-C does, without a traceback."""
    command = [sys.executable, "-m", "feddg", "serve", str(run), "--port", "0", "--device", "cpu"]
    started = subprocess.Popen(
        [*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    said = []
    try:
        for line in started.stdout:
            said.append(line)
            if found := re.search(r"http://\S+/", line):
                break
        else:
            raise AssertionError("".join(said))
        yield ServerProcess(found[0], started.pid)
        assert started.poll() is None, "the server ended"
    finally:
        started.send_signal(signal.SIGINT)
        rest, _ = started.communicate(timeout=60)
    assert "Traceback" not in rest, rest
