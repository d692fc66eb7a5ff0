"""What a method may show of itself in reports, beside its hooks; training never asks for it.

A method that has something to show defines the function; whoever draws the report asks with
``isinstance``. In a composition the first part that shows something is the one that is shown.
"""

from typing import Protocol, runtime_checkable

from torch import Tensor

from feddg.messages import Message
from feddg.models.network import Network


@runtime_checkable
class Redraws(Protocol):
    """A method whose clients train on re-drawn images."""

    def preview(self, images: Tensor, agreed: Message | None) -> Tensor | None:
        """Returns what the method makes of images.

        Args:
            images: uint8 ``(N, 3, H, W)``.
            agreed: what the setup phase agreed on, if there was one.

        Returns:
            Images of the same form, or None if nothing is re-drawn under these settings.
        """
        ...


@runtime_checkable
class Adapts(Protocol):
    """A method whose layers adapt to each image they see."""

    def layer_shares(self, network: Network, images: Tensor) -> dict[str, Tensor]:
        """Returns how much each layer adapts to each image, in [0, 1].

        Args:
            network: holds the global weights, in eval mode.
            images: RGB in [0, 1], ``(B, 3, H, W)``.

        Returns:
            ``(B,)`` by layer, in the network's order; nothing if no layer adapts.
        """
        ...
