"""Connections that send too slowly are closed: they would take the places of everybody else's."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS = 15.0
"""Time in which a request's headers and the first of its body must arrive."""
FIRST_BYTES = 64 * 1024
"""Headers and body that are read before a request has its turn, as uvicorn does. From there on the
body's time is counted where it is read (:func:`feddg.serving.uploads.read_uploads`)."""


class PromptProtocol(H11Protocol):
    """uvicorn's connection, closed where the other side keeps it waiting.

    It is waited for headers, for the first of a body, and after an answer for a body that nobody
    wants. uvicorn itself bounds the time between two requests alone.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._received = 0
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Waits for the first headers."""
        super().connection_made(transport)
        self._look()

    def data_received(self, data: bytes) -> None:
        """Takes what was sent; a little does not buy more time."""
        super().data_received(data)
        self._received += len(data)
        self._look()

    def on_response_complete(self) -> None:
        """Goes on to the next request, for which uvicorn's own time runs."""
        super().on_response_complete()
        self._received = 0
        if self.conn.their_state is not h11.IDLE:
            self._look()

    def connection_lost(self, error: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._stop()
        super().connection_lost(error)

    def _look(self) -> None:
        """Has the time run while it is the other side's turn to send."""
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
