"""What a request is told that cannot be answered: a status of HTTP, and one sentence."""

from http import HTTPStatus


class RequestFault(Exception):
    """A request that is refused; the message is for whoever sent it, and holds nothing of ours.

    Args:
        status: of HTTP.
        said: one sentence.
    """

    def __init__(self, status: HTTPStatus, said: str) -> None:
        super().__init__(said)
        self.status = status
