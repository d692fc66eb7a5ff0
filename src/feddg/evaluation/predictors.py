"""What predictors that adapt a trained model to the images they meet have in common.

Each wraps any model with batch normalisation and leaves its state as it is, to the bit. What they
share with training is in :mod:`feddg.models.normalization` and :mod:`feddg.models.normalization`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from feddg.errors import AdaptationError
from feddg.messages import Weights
from feddg.models.normalization import (
    Adapted,
    Rule,
    map_layers,
    normalised_by,
    normalize_stored,
    stored,
)
from feddg.settings import Settings

Need = Literal["one image", "a batch", "a stream"]


@dataclass(frozen=True)
class Parts:
    """What a run keeps beside its global model.

    Attributes:
        clients: what each client keeps of the network's state (normalisation), by its id.
        seed: the run's, for what is drawn at random.
    """

    clients: Mapping[int, Weights] = field(default_factory=dict)
    seed: int = 0


class NoSettings(Settings):
    """Nothing to choose."""


class Predictor(nn.Module):
    """A model under a test-time adaptation: RGB images in [0, 1] to logits or log-probabilities.

    Attributes:
        model: the trained model, without an adapter of its own.
        name: what ``--adapt`` calls it.
        summary: one line.
        needs: the least it must be shown: one image, a batch of one domain, or a stream of them.
        changes: what it remembers of the images it has seen, until :meth:`reset`.
        cost: beside one forward pass.
        order: its place in tables; smaller ones first.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    needs: ClassVar[Need] = "one image"
    changes: ClassVar[str] = "nothing"
    cost: ClassVar[str] = "none"
    order: ClassVar[int] = 100
    Settings: ClassVar[type[Settings]] = NoSettings

    def __init__(self, model: nn.Module, settings: Any, parts: Parts) -> None:
        super().__init__()
        self.model = without_adapter(model)
        self.settings, self.parts = settings, parts
        self.require(model)

    def require(self, model: nn.Module) -> None:
        """Raises AdaptationError, with the reason, for a model it cannot adapt."""
        if not map_layers(model):
            raise self.refused(
                "it adapts the batch normalisation of feature maps, and this backbone has none"
            )

    def refused(self, reason: str) -> AdaptationError:
        """Returns the error that says why this model cannot be adapted."""
        return AdaptationError(f"{self.name} cannot serve this model: {reason}")

    def reset(self) -> None:
        """Forgets the images seen so far; call it between domains."""

    @property
    def keeps_state(self) -> bool:
        """Whether an answer depends on the images seen before it."""
        return type(self).reset is not Predictor.reset

    def rule(self, images: Tensor) -> Rule:
        """Returns how layers normalise this batch ``(B, 3, H, W)``."""
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        """Returns ``(B, classes)``."""
        with normalised_by(self.model, self.rule(images)):
            logits: Tensor = self.model(images)
        return logits


def without_adapter(model: nn.Module) -> nn.Module:
    """Returns the model that predicts by its running statistics alone."""
    return model.network if isinstance(model, Adapted) else model


def by_running_statistics(layer: _BatchNorm, inputs: Tensor) -> Tensor:
    """Normalises as every batch-normalisation layer does in evaluation mode."""
    return normalize_stored(layer, inputs, stored(layer))
