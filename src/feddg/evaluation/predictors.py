"""Predictors that adapt a trained model to the images they meet; their base and the simple ones.

Each wraps any model with batch normalisation and leaves its state as it is, to the bit. What they
share with training is in :mod:`feddg.models.moments` and :mod:`feddg.models.adapter`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from feddg.errors import AdaptationError
from feddg.messages import Weights
from feddg.models.adapter import Adapted, Share, adapter_of, interpolated
from feddg.models.batch_instance import BatchInstanceNorm2d
from feddg.models.moments import (
    Moments,
    Rule,
    map_layers,
    normalised_by,
    normalize_stored,
    stored,
)
from feddg.models.network import Network
from feddg.models.norm import batch_norms
from feddg.randomness import stream
from feddg.settings import Fraction, Settings

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
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    needs: ClassVar[Need] = "one image"
    changes: ClassVar[str] = "nothing"
    cost: ClassVar[str] = "none"
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


class Global(Predictor):
    """No adaptation: the running statistics, also where the model has an adapter or gates."""

    name = "global"
    summary = "no adaptation: the running statistics"

    def require(self, model: nn.Module) -> None:
        """Any model."""

    def rule(self, images: Tensor) -> Rule:
        """The running statistics."""
        return by_running_statistics


class FixedSettings(Settings):
    """Settings of ``fixed``."""

    alpha: Fraction = 0.5


class Fixed(Predictor):
    """The same share of the image's own moments in every layer (FedIG-A, Table 3; You et al.)."""

    name = "fixed"
    summary = "a fixed share alpha of the image's own moments"
    cost = "moments of every map"
    Settings = FixedSettings

    def rule(self, images: Tensor) -> Rule:
        """Mixes ``alpha`` parts of the instance's moments."""
        alpha = self.settings.alpha

        def share(number: int, layer: _BatchNorm, ours: Moments, image: Moments) -> Tensor:
            return torch.full((len(image.mean),), alpha, device=image.mean.device)

        return interpolated(self.model, share)


class Random(Predictor):
    """A random share for each layer and image (FedIG-A, Table 3).

    The draw belongs to the image's place since the last reset, whatever the batches.
    """

    name = "random"
    summary = "a random share of the image's own moments, for each layer and image"
    changes = "counts the images, which decides the draws"
    cost = "moments of every map"

    def __init__(self, model: nn.Module, settings: Any, parts: Parts) -> None:
        super().__init__(model, settings, parts)
        self._seen = 0

    def reset(self) -> None:
        """Counts from the beginning."""
        self._seen = 0

    def rule(self, images: Tensor) -> Rule:
        """Draws alpha ``(B, layers)``, then mixes."""
        layers, seed = len(map_layers(self.model)), self.parts.seed
        places = range(self._seen, self._seen + len(images))
        self._seen += len(images)
        draws = [
            torch.rand(layers, generator=stream(seed, "random alpha", place)) for place in places
        ]
        alpha = torch.stack(draws).to(images.device)

        def share(number: int, layer: _BatchNorm, ours: Moments, image: Moments) -> Tensor:
            return alpha[:, number]

        return interpolated(self.model, share)


class Adapter(Predictor):
    """The adapter trained by FedIG-A: a share for each layer and image."""

    name = "adapter"
    summary = "FedIG-A's trained adapters give the share, for each layer and image"
    cost = "moments of every map, and two small linear layers beside it"

    def require(self, model: nn.Module) -> None:
        """A model with adapters."""
        if adapter_of(model) is None:
            raise self.refused(
                "it was trained without adapters, and they cannot be added afterwards; "
                "train with --method fedig-a"
            )
        super().require(model)

    def rule(self, images: Tensor) -> Rule:
        """Mixes by the mean of alpha."""
        adapter = adapter_of(self.model)
        assert adapter is not None
        share: Share = adapter.share()
        return interpolated(self.model, share)


class BatchInstance(Predictor):
    """Batch-instance normalisation: a share per channel, learned in training (Nam and Kim 2018)."""

    name = "bin"
    summary = "batch-instance normalisation, whose shares were learned in training"
    cost = "moments of every map"

    def require(self, model: nn.Module) -> None:
        """A model with gates."""
        if not any(isinstance(layer, BatchInstanceNorm2d) for layer in model.modules()):
            raise self.refused(
                "it was trained without batch-instance normalisation; train with --method fedig "
                "--set method.instance_gate=1 (or with copa)"
            )

    def rule(self, images: Tensor) -> Rule:
        """Each layer as it was trained."""
        return lambda layer, inputs: type(layer).forward(layer, inputs)


class Ensemble(Predictor):
    """The mean of the predictions under each client's own normalisation (Seo et al. 2020)."""

    name = "ensemble"
    summary = "the mean of the predictions under each client's own normalisation"
    cost = "one forward pass per client; needs every client's statistics"

    def __init__(self, model: nn.Module, settings: Any, parts: Parts) -> None:
        super().__init__(model, settings, parts)
        networks = {m: n for n, m in self.model.named_modules() if isinstance(m, Network)}
        prefix = next(iter(networks.values()), "")
        prefix = f"{prefix}." if prefix else ""
        own = self.model.state_dict()
        self._members = [
            {f"{prefix}{name}": tensor.to(own[f"{prefix}{name}"]) for name, tensor in part.items()}
            for _, part in sorted(parts.clients.items())
        ]

    def require(self, model: nn.Module) -> None:
        """A model whose clients keep their normalisation."""
        if not self.parts.clients:
            raise self.refused(
                "its clients keep no normalisation of their own; train with a method of local "
                "normalisation (fedbn, silobn, fedig, fedig-a)"
            )
        names = {name for part in self.parts.clients.values() for name in part}
        layers = batch_norms(self.model)
        if not any(name.rpartition(".")[0].endswith(layer) for name in names for layer in layers):
            raise self.refused("what its clients keep is not normalisation")

    def forward(self, images: Tensor) -> Tensor:
        """Returns log-probabilities ``(B, classes)``."""
        with normalised_by(self.model, by_running_statistics):
            members = [functional_call(self.model, part, (images,)) for part in self._members]
        logs = torch.stack(members).float().log_softmax(-1)
        return logs.logsumexp(0) - math.log(len(logs))
