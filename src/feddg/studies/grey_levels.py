"""Grey levels of clients' images before and after style exchange (CCST)."""

from typing import Any

import numpy
import torch
from torch import Tensor

from feddg.messages import Message
from feddg.methods.base import Method, Redraws
from feddg.records import client_name
from feddg.runs.prepare import Progress
from feddg.runs.subject import Subject

MOST_CLIENTS, GREY_IMAGES, GREY_BINS = 6, 64, 32


def grey_levels(subject: Subject, progress: Progress) -> dict[str, Any]:
    """Histograms of some clients' grey levels, before and after the method re-draws images."""
    domains = subject.main_domains()
    order = numpy.lexsort((numpy.arange(len(domains)), _occurrence(domains)))
    before, after, names = [], [], []
    for done, client in enumerate(order[:MOST_CLIENTS].tolist()):
        progress("grey levels", done, min(len(order), MOST_CLIENTS))
        images = subject.images.examples(client).images()[:GREY_IMAGES]
        if len(images) == 0:
            continue
        redrawn = _redrawn(subject.method, images, subject.state.agreed)
        before.append(grey_histogram(images))
        after.append(None if redrawn is None else grey_histogram(redrawn))
        domain = subject.images.partition.domain_ids[int(domains[client])]
        names.append(f"{client_name(client)}, {subject.images.table.domain_names[domain]}")
    return {"clients": names, "before": before, "after": after}


def _occurrence(values: numpy.ndarray) -> numpy.ndarray:
    """How often each value stood before in the array: 0 for the first of its kind."""
    return numpy.array([int((values[:i] == v).sum()) for i, v in enumerate(values)])


def _redrawn(method: Method, images: Tensor, agreed: Message | None) -> Tensor | None:
    if not isinstance(method, Redraws):
        return None
    with torch.no_grad():
        return method.preview(images, agreed)


def grey_histogram(images: Tensor) -> list[float]:
    """Returns the shares of grey levels (ITU-R 601) of uint8 images ``(N, 3, H, W)``, by bin."""
    weights = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)
    grey = (images.float() * weights).sum(dim=1)
    counts = torch.histc(grey, GREY_BINS, min=0, max=256)
    return [round(v, 6) for v in (counts / counts.sum()).tolist()]
