"""What a run writes down about itself: who holds what, on which machine, and the memory it took."""

import ctypes
import os
import platform
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch

from feddg.clients.client import Worker
from feddg.experiment import Experiment
from feddg.models.backbones import weights_digest
from feddg.records import BadImageRow, ClientRow, ClientsTable
from feddg.runs.prepare import Images


def environment(experiment: Experiment, worker: Worker) -> dict[str, Any]:
    """Returns what the run's numbers may depend on beside the experiment."""
    autocast = worker.autocast()
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "feddg": version("feddg"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": version("torchvision"),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(worker.device),
        "precision": "bfloat16" if isinstance(autocast, torch.autocast) else "float32",
        "weights": {
            "name": experiment.model.weights,
            "sha256": weights_digest(experiment.model.weights),
        },
    }


def clients_table(images: Images) -> ClientsTable:
    """Returns who holds what: counts per client, domain and class."""
    table, rows = images.table, images.splits.train
    classes, domains = len(table.class_names), len(table.domain_names)
    clients = []
    for id, positions in enumerate(images.partition.rows):
        own = rows[positions]
        by_domain = torch.bincount(torch.from_numpy(table.domains[own]), minlength=domains)
        by_class = torch.bincount(torch.from_numpy(table.labels[own]), minlength=classes)
        clients.append(ClientRow(id=id, domains=by_domain.tolist(), classes=by_class.tolist()))
    return ClientsTable(
        domains=list(table.domain_names),
        classes=list(table.class_names),
        clients=clients,
        bad_images=[BadImageRow(path=image.path, reason=image.reason) for image in images.bad],
    )


def free_memory() -> int | None:
    """Returns the memory that programs may still take, in bytes; None where it cannot be told."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = next((line for line in file if line.startswith("MemAvailable")), None)
    except OSError:
        return None
    return None if found is None else int(found.split()[1]) * 1024


def give_memory_back() -> bool:
    """Hands freed memory back to the system, where the C library knows how; says whether it did.

    A setup with thousands of clients leaves holes that glibc keeps: at 10,000 clients 390 MB.
    """
    with suppress(OSError, AttributeError, TypeError):  # another C library
        return bool(ctypes.CDLL(None).malloc_trim(0))
    return False


def peak_memory() -> int:
    """Returns the largest resident memory of this process so far, in bytes."""
    try:
        import resource
    except ImportError:  # Windows has no such module
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
