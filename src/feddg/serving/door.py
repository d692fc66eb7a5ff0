"""The door of a server: which requests come in at all, and what every answer carries.

A page on another web site can have its visitor's browser send requests to this machine, and with
a name that it points here (DNS rebinding) read the answers, too. Therefore a request must name a
host that this server is known by, and a browser must say that it comes from the server's own page.
"""

from collections.abc import Collection
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from feddg.serving.faults import RequestFault

LOOPBACK_NAMES = frozenset(("localhost", "127.0.0.1", "::1"))
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
}
_OWN_SITES = ("same-origin", "none")


class Door:
    """Lets requests in that are meant for this server.

    Args:
        app: what answers them.
        hosts: names by which the server is reached, without ports.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app, self._hosts = app, frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or refuses it; every answer tells the browser what it may do."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        try:
            self._check(Headers(scope=scope), scope["method"])
        except RequestFault as fault:
            refusal = JSONResponse({"detail": str(fault)}, fault.status)
            await refusal(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)

    def _check(self, headers: Headers, method: str) -> None:
        said = headers.getlist("host")
        if len(said) != 1 or _name_of(said[0]) not in self._hosts:
            raise RequestFault(
                HTTPStatus.MISDIRECTED_REQUEST,
                "this server is not known by that name; whoever runs it adds it with --known-as",
            )
        if method in ("GET", "HEAD"):
            return
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        foreign = site is not None and site not in _OWN_SITES
        if foreign or (origin is not None and _place_of(origin) != said[0].lower()):
            raise RequestFault(
                HTTPStatus.FORBIDDEN, "requests from pages of other web sites are refused"
            )


def _name_of(host: str) -> str | None:
    """The name in a Host header, without port and brackets; None for what is none."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _place_of(origin: str) -> str | None:
    """Host and port of an Origin header, as a Host header has them."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None
