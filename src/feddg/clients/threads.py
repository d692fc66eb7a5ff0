"""How many threads compute, and how many clients at once: the whole policy, in one place."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from feddg.models.network import Network

# How much memory there is, and how much of it a client's turn takes.


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


def training_memory(network: Network, side: int, batch_size: int) -> int:
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
            logits = network(images)
    finally:
        network.train(training)
    del logits
    weights = sum(parameter.nbytes for parameter in parameters)
    return COPIES * weights + PASSES * batch_size * sum(maps.values()) // MEASURED


SMALL = 1_000_000
"""Networks of at most so many parameters are trained by one thread on a CPU."""
MOST_AT_ONCE = 8
"""More threads than this get in each other's way between PyTorch's operations."""
MOST_LARGE_AT_ONCE = 16
"""The same of larger networks, whose operations take longer."""
SHARE_OF_MEMORY = 0.5
"""How much of its share of the machine's memory a process may fill with clients at once."""


def threads_for(network: nn.Module, device: torch.device) -> int | None:
    """Returns the threads that train ``network`` on ``device``; None for all of the process."""
    small = sum(parameter.numel() for parameter in network.parameters()) <= SMALL
    return 1 if small and device.type == "cpu" else None


def clients_at_once(threads_each: int) -> int:
    """Returns how many clients of a small network train at once, by the threads that each takes."""
    return max(1, min(torch.get_num_threads() // threads_each, MOST_AT_ONCE))


def large_clients_at_once(
    device: torch.device, per_round: int, memory_each: Callable[[], int]
) -> int:
    """Returns how many clients of a larger network train at once: all threads' worth, or one.

    It depends on the machine and the experiment alone, never on what else runs, so that a resumed
    run goes on with the same numbers.

    Args:
        device: where they train; a GPU is filled by one.
        per_round: clients of a round; with fewer than threads they take turns.
        memory_each: returns the bytes that one takes; asked only where it matters.
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
    """Returns how many of a round's clients train at once; the last ones take turns on all threads.

    Args:
        clients: all of them.
        at_once: as many can be under way.
        threads_each: what each takes; None where they share all threads.
    """
    if at_once == 1:
        return 0
    return clients if threads_each is not None else clients - clients % at_once


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


def share_of_process(count: int) -> None:
    """Has this thread, and those it starts, compute with ``count`` CPU threads from now on."""
    torch.set_num_threads(count)


def share_of_client(at_once: int) -> int:
    """Returns the CPU threads each of ``at_once`` clients may use."""
    return max(1, torch.get_num_threads() // at_once)


def threads_per_job(jobs: int) -> int:
    """Returns the threads each of ``jobs`` processes may use; ``OMP_NUM_THREADS`` may say fewer."""
    share = max(1, available_cores() // max(1, jobs))
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(share, int(limit)) if limit.isdigit() and int(limit) else share


def environment_of_job(count: int) -> dict[str, str]:
    """Returns this process's environment for one that is to use ``count`` threads."""
    return os.environ | {"OMP_NUM_THREADS": str(count)}


def available_cores() -> int:
    """Returns the cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
