"""A server of files on this machine that cuts connections, lies and sends on, as it is told."""

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Served:
    """What a server serves, and what it was asked.

    Attributes:
        files: contents by path.
        cuts: after how many bytes of each answer, one after the other, the connection is cut.
        failures: status codes that come first, one an answer.
        ranges: whether parts may be asked for.
        validators: whether it says which version of a file it has.
        redirects: where a path leads to.
        length: whether it says how long an answer is.
        asked: path and ``Range`` of every request.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    ranges: bool = True
    validators: bool = True
    redirects: dict[str, str] = field(default_factory=dict)
    length: bool = True
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    address: str = ""


def _handler(served: Served) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            served.asked.append((self.path, asked))
            if served.failures:
                self.send_error(served.failures.pop(0))
                return
            if self.path in served.redirects:
                self.send_response(302)
                self.send_header("Location", served.redirects[self.path])
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            content = served.files.get(self.path)
            if content is None:
                self.send_error(404)
                return
            self._send(content, asked)

        def _send(self, content: bytes, asked: str | None) -> None:
            tag = f'"{hashlib.md5(content).hexdigest()}"'
            same = self.headers.get("If-Range") in (None, tag)
            found = re.fullmatch(r"bytes=(\d+)-", asked or "")
            start = int(found[1]) if found and served.ranges and same else 0
            whole = not (found and served.ranges and same)
            if not whole and start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            body = content[start:]
            self.send_response(200 if whole else 206)
            if not whole:
                where = f"bytes {start}-{len(content) - 1}/{len(content)}"
                self.send_header("Content-Range", where)
            if served.length:
                self.send_header("Content-Length", str(len(body)))
            if served.validators:
                self.send_header("ETag", tag)
            self.end_headers()
            cut = served.cuts.pop(0) if served.cuts else None
            self.wfile.write(body if cut is None else body[:cut])
            self.wfile.flush()
            self.close_connection = True

        def log_message(self, *arguments: object) -> None:
            pass

    return Handler


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Answers on a free port of this machine; gives the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def serving(**fields: object) -> Iterator[Served]:
    """Serves on a free port of this machine."""
    served = Served(**fields)
    with listening(_handler(served)) as served.address:
        yield served
