"""How far updates are from what clients were sent, and from each other; sums in float64."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from feddg.messages import Weights


def length(weights: Weights, names: Iterable[str]) -> float:
    """Returns the Euclidean length of the named entries together."""
    return math.sqrt(sum(float(squared(weights[name])) for name in names))


def distance(one: Weights, other: Weights, names: Iterable[str]) -> float:
    """Returns the Euclidean distance of two sets of weights over the named entries."""
    return math.sqrt(sum(float(squared(one[n] - other[n].to(one[n]))) for n in names))


def squared(tensor: Tensor) -> Tensor:
    """Returns the sum of squares, a float64 scalar."""
    # A float32 sum over millions of entries is off by up to 3e-4.
    norm: Tensor = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)
    return norm.square()


def shrunk(trained: Weights, sent: Weights, names: Iterable[str], norm: float) -> Weights | None:
    """Returns the weights with a change of at most ``norm``, or None if theirs is no longer.

    Equation: ``w <- x + (w - x) min(1, norm / |w - x|)``.

    Args:
        trained: w; left as it is.
        sent: x.
        names: entries that count and move; the others are taken from ``trained``.
        norm: above 0.
    """
    names = sorted(names)
    found = distance(trained, sent, names)
    if not found > norm:
        return None
    moved = {n: sent[n].to(trained[n]) for n in names}
    return trained | {n: x + (trained[n].detach() - x) * (norm / found) for n, x in moved.items()}
