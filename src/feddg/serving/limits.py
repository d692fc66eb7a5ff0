"""What a server takes, and what it does not: limits on requests, images and work at once."""

from pydantic import Field

from feddg.data.decoding import MOST_PIXELS
from feddg.settings import Settings


class ServeLimits(Settings):
    """What one request may be, and how many are worked on at once.

    Memory is bounded by these: ``at_once`` bodies of ``request_megabytes`` are held, and as many
    images of ``megapixels`` are decoded as there are decoding threads.
    """

    request_megabytes: float = Field(32.0, gt=0, le=4096, description="largest body of a request")
    images: int = Field(32, ge=1, le=1024, description="most images in one request")
    megapixels: float = Field(
        50.0, gt=0, le=MOST_PIXELS / 1e6, description="most pixels of an image, in millions"
    )
    at_once: int = Field(8, ge=1, le=256, description="requests that are read and answered at once")
    waiting: int = Field(256, ge=0, le=10_000, description="requests that may wait for their turn")
    seconds: float = Field(60.0, gt=0, le=3600, description="time a body may take to arrive")

    @property
    def request_bytes(self) -> int:
        """Largest body, bytes."""
        return int(self.request_megabytes * 2**20)

    @property
    def pixels(self) -> int:
        """Most pixels of an image."""
        return int(self.megapixels * 1e6)
