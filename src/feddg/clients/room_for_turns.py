"""How much memory there is, and how much of it a client's turn takes."""

import os
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from feddg.models.network import Network

PASSES = 3
"""Forward passes whose maps a method may hold before its backward pass; RandConv makes three."""
COPIES = 4
"""Of the weights: themselves, their gradients and two moments of an optimizer."""
LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Where Linux says how much a container may take."""
MEASURED = 2
"""Images that maps are measured on."""


def machine_memory() -> int | None:
    """Returns the memory of this machine or container, in bytes; None where it cannot be told."""
    try:
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # Windows
        return None
    for file in LIMITS:
        with suppress(OSError, ValueError):  # no such file, or "max"
            found = min(found, int(file.read_text(encoding="ascii")))
    return found if found > 0 else None


def memory_of_turn(network: Network, side: int, batch_size: int) -> int:
    """Returns about how many bytes a client takes while it trains, at most.

    Args:
        network: on its device; stays as it is.
        side: of its square images, pixels.
        batch_size: images per batch.
    """
    parameters = list(network.parameters())
    own = {p.untyped_storage().data_ptr() for p in [*parameters, *network.buffers()]}
    maps: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in own:
            maps[storage.data_ptr()] = storage.nbytes()
        return saved

    first, training = parameters[0], network.training
    images = torch.zeros(MEASURED, 3, side, side, device=first.device, dtype=first.dtype)
    network.eval()  # its running statistics stay as they are
    try:
        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved),
        ):
            kept = network(images)
    finally:
        network.train(training)
    del kept
    weights = sum(parameter.nbytes for parameter in parameters)
    return COPIES * weights + PASSES * batch_size * sum(maps.values()) // MEASURED
