"""What guards share that wait for all updates of a round: keep them, and fuse them by rank.

Memory: one model per client of the round, and pieces of at most 32 MiB.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from feddg.errors import NotEnoughUpdates
from feddg.guards.guard import Guard
from feddg.messages import Update

_PIECE = 1 << 22
"""Numbers that are looked at together."""


def kept(guard: Guard, updates: Iterable[Update]) -> list[Update]:
    """Returns copies of all updates.

    Raises:
        NotEnoughUpdates: there are fewer than the guard needs.
    """
    copies = [update.keep() for update in updates]
    if len(copies) < guard.least:
        raise NotEnoughUpdates(
            f"{guard.name} needs {guard.least} good updates in a round, and {len(copies)} came"
        )
    return copies


def fused(updates: Sequence[Update], by_rank: Callable[[Tensor], Tensor]) -> Update:
    """Returns one update whose every number is made from the clients' numbers in its place.

    Entries of integers take the lower median.

    Args:
        updates: at least one.
        by_rank: maps a place's numbers in ascending order ``(clients, places)`` to ``(places,)``.
    """
    first = updates[0]
    weights = {}
    for name, tensor in first.weights.items():
        rule = by_rank if tensor.is_floating_point() else lower_median
        parts = [
            rule(torch.stack(piece).sort(dim=0).values).to(tensor.dtype)
            for piece in _pieces([update.weights[name].reshape(-1) for update in updates])
        ]
        weights[name] = torch.cat(parts).reshape(tensor.shape) if parts else tensor
    examples = sum(update.examples for update in updates)
    return replace(first, weights=weights, examples=examples)


def lower_median(ranked: Tensor) -> Tensor:
    """Returns the middle of ``(clients, places)``, the lower of two."""
    return ranked[(len(ranked) - 1) // 2]


def _pieces(rows: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    width = max(1, _PIECE // len(rows))
    return zip(*(torch.split(row, width) for row in rows)) if len(rows[0]) else iter(())
