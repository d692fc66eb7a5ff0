"""Who takes part in a round: drawn from the experiment's seed, or so that nobody can know."""

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from feddg.rng import stream


def drawn_clients(
    ids: Sequence[int], per_round: int | None, seed: int, round: int, attempt: int = 0
) -> list[int]:
    """Returns the clients of a round, ascending; drawn without replacement from the seed.

    Args:
        ids: all clients.
        per_round: how many take part; None for all.
        seed: the experiment's.
        round: from 1.
        attempt: 0, and more where a round is tried again with others.
    """
    ids = list(ids)
    if per_round is None or per_round >= len(ids):
        return ids
    names = ("sample", round, attempt) if attempt else ("sample", round)
    drawn = torch.randperm(len(ids), generator=stream(seed, *names))[:per_round]
    return sorted(ids[i] for i in drawn.tolist())


def secret_clients(ids: Sequence[int], rate: float) -> list[int]:
    """Returns clients that each take part with probability ``rate``, by the system's entropy."""
    rng = secrets.SystemRandom()
    return [id for id in ids if rng.random() < rate]


@dataclass(frozen=True)
class Schedule:
    """Who is planned to take part, and when.

    Attributes:
        clients: N.
        per_round: K; None for all.
        seed: the experiment's.
        rounds: R.
    """

    clients: int
    per_round: int | None = None
    seed: int = 0
    rounds: int = 1

    @property
    def rate(self) -> float:
        """With which probability a client takes part in a round."""
        return min(1.0, (self.per_round or self.clients) / self.clients)

    @cached_property
    def most(self) -> int:
        """In how many rounds the client takes part that takes part most often."""
        taken: Counter[int] = Counter()
        for round in range(1, self.rounds + 1):
            taken.update(drawn_clients(range(self.clients), self.per_round, self.seed, round))
        return max(taken.values())
