"""SelfReg: images of one class are drawn together, without any negative pair.

Every image's logits and features are pulled towards those of another image of its class, and
towards a mixture of two others. Only positive pairs are used, so no large batch and no distance
between classes is needed. Each client regularises itself.

Kim et al., "SelfReg: Self-supervised Contrastive Regularization for Domain Generalization" (ICCV
2021), Eq. 2 to 8.

Equations:
    L = CE + min(CE, 1) [l I + (1 - l) H],    l ~ Beta(0.5, 0.5), drawn per step
    I = MSE(c, c') + 0.3 MSE(z, r')
    H = MSE(c, l c' + (1 - l) c'') + 0.3 MSE(z, l r' + (1 - l) r'')

    c are logits, z embeddings, r = projector(z); ' and '' stand for two random permutations inside
    each class. The factor min(CE, 1) is a constant of the gradient. The projector is three linear
    layers, each with BatchNorm1d.

Leaves the client:
    The network, as in FedAvg, with the projector.

Decisions:
    As both codes: the un-projected embedding is compared with the projected, permuted ones, and no
    gradient is stopped. The projector is averaged with the model. A batch of one, for which
    BatchNorm1d is not defined, is trained by CE alone.
"""

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from feddg.clients.client import Batch, Client
from feddg.messages import Weights
from feddg.methods.base import Method, MethodSettings, register
from feddg.models.network import Network
from feddg.settings import NotNegative, Positive


class SelfRegSettings(MethodSettings):
    """Hyper-parameters of SelfReg."""

    feature_weight: NotNegative = Field(0.3, description="weight of the feature terms (code)")
    mixture_alpha: Positive = Field(0.5, description="of Beta(alpha, alpha), for l (code)")
    regularization: NotNegative = Field(1.0, description="weight of I and H together (code: 1)")


@register
class SelfReg(Method):
    """Pulls logits and features of the same class together, with positive pairs only."""

    name = "selfreg"
    summary = "draws same-class logits and features together (Kim et al. 2021)"
    settings: SelfRegSettings

    def network(self, network: Network) -> Network:
        """Adds the projector."""
        network = super().network(network)
        size = network.features_dimension
        network.heads["projector"] = network.initialised("projector", lambda: projector(size))
        return network

    def draws(self, client: Client, positions: Tensor, labels: Tensor) -> Weights:
        """Adds two partners of each image's class."""
        rng = client.stream("selfreg", client.steps)
        drawn = {f"selfreg/{place}": same_class_partners(labels, rng) for place in range(2)}
        return super().draws(client, positions, labels) | drawn

    def head_loss(self, client: Client, batch: Batch, embeddings: Tensor) -> dict[str, Tensor]:
        """Adds the individual and the mixed term, for logits and for features."""
        terms = super().head_loss(client, batch, embeddings)
        if len(batch) < 2:
            return terms
        alpha = self.settings.mixture_alpha
        share = float(client.numpy_stream("selfreg", client.steps).beta(alpha, alpha))
        drawn = self.drawn(client, batch)
        first, second = drawn["selfreg/0"], drawn["selfreg/1"]
        logits = client.network.classifier(embeddings)
        projected = client.network.heads["projector"](embeddings)
        loss = client.task_loss(logits, batch.labels)  # without what other parts add
        scale = self.settings.regularization * loss.detach().clamp(max=1)

        def drawn_together(ours: Tensor, others: Tensor) -> Tensor:
            mixture = torch.lerp(others[first], others[second], 1 - share)
            return share * mse_loss(ours, others[first]) + (1 - share) * mse_loss(ours, mixture)

        features = self.settings.feature_weight * drawn_together(embeddings, projected)
        return terms | {
            "logit_regularizer": scale * drawn_together(logits, logits),
            "feature_regularizer": scale * features,
        }


def projector(size: int) -> nn.Sequential:
    """Returns the projection head, ``(B, size)`` to ``(B, size)``."""
    hidden = max(1024, size)
    layers: list[nn.Module] = []
    for inputs, outputs in ((size, hidden), (hidden, hidden), (hidden, size)):
        layers += [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def same_class_partners(labels: Tensor, rng: torch.Generator) -> Tensor:
    """Returns a random permutation ``(B,)`` within each class."""
    drawn = torch.randperm(len(labels), generator=rng)
    partners = torch.empty_like(drawn)
    partners[labels.argsort(stable=True)] = drawn[labels[drawn].argsort(stable=True)]
    return partners
