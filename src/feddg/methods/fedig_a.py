"""FedIG-A: FedIG, and an adapter that decides how far each image's own statistics are trusted.

For an image unlike any seen before, the federation's statistics are wrong, but normalising by the
image's own removes what it looked like. Next to each layer of batch normalisation a small adapter
sees how far the two are apart and gives the share alpha of the image's own. It is trained to
classify the client's images with the network frozen, alternating with FedIG on the same mini-batch;
noise in alpha keeps it from fitting the client. A new domain needs one image and one pass.

"Client-agnostic Learning and Zero-shot Adaptation for Federated Domain Generalization" (anonymous
authors, under review).

Equations:
    mu = alpha mu_i + (1 - alpha) mu_G,  sigma = alpha sigma_i + (1 - alpha) sigma_G         (7)
    L_A = CE(C(f_i), y) with f_i under mu and sigma, minimised over the adapters alone       (8)
    alpha = clamp(delta z + epsilon, 0, 1),  z ~ N(0, 1),
    (delta, epsilon) = G(mu_i - mu_G, sigma_i - sigma_G)                                     (9)

    in each layer and for each image; at prediction alpha is epsilon, clamped.

Leaves the client:
    Its weights, its statistics, the adapters and its number of images.

Decisions:
    The adapter's size is worked out from the paper's parameter count (inference): for C channels
    two linear layers, 2C to C / 16 to 2, on the 20 layers of a ResNet-18's maps give the 11.53
    million of its Table 4; the bottleneck's layer has no map and keeps to the federation's
    statistics. Ours, because the paper is silent: a ReLU between the two; an adapter begins at
    alpha 0.1 with deviation 0.1 whatever it sees, since beyond [0, 1] the clamp lets no gradient
    through; it has plain SGD with the paper's 0.01 and momentum 0.5, without weight decay, anew
    every round unless train.keep_optimizer. Distances pass through unscaled. A layer whose alpha is
    0 for the whole batch is the plain one.
"""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from feddg.clients.client import Batch, Client
from feddg.clients.optim import MemoryOrderSGD, kept_moments, rate_share, take_step, take_up
from feddg.errors import ExperimentError
from feddg.messages import Message, Weights
from feddg.methods.base import MethodSettings, register
from feddg.methods.fedig import GLOBAL, FedIG, FedIGSettings
from feddg.models.network import Network
from feddg.models.normalization import (
    HEAD,
    Adapted,
    LayerAdapter,
    ZeroShotAdapter,
    adapter_of,
    interpolated,
    map_layers,
    normalised_by,
)
from feddg.settings import Fraction, NotNegative, Positive

OPTIMIZER = "fedig-a/optimizer"


class FedIGASettings(FedIGSettings, MethodSettings):
    """Hyper-parameters of FedIG-A."""

    reduction: int = Field(
        16, ge=1, description="channels per hidden unit of an adapter (from the parameter count)"
    )
    adapter_lr: Positive | None = Field(
        0.01, description="the adapters' SGD (the paper's network); none for train.lr"
    )
    adapter_momentum: float = Field(
        0.5, ge=0, lt=1, allow_inf_nan=False, description="the adapters' (the paper's network)"
    )
    first_alpha: Fraction = Field(0.1, description="alpha of an untrained adapter (ours)")
    first_spread: NotNegative = Field(0.1, description="deviation of alpha at first (ours)")


@register
class FedIGA(FedIG):
    """FedIG with an adapter for each layer, trained alternately with the network."""

    name = "fedig-a"
    title = "FedIG-A"
    aliases: ClassVar[tuple[str, ...]] = ("fediga",)
    summary = "FedIG with adapters that trust each image's statistics as far as it pays (FedIG-A)"
    settings: FedIGASettings
    excludes: ClassVar[dict[str, str]] = FedIG.excludes | {
        "copa": "copa predicts by several classifiers, fedig-a trains adapters for one; choose one",
        "fedsr": "fedsr predicts by samples of the embedding, fedig-a through adapters; choose one",
        "scaffold": "scaffold corrects plain gradient steps of every parameter, but the adapters "
        "have an optimizer of their own; choose one",
    }

    def network(self, network: Network) -> Network:
        """Adds the adapters."""
        network = super().network(network)
        layers = map_layers(network.featurizer).values()
        if not layers:
            raise ExperimentError(
                f"{self.name} adapts batch normalisation of feature maps, and this backbone has "
                "none; choose one that has (cnn, resnet18, densenet121)"
            )
        chosen = self.settings
        start = chosen.reduction, chosen.first_alpha, chosen.first_spread
        network.heads[HEAD] = network.initialised(
            HEAD,
            lambda: ZeroShotAdapter(LayerAdapter(each.num_features, *start) for each in layers),
        )
        return network

    def adapter(self, network: Network) -> ZeroShotAdapter:
        """Returns the network's adapters."""
        adapter = adapter_of(network)
        assert adapter is not None
        return adapter

    def optimizer(self, client: Client) -> torch.optim.Optimizer:
        """Excludes the adapters, which have their own optimizer."""
        optimizer = super().optimizer(client)
        chosen, parameters = self.settings, list(self.adapter(client.network).parameters())
        ids = {id(parameter) for parameter in parameters}
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in ids]
        share = rate_share(client.worker.train, client.round)
        own_lr = chosen.adapter_lr * share if chosen.adapter_lr else client.train.lr
        own = MemoryOrderSGD(parameters, own_lr, chosen.adapter_momentum)
        if client.train.keep_optimizer:
            take_up(own, self.adapter(client.network), client.memory)
        client.scratch[OPTIMIZER] = own
        return optimizer

    def draws(self, client: Client, positions: Tensor, labels: Tensor) -> Weights:
        """Adds the noise of every layer's alpha."""
        layers = self.adapter(client.network)
        rng = client.stream("fedig-a", client.steps + 1)  # after the step of the network
        noise = torch.stack([torch.randn(len(labels), generator=rng) for _ in layers])
        return super().draws(client, positions, labels) | {"fedig-a": noise}

    def step(self, client: Client, batch: Batch) -> None:
        """Takes one step of the network, then one of the adapters, on the same batch."""
        super().step(client, batch)
        loss = self.adapter_loss(client, batch)
        optimizer = client.scratch[OPTIMIZER]
        optimizer.zero_grad(set_to_none=True)  # FedProx's term reaches them in the network's step
        with torch.autocast(client.device.type, enabled=False):
            loss.backward(inputs=list(self.adapter(client.network).parameters()))
        take_step(optimizer, client.worker.train.gradient_clipping)
        client.note({"adapter": loss})

    def report(self, client: Client) -> Message:
        """Keeps the moments of the adapters' optimizer, where the client keeps its own."""
        if client.train.keep_optimizer:
            own = kept_moments(client.scratch[OPTIMIZER], self.adapter(client.network))
            client.memory.update(own)
        return super().report(client)

    def adapter_loss(self, client: Client, batch: Batch) -> Tensor:
        """Returns the cross-entropy under sampled alpha (Eq. 8)."""
        share = self.adapter(client.network).share(self.drawn(client, batch)["fedig-a"])
        rule = interpolated(client.network, share, client.scratch[GLOBAL].__getitem__)
        with normalised_by(client.network, rule):
            return client.task_loss(client.network(batch.images), batch.labels)

    def predictor(self, network: Network) -> nn.Module:
        """Predicts through the adapters, with the mean of alpha."""
        return Adapted(network)
