"""The clients' own normalisations, all asked and averaged."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from feddg.evaluation.adaptation import register_adaptation
from feddg.evaluation.predictors import Parts, Predictor, by_running_statistics
from feddg.models.network import Network
from feddg.models.normalization import batch_norms, normalised_by


@register_adaptation
class ClientEnsemble(Predictor):
    """The mean of the predictions under each client's own normalisation (Seo et al. 2020)."""

    name = "ensemble"
    summary = "the mean of the predictions under each client's own normalisation"
    order = 50
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
