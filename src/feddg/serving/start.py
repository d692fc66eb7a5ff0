"""Starts a server: on this machine alone, unless it is asked for otherwise."""

import ipaddress
import logging
import socket
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from feddg.errors import AdaptationError, RunError
from feddg.prediction.classifier import ImageClassifier, load_classifier
from feddg.runs.findings import refuse_doubtful
from feddg.serving.door import LOOPBACK_NAMES
from feddg.serving.limits import ServeLimits

log = logging.getLogger("feddg")
CONNECTIONS_BEYOND = 64
"""Connections beside those that are worked on or wait: for the page, and to be sent away."""
LONGEST_HEADERS = 16 * 1024


def serve(
    model: Path | str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    adapt: str | None = None,
    which: str | None = None,
    device: str = "cpu",
    limits: ServeLimits | None = None,
    known_as: Sequence[str] = (),
    allow_network: bool = False,
    strict: bool = False,
    ready: Callable[[str, ImageClassifier], None] = lambda address, classifier: None,
) -> None:
    """Serves a model until it is stopped (Ctrl-C).

    Args:
        model: the run folder, or an ONNX file of ``feddg export``.
        host: the address that is listened on.
        port: 0 for a free one.
        adapt: a test-time adaptation without memory.
        which: the model by a selection rule.
        device: ``cpu``, ``cuda`` or ``auto``.
        limits: on requests.
        known_as: names by which the server is reached, beside those of this machine.
        allow_network: whether other machines may reach it.
        strict: whether to refuse a model that is no better than a constant one.
        ready: is told the address, and the model, before the first request.

    Raises:
        RunError: there is no model, the address is not this machine's alone and ``allow_network``
            is not said, it cannot be listened on, the extra ``serve`` is missing, or ``strict``.
        AdaptationError: the adaptation is unknown, does not suit the model, or keeps state.
    """
    _uvicorn()
    if not is_loopback(host) and not allow_network:
        raise RunError(
            f"{host} is reached by other machines: whoever reaches it may use the model, without a "
            "password and in clear. Say --allow-network if that is wanted, best behind a proxy "
            "with TLS and accounts"
        )
    classifier = load_classifier(model, adapt, device, which)
    if classifier.keeps_state:
        raise AdaptationError(
            f"{adapt} cannot be served: it remembers the images it has seen, so that one person's "
            "would change another's answers; use it with `feddg predict --adapt`"
        )
    if strict:
        refuse_doubtful(classifier.cautions)
    from feddg.serving.application import create_application

    limits = limits or ServeLimits()
    listening = _listen(host, port)
    server = server_for(create_application(classifier, limits, hosts_of(host, known_as)), limits)
    taken = listening.getsockname()[1]
    ready(f"http://{f'[{host}]' if ':' in host else host}:{taken}/", classifier)
    with listening:
        server.run(sockets=[listening])


def server_for(application: Any, limits: ServeLimits) -> Any:
    """Returns uvicorn, ready to run an application.

    Raises:
        RunError: the extra ``serve`` is missing.
    """
    uvicorn = _uvicorn()
    from feddg.serving.connections import PromptProtocol

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
    """Whether an address is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def hosts_of(host: str, known_as: Sequence[str]) -> Collection[str]:
    """Returns the names by which requests may call a server."""
    own = () if host in ("0.0.0.0", "::") else (host,)
    return {*LOOPBACK_NAMES, *own, *known_as}


def _listen(host: str, port: int) -> socket.socket:
    listening = None
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(512)
    except OSError as error:
        if listening is not None:
            listening.close()
        raise RunError(
            f"cannot listen on {host}, port {port}: {error.strerror or error}; choose another with "
            "--port"
        ) from None
    return listening


def _uvicorn() -> Any:
    try:
        import fastapi
        import python_multipart
        import uvicorn
    except ImportError as error:
        raise RunError(
            f"serving needs the package {error.name}: pip install 'feddg[serve]'"
        ) from None
    del fastapi, python_multipart
    return uvicorn
