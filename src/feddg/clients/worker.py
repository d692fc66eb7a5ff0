"""The machinery that clients take turns to use."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import torch

from feddg.clients.stepping import Stepper
from feddg.data.augment import AugmentSettings
from feddg.models.network import Network
from feddg.settings import TrainSettings
from feddg.styles.statistics import StyleNoise


@dataclass(frozen=True)
class RecordNoise:
    """How gradients are clipped and noised.

    Attributes:
        multiplier: z, deviation over norm.
        norm: C, longest gradient of an image.
    """

    multiplier: float
    norm: float


@dataclass
class Worker:
    """The machinery that clients take turns to use: one network, one optimizer, one device.

    Attributes:
        network: loaded with the client's starting weights before each turn.
        augmentation: how training images are varied.
        autocast: opens the mixed-precision context, or a null context in float32.
        freeze: whether batch-normalisation statistics stay as they are.
        cache: folder for what is expensive to compute twice, or None.
        threads: CPU threads that its computations use; None for as many as PyTorch is set to.
        style_noise: how styles are noised before they leave a client, if they are.
        record_noise: how the gradients of images are noised, if they are.
        stepper: how its clients step.
        stopped: set while turns that are under way are to end, because nobody waits for them.
    """

    network: Network
    train: TrainSettings
    augmentation: AugmentSettings
    device: torch.device
    seed: int
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    freeze: bool = False
    cache: Path | None = None
    threads: int | None = None
    style_noise: StyleNoise | None = None
    record_noise: RecordNoise | None = None
    stepper: Stepper = field(default_factory=Stepper)
    stopped: Event = field(default_factory=Event)
