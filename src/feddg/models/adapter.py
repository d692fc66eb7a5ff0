"""FedIG-A's zero-shot adapter: how far each layer trusts an image's own moments.

For every batch-normalisation layer of feature maps, a network of two linear layers sees how far an
image's moments are from the global ones and gives a share alpha in [0, 1]; the layer normalises by
alpha parts of the image's moments and 1 - alpha parts of the global ones (FedIG-A, Eq. 7 and 9).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from feddg.models.moments import (
    Moments,
    Rule,
    Stored,
    has_map,
    instance_moments,
    map_layers,
    normalised_by,
    normalize,
    normalize_stored,
    stored,
)
from feddg.models.network import Network

HEAD = "zero_shot_adapter"
Statistics = Callable[[_BatchNorm], Stored]
Share = Callable[[int, _BatchNorm, Moments, Moments], Tensor]
"""From a layer's number, the layer, global and instance moments to alpha ``(B,)``."""


class LayerAdapter(nn.Module):
    """Maps the distance between moments of C channels to the distribution of alpha.

    Args:
        channels: C.
        reduction: the hidden layer has C / reduction units, at least one.
        alpha: what it answers before any training, whatever it sees.
        spread: the deviation it begins with.
    """

    def __init__(self, channels: int, reduction: int, alpha: float, spread: float) -> None:
        super().__init__()
        hidden = max(1, channels // reduction)
        self.layers = nn.Sequential(
            nn.Linear(2 * channels, hidden), nn.ReLU(), nn.Linear(hidden, 2)
        )
        # Outside [0, 1] alpha is clamped and learns nothing: begin well inside, for every input.
        last = self.layers[-1]
        assert isinstance(last, nn.Linear)
        with torch.no_grad():
            last.weight.zero_()
            last.bias.copy_(torch.tensor([spread, alpha]))

    def forward(self, ours: Moments, image: Moments) -> tuple[Tensor, Tensor]:
        """Returns deviation and mean of alpha before it is clamped, ``(B,)`` each.

        Args:
            ours: the global moments, ``(C,)``.
            image: each image's own, ``(B, C)``.
        """
        distance = torch.cat([image.mean - ours.mean, image.deviation - ours.deviation], dim=1)
        spread, mean = self.layers(distance).unbind(1)
        return spread.float(), mean.float()


class ZeroShotAdapter(nn.ModuleList):
    """One :class:`LayerAdapter` for each layer of feature maps, in the network's order."""

    def share(self, noise: torch.Generator | None = None) -> Share:
        """Returns what gives alpha: its mean, or with ``noise`` a sample of it (training)."""

        def alpha(number: int, layer: _BatchNorm, ours: Moments, image: Moments) -> Tensor:
            spread, mean = self[number](ours, image)
            if noise is not None:
                mean = mean + spread * torch.randn(len(mean), generator=noise).to(mean)
            clamped: Tensor = mean.clamp(0, 1)
            return clamped

        return alpha


def add_adapter(network: Network, reduction: int, alpha: float, spread: float) -> None:
    """Gives the network an adapter as the head :data:`HEAD`."""
    network.heads[HEAD] = network.initialised(
        HEAD,
        lambda: ZeroShotAdapter(
            LayerAdapter(layer.num_features, reduction, alpha, spread)
            for layer in map_layers(network.featurizer).values()
        ),
    )


def adapter_of(network: nn.Module) -> ZeroShotAdapter | None:
    """Returns the adapter inside a network, or None if it was trained without one."""
    found = [layer for layer in network.modules() if isinstance(layer, ZeroShotAdapter)]
    return found[0] if found else None


def interpolated(
    network: nn.Module,
    share: Share,
    statistics: Statistics = stored,
    watch: Callable[[int, Tensor], None] | None = None,
) -> Rule:
    """Returns the rule that mixes each image's moments into the kept ones (FedIG-A, Eq. 7).

    A layer that sees no map of several pixels, such as a bottleneck's, keeps to the statistics.

    Args:
        network: what it will be applied to.
        share: gives alpha.
        statistics: the global statistics of a layer; its running ones by default.
        watch: is told each layer's number and alpha ``(B,)``.
    """
    numbers: dict[nn.Module, int] = {
        layer: number for number, layer in enumerate(map_layers(network).values())
    }

    def rule(layer: _BatchNorm, inputs: Tensor) -> Tensor:
        kept = statistics(layer)
        if not has_map(inputs):
            return normalize_stored(layer, inputs, kept)
        ours, image = kept.moments(layer.eps), instance_moments(inputs, layer.eps)
        alpha = share(numbers[layer], layer, ours, image)
        if watch is not None:
            watch(numbers[layer], alpha)
        # A graph that is traced must not depend on the images it is traced with.
        traced = torch.compiler.is_compiling()
        if not traced and not alpha.requires_grad and not alpha.any():
            return normalize_stored(layer, inputs, kept)  # the plain model, to the bit
        return normalize(layer, inputs, ours.mixed(image, alpha[:, None]))

    return rule


class Adapted(nn.Module):
    """Predicts with the network's adapter: one forward pass, each image by itself.

    Attributes:
        network: what it predicts with; alone it predicts by its running statistics.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    @property
    def share(self) -> Share:
        """What gives alpha: its mean."""
        adapter = adapter_of(self.network)
        assert adapter is not None, "the network has no adapter"
        return adapter.share()

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits ``(B, classes)``."""
        with normalised_by(self.network, interpolated(self.network, self.share)):
            logits: Tensor = self.network(images)
        return logits

    def alphas(self, images: Tensor) -> dict[str, Tensor]:
        """Returns alpha of each layer for each image, ``(B,)`` by the layer's name."""
        found: dict[int, Tensor] = {}
        rule = interpolated(self.network, self.share, watch=found.__setitem__)
        with normalised_by(self.network, rule):
            self.network(images)
        names = list(map_layers(self.network))
        return {names[number]: alpha for number, alpha in sorted(found.items())}
