"""Starts a server, by default for this machine only; closes connections that stall."""

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from feddg.errors import AdaptationError, RunError, schema_faults
from feddg.prediction.classifier import ImageClassifier, load_classifier
from feddg.runs.diagnostics import refuse_doubtful
from feddg.serving.application import LOOPBACK_NAMES, ServeLimits, create_application
from feddg.storage import file_faults

CONNECTIONS_BEYOND = 64
"""Connections in addition to processed and waiting ones: for the page, and for refusals."""
LONGEST_HEADERS = 16 * 1024


SECONDS = 15.0
"""Seconds for a request's headers, and for the rest of a body that nobody reads any more. The time
of a body that is read is limited there (:func:`feddg.serving.application.read_uploads`).
"""


class PromptProtocol(H11Protocol):
    """uvicorn's connection, which ends if a client keeps the server waiting.

    uvicorn itself only limits the time between two requests, and every byte starts it anew.
    """

    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the time for the first headers."""
        super().connection_made(transport)
        self._wait()

    def on_response_complete(self) -> None:
        """Starts the time for the rest of the body, and the next headers."""
        super().on_response_complete()
        self._wait()

    def _wait(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._patience = self.loop.call_later(SECONDS, self._give_up)

    def _give_up(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


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
    with schema_faults(RunError, "limits: ", ServeLimits.model_fields):
        limits = ServeLimits.model_validate(limits or {})
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
    return {*LOOPBACK_NAMES, *names, *known_as}


def _listen(host: str, port: int) -> socket.socket:
    is_ipv6 = ":" in host
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    both = is_ipv6 and socket.has_dualstack_ipv6()
    where = f"cannot listen on {host}, port {port} (choose another with --port)"
    with file_faults(RunError, where):
        return socket.create_server((host, port), family=family, backlog=512, dualstack_ipv6=both)
