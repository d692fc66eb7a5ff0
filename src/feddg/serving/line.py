"""The line of requests: a few are worked on, some wait, and who comes after that is sent away."""

import asyncio
from http import HTTPStatus

from feddg.serving.faults import RequestFault
from feddg.serving.limits import ServeLimits


class RequestLine:
    """Lets ``at_once`` requests work; of who waits, no body is read.

    Args:
        limits: on requests.
    """

    def __init__(self, limits: ServeLimits) -> None:
        self._limits = limits
        self._free = asyncio.Semaphore(limits.at_once)
        self._waiting = 0

    async def __aenter__(self) -> None:
        """Waits for a turn.

        Raises:
            RequestFault: too many wait.
        """
        if self._free.locked() and self._waiting >= self._limits.waiting:
            raise RequestFault(
                HTTPStatus.SERVICE_UNAVAILABLE, "too many requests wait; send this one again later"
            )
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1

    async def __aexit__(self, *_: object) -> None:
        """Lets the next one work."""
        self._free.release()
