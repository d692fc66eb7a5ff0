"""MixStyle: images of a client exchange the statistics of their shallow feature maps.

Behind the first stages of the network, each image's feature statistics are mixed with those of
another image of the batch while the label stays. The shallow layers' channel means and deviations
carry the style, so the classifier meets styles between those of its client. Nothing is exchanged
between clients: mixing happens inside one client's batch.

Zhou et al., "Domain Generalization with MixStyle" (ICLR 2021), Eq. 3 to 6.

Equations:
    For a feature map x with spatial mean mu(x) and deviation sigma(x) per image and channel, a
    partner x' from a random permutation of the batch and l ~ Beta(alpha, alpha) per image,

        mu_mix    = l mu(x)    + (1 - l) mu(x')
        sigma_mix = l sigma(x) + (1 - l) sigma(x')
        y         = sigma_mix (x - mu(x)) / sigma(x) + mu_mix

    with the moments held constant in the gradient. Done with probability p at every forward pass
    and stage, in training only.

Leaves the client:
    The network, as in FedAvg. Styles never do.

Decisions:
    As the authors' code: p 0.5, alpha 0.1, variance + 1e-6. The permutation is drawn within the
    client's batch (inference: a client cannot see others' features). A batch of one is left alone.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy
import torch
from pydantic import Field
from torch import Tensor, nn

from feddg.clients.client import Client
from feddg.errors import ExperimentError
from feddg.methods.base import Method, MethodSettings, Presets, register
from feddg.models.network import Network
from feddg.rng import Ahead
from feddg.settings import Fraction, Positive

VARIANCE_FLOOR = 1e-6
"""Added to a feature map's variance before the root (authors' code)."""


class MixStyleSettings(MethodSettings):
    """Hyper-parameters of MixStyle."""

    mix_probability: Fraction = Field(0.5, description="p, per forward pass and stage (paper)")
    mix_alpha: Positive = Field(0.1, description="alpha of Beta(alpha, alpha) (paper)")
    mix_stages: int = Field(2, ge=1, description="stages that mix, first ones (code: PACS 3)")


class StyleMixer(nn.Module):
    """Mixes the statistics of feature maps; has no weights, so state-dict names do not change.

    Args:
        probability: probability that a call mixes.
        alpha: parameter of the Beta distribution of mixing weights.

    Attributes:
        ahead: what the passes draw; without it, and outside training, nothing is mixed.
    """

    def __init__(self, probability: float, alpha: float) -> None:
        super().__init__()
        self.probability, self.alpha = probability, alpha
        self.ahead: Ahead | None = None

    def draw_from(self, rng: numpy.random.Generator) -> None:
        """Sets the random generator of the passes from now on."""
        self.ahead = Ahead(rng, self._drawn, self.ahead)

    def _drawn(self, rng: numpy.random.Generator, shape: Sequence[int]) -> list[Tensor]:
        if rng.random() >= self.probability:
            return []
        shares = rng.beta(self.alpha, self.alpha, shape[0])
        return [torch.from_numpy(drawn) for drawn in (rng.permutation(shape[0]), shares)]

    def after_stage(self, stage: nn.Module, inputs: object, maps: Tensor) -> Tensor | None:
        """Forward hook: returns the replacement of a stage's output ``(B, C, h, w)``."""
        if not self.training or self.ahead is None or len(maps) < 2:
            return None
        drawn = self.ahead.take(maps.device, maps.shape[:1])
        if not drawn:
            return None
        partners, shares = drawn
        return mixed(maps, partners, shares.to(maps))


def mixed(maps: Tensor, partners: Tensor, shares: Tensor) -> Tensor:
    """Returns feature maps with statistics between their own and their partners' (Eq. 3 to 6).

    Args:
        maps: ``(B, C, h, w)``.
        partners: ``(B,)`` index of the other image for each.
        shares: ``(B,)`` weight of the own statistics, in [0, 1].
    """
    variance, mean = torch.var_mean(maps.detach().float(), (2, 3), correction=0, keepdim=True)
    moments = torch.stack([mean, (variance + VARIANCE_FLOOR).sqrt()])
    mean, deviation = moments.to(maps)
    foreign = (1 - shares.float())[:, None, None, None]
    new_mean, new_deviation = moments.lerp(moments[:, partners], foreign).to(maps)
    return (maps - mean) / deviation * new_deviation + new_mean


def mixers(network: nn.Module) -> Iterator[StyleMixer]:
    """Yields the network's mixers, the shallowest first."""
    return (module for module in network.modules() if isinstance(module, StyleMixer))


@register
class MixStyle(Method):
    """Mixes feature statistics between the images of a batch."""

    name = "mixstyle"
    summary = "feature statistics mixed inside each client's batch (Zhou et al. 2021)"
    any_task = True
    settings: MixStyleSettings
    presets: ClassVar[Presets] = {"pacs": {"method": {"mix_stages": 3}}}

    def network(self, network: Network) -> Network:
        """Adds a mixer after each of the first stages."""
        network, chosen = super().network(network), self.settings
        stages = network.stages[: chosen.mix_stages]
        if len(stages) < chosen.mix_stages:
            raise ExperimentError(
                f"mixstyle mixes behind {chosen.mix_stages} stages, but this backbone has "
                f"{len(stages)}; lower method.mix_stages or choose cnn or a ResNet"
            )
        network.mixers = nn.ModuleList()
        for stage in stages:
            mixer = StyleMixer(chosen.mix_probability, chosen.mix_alpha)
            stage.register_forward_hook(mixer.after_stage)
            network.mixers.append(mixer)
        return network

    def begin(self, client: Client) -> None:
        """Gives each mixer the client's random stream of this round."""
        super().begin(client)
        for stage, mixer in enumerate(mixers(client.network)):
            mixer.draw_from(client.numpy_stream("mixstyle", stage))
