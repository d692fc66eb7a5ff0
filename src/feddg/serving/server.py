"""Starts a server, by default for this machine only; closes connections that stall."""

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import h11
import uvicorn
from pydantic import ValidationError
from uvicorn.protocols.http.h11_impl import H11Protocol

from feddg.errors import AdaptationError, RunError, field_fault
from feddg.prediction.classifier import ImageClassifier, load_classifier
from feddg.runs.diagnostics import refuse_doubtful
from feddg.serving.application import LOOPBACK_NAMES, ServeLimits, create_application

CONNECTIONS_BEYOND = 64
"""Connections in addition to processed and waiting ones: for the page, and for refusals."""
LONGEST_HEADERS = 16 * 1024


SECONDS = 15.0
"""Seconds for a request's headers and the beginning of its body."""
FIRST_BYTES = 64 * 1024
"""Bytes of headers and body that uvicorn reads before a request's turn. After that, the body's time
is measured where it is read (:func:`feddg.serving.application.read_uploads`).
"""


class PromptProtocol(H11Protocol):
    """uvicorn's connection, with time limits for a slow client.

    Limits the time for headers, for the beginning of a body, and for an unread body after the
    answer. uvicorn itself only limits the time between two requests.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._received, self._since = 0, 0.0
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the time for the first headers."""
        super().connection_made(transport)
        self._since = self.loop.time()
        self._make_room()
        self._look()

    def _make_room(self) -> None:
        """Where all places are taken, ends the connection that has kept its headers longest."""
        if self.limit_concurrency is None or len(self.connections) < self.limit_concurrency:
            return
        waiting = [
            connection
            for connection in self.connections
            if isinstance(connection, PromptProtocol) and connection is not self
            if connection.conn.their_state is h11.IDLE and not connection.transport.is_closing()
        ]
        if waiting:
            longest = min(waiting, key=lambda connection: connection._since)
            longest.transport.abort()
            self.connections.discard(longest)  # its place is free before the next bytes are read

    def data_received(self, data: bytes) -> None:
        """Accepts received bytes; a few bytes do not extend the time."""
        super().data_received(data)
        self._received += len(data)
        self._look()

    def on_response_complete(self) -> None:
        """Continues with the next request, whose time uvicorn limits."""
        super().on_response_complete()
        self._received = 0
        if self.conn.their_state is not h11.IDLE:
            self._look()

    def connection_lost(self, error: Exception | None) -> None:
        """Stops all timers."""
        self._stop()
        super().connection_lost(error)

    def _look(self) -> None:
        """Runs the timer while the client has to send."""
        waits = self.conn.their_state is h11.IDLE or (
            self.conn.their_state is h11.SEND_BODY
            and not self.flow.read_paused
            and (self.conn.our_state is h11.DONE or self._received < FIRST_BYTES)
        )
        if not waits:
            self._stop()
        elif self._patience is None and not self.transport.is_closing():
            self._patience = self.loop.call_later(SECONDS, self.transport.abort)

    def _stop(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


def serve(
    model: Path | str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    adapt: str | None = None,
    which: str | None = None,
    device: str = "auto",
    precision: str = "float32",
    limits: ServeLimits | Mapping[str, object] | None = None,
    known_as: Sequence[str] = (),
    allow_network: bool = False,
    strict: bool = False,
    ready: Callable[[str, ImageClassifier], None] = lambda address, classifier: None,
) -> None:
    """Serves a model until it is stopped (Ctrl-C).

    Args:
        model: the run folder, or an ONNX file of ``feddg export``.
        host: the address to listen on.
        port: the port; 0 for a free one.
        adapt: a test-time adaptation without memory.
        which: selection rule of the model.
        device: ``cpu``, ``cuda`` or ``auto``.
        precision: ``float32``, ``bfloat16``, or ``auto``: bfloat16 where the device is fast at it.
        limits: limits on requests.
        known_as: further host names under which the server is reached.
        allow_network: let other machines connect; there is no password.
        strict: whether to refuse a model with warnings.
        ready: called with the address and the model before the first request.

    Raises:
        RunError: there is no model; other machines can reach the address and ``allow_network`` is
            False; the address cannot be used; or ``strict`` and there are warnings.
        AdaptationError: the adaptation is unknown, does not suit the model, or keeps state.
    """
    if not isinstance(limits, ServeLimits):
        try:
            limits = ServeLimits(**(limits or {}))
        except ValidationError as error:
            flag, _, fault = field_fault(error).partition(":")
            raise RunError(f"--{flag.replace('_', '-')}:{fault}") from None
    if not is_loopback(host) and not allow_network:
        raise RunError(
            f"Other machines can reach {host}: anyone who does can use the model, without a "
            "password or encryption. If you want that, add --allow-network, preferably behind a "
            "proxy with TLS and accounts"
        )
    classifier = load_classifier(model, adapt, device, which, precision)
    if classifier.description.features is not None:
        raise RunError(f"{model} takes features, not images: use feddg predict")
    if classifier.keeps_state:
        raise AdaptationError(
            f"{adapt} cannot be served: it remembers the images it has seen, so that one person's "
            "would change another's answers; use it with `feddg predict --adapt`"
        )
    refuse_doubtful(classifier.diagnostics, strict)
    listening = _listen(host, port)
    server = server_for(create_application(classifier, limits, hosts_of(host, known_as)), limits)
    taken = listening.getsockname()[1]
    ready(f"http://{f'[{host}]' if ':' in host else host}:{taken}/", classifier)
    with listening:
        server.run(sockets=[listening])


def server_for(application: Any, limits: ServeLimits) -> uvicorn.Server:
    """Returns a uvicorn server for an application."""
    return uvicorn.Server(
        uvicorn.Config(
            application,
            http=PromptProtocol,  # with h11, which bounds the length of headers
            h11_max_incomplete_event_size=LONGEST_HEADERS,
            ws="none",
            limit_concurrency=limits.at_once + limits.waiting + CONNECTIONS_BEYOND,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=10,
            proxy_headers=False,
            server_header=False,
            access_log=False,  # file names would be in it
            log_level="warning",
        )
    )


def is_loopback(host: str) -> bool:
    """Returns whether an address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def hosts_of(host: str, known_as: Sequence[str]) -> Collection[str]:
    """Returns the names that requests may use for a server."""
    names = () if host in ("0.0.0.0", "::") else (host,)
    return {*LOOPBACK_NAMES, *names, *map(_without_port, known_as)}


def _without_port(name: str) -> str:
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name if name.count(":") > 1 else name.partition(":")[0]  # of IPv6 all are the address's


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(
            (str(address[0]), port), family=family, backlog=512, dualstack_ipv6=both
        )
    except OSError as error:
        raise RunError(
            f"cannot listen on {host}, port {port}: {error.strerror or error}; choose another with "
            "--port"
        ) from None
