"""A Gaussian embedding: sampled in training; predictions are averaged over samples."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from feddg.models.network import Network
from feddg.rng import stream

SMALLEST_DEVIATION = 1e-6


class GaussianEmbedding(nn.Module):
    """Maps features to a Gaussian, and returns a sample of it in training, its mean otherwise.

    Attributes:
        chance: where training samples come from; None gives the mean.
        last: mean and deviation, ``(B, d)`` each, of the last forward pass.
    """

    last: tuple[Tensor, Tensor]

    def __init__(self, inner: nn.Module, dimension: int) -> None:
        super().__init__()
        self.inner = inner
        self.moments = nn.Linear(dimension, 2 * dimension)
        self.chance: torch.Generator | None = None

    def distribution(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mean and standard deviation, ``(B, d)`` each, in float32."""
        mean, raw = self.moments(self.inner(features)).float().chunk(2, dim=1)
        return mean, softplus(raw).clamp_min(SMALLEST_DEVIATION)

    def forward(self, features: Tensor) -> Tensor:
        """Returns ``(B, d)`` embeddings."""
        mean, deviation = self.last = self.distribution(features)
        if not self.training or self.chance is None:
            return mean
        return mean + deviation * torch.randn(mean.shape, generator=self.chance).to(mean)


def embedding_of(network: Network) -> GaussianEmbedding:
    """Returns the network's Gaussian embedding."""
    embedding = network.embedding
    assert isinstance(embedding, GaussianEmbedding)
    return embedding


class MeanOverSamples(nn.Module):
    """Predicts by the mean of softmax over samples of the embedding; gives its logarithm."""

    noise: Tensor

    def __init__(self, network: Network, samples: int) -> None:
        super().__init__()
        self.network = network
        chance = stream(network.seed, "samples of the embedding")
        noise = torch.randn((samples, 1, network.features_dimension), generator=chance)
        device = next(network.parameters()).device
        self.register_buffer("noise", noise.to(device), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Returns log-probabilities ``(B, classes)``."""
        network = self.network
        features = network.featurizer(network.normalize(images))
        mean, deviation = embedding_of(network).distribution(features)
        logits: Tensor = network.classifier(mean + deviation * self.noise)
        samples = logits.float().log_softmax(-1)
        return samples.logsumexp(0) - math.log(len(samples))
