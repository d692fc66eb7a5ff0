"""A stand-in for the proxy of a deployment, where there is no nginx; it answers as nginx does."""

import http.server
import time
from email.utils import formatdate

from feddg.deploy.setup import FLEET_METHODS


class StandInProxy(http.server.BaseHTTPRequestHandler):
    """Answers as the written configuration has nginx answer; test_proxy.py compares the two.

    Attributes:
        listed: values of the header ``flwr-public-key`` that are on the list.
        ahead: seconds that its clock is ahead.
    """

    listed: tuple[str, ...] = ()
    ahead = 0.0

    def answer(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        own = type(self)
        if self.path.removeprefix("/v1/fleet/") not in FLEET_METHODS:
            status = 403
        elif self.headers.get("flwr-public-key") not in own.listed:
            status = 401
        else:
            status = 200 if self.command == "POST" else 405
        self.send_response_only(status)
        self.send_header("Date", formatdate(time.time() + own.ahead, usegmt=True))
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST = do_PUT = do_DELETE = answer

    def log_message(self, *_):
        pass
