"""Trains a codec on folders of content and style images; run again to go on.

    python benchmarks/codec/train.py --content PHOTOS --style PICTURES --out FOLDER [--size 64 128]
        [--codec compact|modulated|vgg19] [--loss-network VGG19_ENCODER] [--critic 0.3]
        [--keep-encoder] [--learning-rate 1e-3]

``decoder.safetensors`` in the folder (and ``encoder.safetensors``, if that was trained) is what
``method.decoder`` of an experiment, or ``stylize.py --decoder``, takes.
"""

import argparse
import csv
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional

from feddg.attacks.attack import load_public
from feddg.errors import DataError, WeightsError
from feddg.models.backbones import read_weights
from feddg.models.normalization import instance_moments
from feddg.rng import stream
from feddg.storage import replace_bytes
from feddg.styles.codec import CODECS, VARIANCE_FLOOR, adain
from feddg.styles.codecs import (
    CompactCodec,
    ConvolutionalCodec,
    ModulatedDecoder,
    Vgg19Codec,
)
from feddg.styles.statistics import between, texture

M = TypeVar("M", bound=nn.Module)
Variant = Callable[[Tensor, torch.Generator], Tensor]

# What a codec's training looks at: squares of two collections, in many styles.
#
# A batch is made of groups. Each has its own contents and styles, and one variant of either, drawn
# once for the group. So a group's styles may be pooled, as a client's or a cluster's are, and the
# *counterpart* of a content, itself in the styles' variant, is known where both come from the same
# collection.


GROUP = 4
"""Largest number of images in a group."""

MOST_IMAGES = 32
"""Largest number of images in a batch, for any image size."""

TERMS = ("content", "style", "reconstruction", "counterpart", "overshoot", "critic")
STRONG = 0.8
"""From this strength on, an image should look like one of the style's collection."""
CURVE_STEP = 25
"""Number of steps averaged into one row of the loss curve."""
_ADAM = ("step", "exp_avg", "exp_avg_sq")
_FAULTS = (OSError, RuntimeError, TypeError, KeyError, ValueError)
"""Exceptions that reading a damaged state raises."""
LONGEST_GRADIENT = 5.0
"""Gradients with a larger norm are clipped to this."""
SMALLEST_SIZE = 16
"""Smallest side in pixels; VGG-19's deepest map needs it."""
KEPT_SIDE = 160
"""Side in pixels at which square images are stored; larger crops are enlarged from them."""


@dataclass(frozen=True)
class TrainingBatch:
    """Images of one step, float RGB in [0, 1].

    Attributes:
        contents: ``(B, 3, S, S)``, images to stylize.
        styles: ``(B, 3, S, S)``, images that give the styles.
        counterparts: ``(B, 3, S, S)``, the target of stylizing at strength 1.
        known: ``(B, 1, 1, 1)``, 1 if the counterpart is known, 0 if it must be ignored.
        strength: ``(B, 1, 1)`` in [0, 1].
        pool: number of neighbouring images that share one style.
    """

    contents: Tensor
    styles: Tensor
    counterparts: Tensor
    known: Tensor
    strength: Tensor
    pool: int


def draw_batch(
    contents: Tensor, styles: Tensor, *, sizes: Sequence[int], pixels: int, seed: int, step: int
) -> TrainingBatch:
    """Returns the batch of one step, which depends on the seed and the step only.

    Args:
        contents: ``(N, 3, s, s)`` uint8, photographs.
        styles: ``(M, 3, s, s)`` uint8, images in other styles.
        sizes: possible sides of the squares, one of which is drawn; repeat one to draw it more
            often.
        pixels: total pixels of the contents, as nearly as groups allow.
        seed: seed of the training.
        step: counted from 0.
    """
    generator = stream(seed, "batch", step)
    size = sizes[int(torch.randint(len(sizes), (), generator=generator))]
    count = min(MOST_IMAGES, max(2, pixels // size**2))
    group = min(GROUP, count)
    groups = [
        _group(contents, styles, group, size, generator) for _ in range(max(1, count // group))
    ]
    count = group * len(groups)
    drawn, copied, counterparts = (torch.cat(part) for part in list(zip(*groups))[:3])
    known = torch.tensor([float(one[3]) for one in groups]).repeat_interleave(group)
    strength = (1.7 * torch.rand(count, 1, 1, generator=generator) - 0.4).clamp(0, 1)
    pool = group if _chance(0.5, generator) else 1
    return TrainingBatch(drawn, copied, counterparts, known[:, None, None, None], strength, pool)


def _group(
    contents: Tensor, styles: Tensor, count: int, size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Returns contents, styles, counterparts, and whether the counterparts are known."""
    of_content, of_style = _chance(0.75, generator), _chance(0.65, generator)
    plain = _squares(contents if of_content else styles, count, size, generator)
    other = _squares(contents if of_style else styles, count, size, generator)
    before, after = _variant(0.5, generator), _variant(0.35 if of_style else 0.5, generator)
    both = after(torch.cat([plain, other]), generator)
    known = of_content == of_style and before in RECOVERABLE and after is not texture
    return before(plain, generator), both[count:], both[:count], known


def _variant(plain: float, generator: torch.Generator) -> Variant:
    """Draws a variant: the unchanged image with probability ``plain``, else a random one."""
    choice = VARIANTS[int(torch.randint(len(VARIANTS), (), generator=generator))]
    return unchanged if _chance(plain, generator) else choice


def _chance(share: float, generator: torch.Generator) -> bool:
    return bool(torch.rand((), generator=generator) < share)


def _squares(images: Tensor, count: int, size: int, generator: torch.Generator) -> Tensor:
    """Returns random square crops of one scale, resized to ``size``, some flipped; in [0, 1]."""
    side = images.shape[-1]
    smallest = min(max(size, 48), side)
    crop = int(torch.randint(smallest, side + 1, (), generator=generator))
    rows = torch.randint(len(images), (count,), generator=generator).tolist()
    corners = torch.randint(side - crop + 1, (count, 2), generator=generator).tolist()
    squares = torch.stack(
        [images[row, :, y : y + crop, x : x + crop] for row, (y, x) in zip(rows, corners)]
    )
    resized = functional.interpolate(squares / 255, (size, size), mode="bilinear", antialias=True)
    return (resized.flip(-1) if _chance(0.5, generator) else resized).clamp(0, 1)


# Strong colour and texture variants of images: more styles for the decoder than folders hold.
#
# Each variant takes float RGB images ``(B, 3, H, W)`` in [0, 1] and a generator, and returns
# images of the same shape and range.


def unchanged(images: Tensor, generator: torch.Generator) -> Tensor:
    """Returns the images unchanged."""
    return images


def recoloured(images: Tensor, generator: torch.Generator) -> Tensor:
    """Returns images with randomly mixed colour channels and a random tone curve."""
    mix = torch.eye(3) + 0.6 * torch.randn(3, 3, generator=generator)
    mixed = torch.einsum("oc,bchw->bohw", mix, images - 0.5) + 0.5
    return mixed.clamp(0, 1).pow(between(0.5, 2.0, generator))


def inverted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Returns the negatives."""
    return 1 - images


def grey(images: Tensor, generator: torch.Generator) -> Tensor:
    """Returns grey images of random contrast and brightness."""
    contrast = between(0.4, 2.5, generator)
    brightness = between(0.3, 0.7, generator)
    return ((_luminance(images) - 0.5) * contrast + brightness).clamp(0, 1).expand_as(images)


def line_drawing(images: Tensor, generator: torch.Generator) -> Tensor:
    """Returns dark lines on white paper, from a difference of Gaussians."""
    return _paper_with_lines(images, generator).expand_as(images)


def flat_colours(images: Tensor, generator: torch.Generator) -> Tensor:
    """Returns smooth, saturated areas of few tones with dark outlines."""
    from torchvision.transforms.functional import gaussian_blur  # a second to import

    smooth = gaussian_blur(images, [5, 5], [1.5, 1.5])
    levels = 2 + int(between(0, 4, generator))
    luminance = _luminance(smooth)
    vivid = luminance + (smooth - luminance) * between(1.0, 3.0, generator)
    posterised = (vivid.clamp(0, 1) * levels).round() / levels
    outlined: Tensor = posterised * _paper_with_lines(images, generator)
    return outlined


VARIANTS: tuple[Variant, ...] = (
    unchanged,
    recoloured,
    flat_colours,
    line_drawing,
    grey,
    inverted,
    texture,
)
RECOVERABLE: tuple[Variant, ...] = (unchanged, recoloured, inverted)
"""Variants from which the counterpart of an image can be recovered."""


def _paper_with_lines(images: Tensor, generator: torch.Generator) -> Tensor:
    """Returns ``(B, 1, H, W)``: 1 on paper, towards 0 at dark edges."""
    width = between(0.6, 1.6, generator)
    luminance = _luminance(images)
    from torchvision.transforms.functional import gaussian_blur

    fine, coarse = (gaussian_blur(luminance, [9, 9], [s, s]) for s in (width, 1.6 * width))
    threshold = between(0.005, 0.03, generator)
    return torch.sigmoid((fine - coarse + threshold) * between(100, 400, generator))


def _luminance(images: Tensor) -> Tensor:
    return images.mean(dim=1, keepdim=True)


# What a codec is trained for.
#
# A frozen network judges: its maps after the first convolution of every scale. The AdaIN paper's
# two terms (Huang and Belongie, ICCV 2017, equations 11 to 13) are taken in that network, so that
# the codec's own encoder may be trained, too:
#
# - content: the stylized image's deepest map is that of the original with the style's moments;
# - style: its channel moments at every scale are those of the style.
#
# Moments blend linearly with the strength. Further terms serve federated domain generalization:
#
# - reconstruction: at strength 0 the image comes back, in its pixels and in the network's maps;
# - counterpart: so does, at strength 1, what the content looks like in the style's variant;
# - overshoot: colours outside [0, 1] are clamped before they are judged, and cost;
# - critic: a small adversary on the network's maps (after Sauer et al., "Projected GANs Converge
#   Faster", NeurIPS 2021), which knows the style asked for, cannot tell stylized from real images.


class LossNetwork:
    """The frozen network whose feature maps the losses compare.

    Args:
        encoder: VGG-like layers.
        examples: ``(N, 3, H, W)`` in [0, 1]; each scale's maps are divided by their channel
            deviation on these images, so that scales and networks have equal weight.
    """

    def __init__(self, encoder: nn.Sequential, examples: Tensor) -> None:
        self.encoder = encoder.requires_grad_(False)
        self._gains = [1.0]
        self.widths: list[int] = []
        with torch.no_grad():
            maps = list(self._scales(examples))
        self.widths = [features.shape[1] for features in maps]
        self._gains = [_deviation(features) for features in maps]

    def maps(self, images: Tensor) -> list[Tensor]:
        """Returns the maps ``(B, C, h, w)`` of images in [0, 1], from shallow to deep."""
        return [features / gain for features, gain in zip(self._scales(images), self._gains)]

    def _scales(self, images: Tensor) -> list[Tensor]:
        found = []
        features = images.contiguous(memory_format=torch.channels_last)
        first = True
        for layer in self.encoder:
            features = layer(features)
            if isinstance(layer, nn.ReLU) and first:
                found.append(features)
                first = False
            first = first or isinstance(layer, nn.MaxPool2d)
        return found


class Critic(nn.Module):
    """A discriminator between real and stylized images, on all maps but the shallowest.

    Args:
        widths: channels of its input maps, from shallow to deep.
        seed: seed of its initial weights.
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
        """Returns ``(scales, B)``: positive if an image looks real.

        Args:
            maps: feature maps of the images, from shallow to deep.
            styles: ``(B, 2, C)`` at each scale, the target moments.
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


def judge(
    codec: ConvolutionalCodec, network: LossNetwork, critic: Critic | None, batch: TrainingBatch
) -> tuple[list[Tensor], Tensor | None]:
    """Stylizes a batch and returns its losses.

    Returns:
        The scalars of :data:`TERMS` in its order, and the critic's own loss, None if it has nothing
        to learn.
    """
    with torch.no_grad():
        before = network.maps(batch.contents)
        real = network.maps(batch.styles)
        answer = network.maps(batch.counterparts)
        asked = [pooled(moments(features), batch.pool) for features in real]
        wanted = [torch.lerp(moments(b), a, batch.strength) for b, a in zip(before, asked)]
        target = adain(before[-1], wanted[-1])
    drawn = stylize(codec, batch)
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
    return terms, critic_loss


def stylize(codec: ConvolutionalCodec, batch: TrainingBatch) -> Tensor:
    """Returns the contents in their styles, ``(B, 3, S, S)``, not clamped, with gradients."""
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
    """Returns the joint moments of each group of ``count`` neighbouring maps, ``(B, 2, C)``."""
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
    """Returns the critic's hinge loss, and the codec's loss against the critic."""
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
    """Returns mean absolute pixel error plus 0.1 times squared map error, for chosen images."""
    share = chosen.mean().clamp(min=1e-6)
    pixels = ((drawn - image).abs() * chosen).mean()
    squares = [((a - m).square() * chosen).mean() for a, m in zip(after, maps)]
    return (pixels + 0.1 * torch.stack(squares).sum()) / share


def _deviation(features: Tensor) -> float:
    """Returns the square root of the channels' mean variance."""
    return max(1e-3, features.var((0, 2, 3)).mean().sqrt().item())


@dataclass
class Trainee:
    """A network with its optimizer; a frozen network has none and does not change."""

    module: nn.Module
    optimizer: torch.optim.Adam

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Returns all tensors to save, under names that begin with ``prefix``."""
        found = {f"{prefix}.weight.{key}": t for key, t in self.module.state_dict().items()}
        for index, kept in self.optimizer.state_dict()["state"].items():
            found |= {f"{prefix}.adam.{index}.{name}": kept[name] for name in _ADAM}
        return found

    def restore(self, prefix: str, tensors: dict[str, Tensor]) -> None:
        """Loads what :meth:`tensors` returned.

        Raises:
            KeyError: an entry is missing.
            RuntimeError: an entry does not fit.
        """
        keys = self.module.state_dict()
        self.module.load_state_dict({key: tensors[f"{prefix}.weight.{key}"] for key in keys})
        state = self.optimizer.state_dict()
        count = len(state["param_groups"][0]["params"])
        state["state"] = {
            index: {name: tensors[f"{prefix}.adam.{index}.{name}"] for name in _ADAM}
            for index in range(count)
            if f"{prefix}.adam.{index}.step" in tensors
        }
        self.optimizer.load_state_dict(state)


@dataclass
class TrainingState:
    """The state of a codec's training.

    Attributes:
        trainees: the networks in training by name.
        curve: the loss terms of every step so far.
    """

    trainees: dict[str, Trainee]
    curve: list[list[float]]

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return len(self.curve)

    def recent(self, terms: tuple[str, ...], end: int | None = None) -> dict[str, float]:
        """Returns the mean of each term over the last :data:`CURVE_STEP` steps before ``end``."""
        rows = self.curve[:end][-CURVE_STEP:]
        return {term: sum(column) / len(rows) for term, column in zip(terms, zip(*rows))}


def continue_from(out: Path, recipe: dict[str, Any], state: TrainingState) -> None:
    """Continues the training saved in ``out``, if there is one.

    Raises:
        DataError: ``out`` holds a training with another recipe, or a damaged file.
    """
    path = out / "state.safetensors"
    if not path.exists():
        return
    try:
        with safetensors.safe_open(path, "pt") as file:
            found = json.loads(file.metadata()["recipe"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        if found != recipe:
            different = ", ".join(key for key in recipe if found.get(key) != recipe[key])
            raise DataError(
                f"{out} holds a training with other settings ({different}); "
                "choose another folder or delete it"
            )
        for name, trainee in state.trainees.items():
            trainee.restore(name, tensors)
        state.curve = tensors["curve"].tolist()
    except (safetensors.SafetensorError, *_FAULTS) as error:
        raise DataError(f"{path}: not the state of a training ({error}); delete it") from error


def save(out: Path, recipe: dict[str, Any], state: TrainingState, terms: tuple[str, ...]) -> None:
    """Writes state and curve; each file is replaced as a whole."""
    tensors = {"curve": torch.tensor(state.curve, dtype=torch.float64)}
    for name, trainee in state.trainees.items():
        tensors |= trainee.tensors(name)
    write_tensors(out / "state.safetensors", tensors, {"recipe": json.dumps(recipe)})
    ends = range(CURVE_STEP, state.step + 1, CURVE_STEP)
    with (out / "loss.csv").open("w", newline="") as file:
        rows = [[end, *state.recent(terms, end).values()] for end in ends]
        csv.writer(file).writerows([["step", *terms], *rows])


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Replaces a weights file as a whole; an interruption leaves the old one."""
    whole = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
    replace_bytes(path, safetensors.torch.save(whole, metadata=metadata))


@dataclass(frozen=True)
class Recipe:
    """Settings for training a codec.

    Attributes:
        codec: the codec's name; it must have weights to train.
        steps: optimizer steps, over which the learning rate falls to zero.
        seed: seed of the initial weights and all draws.
        sizes: sides of the square crops in pixels, one of which is drawn at every step; repeat
            one to draw it more often.
        batch_pixels: total pixels of a step's contents: 32,768 are 8 images of 64 pixels.
        learning_rate: initial learning rate of Adam.
        style_weight: weight of the style term relative to the content term; 10 in the AdaIN paper.
        reconstruction_weight: weight of the term at strength 0.
        counterpart_weight: weight of the term at strength 1, where the target is known.
        critic_weight: weight of the adversarial term; 0 trains without a critic.
        keep_encoder: whether to fix the encoder even if another loss network is used: styles then
            remain those of its codec, and a step takes two thirds of the time.
    """

    codec: str = "compact"
    steps: int = 4000
    seed: int = 0
    sizes: tuple[int, ...] = (64,)
    batch_pixels: int = 2**15
    learning_rate: float = 1e-3
    style_weight: float = 10.0
    reconstruction_weight: float = 5.0
    counterpart_weight: float = 5.0
    critic_weight: float = 0.0
    keep_encoder: bool = False

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights of :data:`TERMS`, in order."""
        return (
            1.0,
            self.style_weight,
            self.reconstruction_weight,
            self.counterpart_weight,
            1.0,
            self.critic_weight,
        )


@dataclass(frozen=True)
class Progress:
    """A report during training: the mean losses of the last steps."""

    step: int
    steps: int
    losses: dict[str, float]


def train_codec(
    *,
    content: Sequence[Path],
    style: Sequence[Path],
    out: Path,
    recipe: Recipe | None = None,
    encoder: Path | None = None,
    start: Path | None = None,
    loss_network: Path | None = None,
    progress: Callable[[Progress], None] | None = None,
    save_every: int = 250,
) -> Path:
    """Trains a codec; continues an interrupted training.

    The same images, files and recipe give the same weights, interrupted or not.

    Args:
        content: folders of photographs to stylize, searched at any depth.
        style: folders of images that give styles, in addition to variants of both.
        out: folder for ``encoder.safetensors``, ``decoder.safetensors``, ``loss.csv`` and the
            state to continue from.
        recipe: all other settings; the defaults of :class:`Recipe` if None.
        encoder: initial weights of the encoder; if None, the codec's own if it is fixed, random
            ones if it is trained.
        start: initial weights of the decoder; random ones if None.
        loss_network: an encoder shaped like VGG-19, of any width; the codec's own if None.
        progress: called every :data:`CURVE_STEP` steps and at the end.
        save_every: steps between saved states.

    Returns:
        The decoder's path. Pass it, and the encoder beside it if that was trained, to
        :func:`feddg.styles.codec.load_codec`.

    Raises:
        DataError: a folder is missing or has no readable image, a size is too small, or ``out``
            holds a training with another recipe.
        WeightsError: a file is missing or does not fit, or the codec has nothing to train.
    """
    recipe = recipe or Recipe()
    if not content or not style:
        raise DataError(f"{'style' if content else 'content'}: no folder of images was given")
    if min(recipe.sizes, default=0) < SMALLEST_SIZE:
        raise DataError(f"sizes {recipe.sizes}: crops need {SMALLEST_SIZE} pixels or more a side")
    contents, styles = load_public(content, KEPT_SIDE), load_public(style, KEPT_SIDE)
    codec = _beginning(recipe, encoder, start, alone=loss_network is None)
    training = _Training(recipe, codec, contents, styles, _network(codec, loss_network, contents))
    fixed = training.identity()
    out.mkdir(parents=True, exist_ok=True)
    continue_from(out, fixed, training.state)
    while training.state.step < recipe.steps:
        training.advance()
        step = training.state.step
        if progress and (step % CURVE_STEP == 0 or step == recipe.steps):
            progress(Progress(step, recipe.steps, training.state.recent(TERMS)))
        if step % save_every == 0 or step == recipe.steps:
            save(out, fixed, training.state, TERMS)
            _export(out, codec)
    return out / "decoder.safetensors"


class _Training:
    """The networks in training, and the training step."""

    def __init__(
        self,
        recipe: Recipe,
        codec: ConvolutionalCodec,
        contents: Tensor,
        styles: Tensor,
        network: LossNetwork,
    ) -> None:
        self.recipe, self.codec, self.network = recipe, codec, network
        self.contents, self.styles = contents, styles
        self.critic = Critic(network.widths, recipe.seed) if recipe.critic_weight else None
        trainees = {"codec": Trainee(codec, torch.optim.Adam(_trained(codec)))}
        if self.critic is not None:
            adversary = torch.optim.Adam(self.critic.parameters(), lr=1e-3, betas=(0.0, 0.99))
            trainees["critic"] = Trainee(self.critic, adversary)
        self.state = TrainingState(trainees, [])

    def identity(self) -> dict[str, Any]:
        """All that decides the result; compared with a saved state."""
        return asdict(self.recipe) | {
            "sizes": list(self.recipe.sizes),
            "first weights": _hash(self.codec.state_dict().values()),
            "loss network": _hash(self.network.encoder.state_dict().values()),
            "images": _hash((self.contents, self.styles)),
        }

    def advance(self) -> None:
        """Takes one step of the codec's optimizer, and one of the critic's."""
        recipe, state = self.recipe, self.state
        batch = draw_batch(
            self.contents,
            self.styles,
            sizes=recipe.sizes,
            pixels=recipe.batch_pixels,
            seed=recipe.seed,
            step=state.step,
        )
        terms, critic_loss = judge(self.codec, self.network, self.critic, batch)
        loss = sum(weight * term for weight, term in zip(recipe.weights, terms))
        optimizer = state.trainees["codec"].optimizer
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _schedule(state.step / recipe.steps)
        _descend(optimizer, loss, _trained(self.codec))
        if critic_loss is not None:
            _descend(state.trainees["critic"].optimizer, critic_loss, [])
        state.curve.append([term.item() for term in terms])


def _beginning(
    recipe: Recipe, encoder: Path | None, start: Path | None, *, alone: bool
) -> ConvolutionalCodec:
    """Returns the codec before step 1; if ``alone`` (no loss network), its encoder is fixed."""
    definition = CODECS.find(recipe.codec)
    if not issubclass(definition, ConvolutionalCodec):
        raise WeightsError(
            f"codec {recipe.codec!r} has nothing to train; choose compact, modulated or vgg19"
        )
    kept = alone or recipe.keep_encoder
    first = definition.file("encoder", encoder) if kept else encoder
    codec = untrained(definition, first, start, recipe.seed)
    codec.encoder.requires_grad_(not kept)
    return codec


def untrained(
    definition: type[ConvolutionalCodec], encoder: Path | None, decoder: Path | None, seed: int
) -> ConvolutionalCodec:
    """Returns a codec at the start of training; a part without a file gets random weights.

    A modulated decoder without a file draws like the one of ``compact``.

    Raises:
        WeightsError: a file is missing, unreadable or does not fit.
    """
    parts = definition.filled(encoder, decoder)
    for part, module, file in zip(("encoder", "decoder"), parts, (encoder, decoder)):
        if file is None:
            initialised(module, seed, part)
    if decoder is None and isinstance(parts[1], ModulatedDecoder):
        parts[1].layers.load_state_dict(read_weights(CompactCodec.file("decoder", None)))
        nn.init.zeros_(parts[1].write.weight)
        nn.init.zeros_(parts[1].write.bias)
    return definition(*parts).to(memory_format=torch.channels_last)


def initialised(module: M, seed: int, part: str) -> M:
    """Gives a part of a codec random weights that suit ReLU (He et al. 2015)."""
    module.to_empty(device="cpu")
    generator = stream(seed, "codec", part)
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
            nn.init.zeros_(cast(Tensor, layer.bias))
    return module


def _network(codec: ConvolutionalCodec, file: Path | None, contents: Tensor) -> LossNetwork:
    encoder = codec.encoder if file is None else untrained(Vgg19Codec, file, None, 0).encoder
    return LossNetwork(encoder, contents[:64] / 255)


def _trained(codec: ConvolutionalCodec) -> list[nn.Parameter]:
    return [parameter for parameter in codec.parameters() if parameter.requires_grad]


def _descend(optimizer: torch.optim.Optimizer, loss: Any, limited: Sequence[nn.Parameter]) -> None:
    optimizer.zero_grad()
    loss.backward()
    if limited:
        nn.utils.clip_grad_norm_(limited, LONGEST_GRADIENT)
    optimizer.step()


def _schedule(done: float) -> float:
    """Learning-rate factor: rises over the first fiftieth, then falls to 0 along a cosine."""
    return min(1.0, 50 * done + 0.02) * (1 + math.cos(math.pi * done)) / 2


def _export(out: Path, codec: ConvolutionalCodec) -> None:
    """Writes the trained parts in half precision, ready for :func:`load_codec`."""
    for part in ("encoder", "decoder"):
        module = getattr(codec, part)
        if any(parameter.requires_grad for parameter in module.parameters()):
            halves = {key: weight.half() for key, weight in module.state_dict().items()}
            write_tensors(out / f"{part}.safetensors", halves, {"codec": codec.name})


def _hash(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def main(words: Sequence[str] | None = None) -> None:
    """Trains the codec that the command line asks for."""
    parser = argparse.ArgumentParser(description="Train a codec; run again to go on.")
    folders = {"type": Path, "nargs": "+", "required": True}
    parser.add_argument("--content", **folders, help="folders of photographs")
    parser.add_argument("--style", **folders, help="folders of pictures in other styles")
    parser.add_argument("--out", type=Path, required=True, help="weights, loss curve, saved state")
    parser.add_argument("--codec", default="compact", help="compact, modulated or vgg19")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--size", type=int, nargs="+", default=[64], help="sides of the crops")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--encoder", type=Path, help="the encoder's first weights")
    parser.add_argument("--decoder", type=Path, help="the decoder's first weights")
    parser.add_argument("--loss-network", type=Path, help="VGG-19-like encoder that judges")
    parser.add_argument("--keep-encoder", action="store_true", help="train the decoder alone")
    parser.add_argument("--critic", type=float, default=0.0, help="weight of an adversary")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--save-every", type=int, default=250, help="steps between saved states")
    options = parser.parse_args(words)
    recipe = Recipe(
        options.codec,
        steps=options.steps,
        seed=options.seed,
        sizes=tuple(options.size),
        learning_rate=options.learning_rate,
        critic_weight=options.critic,
        keep_encoder=options.keep_encoder,
    )
    print(
        train_codec(
            content=options.content,
            style=options.style,
            out=options.out,
            recipe=recipe,
            encoder=options.encoder,
            start=options.decoder,
            loss_network=options.loss_network,
            progress=lambda now: print(f"step {now.step} of {now.steps}", now.losses),
            save_every=options.save_every,
        )
    )


if __name__ == "__main__":
    main()
