"""The learning rate of a round: the same for all clients, whichever engine carries the rounds.

A client's optimizer is new each round, so its learning rate is a function of the round alone, which
every broadcast tells. With r rounds passed of R, W of them warm-up, and rate L::

    warm-up    L (r + 1) / (W + 1)                                            for r < W
    cosine     L (f + (1 - f) (1 + cos(pi (r - W) / (R - W))) / 2)            f = schedule_final
    linear     L (1 + (f - 1) (r - W) / (R - W))
    step       L gamma^k, k of the milestones s with r / R >= s               s = schedule_steps

These are torch's ``CosineAnnealingLR``, ``LinearLR`` and ``MultiStepLR`` stepped once a round.
Source of the cosine: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts"
(ICLR 2017).
"""

import math

from feddg.settings import TrainSettings


def rate_share(train: TrainSettings, round: int) -> float:
    """Returns the learning rate of a round, as a share of ``train.lr``.

    Args:
        train: rounds, schedule and warm-up.
        round: the round, from 1; later ones than there are count as the last, 0 as the first.
    """
    passed = max(0, min(round, train.rounds) - 1)
    if passed < train.warmup_rounds:
        return (passed + 1) / (train.warmup_rounds + 1)
    if train.schedule == "step":
        milestones = sum(passed / train.rounds >= share for share in train.schedule_steps)
        return float(train.schedule_gamma**milestones)
    progress = (passed - train.warmup_rounds) / (train.rounds - train.warmup_rounds)
    final = train.schedule_final
    if train.schedule == "cosine":
        return float(final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2)
    if train.schedule == "linear":
        return float(1 + (final - 1) * progress)
    return 1.0


def in_round(train: TrainSettings, round: int) -> TrainSettings:
    """Returns the settings as they hold in a round: ``lr`` is the round's learning rate."""
    share = rate_share(train, round)
    # A rate must stay above 0; the last round of a schedule never reaches its end.
    return train if share == 1.0 else train.model_copy(update={"lr": train.lr * share})
