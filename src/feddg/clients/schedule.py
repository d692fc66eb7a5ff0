"""The learning rate of a round: the same for all clients, whichever engine carries the rounds.

A client's optimizer is new each round, so its learning rate is a function of the round alone, which
every broadcast tells. With r counted from 0, R rounds in all, W of them warm-up and rate L::

    warm-up    L (r + 1) / (W + 1)                                            for r < W
    cosine     L (f + (1 - f) (1 + cos(pi (r - W) / (R - W))) / 2)            f = final share
    linear     L (1 + (f - 1) (r - W) / (R - W))
    step       L gamma^k, k = milestones passed: shares of the rounds         default 1/2 and 3/4

Cosine and linear are torch's ``CosineAnnealingLR`` and ``LinearLR`` stepped once a round. Source of
the cosine: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts" (ICLR 2017).
"""

import math

from feddg.settings import TrainSettings


def learning_rate(train: TrainSettings, round: int) -> float:
    """Returns the learning rate of a round.

    Args:
        train: rate, rounds, schedule and warm-up.
        round: the round, from 1; later ones than there are count as the last.
    """
    passed = max(0, min(round, train.rounds) - 1)
    if passed < train.warmup_rounds:
        return train.lr * (passed + 1) / (train.warmup_rounds + 1)
    span = max(1, train.rounds - train.warmup_rounds)
    return train.lr * _share(train, (passed - train.warmup_rounds) / span)


def _share(train: TrainSettings, progress: float) -> float:
    """Returns the share of the full rate after ``progress`` in [0, 1) of the scheduled rounds."""
    final = train.schedule_final
    if train.schedule == "cosine":
        return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2
    if train.schedule == "linear":
        return 1 + (final - 1) * progress
    if train.schedule == "step":
        return train.schedule_gamma ** sum(progress >= share for share in train.schedule_steps)
    return 1.0
