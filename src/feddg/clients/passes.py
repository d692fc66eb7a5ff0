"""How many images go through a client's network in a turn, each as often as it does."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from feddg.clients.client import Client


@contextmanager
def counted_passes(client: Client) -> Iterator[None]:
    """Adds to ``client.passes`` every image that enters the featurizer in the block.

    A batch that a method passes in three versions counts three times; what goes through a copy of
    the network, as a frozen teacher, counts as well.
    """

    def count(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        client.passes += len(inputs[0])

    hook = client.network.featurizer.register_forward_pre_hook(count)
    try:
        yield
    finally:
        hook.remove()
