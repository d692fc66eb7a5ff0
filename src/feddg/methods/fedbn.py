"""FedBN: batch normalisation stays with each client (Li et al., ICLR 2021).

Batch normalisation holds what is particular to a domain: the scale and the brightness of its
features. FedBN averages every other layer and lets each client keep its own normalisation, scales
and shifts as well as statistics, from its first round on. A domain that no client holds is
predicted with the average of the clients' normalisation.

Equations:
    w = w^shared + w^BN;  w^shared <- sum_k (n_k/n) w_k^shared;  w_k^BN is never overwritten.
    Unseen domain: w^BN = sum_k (n_k/n) w_k^BN over the last round's clients.

Leaves the client:
    Its weights and its number of images, as in FedAvg. The normalisation layers are sent too: the
    server needs them for the average that unseen domains use, and a client that has not trained
    yet starts from it.

Decisions:
    Normalisation means batch normalisation of any dimension, counters included. The average for
    unseen domains follows FedIG's protocol; the paper does not predict them. Pretrained
    experiments freeze normalisation statistics by default, which would leave FedBN only scales and
    shifts to keep; its preset therefore trains them (model.normalization: train).
"""

from typing import Any, ClassVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from feddg.errors import ExperimentError
from feddg.methods.base import Method
from feddg.methods.catalogue import register
from feddg.methods.reference import CodeDifference, Reference
from feddg.models.network import Network
from feddg.models.normalization import batch_norms


@register
class FedBN(Method):
    """All of batch normalisation stays with each client; unseen domains use its average."""

    name = "fedbn"
    title = "FedBN"
    summary = "all of batch normalisation stays with the clients (Li et al. 2021)"
    reference = Reference(
        "the authors' (med-air/FedBN)",
        (
            CodeDifference(
                "local is what has `bn` in its name, which misses `downsample.1` of a "
                "torchvision ResNet",
                "every batch-normalisation layer, found by type",
                "the paper's rule; a ResNet-18 has 100 such tensors",
            ),
            CodeDifference(
                "clients are tested with their own layers",
                "an unseen domain is predicted with the clients' average",
                "an unseen domain has no client (FedIG's protocol)",
            ),
        ),
    )
    presets: ClassVar[dict[str, dict[str, Any]]] = {"*": {"model": {"normalization": "train"}}}

    def network(self, network: Network) -> Network:
        """Refuses a network without batch normalisation."""
        require_batch_norms(network, self.name)
        return super().network(network)

    def is_local(self, name: str, module: nn.Module) -> bool:
        """Every entry of a batch-normalisation layer."""
        return isinstance(module, _BatchNorm) or super().is_local(name, module)


def require_batch_norms(network: Network, method: str) -> None:
    """Raises ExperimentError if there is no batch normalisation that could stay local."""
    if not batch_norms(network):
        raise ExperimentError(
            f"{method} keeps batch normalisation with the clients, but this backbone has none; "
            "choose one that has (cnn, resnet18, densenet121) or another method"
        )
