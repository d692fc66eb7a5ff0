"""How many threads compute, and how many clients at once: the whole policy, in one place.

A process has as many threads as its share of the cores. A small network on a CPU is trained by one
thread, and several clients at once: faster than several threads for one client, and the same
numbers on any count of cores. A larger network fills all threads by itself, and another copy of it
would cost memory, so its clients take turns.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

SMALL = 1_000_000
"""Networks of at most so many parameters are trained by one thread on a CPU."""
MOST_AT_ONCE = 8
"""More threads than this get in each other's way between PyTorch's operations."""


def threads_for(network: nn.Module, device: torch.device) -> int | None:
    """Returns the threads that train ``network`` on ``device``; None for all of the process."""
    small = sum(parameter.numel() for parameter in network.parameters()) <= SMALL
    return 1 if small and device.type == "cpu" else None


def clients_at_once(threads_each: int | None) -> int:
    """Returns how many clients one process trains at once, by the threads that each takes."""
    if threads_each is None:
        return 1
    return max(1, min(torch.get_num_threads() // threads_each, MOST_AT_ONCE))


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Has PyTorch compute with ``count`` CPU threads in its block; None changes nothing."""
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_beside(workers: int) -> AbstractContextManager[None]:
    """Gives its block what it may compute with while ``workers`` clients are at work.

    Beside several it is one thread: idle ones would wait by spinning, on the cores they need.
    """
    return threads(1 if workers > 1 else None)


def share_of_process(count: int) -> None:
    """Has the whole process compute with ``count`` CPU threads from now on."""
    torch.set_num_threads(count)


def threads_per_job(jobs: int) -> int:
    """Returns the threads each of ``jobs`` processes may use; ``OMP_NUM_THREADS`` may say fewer."""
    share = max(1, available_cores() // max(1, jobs))
    said = os.environ.get("OMP_NUM_THREADS", "")
    return min(share, int(said)) if said.isdigit() and int(said) else share


def environment_of_job(count: int) -> dict[str, str]:
    """Returns this process's environment for one that is to use ``count`` threads."""
    return os.environ | {"OMP_NUM_THREADS": str(count)}


def available_cores() -> int:
    """Returns the cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
