"""Updates as whole numbers that can be masked and summed, and their sum without the masks."""

from collections.abc import Sequence

import numpy
import torch

from feddg.errors import ClientError
from feddg.guards import masking
from feddg.messages import Update, Weights

_SCALE = 2.0**26
_LARGEST = 2.0**62


def encoded(update: Update, received: Weights, count: int, clients: int) -> numpy.ndarray:
    """Returns an update's change as whole numbers modulo 2^64, uint64, its count at the end.

    Args:
        update: as trained.
        received: the weights the client was sent.
        count: how much it counts in the sum.
        clients: how many are summed.

    Raises:
        ClientError: it is too large for the sum, or not finite.
    """
    parts = [
        ((update.weights[n].double() - received[n].to(update.weights[n]).double()) * _SCALE).round()
        for n in sorted(update.weights)
    ]
    flat = torch.cat([part.flatten().cpu() for part in parts]) if parts else torch.zeros(0)
    largest = float(flat.abs().max()) * count if len(flat) else 0.0
    if not largest <= _LARGEST / clients:
        raise ClientError("its change is not finite, or too large to be summed; lower train.lr")
    values = torch.cat([flat.to(torch.int64) * count, torch.tensor([count])])
    found: numpy.ndarray = values.numpy().view(numpy.uint64)
    return found


def decoded(total: numpy.ndarray, received: Weights) -> tuple[Weights, int]:
    """Returns the mean of the weights whose changes were summed, and what they count together.

    Args:
        total: uint64, as :func:`encoded`, summed.
        received: the weights the clients were sent.

    Raises:
        ValueError: it is no such sum.
    """
    values, at, weights = torch.from_numpy(total.view(numpy.int64).copy()), 0, {}
    count = int(values[-1])
    if count < 1 or len(values) != 1 + sum(tensor.numel() for tensor in received.values()):
        raise ValueError("the sum is of something else")
    for name in sorted(received):
        tensor = received[name]
        change = values[at : at + tensor.numel()].double().reshape(tensor.shape) / (_SCALE * count)
        at += tensor.numel()
        mean = tensor.double() + change.to(tensor.device)
        weights[name] = (mean if tensor.is_floating_point() else mean.round()).to(tensor.dtype)
    return {name: weights[name] for name in received}, count


def added(values: numpy.ndarray, more: numpy.ndarray, plus: bool) -> numpy.ndarray:
    """Returns ``values + more`` modulo 2^64, or their difference."""
    found: numpy.ndarray = values + more if plus else values - more
    return found


def unmasked(
    sums: Sequence[numpy.ndarray],
    seeds: Sequence[bytes],
    lost: Sequence[tuple[int, bytes]],
    left: Sequence[tuple[int, bytes]],
) -> numpy.ndarray:
    """Returns the sum of what survivors masked.

    Args:
        sums: their masked vectors, uint64.
        seeds: their own masks' seeds.
        lost: id and private mask key of each client that was masked with and sent nothing.
        left: id and public mask key of each survivor.
    """
    total = sums[0].copy()
    for more in sums[1:]:
        total += more
    for seed in seeds:
        total -= masking.mask(seed, len(total))
    for gone, private in lost:
        for id, public in left:
            more = masking.mask(masking.agreed(private, public, "mask"), len(total))
            total = added(total, more, id > gone)
    return total
