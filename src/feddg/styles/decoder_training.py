"""Training a codec's decoder on the user's own images.

The encoder is frozen. The decoder learns the AdaIN paper's objective (Huang and Belongie, ICCV
2017, equations 11 to 13): the re-drawn image, encoded again, must give back the feature map it was
drawn from (content), and its channel moments at the first layer of every scale must be those of
the style. Four additions serve federated domain generalization:

- blended targets: each image has its own strength in [0, 1]; moments blend linearly with it;
- strength 0 is plain reconstruction, where the pixels count too;
- colours outside [0, 1] are clamped before they are judged, and their overshoot costs;
- some styles are pooled over a batch, as a client's or a cluster's style is.
"""

import csv
import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional

from feddg.data.decoding import UnusableImageError, decode_image
from feddg.data.images import IMAGE_SUFFIXES
from feddg.errors import DataError, WeightsError
from feddg.files import is_file, private_folder, replace_bytes, why
from feddg.randomness import stream
from feddg.styles.codec import (
    VARIANCE_FLOOR,
    VGG19_FILES,
    Codec,
    adain,
    codec_modules,
    initialised,
    load_weights,
    packaged,
)
from feddg.styles.variants import VARIANTS

logger = logging.getLogger("feddg")

TERMS = ("content", "style", "reconstruction", "overshoot")
CURVE_STEP = 25
"""Steps averaged into one row of the loss curve."""

ADAM_TENSORS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Progress:
    """What a training reports: the mean losses of the last steps."""

    step: int
    steps: int
    losses: dict[str, float]


@dataclass(frozen=True)
class DecoderSettings:
    """Everything that decides the outcome of a training; the last three are hashes."""

    codec: str
    steps: int
    seed: int
    size: int
    batch_size: int
    learning_rate: float
    style_weight: float
    reconstruction_weight: float
    encoder: str
    start: str
    images: str


@dataclass
class UnfinishedTraining:
    """A training in the making: all that an interruption must not lose."""

    decoder: nn.Sequential
    optimizer: torch.optim.Adam
    step: int
    curve: list[list[float]]


def train_decoder(
    *,
    content: Sequence[Path],
    style: Sequence[Path],
    out: Path,
    steps: int = 4000,
    seed: int = 0,
    size: int = 64,
    batch_size: int = 8,
    learning_rate: float = 2e-3,
    style_weight: float = 40.0,
    reconstruction_weight: float = 5.0,
    name: str = "compact",
    encoder: Path | None = None,
    start: Path | None = None,
    progress: Callable[[Progress], None] | None = None,
    save_every: int = 250,
) -> Path:
    """Trains a decoder for a codec's encoder; continues one that was interrupted.

    The same folder, images and settings give the same weights, interrupted or not.

    Args:
        content: folders of photographs to re-draw, searched in depth.
        style: folders of images to take styles from, beside variants of both.
        out: folder for ``decoder.safetensors``, ``loss.csv`` and the state to continue from.
        steps: optimizer steps; the learning rate falls to zero over them.
        seed: of the initial weights and all draws.
        size: side of the square training crops in pixels.
        batch_size: images per step.
        learning_rate: Adam's, at the start.
        style_weight: of the style term against the content term. The paper's is 10; early
            trainings of the compact decoder with 10 stayed far from most styles.
        reconstruction_weight: of the mean absolute pixel error at strength 0.
        name: ``"compact"`` or ``"vgg19"``.
        encoder: the encoder's weights file; ``compact`` has one inside the package.
        start: a decoder's weights to begin with, for example to adapt the packaged one to other
            images; random ones if not given.
        progress: called every :data:`CURVE_STEP` steps and at the end.
        save_every: steps between saved states.

    Returns:
        The decoder's path; pass it to :func:`feddg.styles.codec.load_codec` as ``decoder``.

    Raises:
        DataError: a folder is missing or has no readable image, or ``out`` holds a training
            with other settings.
        WeightsError: the encoder's file is missing or does not fit.
    """
    if not content or not style:
        raise DataError(f"{'style' if content else 'content'}: no folder of images was given")
    contents = load_images(content, round(2.5 * size))
    styles = load_images(style, round(2.5 * size))
    codec = _untrained(name, encoder, start, seed)
    settings = DecoderSettings(
        name, steps, seed, size, batch_size, learning_rate, style_weight, reconstruction_weight,
        encoder=_hash(codec.encoder.state_dict().values()),
        start=_hash(codec.decoder.state_dict().values()),
        images=_hash((contents, styles)),
    )  # fmt: skip
    state = _start_or_continue(out, settings, codec.decoder)
    while state.step < steps:
        batch = _draw_batch(contents, styles, settings, state.step)
        state.curve.append(_train_step(codec, state, batch, settings))
        if progress and (state.step % CURVE_STEP == 0 or state.step == steps):
            progress(Progress(state.step, steps, _recent(state.curve)))
        if state.step % save_every == 0 or state.step == steps:
            _save(out, settings, state)
    return out / "decoder.safetensors"


def load_images(folders: Sequence[Path], side: int) -> Tensor:
    """Returns every readable image under some folders, as squares.

    Args:
        folders: searched in depth, in the order of their paths.
        side: the short side is resized to this many pixels and the centre square kept.

    Returns:
        ``(N, 3, side, side)``, uint8 RGB.

    Raises:
        DataError: a folder is missing or has no readable image.
    """
    return torch.stack([image for folder in folders for image in _images_of(folder, side)])


def _images_of(folder: Path, side: int) -> list[Tensor]:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; give a folder of images")
    images = []
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in IMAGE_SUFFIXES:
            try:
                images.append(torch.from_numpy(decode_image(path, side, "crop")).permute(2, 0, 1))
            except UnusableImageError as error:
                logger.warning("%s is left out: %s", path, error)
    if not images:
        raise DataError(f"{folder}: no readable image ({', '.join(sorted(IMAGE_SUFFIXES))})")
    return images


def _untrained(name: str, encoder_path: Path | None, start: Path | None, seed: int) -> Codec:
    """The frozen encoder with a decoder to be trained."""
    encoder, decoder = codec_modules(name)
    if name != "compact" and encoder_path is None:
        raise WeightsError(f"training a decoder for {name!r} needs its encoder. {VGG19_FILES}")
    load_weights(encoder, encoder_path or packaged("encoder"))
    if start is None:
        initialised(decoder, seed)
    else:
        load_weights(decoder, start)
    codec = Codec(name, encoder, decoder).frozen()
    codec.decoder.requires_grad_(True)
    return codec


@dataclass(frozen=True)
class _Batch:
    """Images in [0, 1] of one step; ``strength`` is ``(B, 1, 1)``, ``pooled`` shares one style."""

    contents: Tensor
    styles: Tensor
    strength: Tensor
    pooled: bool


def _draw_batch(contents: Tensor, styles: Tensor, settings: DecoderSettings, step: int) -> _Batch:
    """The batch of one step, a function of the seed and the step alone."""
    generator = stream(settings.seed, "batch", step)
    pooled = _chance(0.3, generator)
    redrawn = _images(contents, styles, 0.3, 4, settings, generator)
    copied = _images(contents, styles, 0.6, 1 if pooled else 4, settings, generator)
    strength = 1.7 * torch.rand(settings.batch_size, 1, 1, generator=generator) - 0.4
    return _Batch(redrawn, copied, strength.clamp(0, 1), pooled)


def _images(
    contents: Tensor,
    styles: Tensor,
    style_share: float,
    groups: int,
    settings: DecoderSettings,
    generator: torch.Generator,
) -> Tensor:
    """Crops from one of the two collections; about half of the groups as some variant."""
    images = styles if _chance(style_share, generator) else contents
    crops = _crops(images, settings.batch_size, settings.size, generator)
    changed = []
    for group in crops.chunk(groups):
        choice = int(torch.randint(-len(VARIANTS), len(VARIANTS), (), generator=generator))
        changed.append(VARIANTS[max(choice, 0)](group, generator))
    return torch.cat(changed)


def _chance(share: float, generator: torch.Generator) -> bool:
    return bool(torch.rand((), generator=generator) < share)


def _crops(images: Tensor, count: int, size: int, generator: torch.Generator) -> Tensor:
    """Random squares of one random scale, resized to ``size``, some mirrored; in [0, 1]."""
    side = images.shape[-1]
    crop = int(torch.randint(size, side + 1, (), generator=generator))
    rows = torch.randint(len(images), (count,), generator=generator).tolist()
    corners = torch.randint(side - crop + 1, (count, 2), generator=generator).tolist()
    squares = torch.stack(
        [images[row, :, y : y + crop, x : x + crop] for row, (y, x) in zip(rows, corners)]
    )
    resized = functional.interpolate(squares / 255, (size, size), mode="bilinear", antialias=True)
    return (resized.flip(-1) if _chance(0.5, generator) else resized).clamp(0, 1)


def _train_step(
    codec: Codec, state: UnfinishedTraining, batch: _Batch, settings: DecoderSettings
) -> list[float]:
    """One optimizer step; returns the loss terms."""
    for group in state.optimizer.param_groups:
        group["lr"] = settings.learning_rate * _schedule(state.step / settings.steps)
    terms = _loss_terms(codec, batch)
    weights = (1.0, settings.style_weight, settings.reconstruction_weight, 1.0)
    loss = torch.stack([weight * term for weight, term in zip(weights, terms)]).sum()
    state.optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    state.optimizer.step()
    state.step += 1
    return [term.item() for term in terms]


def _schedule(done: float) -> float:
    """Rises over the first fiftieth, then falls to zero along a cosine."""
    return min(1.0, 50 * done + 0.02) * (1 + math.cos(math.pi * done)) / 2


def _loss_terms(codec: Codec, batch: _Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The means over the batch of the terms that :data:`TERMS` names."""
    with torch.no_grad():
        content_maps = _scales(codec, batch.contents)
        style = [_moments(features) for features in _scales(codec, batch.styles)]
        if batch.pooled:
            style = [_pooled(moments) for moments in style]
        content = [_moments(features) for features in content_maps]
        wanted = [torch.lerp(c, s, batch.strength) for c, s in zip(content, style)]
        target = adain(content_maps[-1], wanted[-1])
    drawn = codec.decoder(target.contiguous(memory_format=torch.channels_last))
    visible = drawn.clamp(0, 1)
    drawn_maps = _scales(codec, visible)
    reached = [_moments(features) for features in drawn_maps]
    identity = (batch.strength == 0).float()[..., None]
    return (
        functional.mse_loss(drawn_maps[-1], target),
        torch.stack([functional.mse_loss(*pair) for pair in zip(reached, wanted)]).sum(),
        ((drawn - batch.contents).abs() * identity).mean() / identity.mean().clamp(min=1e-6),
        (drawn - visible).abs().mean(),
    )


def _scales(codec: Codec, images: Tensor) -> list[Tensor]:
    """The encoder's maps after the first convolution of each scale, and its output at last."""
    maps = []
    features = images.contiguous(memory_format=torch.channels_last)
    first = True
    for layer in codec.encoder:
        features = layer(features)
        if isinstance(layer, nn.ReLU) and (first or layer is codec.encoder[-1]):
            maps.append(features)
            first = False
        first = first or isinstance(layer, nn.MaxPool2d)
    return maps


def _moments(features: Tensor) -> Tensor:
    """Means and standard deviations per image and channel, ``(B, 2, C)``."""
    variance, mean = torch.var_mean(features, dim=(-2, -1), correction=0)
    return torch.stack([mean, (variance + VARIANCE_FLOOR).sqrt()], dim=1)


def _pooled(moments: Tensor) -> Tensor:
    """The moments of all images of a batch taken together, for each of them."""
    mean, deviation = moments.unbind(1)
    variance = (deviation**2 + mean**2).mean(0) - mean.mean(0) ** 2
    pooled = torch.stack([mean.mean(0), variance.clamp(min=0).sqrt()])
    return pooled.expand_as(moments)


def _start_or_continue(
    out: Path, settings: DecoderSettings, decoder: nn.Sequential
) -> UnfinishedTraining:
    """A new training, or the one whose state ``out`` holds."""
    state = UnfinishedTraining(decoder, torch.optim.Adam(decoder.parameters()), 0, [])
    try:
        private_folder(out)
    except OSError as error:
        raise DataError(f"Cannot write into {out}: {why(error)}.") from None
    path = out / "state.safetensors"
    if not is_file(path, DataError):
        return state
    found, tensors = _read(path)
    if found != asdict(settings):
        different = ", ".join(
            key for key, value in asdict(settings).items() if found.get(key) != value
        )
        raise DataError(
            f"{out} holds a training with other settings ({different}); "
            "choose another folder or delete it"
        )
    _restore(state, tensors)
    return state


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The settings and the tensors of a saved state."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            settings = json.loads(file.metadata()["settings"])
            return settings, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
        raise DataError(f"{path}: not the state of a training ({error}); delete it") from error


def _restore(state: UnfinishedTraining, tensors: dict[str, Tensor]) -> None:
    decoder = {
        key.removeprefix("decoder."): t for key, t in tensors.items() if key.startswith("decoder.")
    }
    state.decoder.load_state_dict(decoder)
    state.curve = tensors["curve"].tolist()
    state.step = len(state.curve)
    adam = state.optimizer.state_dict()
    adam["state"] = {
        index: {name: tensors[f"adam.{index}.{name}"] for name in ADAM_TENSORS}
        for index in range(len(decoder))
    }
    state.optimizer.load_state_dict(adam)


def _save(out: Path, settings: DecoderSettings, state: UnfinishedTraining) -> None:
    """Writes the state, the decoder and the curve, each replacing the last one whole."""
    tensors = {f"decoder.{key}": weight for key, weight in state.decoder.state_dict().items()}
    for index, moments in state.optimizer.state_dict()["state"].items():
        tensors |= {f"adam.{index}.{name}": moments[name] for name in ADAM_TENSORS}
    tensors["curve"] = torch.tensor(state.curve, dtype=torch.float64)
    _write(out / "state.safetensors", tensors, {"settings": json.dumps(asdict(settings))})
    halves = {key: weight.half() for key, weight in state.decoder.state_dict().items()}
    _write(out / "decoder.safetensors", halves, {"codec": settings.codec})
    rows = [
        [end, *_recent(state.curve[:end]).values()]
        for end in range(CURVE_STEP, state.step + 1, CURVE_STEP)
    ]
    with (out / "loss.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["step", *TERMS], *rows])


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Replaces a weights file whole: an interruption leaves the old one."""
    whole = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
    replace_bytes(path, safetensors.torch.save(whole, metadata=metadata))


def _recent(curve: list[list[float]]) -> dict[str, float]:
    """The mean of each term over the last :data:`CURVE_STEP` steps."""
    recent = curve[-CURVE_STEP:]
    return {term: sum(column) / len(recent) for term, column in zip(TERMS, zip(*recent))}


def _hash(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
