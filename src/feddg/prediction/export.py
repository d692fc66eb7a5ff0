"""Exports a run's model: as a file that works without feddg, or a folder for Hugging Face's hub."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from feddg.data.data_set import load_images_of
from feddg.data.inspection import open_images
from feddg.diagnostics import warn
from feddg.errors import AdaptationError, FeddgError, RunError, need
from feddg.experiment import Experiment
from feddg.models.backbones import ALIASES
from feddg.prediction.card import model_card
from feddg.prediction.classifier import describe_model
from feddg.prediction.model import load_trained
from feddg.prediction.model_file import (
    ENDINGS,
    OPSET,
    OUTPUTS,
    OWN_WAY,
    RANDOM_IMAGES,
    Format,
    ModelDescription,
    example,
    input_of_weights,
    write_file,
    write_weights,
)
from feddg.prediction.shared import (
    CONFIG,
    SCHEMA,
    WEIGHTS,
    SharedModel,
    is_shared,
    network_config,
    read_shared,
)
from feddg.rng import stream
from feddg.runs.diagnostics import refuse_doubtful
from feddg.runs.reading import require_run
from feddg.storage import digest, file_faults, replace_file, replace_text, set_aside

REAL_IMAGES = 128
MODEL_CARD = "model_card.md"
log = logging.getLogger("feddg")


def images_to_check(experiment: Experiment) -> tuple[Tensor, int]:
    """Returns uint8 images for the check, random and real ones, and the number of real ones.

    There are no real ones where the run's images cannot be read.
    """
    data, seed = experiment.data, experiment.seed
    images = example(data.image_size, RANDOM_IMAGES, seed)
    try:
        table = load_images_of(data)
        order = torch.randperm(len(table), generator=stream(seed, "export check"))
        some = table.take(order[:REAL_IMAGES].numpy())
        (_, pixels, _), _ = open_images(some, data, None)
    except FeddgError:
        return images, 0
    real = pixels.gather(torch.arange(min(REAL_IMAGES, len(pixels))))
    return torch.cat([images, real]), len(real)


@dataclass(frozen=True)
class Exported:
    """The result of an export.

    Attributes:
        path: path of the model.
        card: path of the model card in Markdown.
        description: the file's description of the model.
        checked: number of images on which predictions were compared with the run's; 0 for weights
            only.
        difference: largest difference of a probability on these images.
    """

    path: Path
    card: Path
    description: ModelDescription
    checked: int = 0
    difference: float = 0.0


def export_run(
    run: Path | str,
    path: Path,
    format: Format,
    *,
    adapt: str | None = None,
    which: str | None = None,
    strict: bool = False,
) -> Exported:
    """Writes a run's model as one file, and a model card beside it, named like ``model.onnx.md``.

    ``onnx`` and ``torch`` map RGB images ``(B, 3, S, S)``, any B, to ``probabilities`` ``(B, C)``,
    ``label`` ``(B,)`` and ``energy`` ``(B,)``; resizing to the S of the metadata is not included.
    Before the file is moved to its place, its predictions for random and real images are checked:
    labels must equal the run's, probabilities may differ by 1e-4. ``safetensors`` contains only the
    network's weights, under the names of :func:`feddg.models.backbones.own_state`.

    Args:
        run: the run folder.
        path: the file to write; an existing file is replaced.
        format: format of the file.
        adapt: a test-time adaptation without memory.
        which: the selection rule of the model, see :func:`feddg.prediction.model.load_model`.
        strict: whether to refuse a model with warnings.

    Raises:
        RunError: the folder has no model, the file's suffix does not fit its format, the file
            cannot be written or predicts differently, the extra ``export`` is not installed, or
            ``strict`` and there are warnings.
        AdaptationError: the adaptation is unknown, does not suit the model, or keeps state.
    """
    if format == "safetensors" and adapt is not None:
        raise AdaptationError("weights alone hold no adaptation; export it with --onnx or --torch")
    if path.suffix.lower() != ENDINGS[format]:
        raise RunError(f"{path} must end in {ENDINGS[format]}")
    if format == "onnx":
        need("export", "ONNX", otherwise="use --torch")
    require_run(Path(run))
    trained = load_trained(run, which=which)
    about = describe_model(Path(run), trained)
    if about.features is not None and format != "safetensors":
        raise RunError(f"{run} takes features, not images: use --hub, or feddg predict")
    refuse_doubtful(about.diagnostics, strict)
    changes: dict[str, object] = {"format": format}
    if format == "safetensors" or adapt is not None:
        # The threshold is for energies of the model as it was trained, which weights do not give.
        changes["energy_threshold"] = None
    if format == "safetensors":
        model: nn.Module = trained.network
        images = torch.empty(0)
        changes["input"] = input_of_weights(trained.network, about.image_size, about.features)
        # timm's network of the short name takes the same weights, and gives other answers.
        changes["backbone"] = ALIASES.get(about.backbone, about.backbone)
    else:
        model = trained.predictor(adapt)
        images, real = images_to_check(trained.experiment)
        changes |= {"outputs": OUTPUTS, "adaptation": adapt or OWN_WAY}
        changes |= {"opset": OPSET} if format == "onnx" else {}
        changes["checked"] = {"random_images": RANDOM_IMAGES, "real_images": real}
    about = about.model_copy(update=changes)
    gap = write_file(path, model, about, images)
    card = path.with_name(f"{path.name}.md")  # a model's files in several formats have one each
    _write_card(card, model_card(run, about))
    return Exported(path, card, about, len(images), gap)


def save_model(
    run: Path | str,
    folder: Path,
    *,
    adapt: str | None = None,
    which: str | None = None,
    strict: bool = False,
) -> Exported:
    """Writes a run's model as a folder: weights, configuration, and a model card ``README.md``.

    ``feddg.load_model(folder)`` and `feddg predict` give the same bits as with the run. The folder
    contains no image names, clients or paths; see :mod:`feddg.prediction.shared`.

    Args:
        run: the run folder.
        folder: a new folder, or an earlier one of this kind, whose files are replaced.
        adapt: refused, because the folder can be used with any adaptation.
        which: the selection rule of the model, see :func:`feddg.prediction.model.load_model`.
        strict: whether to refuse a model with warnings.

    Raises:
        RunError: the run has no model to share, the folder contains other files, or ``strict`` and
            there are warnings.
        AdaptationError: ``adapt`` is given.
    """
    if adapt is not None:
        raise AdaptationError("a shared folder has no adaptation; pass --adapt when you use it")
    require_run(Path(run))
    card = folder / "README.md"
    if is_shared(folder):
        read_shared(folder)  # refuses another program's
    elif folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise RunError(f"{folder} holds something else; name a new folder")
    trained = load_trained(run, which=which)
    about = describe_model(Path(run), trained).model_copy(update={"format": "hub"})
    refuse_doubtful(about.diagnostics, strict)
    state = trained.network.state_dict()
    with file_faults(RunError, f"cannot write {folder}"):
        replace_file(folder / WEIGHTS, lambda aside: write_weights(aside, state, about))
        config = SharedModel(
            feddg_model=SCHEMA,
            weights_sha256=digest(folder / WEIGHTS),
            network=network_config(trained.experiment, trained.method, trained.network),
            about=about,
        )
        replace_text(folder / CONFIG, config.to_text())
        _write_card(card, model_card(run, about))
    return Exported(folder, card, about)


def _write_card(card: Path, text: str) -> None:
    """Writes a card. People edit cards: one that says something else is renamed."""
    if card.is_file() and card.read_bytes() != text.encode():
        former = set_aside(card)
        warn("former-card", f"{card} said something else, and is {former.name} now.")
    replace_text(card, text)


def ensure_card(run: Path) -> Path | None:
    """Writes a complete run's ``model_card.md`` if it has none; returns its path.

    Cards are edited by people (terms of the images, intended use), so they are never replaced.
    Returns None if there is no model shared by all clients. Errors are logged and do not fail the
    run.
    """
    card = run / MODEL_CARD
    if card.is_file():
        return card
    try:
        about = describe_model(run, load_trained(run)).model_copy(update={"adaptation": OWN_WAY})
        replace_text(card, model_card(run, about))
    except (FeddgError, OSError) as error:
        log.info("no model card: %s", error)
        return None
    return card
