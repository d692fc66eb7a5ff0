"""A trained model with all that an answer takes, and the image files it is asked about."""

import glob
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from feddg.data.decoding import AS_IT_IS, MOST_PIXELS, Reading, Resize, decode_image
from feddg.data.images import IMAGE_SUFFIXES, ImageSource
from feddg.data.pixels import as_unit
from feddg.diagnostics import Diagnostic
from feddg.errors import DataError, FeddgError, RunError
from feddg.evaluation.accuracy import energy
from feddg.evaluation.adaptation import Predictor
from feddg.runs.diagnostics import about_model, result_sentence_of
from feddg.runs.execute import fingerprint, read_warning_light
from feddg.runs.model import Trained, load_trained
from feddg.runs.provenance import training_depth


@dataclass(frozen=True)
class ImagePreparation:
    """How a file becomes the pixels that a model was trained on.

    Attributes:
        size: side of the square, pixels.
        resize: how an image becomes square.
        reading: which bands become colours, which values black and white, and whether large images
            are cut into tiles.
        bits: bits that the values of the training images used; 0 where they were of 8 bits.
    """

    size: int
    resize: Resize = "squash"
    reading: Reading = AS_IT_IS
    bits: int = 0

    def decode(self, source: ImageSource, most: int = MOST_PIXELS) -> numpy.ndarray:
        """Returns the pixels of a whole file, ``(size, size, 3)`` uint8.

        Raises:
            UnusableImageError: it has none, or more than ``most``.
        """
        return decode_image(source, self.size, self.resize, self.reading, self.bits, most)


class ImageClassifier(ABC):
    """Answers for images.

    Attributes:
        preparation: how files become its images.
        class_names: in the order of the probabilities.
        threshold: the energy above which an image is unlike those of training, or None.
        identity: whose weights answer: fields for people and for tables.
        diagnostics: the warnings about it.
        result: how good it was where nobody trained, one sentence.
        weights: a hash of them.
    """

    preparation: ImagePreparation
    class_names: tuple[str, ...]
    threshold: float | None
    identity: Mapping[str, Any]
    diagnostics: tuple[Diagnostic, ...]
    result: str
    weights: str

    @property
    def keeps_state(self) -> bool:
        """Whether an answer depends on the images before it."""
        return False

    @abstractmethod
    def answer(self, pixels: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Maps ``(B, size, size, 3)`` uint8 to probabilities ``(B, C)`` and energies ``(B,)``."""


class RunClassifier(ImageClassifier):
    """The model of a run folder.

    Args:
        run: the run folder.
        adapt: a test-time adaptation, as in ``feddg evaluate``.
        device: ``cpu``, ``cuda`` or ``auto``.
        which: the model by a selection rule, see :func:`feddg.runs.model.load_model`.

    Raises:
        RunError: the folder holds no model, or none by that rule.
        AdaptationError: the adaptation is unknown, or does not suit the model.
    """

    def __init__(
        self,
        run: Path | str,
        adapt: str | None = None,
        device: str = "cpu",
        which: str | None = None,
    ) -> None:
        trained: Trained = load_trained(run, device, which)
        self._own = trained.predictor()
        self._model: nn.Module = self._own if adapt is None else trained.predictor(adapt)
        self._adapted = adapt is not None
        self._device = next(self._own.parameters()).device
        light = read_warning_light(Path(run), self._own)
        self.threshold = None if light is None else light.threshold
        self.class_names = trained.class_names
        self.preparation = preparation_of(Path(run), trained)
        self.weights = fingerprint(self._own)
        self.diagnostics = about_model(run, trained.which, trained.round)
        self.result = result_sentence_of(run, trained.which, trained.round)
        self.identity = identity_of(trained, self.weights) | {"adaptation": adapt}

    @property
    def keeps_state(self) -> bool:
        """Whether an answer depends on the images before it."""
        return isinstance(self._model, Predictor) and self._model.keeps_state

    def answer(self, pixels: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Maps ``(B, size, size, 3)`` uint8 to probabilities ``(B, C)`` and energies ``(B,)``."""
        images = as_unit(torch.from_numpy(pixels).permute(0, 3, 1, 2), self._device)
        with torch.inference_mode():
            logits = self._model(images).float().cpu()
            # The light is the trained model's, whatever is done to the images of today.
            lit = self._adapted and self.threshold is not None
            plain = self._own(images).float().cpu() if lit else logits
        return logits.softmax(1).numpy(), energy(plain).numpy()


def load_classifier(
    path: Path | str,
    adapt: str | None = None,
    device: str = "cpu",
    which: str | None = None,
) -> ImageClassifier:
    """Returns the model of a run folder, or that of an ONNX file of ``feddg export``.

    See :class:`RunClassifier` for the arguments; a file is what it is, under no other adaptation.

    Raises:
        RunError: there is no model, or none by that rule.
        AdaptationError: the adaptation is unknown, or does not suit the model.
    """
    if Path(path).suffix.lower() != ".onnx":
        return RunClassifier(path, adapt, device, which)
    if adapt is not None or which is not None:
        raise RunError(f"{path} holds one model as it is; --adapt and --which are for run folders")
    from feddg.prediction.export import OnnxClassifier

    return OnnxClassifier(Path(path))


def preparation_of(run: Path, trained: Trained) -> ImagePreparation:
    """Returns how files become images as in a run's training."""
    data = trained.experiment.data
    return ImagePreparation(data.image_size, data.resize, Reading.of(data), training_depth(run))


def identity_of(trained: Trained, weights: str) -> dict[str, Any]:
    """Returns which model it is, in a few fields."""
    experiment = trained.experiment
    return {
        "experiment": experiment.id,
        "method": experiment.method.name,
        "backbone": experiment.model.backbone,
        "model": trained.which,
        "round": trained.round,
        "weights": weights,
    }


def unknown_classes(model: ImageClassifier, names: Sequence[str]) -> None:
    """Makes sure that a model knows classes.

    Raises:
        FeddgError: it does not know one of them.
    """
    strange = sorted(set(names) - set(model.class_names))
    if strange:
        raise FeddgError(
            f"the model knows no class {strange[0]!r}; its classes are "
            f"{', '.join(model.class_names)}: rename the folders, or take away those it cannot know"
        )


# Image files below whatever a user names: files, folders and globs, one after another.


def image_files(named: Sequence[Path | str]) -> Iterator[Path]:
    """Yields the image files that are named, in the order of the names.

    A file counts whatever its ending. A folder gives the image files below it, sorted by name,
    hidden ones and those behind linked folders left out. A glob (``*``, ``?``, ``[...]``, ``**``)
    gives what it matches, sorted. Memory holds the names of one folder, or of one glob, at a time.

    Args:
        named: files, folders, globs.

    Raises:
        DataError: something named does not exist, or cannot be listed; raised before any file.
    """
    names = [Path(name).expanduser() for name in named]
    for name in names:
        if not name.exists() and not glob.has_magic(str(name)):
            raise DataError(f"{name} does not exist; name images, folders or globs")
    return (file for name in names for file in _below(name))


def count_files(named: Sequence[Path | str]) -> int:
    """Returns how many files :func:`image_files` yields.

    Raises:
        DataError: as there, and where there are none at all.
    """
    count = sum(1 for _ in image_files(named))
    if not count:
        said = ", ".join(str(name) for name in named) or "nothing"
        raise DataError(
            f"there is no image in {said}; known endings: {', '.join(sorted(IMAGE_SUFFIXES))}"
        )
    return count


def _below(name: Path) -> Iterator[Path]:
    if name.is_dir():
        yield from _in_folder(name)
    elif name.exists():
        yield name
    else:
        for match in sorted(glob.iglob(str(name), recursive=True)):
            if os.path.isdir(match) and "**" not in str(name):
                yield from _in_folder(Path(match))
            elif Path(match).suffix.lower() in IMAGE_SUFFIXES and os.path.isfile(match):
                yield Path(match)


def _in_folder(folder: Path) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            names = sorted((e.name, e.is_dir(follow_symlinks=False)) for e in entries)
    except OSError as error:
        raise DataError(f"{folder} cannot be listed: {error.strerror}") from None
    for name, is_folder in names:
        if name.startswith("."):
            continue
        if is_folder:
            yield from _in_folder(folder / name)
        elif os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES and (folder / name).is_file():
            yield folder / name
