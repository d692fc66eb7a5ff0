"""Image privacy: a client's steps are noised, so that no image shows in what it trains (DP-SGD).

The client does it (:mod:`feddg.federation.local_training`), whoever the server is; this guard says what
it promises, counts what it costs, and refuses what would go around it.

An image is in one batch of every epoch of every round its client takes part in: so many releases.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from feddg.clients.client import RecordNoise
from feddg.clients.sampling import Schedule
from feddg.guards.account import Account, Release
from feddg.guards.accounting import gaussian_noise, rounded_up
from feddg.guards.compatibility import DESCRIPTIONS, EXTRAS, STATISTICS, TRAINING
from feddg.guards.guard import Guard, Passage, WeightFacts
from feddg.messages import Message, Update, Weights
from feddg.settings import PrivacySettings

_OPEN = "which is taken from images without noise"


def record_noise(privacy: PrivacySettings, schedule: Schedule, epochs: int) -> RecordNoise | None:
    """Returns how steps are noised, so that all planned epochs cost what they may; None if not."""
    if privacy.record_epsilon is None:
        return None
    once = gaussian_noise(privacy.record_epsilon, privacy.delta)
    return RecordNoise(rounded_up(once * math.sqrt(schedule.most * epochs)), privacy.record_norm)


class NoisedRecords(Guard):
    """Steps that say little about an image.

    Args:
        settings: epsilon, delta and the norm.
        schedule: who is planned to take part.
        epochs: passes over a client's images in a round.
    """

    name = "noised_records"
    summary = "gradients clipped image by image and noised; asked for as privacy.record_epsilon"
    Settings = PrivacySettings
    breaks: ClassVar[dict[str, str]] = {
        DESCRIPTIONS: _OPEN,
        EXTRAS: _OPEN,
        TRAINING: "and gradients are clipped image by image for plain training alone",
        STATISTICS: "which mix the images of a batch; choose model.backbone cnn_gn or another "
        "without, or set model.normalization to frozen",
    }
    noised = True

    def __init__(self, settings: PrivacySettings, schedule: Schedule, epochs: int) -> None:
        super().__init__(settings)
        self._epochs = epochs
        self._noise = record_noise(settings, schedule, epochs) or RecordNoise(0.0, 1.0)

    @property
    def promise(self) -> str:
        """Epsilon, for an image, by which noise."""
        chosen = self.settings
        return (
            f"updates: epsilon {chosen.record_epsilon:g} at delta {chosen.delta:g} for an image, "
            f"by noise of {self._noise.multiplier:g} times the norm in every step at the client"
        )

    def _release(self, round: int, clients: Sequence[int]) -> Release:
        noise, times = self._noise.multiplier, self._epochs
        return Release("update", round, clients, noise, "image", "client", times=times)

    def affords(self, round: int, clients: Sequence[int], account: Account) -> bool:
        """See :class:`Guard`."""
        chosen = self.settings
        return account.affords(self._release(round, clients), chosen.delta, chosen.record_epsilon)

    def asked(self, clients: Sequence[int], passage: Passage) -> None:
        """Charges for the epochs that these clients are about to train.

        Raises:
            BudgetSpent: they may not be asked.
        """
        chosen, release = self.settings, self._release(passage.round, clients)
        passage.account.charge(release, chosen.delta, chosen.record_epsilon)

    def protect(
        self, update: Update, received: Weights, told: Message, facts: WeightFacts
    ) -> Update:
        """The means of the loss terms stay at the client."""
        return replace(update, terms={})
