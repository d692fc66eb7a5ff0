"""FedSR: a simple, probabilistic embedding (Nguyen et al., NeurIPS 2022).

The encoder gives a Gaussian instead of a point, and the classifier sees a sample of it. Two terms
keep the embedding from holding more about the image than the class needs: its length, and its
divergence from a learnt Gaussian for its class. Both bound information that would differ between
domains.

Equations:
    z ~ N(mu(x), sigma(x)^2), sigma = softplus(raw);  L = CE(z, y) + a_L2R * L2R + a_CMI * CMI.
    L2R = mean ||z||_2 (`length: norm`) or mean ||z||_2^2 (`length: squared`).
    CMI = mean KL( N(C mu, (C sigma)^2) || N(r_mu[y], softplus(r_raw[y])^2) ), that is, with
        m = C mu, s = C sigma and r = softplus(r_raw[y]), the sum over dimensions of
        log(r/s) + (s^2 + (m - r_mu[y])^2) / (2 r^2) - 1/2.
    Prediction: log of the mean over 20 samples of softmax.

Leaves the client:
    Its weights and its number of images, as in FedAvg; the weights hold the heads of mu and sigma,
    and the class references r and C, although these stay local.

Decisions:
    Ours is the authors' code by default: the norm (the equation squares it), a learnt C inside CMI,
    and r and C at the client. The port that PARDON compared with trains by plain SGD at 3e-5, draws
    r anew in every round, and cannot evaluate its sampled embedding; its rows are at chance. A
    linear layer maps the backbone's d features to mu and sigma of d dimensions (the paper: 512 with
    ResNet-18, 2048 with ResNet-50, which is d). `length: norm` is the default because the
    coefficients 0.01 and 0.001 were published with it; squared, the term grows with d.
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import softplus

from feddg.clients.client import Batch, Client
from feddg.methods.base import Method, MethodSettings, register
from feddg.models.network import (
    SMALLEST_DEVIATION,
    GaussianEmbedding,
    MeanOverSamples,
    Network,
    embedding_of,
)
from feddg.settings import NotNegative


class FedSRSettings(MethodSettings):
    """Hyper-parameters of FedSR."""

    alpha_l2r: NotNegative = Field(0.01, description="weight of the length (authors' code, PACS)")
    alpha_cmi: NotNegative = Field(
        0.001,
        description="weight of the divergence from the class reference (authors' code, PACS)",
    )
    length: Literal["norm", "squared"] = Field(
        "norm", description="mean length of z (authors' code), or mean squared length (paper)"
    )
    samples: int = Field(
        20, ge=1, description="embeddings a prediction is averaged over (authors' code)"
    )


class GaussianReference(nn.Module):
    """One Gaussian for each class, and the factor C of the embedding compared with it."""

    def __init__(self, classes: int, dimension: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(classes, dimension))
        self.raw_deviation = nn.Parameter(torch.ones(classes, dimension))
        self.factor = nn.Parameter(torch.ones(()))

    def divergence(self, mean: Tensor, deviation: Tensor, labels: Tensor) -> Tensor:
        """Returns the batch mean of CMI's divergence."""
        reference = softplus(self.raw_deviation[labels]).clamp_min(SMALLEST_DEVIATION)
        scaled = (self.factor.abs() * deviation).clamp_min(SMALLEST_DEVIATION)
        return gaussian_divergence(self.factor * mean, scaled, self.mean[labels], reference).mean()


def gaussian_divergence(mean: Tensor, deviation: Tensor, other: Tensor, width: Tensor) -> Tensor:
    """Returns KL( N(mean, deviation^2) || N(other, width^2) ), summed over dimensions: ``(B,)``."""
    distance = deviation.square() + (mean - other).square()
    return ((width / deviation).log() + distance / (2 * width.square()) - 0.5).sum(1)


@register
class FedSR(Method):
    """Samples a Gaussian embedding that is short and close to its class's reference."""

    name = "fedsr"
    summary = "a short, class-conditional Gaussian embedding (Nguyen et al. 2022)"
    settings: FedSRSettings
    excludes: ClassVar[dict[str, str]] = {
        "copa": "copa predicts by several classifiers on one embedding, fedsr by one classifier on "
        "several samples of it; choose one",
        "l2d": "fedsr and l2d both replace the embedding by one with noise; choose one",
    }

    def network(self, network: Network) -> Network:
        """Makes the embedding Gaussian and adds the class references."""
        network = super().network(network)
        inner, dimension = network.embedding, network.features_dimension
        network.embedding = network.initialised(
            "fedsr", lambda: GaussianEmbedding(inner, dimension)
        )
        network.heads["fedsr"] = GaussianReference(network.classes, dimension)
        return network

    def is_local(self, name: str, module: nn.Module) -> bool:
        """Returns whether the entry is of the class references."""
        return isinstance(module, GaussianReference) or super().is_local(name, module)

    def begin(self, client: Client) -> None:
        """Sets the client's random stream for the noise."""
        super().begin(client)
        embedding_of(client.network).draw_from(client.stream("fedsr"))

    def step(self, client: Client, batch: Batch) -> None:
        """Forgets the pass after the step.

        Its graph would go on to add gradients on the stream of that step: no other stream could
        record one (:mod:`feddg.clients.graphs`).
        """
        super().step(client, batch)
        vars(embedding_of(client.network)).pop("last", None)

    def head_loss(self, client: Client, batch: Batch, embeddings: Tensor) -> dict[str, Tensor]:
        """Adds the embedding's length and its divergence from the class reference."""
        terms = super().head_loss(client, batch, embeddings)
        mean, deviation = embedding_of(client.network).moments_of(embeddings)
        length = torch.linalg.vector_norm(embeddings.float(), dim=1)
        length = length.square() if self.settings.length == "squared" else length
        reference: GaussianReference = client.network.heads["fedsr"]  # type: ignore[assignment]
        divergence = reference.divergence(mean, deviation, batch.labels)
        terms["length"] = self.settings.alpha_l2r * length.mean()
        return terms | {"divergence": self.settings.alpha_cmi * divergence}

    def predictor(self, network: Network) -> nn.Module:
        """Averages softmax over samples."""
        return MeanOverSamples(network, self.settings.samples)
