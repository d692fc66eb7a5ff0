"""A server in a thread of the test's process, and a client that speaks to it over a socket."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from feddg.serving.application import create_application
from feddg.serving.limits import ServeLimits
from feddg.serving.start import server_for
from feddg.studies.classifier import ImageClassifier


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
