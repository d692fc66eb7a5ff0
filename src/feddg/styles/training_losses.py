"""What a codec is trained for.

A frozen network judges: its maps after the first convolution of every scale. The AdaIN paper's two
terms (Huang and Belongie, ICCV 2017, equations 11 to 13) are taken in that network, so that the
codec's own encoder may be trained, too:

- content: the re-drawn image's deepest map is that of the original with the style's moments;
- style: its channel moments at every scale are those of the style.

Moments blend linearly with the strength. Further terms serve federated domain generalization:

- reconstruction: at strength 0 the image comes back, in its pixels and in the network's maps;
- counterpart: so does, at strength 1, what the content looks like in the style's variant;
- overshoot: colours outside [0, 1] are clamped before they are judged, and cost;
- critic: a small adversary on the network's maps (after Sauer et al., "Projected GANs Converge
  Faster", NeurIPS 2021), which knows the style asked for, cannot tell re-drawn from real images.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from feddg.models.normalization import instance_moments
from feddg.rng import stream
from feddg.styles.codec import VARIANCE_FLOOR, adain
from feddg.styles.convolutional import ConvolutionalCodec
from feddg.styles.training_images import TrainingBatch

TERMS = ("content", "style", "reconstruction", "counterpart", "overshoot", "critic")

STRONG = 0.8
"""Strength from which on an image should look like one of the style's collection."""


class LossNetwork:
    """The frozen maps that re-drawn images are judged on.

    Args:
        encoder: VGG-like layers.
        examples: ``(N, 3, H, W)`` in [0, 1]; each scale's maps are divided by the deviation of
            their channels on these, so that scales and networks weigh alike.
    """

    def __init__(self, encoder: nn.Sequential, examples: Tensor) -> None:
        self._encoder = encoder.requires_grad_(False)
        self._gains = [1.0]
        self.widths: list[int] = []
        with torch.no_grad():
            maps = list(self._scales(examples))
        self.widths = [features.shape[1] for features in maps]
        self._gains = [_deviation(features) for features in maps]

    def fingerprint(self) -> str:
        """Returns a stable hash of the weights."""
        digest = hashlib.sha256()
        for weight in self._encoder.state_dict().values():
            digest.update(weight.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def maps(self, images: Tensor) -> list[Tensor]:
        """Returns the maps ``(B, C, h, w)`` of images in [0, 1], from shallow to deep."""
        return [features / gain for features, gain in zip(self._scales(images), self._gains)]

    def _scales(self, images: Tensor) -> list[Tensor]:
        found = []
        features = images.contiguous(memory_format=torch.channels_last)
        first = True
        for layer in self._encoder:
            features = layer(features)
            if isinstance(layer, nn.ReLU) and first:
                found.append(features)
                first = False
            first = first or isinstance(layer, nn.MaxPool2d)
        return found


class Critic(nn.Module):
    """Tells images of a style's collection from re-drawn ones, by all maps but the shallowest.

    Args:
        widths: channels of the maps it is given, from shallow to deep.
        seed: of its first weights.
    """

    def __init__(self, widths: Sequence[int], seed: int) -> None:
        super().__init__()
        inputs = 2 * sum(widths)
        with torch.device("meta"):  # drawn below, from a stream of its own
            self.asked = nn.Sequential(
                nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 32 * (len(widths) - 1))
            )
            self.readers = nn.ModuleList(_reader(width) for width in widths[1:])
            self.verdicts = nn.ModuleList(nn.Conv2d(32, 1, 1) for _ in widths[1:])
        self.to_empty(device="cpu")
        generator = stream(seed, "critic")
        with torch.no_grad():
            for weight in self.parameters():
                fan = weight[0].numel() if weight.ndim > 1 else 1
                spread = (2 / fan) ** 0.5 if weight.ndim > 1 else 0.0
                weight.copy_(spread * torch.randn(weight.shape, generator=generator))

    def forward(self, maps: Sequence[Tensor], styles: Sequence[Tensor]) -> Tensor:
        """Returns ``(scales, B)``: positive where an image looks real.

        Args:
            maps: of the images, from shallow to deep.
            styles: ``(B, 2, C)`` at each scale, the moments asked for.
        """
        asked = self.asked(torch.cat([moments.flatten(1) for moments in styles], 1))
        verdicts = []
        for reader, verdict, wish, features in zip(
            self.readers, self.verdicts, asked.chunk(len(self.readers), 1), maps[1:]
        ):
            read = reader(features)
            fit = (read * wish[..., None, None]).mean(1, keepdim=True)
            verdicts.append((verdict(read) + fit).mean((1, 2, 3)))
        return torch.stack(verdicts)


@dataclass(frozen=True)
class Judgement:
    """Loss terms of a batch, and what the critic is to learn from it.

    Attributes:
        terms: the scalars that :data:`TERMS` names, in its order.
        critic: the critic's own loss, or None where there is nothing to learn.
    """

    terms: list[Tensor]
    critic: Tensor | None


def judge(
    codec: ConvolutionalCodec, network: LossNetwork, critic: Critic | None, batch: TrainingBatch
) -> Judgement:
    """Re-draws a batch and returns what is wrong with it."""
    with torch.no_grad():
        before = network.maps(batch.contents)
        real = network.maps(batch.styles)
        answer = network.maps(batch.counterparts)
        asked = [pooled(moments(features), batch.pool) for features in real]
        wanted = [torch.lerp(moments(b), a, batch.strength) for b, a in zip(before, asked)]
        target = adain(before[-1], wanted[-1])
    drawn = redraw(codec, batch)
    visible = drawn.clamp(0, 1)
    after = network.maps(visible)
    same = (batch.strength == 0).float()[..., None]
    known = (batch.strength == 1).float()[..., None] * batch.known
    strong = batch.strength.flatten() >= STRONG
    critic_loss, fooled = None, drawn.new_zeros(())
    if critic is not None and strong.any():
        critic_loss, fooled = _contest(critic, real, after, asked, strong)
    terms = [
        functional.mse_loss(after[-1], target),
        torch.stack([functional.mse_loss(moments(a), w) for a, w in zip(after, wanted)]).sum(),
        _difference(drawn, batch.contents, after, before, same),
        _difference(drawn, batch.counterparts, after, answer, known),
        (drawn - visible).abs().mean(),
        fooled,
    ]
    return Judgement(terms, critic_loss)


def redraw(codec: ConvolutionalCodec, batch: TrainingBatch) -> Tensor:
    """Returns the contents in their styles, ``(B, 3, S, S)``, not clamped, with gradient."""
    features = codec.encode(batch.contents.contiguous(memory_format=torch.channels_last))
    styles = codec.encode(batch.styles.contiguous(memory_format=torch.channels_last))
    own, asked = moments(features), pooled(moments(styles), batch.pool)
    restyled = adain(features, torch.lerp(own, asked, batch.strength))
    drawn: Tensor = codec.decoder(restyled.contiguous(memory_format=torch.channels_last))
    return drawn[..., : batch.contents.shape[-2], : batch.contents.shape[-1]]


def moments(features: Tensor) -> Tensor:
    """Means and standard deviations per image and channel, ``(B, 2, C)``."""
    return torch.stack(instance_moments(features, VARIANCE_FLOOR), dim=1)


def pooled(each: Tensor, count: int) -> Tensor:
    """Gives ``count`` neighbours the moments that their maps have together, ``(B, 2, C)``."""
    groups = each.unflatten(0, (-1, count))
    mean, deviation = groups.unbind(2)
    together = mean.mean(1, keepdim=True)
    variance = (deviation**2 + mean**2).mean(1, keepdim=True) - together**2
    return torch.stack([together, variance.clamp(min=0).sqrt()], 2).expand_as(groups).flatten(0, 1)


def _reader(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(width, 64, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(64, 32, 3, padding=1),
        nn.LeakyReLU(0.2),
    )


def _contest(
    critic: Critic,
    real: Sequence[Tensor],
    after: Sequence[Tensor],
    asked: Sequence[Tensor],
    strong: Tensor,
) -> tuple[Tensor, Tensor]:
    """The critic's hinge loss, and the codec's loss against it."""
    wish = [moments[strong] for moments in asked]
    drawn = [features[strong] for features in after]
    critic.requires_grad_(False)
    fooled = -critic(drawn, wish).mean()
    critic.requires_grad_(True)
    false = critic([features.detach() for features in drawn], wish)
    true = critic(real, asked)
    return (functional.relu(1 + false).mean() + functional.relu(1 - true).mean()) / 2, fooled


def _difference(
    drawn: Tensor, image: Tensor, after: list[Tensor], maps: list[Tensor], chosen: Tensor
) -> Tensor:
    """Mean absolute error of pixels and, at a tenth, squared error of maps of the chosen images."""
    share = chosen.mean().clamp(min=1e-6)
    pixels = ((drawn - image).abs() * chosen).mean()
    squares = [((a - m).square() * chosen).mean() for a, m in zip(after, maps)]
    return (pixels + 0.1 * torch.stack(squares).sum()) / share


def _deviation(features: Tensor) -> float:
    """The root of the channels' mean variance."""
    return max(1e-3, features.var((0, 2, 3)).mean().sqrt().item())
