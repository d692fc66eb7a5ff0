"""Which clients take part in a round: drawn from the experiment's seed, or secretly."""

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch

from feddg.rng import stream
from feddg.settings import ExperimentSettings


def drawn_clients(
    ids: Sequence[int], per_round: int | None, seed: int, round: int, attempt: int = 0
) -> list[int]:
    """Returns the ids of a round's clients, ascending, drawn without replacement by the seed.

    Args:
        ids: all clients.
        per_round: how many take part; None for all.
        seed: the experiment's seed.
        round: the round, from 1.
        attempt: 0, or the number of the retry if a round is repeated with other clients.
    """
    ids = list(ids)
    if per_round is None or per_round >= len(ids):
        return ids
    names = ("sample", round, attempt) if attempt else ("sample", round)
    drawn = torch.randperm(len(ids), generator=stream(seed, *names))[:per_round]
    return sorted(ids[i] for i in drawn.tolist())


def secret_clients(ids: Sequence[int], rate: float) -> list[int]:
    """Returns clients, each sampled with probability ``rate`` by the system's entropy."""
    rng = secrets.SystemRandom()
    return [id for id in ids if rng.random() < rate]


@dataclass(frozen=True)
class Schedule:
    """How often clients take part: the numbers that privacy accounting needs.

    Attributes:
        clients: number of clients, N.
        per_round: clients per round, K.
        seed: the experiment's seed.
        rounds: number of rounds, R.
    """

    clients: int
    per_round: int
    seed: int = 0
    rounds: int = 1

    @classmethod
    def of(cls, settings: ExperimentSettings, *, gathered: bool = False) -> Self:
        """Returns what an experiment plans; ``gathered``: whether one client has all images."""
        number = 1 if gathered else settings.clients.number
        per_round = min(number, settings.clients.per_round or number)
        return cls(number, per_round, settings.seed, settings.train.rounds)

    @property
    def rate(self) -> float:
        """The probability that a client takes part in a round."""
        return self.per_round / self.clients

    @cached_property
    def most(self) -> int:
        """The largest number of rounds that any client takes part in."""
        taken: Counter[int] = Counter()
        for round in range(1, self.rounds + 1):
            taken.update(drawn_clients(range(self.clients), self.per_round, self.seed, round))
        return max(taken.values())
