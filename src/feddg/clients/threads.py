"""The policy for CPU threads: how many compute, and how many clients train at once."""

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from feddg.models.network import Network

PASSES = 3
"""Forward passes whose feature maps a method may hold before its backward pass; RandConv has three.
"""
COPIES = 4
"""Tensors as large as the weights: weights, gradients and two moments of an optimizer."""
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files in which Linux states a container's memory limit."""
MEASURED = 2
"""Number of images used to measure feature maps."""
SMALL = 1_000_000
"""On a CPU, networks with at most this many parameters are trained by one thread each."""
MOST_AT_ONCE = 8
"""Most clients at once for small networks; more disturb each other between operations."""
MOST_LARGE_AT_ONCE = 16
"""The same for larger networks, whose operations take longer."""
SHARE_OF_MEMORY = 0.5
"""Part of a process's share of memory that clients training at once may use."""


def machine_memory() -> int | None:
    """Returns the memory of this machine or container in bytes; None if unknown."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # Windows
        return None
    for file in LIMITS:
        with suppress(OSError, ValueError):  # no such file, or "max"
            memory = min(memory, int(file.read_text(encoding="ascii")))
    return memory if memory > 0 else None


def keep_memory() -> bool:
    """Makes glibc keep freed memory in this process; returns whether it does.

    By default glibc returns memory freed by a training step to the system, which must clear every
    page again for the next step: up to a third of a step's time in float32. The process keeps its
    largest memory until it ends, or until :func:`feddg.runs.prepare.give_memory_back`.
    """
    with suppress(OSError, AttributeError, ValueError):  # another C library
        if os.confstr("CS_GNU_LIBC_VERSION"):
            library = ctypes.CDLL(None)
            # M_MMAP_MAX, M_TRIM_THRESHOLD (-1: never) and M_TOP_PAD, see mallopt(3).
            options = {-4: 0, -1: -1, -2: 64 * 2**20}
            return all(library.mallopt(*option) for option in options.items())
    return False


def training_memory(network: Network, shape: Sequence[int], batch_size: int) -> int:
    """Returns an upper estimate of the bytes a client needs to train.

    Args:
        network: on its device; left in eval mode.
        shape: of an image, ``(3, H, W)``, or of a row of features.
        batch_size: images per batch.
    """
    parameters = list(network.parameters())
    known = {p.untyped_storage().data_ptr() for p in [*parameters, *network.buffers()]}
    maps: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in known:
            maps[storage.data_ptr()] = storage.nbytes()
        return saved

    first = parameters[0]
    images = torch.zeros(MEASURED, *shape, device=first.device, dtype=first.dtype)
    network.eval()  # its running statistics stay as they are
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        network(images)
    weights = sum(parameter.nbytes for parameter in parameters)
    return COPIES * weights + PASSES * batch_size * sum(maps.values()) // MEASURED


def threads_for(network: nn.Module, device: torch.device) -> int | None:
    """Returns the threads that train ``network`` on ``device``; None for all of them."""
    small = sum(parameter.numel() for parameter in network.parameters()) <= SMALL
    return 1 if small and device.type == "cpu" else None


def clients_at_once(threads_each: int) -> int:
    """Returns how many clients of a small network train at once, given the threads of each."""
    return max(1, min(torch.get_num_threads() // threads_each, MOST_AT_ONCE))


def large_clients_at_once(
    device: torch.device, per_round: int, memory_each: Callable[[], int]
) -> int:
    """Returns how many clients of a larger network train at once: one per thread, or one.

    It depends only on the machine and the experiment, not on other processes, so that a resumed run
    gives the same numbers.

    Args:
        device: where they train; a GPU is used by one at a time.
        per_round: clients per round; if fewer than threads, they train one after the other.
        memory_each: returns the bytes that one client needs; called only if it matters.
    """
    threads = torch.get_num_threads()
    at_once = min(threads, MOST_LARGE_AT_ONCE)
    if device.type != "cpu" or at_once == 1 or per_round < at_once:
        return 1
    memory = machine_memory()
    if memory is None:
        return 1
    share = memory * min(1.0, threads / available_cores()) * SHARE_OF_MEMORY
    return at_once if at_once * memory_each() <= share else 1


def side_by_side(clients: int, at_once: int, threads_each: int | None) -> int:
    """Returns how many of a round's clients train at once; the rest follow on all threads.

    Args:
        clients: number of clients in the round.
        at_once: the largest number at once.
        threads_each: threads per client; None if they share all threads.
    """
    if at_once == 1:
        return 0
    return clients if threads_each is not None else clients - clients % at_once


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Makes PyTorch use ``count`` CPU threads inside the block; None changes nothing."""
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def share_of_process(count: int) -> None:
    """Makes this thread, and those it starts, use ``count`` CPU threads from now on."""
    torch.set_num_threads(count)


def share_of_client(at_once: int) -> int:
    """Returns the number of CPU threads for each of ``at_once`` clients."""
    return max(1, torch.get_num_threads() // at_once)


def available_cores() -> int:
    """Returns the number of cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
