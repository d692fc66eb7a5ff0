"""Connections that are opened and then send next to nothing: they lock nobody out for long."""

import socket
import time
from contextlib import ExitStack, suppress

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")
pytest.importorskip("python_multipart", reason="needs the extra `serve`")
httpx = pytest.importorskip("httpx", reason="needs httpx")

from feddg.prediction.classifier import load_classifier
from feddg.serving import server as connections
from feddg.serving.server import CONNECTIONS_BEYOND, ServeLimits
from hostile_uploads import CONTENT_TYPE, multipart, png
from served_models import serving

FEW = ServeLimits(at_once=1, waiting=0, seconds=5)
STALLED = FEW.at_once + FEW.waiting + CONNECTIONS_BEYOND + 10
"""Connections that the attacker opens: more than the server has places."""
LONGEST = 30.0
"""Seconds after which honest people must be served again; far more than the patched bound."""
HEAD = f"Host: 127.0.0.1\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: 100000\r\n\r\n"


@pytest.fixture
def server(finished, monkeypatch):
    monkeypatch.setattr(connections, "SECONDS", 1.0)
    with serving(load_classifier(finished), FEW) as client:
        yield client


@pytest.mark.parametrize(
    "begun",
    [
        pytest.param("", id="nothing"),
        pytest.param(f"GET /health HTTP/1.1\r\n{HEAD[:40]}", id="half the headers"),
        pytest.param(f"POST /predict HTTP/1.1\r\n{HEAD}", id="a body that does not come"),
        pytest.param(f"GET /health HTTP/1.1\r\n{HEAD}", id="a body that nobody reads"),
    ],
)
def test_connections_that_send_a_byte_now_and_then_lock_nobody_out(server, begun):
    address = ("127.0.0.1", server.base_url.port)
    with ExitStack() as opened:
        attack = []
        for _ in range(STALLED):
            attack.append(opened.enter_context(socket.create_connection(address, timeout=10)))
            attack[-1].sendall(begun.encode())

        def status():
            for one in attack:
                with suppress(OSError):  # it was closed
                    one.send(b"x")
            return httpx.get(f"{server.base_url}/health").status_code

        until = time.monotonic() + LONGEST
        while (found := status()) != 200 and time.monotonic() < until:
            time.sleep(0.1)
        assert found == 200


def test_a_body_may_take_longer_than_the_headers(server):
    body = multipart(("a.png", png(256)))

    def slowly():
        yield body[:1000]
        time.sleep(2 * connections.SECONDS)
        yield body[1000:]

    headers = {"content-type": CONTENT_TYPE, "content-length": str(len(body))}
    assert server.post("/predict", content=slowly(), headers=headers).status_code == 200
