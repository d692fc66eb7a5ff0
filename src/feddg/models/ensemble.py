"""An ensemble of linear classifiers on one embedding."""

import math

import torch
from torch import Tensor, nn

from feddg.models.network import Network


class Heads(nn.Module):
    """Frozen classifiers, one for each domain or client.

    Attributes:
        weight: ``(heads, classes, d)``.
        bias: ``(heads, classes)``.
        trained: ``(heads,)`` bool, those that a client has trained.
    """

    weight: Tensor
    bias: Tensor
    trained: Tensor

    def __init__(self, heads: int, classes: int, dimension: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(heads, classes, dimension))
        self.register_buffer("bias", torch.zeros(heads, classes))
        self.register_buffer("trained", torch.zeros(heads, dtype=torch.bool))

    def forward(self, embeddings: Tensor, which: Tensor) -> Tensor:
        """Returns the logits ``(n, B, classes)`` of some heads.

        Args:
            embeddings: ``(B, d)``.
            which: ``(heads,)`` bool, or ``(n,)`` numbers of heads.
        """
        logits: Tensor = torch.einsum("bd,hcd->hbc", embeddings, self.weight[which])
        return logits + self.bias[which][:, None]


class MeanOverHeads(nn.Module):
    """Predicts by the mean of the trained heads' softmax; gives its logarithm.

    Before any is trained it predicts by the network's own classifier.
    """

    def __init__(self, network: Network, heads: Heads) -> None:
        super().__init__()
        self.network, self.heads = network, heads

    def forward(self, images: Tensor) -> Tensor:
        """Returns log-probabilities ``(B, classes)``."""
        heads, embeddings = self.heads, self.network.features(images)
        if not heads.trained.any():
            logits: Tensor = self.network.classifier(embeddings)
            return logits.float().log_softmax(-1)
        logits = heads(embeddings, heads.trained).float().log_softmax(-1)
        return logits.logsumexp(0) - math.log(len(logits))

    def traceable(self) -> nn.Module:
        """Returns the same predictor without a branch, as a graph needs it; weights are shared."""
        trained = self.heads.trained
        if not trained.any():
            return nn.Sequential(self.network, nn.LogSoftmax(-1))
        weight, bias = self.heads.weight[trained], self.heads.bias[trained]
        return MeanOverAllHeads(self.network, weight, bias)


class MeanOverAllHeads(nn.Module):
    """Predicts by the mean of all given heads' softmax; gives its logarithm.

    Args:
        network: gives the embeddings.
        weight: ``(heads, classes, d)``.
        bias: ``(heads, classes)``.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, network: Network, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, images: Tensor) -> Tensor:
        """Returns log-probabilities ``(B, classes)``."""
        embeddings = self.network.features(images)
        logits = torch.einsum("bd,hcd->hbc", embeddings, self.weight) + self.bias[:, None]
        shares = logits.float().log_softmax(-1)
        return shares.logsumexp(0) - math.log(len(self.weight))
