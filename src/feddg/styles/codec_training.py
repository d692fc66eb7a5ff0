"""Training a codec on the user's own images: its decoder, and its encoder where that is wished.

A frozen network judges the re-drawn images (:mod:`feddg.styles.training_losses`): a VGG-like
encoder from a file, or the codec's own. Under its own the encoder stays as it is, for it could
make itself blind; under another network both parts are trained together.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from feddg.errors import DataError, WeightsError
from feddg.styles.codec import CODECS
from feddg.styles.codecs.vgg19 import Vgg19Codec
from feddg.styles.convolutional import ConvolutionalCodec
from feddg.styles.training_images import draw_batch, load_images
from feddg.styles.training_losses import TERMS, Critic, LossNetwork, judge
from feddg.styles.training_state import (
    CURVE_STEP,
    Trainee,
    TrainingState,
    continue_from,
    save,
    write_tensors,
)

LONGEST_GRADIENT = 5.0
"""Norm that the gradient of a step is cut down to."""


SMALLEST_SIZE = 16
"""Pixels a side that leave VGG-19's deepest map a neighbourhood to look at."""

KEPT_SIDE = 160
"""Side of the squares that images are kept as, in pixels; larger crops are enlarged from them."""


@dataclass(frozen=True)
class Recipe:
    """How a codec is trained.

    Attributes:
        codec: which one; it must have weights to train.
        steps: optimizer steps; the learning rate falls to zero over them.
        seed: of the first weights and all draws.
        sizes: sides of the square crops in pixels, one of which is drawn at every step; repeat
            one to draw it more often.
        batch_pixels: of a step's contents together: 32,768 are 8 images of 64 pixels.
        learning_rate: Adam's, at the start.
        style_weight: of the style term against the content term; the AdaIN paper's is 10.
        reconstruction_weight: of the term at strength 0.
        counterpart_weight: of the term at strength 1 where the answer is known.
        critic_weight: of the adversary; 0 trains without one.
        keep_encoder: whether the encoder stays as it is under another loss network, too: styles
            then remain those of its codec, and a step takes two thirds of the time.
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
        """The weight of each of :data:`feddg.styles.training_losses.TERMS`."""
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
    """What a training reports: the mean losses of the last steps."""

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
    """Trains a codec; continues a training that was interrupted.

    The same folder, images, files and recipe give the same weights, interrupted or not.

    Args:
        content: folders of photographs to re-draw, searched in depth.
        style: folders of images to take styles from, beside variants of both.
        out: folder for ``encoder.safetensors``, ``decoder.safetensors``, ``loss.csv`` and the
            state to continue from.
        recipe: all else that decides the outcome; the defaults of :class:`Recipe` if not given.
        encoder: the encoder's first weights; if not given, the codec's own where it stays as it
            is, and random ones where it is trained.
        start: the decoder's first weights; random ones if not given.
        loss_network: an encoder of the VGG-19 shape, of any width; the codec's own if not given.
        progress: called every :data:`CURVE_STEP` steps and at the end.
        save_every: steps between saved states.

    Returns:
        The decoder's path. Pass it, and the encoder beside it if that was trained, to
        :func:`feddg.styles.codec.load_codec`.

    Raises:
        DataError: a folder is missing or has no readable image, a size is too small, or ``out``
            holds a training by another recipe.
        WeightsError: a file is missing or does not fit, or the codec has nothing to train.
    """
    recipe = recipe or Recipe()
    if not content or not style:
        raise DataError(f"{'style' if content else 'content'}: no folder of images was given")
    if min(recipe.sizes, default=0) < SMALLEST_SIZE:
        raise DataError(f"sizes {recipe.sizes}: crops need {SMALLEST_SIZE} pixels or more a side")
    contents, styles = load_images(content, KEPT_SIDE), load_images(style, KEPT_SIDE)
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
    """The networks in training, and what one step does to them."""

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
        """All that decides the outcome, for a saved state to be compared with."""
        return asdict(self.recipe) | {
            "sizes": list(self.recipe.sizes),
            "first weights": _hash(self.codec.state_dict().values()),
            "loss network": self.network.fingerprint(),
            "images": _hash((self.contents, self.styles)),
        }

    def advance(self) -> None:
        """One step of the codec's optimizer, and one of the critic's."""
        recipe, state = self.recipe, self.state
        batch = draw_batch(
            self.contents,
            self.styles,
            sizes=recipe.sizes,
            pixels=recipe.batch_pixels,
            seed=recipe.seed,
            step=state.step,
        )
        judgement = judge(self.codec, self.network, self.critic, batch)
        loss = sum(weight * term for weight, term in zip(recipe.weights, judgement.terms))
        optimizer = state.trainees["codec"].optimizer
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _schedule(state.step / recipe.steps)
        _descend(optimizer, loss, _trained(self.codec))
        if judgement.critic is not None:
            _descend(state.trainees["critic"].optimizer, judgement.critic, [])
        state.curve.append([term.item() for term in judgement.terms])


def _beginning(
    recipe: Recipe, encoder: Path | None, start: Path | None, *, alone: bool
) -> ConvolutionalCodec:
    """The codec before the first step; ``alone``, without another network, its encoder is fixed."""
    definition = CODECS.find(recipe.codec)
    if not issubclass(definition, ConvolutionalCodec):
        raise WeightsError(
            f"codec {recipe.codec!r} has nothing to train; choose compact, modulated or vgg19"
        )
    kept = alone or recipe.keep_encoder
    first = definition.file("encoder", encoder) if kept else encoder
    codec = definition.untrained(first, start, recipe.seed)
    codec.encoder.requires_grad_(not kept)
    return codec


def _network(codec: ConvolutionalCodec, file: Path | None, contents: Tensor) -> LossNetwork:
    encoder = codec.encoder if file is None else Vgg19Codec.untrained(file, None, 0).encoder
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
    """Rises over the first fiftieth, then falls to zero along a cosine."""
    return min(1.0, 50 * done + 0.02) * (1 + math.cos(math.pi * done)) / 2


def _export(out: Path, codec: ConvolutionalCodec) -> None:
    """Writes the trained parts in half precision, as they are shipped."""
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
