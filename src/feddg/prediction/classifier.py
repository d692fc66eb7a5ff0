"""A trained model that predicts image files, and the lookup of these files."""

import glob
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from pydantic import Field, ValidationError

import feddg
from feddg.data.decoding import AS_IT_IS, MOST_PIXELS, Reading, Resize, ValueRange, decode_image
from feddg.data.images import IMAGE_SUFFIXES, ImageSource, endings
from feddg.data.pixels import as_unit
from feddg.diagnostics import Diagnostic
from feddg.errors import DataError, FeddgError, RunError, field_fault
from feddg.evaluation.accuracy import energy
from feddg.evaluation.adaptation import Predictor
from feddg.methods.base import local_names
from feddg.records import Row
from feddg.runs.diagnostics import about_model, result_sentence_of
from feddg.runs.execute import fingerprint, read_energy_threshold
from feddg.runs.model import Trained, load_trained
from feddg.runs.provenance import training_depth
from feddg.text import counted, printable


@dataclass(frozen=True)
class ImagePreparation:
    """How a file becomes the pixels that a model was trained on.

    Attributes:
        size: side of the square in pixels.
        resize: how an image becomes square.
        reading: which bands become colours, which values are black and white, and whether large
            images are cut into tiles.
        bits: bits used by the values of the training images; 0 for 8-bit images.
        columns: options of a table of features, if the model takes these instead of images.
    """

    size: int
    resize: Resize = "squash"
    reading: Reading = AS_IT_IS
    bits: int = 0
    columns: Mapping[str, Any] | None = None

    def decode(self, source: ImageSource, most: int = MOST_PIXELS) -> numpy.ndarray:
        """Returns the pixels of a whole file, ``(size, size, 3)`` uint8.

        Raises:
            UnusableImageError: the file has no pixels, or more than ``most``.
        """
        return decode_image(source, self.size, self.resize, self.reading, self.bits, most)


class ModelIdentity(Row):
    """The origin of a model's weights.

    Attributes:
        experiment: the run's id.
        method: the method that trained it.
        backbone: its backbone.
        model: the selection rule that chose it.
        round: the round it is from.
        weights: a hash of the weights.
    """

    experiment: str = ""
    method: str = ""
    backbone: str = ""
    model: str = ""
    round: int = 0
    weights: str = ""


class ModelDescription(ModelIdentity):
    """The description in a model's file: what prediction needs, and the model's origin.

    ONNX files store it as text, which is checked here.

    Attributes:
        class_names: the classes in the order of the probabilities.
        image_size: side of the square in pixels.
        resize: how an image becomes square.
        input: the images it takes, in words.
        range: which values are black and white, see :class:`feddg.data.decoding.Reading`.
        bands: which bands become colours.
        tile: side of the tiles into which large images are cut; None for no tiles.
        bits: bits used by the values of the training images; 0 for 8-bit images.
        features: numbers in a row, of a model that takes features instead of images.
        columns: options of the table of features it was trained on.
        energy_threshold: images with a higher energy are unlike the training images; None if
            unknown.
        diagnostics: warnings about the model.
        result: its accuracy on held-out domains, in one sentence.
        adaptation: the test-time adaptation it contains.
        format: format of the file; ``run`` for a run folder, ``hub`` for a shared folder.
        feddg: the version that wrote it.
        outputs: outputs of the graph.
        opset: ONNX opset.
        kept_by_clients: tensors that each client keeps for itself.
        checked: number of images on which its predictions were compared with the run's.
    """

    class_names: tuple[str, ...] = Field(min_length=1)
    image_size: int = Field(ge=1, le=4096)
    resize: Resize
    input: str
    range: ValueRange = "auto"
    bands: tuple[int, ...] = ()
    tile: int | None = None
    bits: int = Field(0, ge=0, le=32)
    features: int | None = Field(None, ge=1)
    columns: dict[str, Any] = Field(default_factory=dict)
    energy_threshold: float | None = None
    diagnostics: tuple[Diagnostic, ...] = ()
    result: str = "The file does not say how good it was where nobody trained."
    adaptation: str | None = None
    format: str = ""
    feddg: str = ""
    outputs: tuple[str, ...] = ()
    opset: int | None = None
    kept_by_clients: int = 0
    checked: dict[str, int] | None = None

    @property
    def preparation(self) -> ImagePreparation:
        """The preparation of files for the model."""
        reading = Reading(self.range, self.bands, self.tile)
        columns = None if self.features is None else self.columns
        return ImagePreparation(self.image_size, self.resize, reading, self.bits, columns)

    def fields(self) -> dict[str, Any]:
        """Returns the known fields, ready for JSON."""
        return self.model_dump(mode="json", exclude_unset=True)


def describe_model(run: Path, trained: Trained) -> ModelDescription:
    """Returns the description of a run's model, without an adaptation.

    Raises:
        RunError: the folder is damaged.
    """
    if trained.about is not None:
        try:
            return ModelDescription.model_validate(trained.about)
        except ValidationError as error:
            raise RunError(f"{run} is damaged: about.{field_fault(error)}") from None
    predictor, experiment, data = trained.predictor(), trained.experiment, trained.experiment.data
    light = read_energy_threshold(run, predictor)
    return ModelDescription(
        format="run",
        feddg=feddg.__version__,
        experiment=experiment.id,
        method=experiment.method.name,
        backbone=experiment.model.backbone,
        model=trained.which,
        round=trained.round,
        weights=fingerprint(predictor),
        class_names=trained.class_names,
        image_size=data.image_size,
        resize=data.resize,
        range=data.range,
        bands=data.bands,
        tile=data.tile,
        bits=training_depth(run),
        features=data.features,
        columns=data.options if data.features else {},
        input=f"features (batch, {data.features})"
        if data.features
        else f"RGB images (batch, 3, {data.image_size}, {data.image_size}), uint8 in 0..255",
        kept_by_clients=len(local_names(trained.method, trained.network)),
        diagnostics=about_model(run, trained.which, trained.round),
        result=result_sentence_of(run, trained.which, trained.round),
        energy_threshold=None if light is None else light.threshold,
    )


class ImageClassifier(ABC):
    """Predicts images with a model.

    Attributes:
        description: description of the model.
        preparation: how files become pixels.
        class_names: the classes in the order of the probabilities.
        threshold: images with a higher energy are unlike the training images; None if unknown.
        identity: the origin of the weights, as fields for people and tables.
        diagnostics: warnings about the model.
        result: its accuracy on held-out domains, in one sentence.
        weights: a hash of the weights.
    """

    def __init__(self, description: ModelDescription) -> None:
        self.description, self.preparation = description, description.preparation
        self.class_names, self.threshold = description.class_names, description.energy_threshold
        self.diagnostics, self.result = description.diagnostics, description.result
        self.weights = description.weights
        self.identity = description.model_dump(include={*ModelIdentity.model_fields, "adaptation"})

    @property
    def keeps_state(self) -> bool:
        """Whether a prediction depends on earlier images."""
        return False

    @abstractmethod
    def answer(self, pixels: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Maps ``(B, size, size, 3)`` uint8 to probabilities ``(B, C)`` and energies ``(B,)``."""


class RunClassifier(ImageClassifier):
    """The model of a run folder or a shared model: see :func:`feddg.runs.model.load_model`.

    Args:
        run: the folder, or ``hf:owner/name``.
        adapt: a test-time adaptation, as in ``feddg evaluate``.
        device: its device.
        which: the selection rule of the model, see :func:`feddg.runs.model.load_model`.

    Attributes:
        folder: as it was named.
        trained: the model.
        device: where it is.

    Raises:
        RunError: the folder has no model, or none by that rule.
        AdaptationError: the adaptation is unknown, or does not suit the model.
    """

    def __init__(
        self,
        run: Path | str,
        adapt: str | None = None,
        device: str = "cpu",
        which: str | None = None,
    ) -> None:
        trained = self.trained = load_trained(run, device, which)
        self.folder = Path(run)
        description = describe_model(self.folder, trained)
        super().__init__(description.model_copy(update={"adaptation": adapt}))
        self._own = trained.predictor()
        self._model = self._own if adapt is None else trained.predictor(adapt)
        self.device = next(self._own.parameters()).device

    @property
    def keeps_state(self) -> bool:
        """Whether a prediction depends on earlier images."""
        return isinstance(self._model, Predictor) and self._model.keeps_state

    def answer(self, pixels: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Maps ``(B, size, size, 3)`` uint8 to probabilities ``(B, C)`` and energies ``(B,)``.

        A model that takes features maps ``(B, d)`` float32.

        Raises:
            DataError: there are more or fewer features than it was trained on.
        """
        raw, expected = torch.from_numpy(pixels), self.description.features
        if expected not in (None, raw.shape[1]):
            raise DataError(f"the rows have {raw.shape[1]} features, the model takes {expected}")
        images = as_unit(raw if expected else raw.permute(0, 3, 1, 2), self.device)
        with torch.inference_mode():
            logits = plain = self._model(images).float().cpu()
            # The light is the trained model's, whatever is done to the images of today.
            if self._model is not self._own and self.threshold is not None:
                plain = self._own(images).float().cpu()
        return logits.softmax(1).numpy(), energy(plain).numpy()


def load_classifier(
    path: Path | str,
    adapt: str | None = None,
    device: str = "cpu",
    which: str | None = None,
) -> ImageClassifier:
    """Returns the model of a run folder, a shared model, or an ONNX file of ``feddg export``.

    See :class:`RunClassifier` for the arguments; an ONNX file accepts no other adaptation.

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


def unknown_classes(model: ImageClassifier, names: Sequence[str]) -> None:
    """Raises an error if a model lacks one of these classes.

    Raises:
        FeddgError: the model lacks one of them.
    """
    strange = sorted(set(names) - set(model.class_names))
    if strange:
        raise FeddgError(
            f"the model knows no class {strange[0]!r}; its classes are "
            f"{', '.join(model.class_names)}: rename the folders, or take away those it cannot know"
        )


# Image files below whatever a user names: files, folders and globs, one after another.


def image_files(named: Sequence[Path | str]) -> Iterator[Path]:
    """Yields the named image files, in the order of the names.

    A named file may have any suffix. A folder (or a link to one) gives the image files below it,
    sorted by name, without hidden files, linked folders and links to files elsewhere
    (:func:`about_links` reports these). A glob (``*``, ``?``, ``[...]``, ``**``) gives its matches,
    sorted. Only the names of one folder or glob are in memory at a time.

    Args:
        named: files, folders, globs.

    Raises:
        DataError: a name does not exist, or cannot be listed; raised before the first file.
    """
    names = [Path(name).expanduser() for name in named]
    for name in names:
        if not name.exists() and not glob.has_magic(str(name)):
            raise DataError(f"{name} does not exist; name images, folders or globs")
    return (file for name in names for file in _below(name, []))


def about_links(named: Sequence[Path | str]) -> Iterator[Diagnostic]:
    """Reports links in named folders that lead outside; they are skipped.

    Their targets could be any files; name them directly to include them.
    """
    left_out: list[Path] = []
    for name in named:
        for _ in _below(Path(name).expanduser(), left_out):
            pass
    if left_out:
        first, count = printable(str(left_out[0])), len(left_out)
        yield Diagnostic(
            "links-left-out",
            "warning",
            f"{counted(count, 'link')} out of the named folders left out, the first: {first}.",
            "Name what is meant instead.",
        )


def count_files(named: Sequence[Path | str]) -> int:
    """Returns how many files :func:`image_files` yields.

    Raises:
        DataError: see :func:`image_files`; or there are no image files.
    """
    count = sum(1 for _ in image_files(named))
    if not count:
        listed = ", ".join(str(name) for name in named) or "nothing"
        raise DataError(f"there is no image in {listed}; known endings: {endings()}")
    return count


def _below(name: Path, left_out: list[Path]) -> Iterator[Path]:
    if name.is_dir():
        yield from _in_folder(name, Path(os.path.realpath(name)), left_out)
    elif name.exists():
        yield name
    else:
        for match in sorted(glob.iglob(str(name), recursive=True)):
            if os.path.isdir(match) and "**" not in str(name):
                yield from _in_folder(Path(match), Path(os.path.realpath(match)), left_out)
            elif Path(match).suffix.lower() in IMAGE_SUFFIXES and os.path.isfile(match):
                yield Path(match)


def _in_folder(folder: Path, root: Path, left_out: list[Path]) -> Iterator[Path]:
    """Yields the images below a folder; links that lead outside ``root`` are collected instead."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(
                (e.name, e.is_dir(follow_symlinks=False), e.is_symlink()) for e in entries
            )
    except OSError as error:
        raise DataError(f"{folder} cannot be listed: {error.strerror}") from None
    for name, is_folder, is_link in names:
        if name.startswith("."):
            continue
        if is_link and not Path(os.path.realpath(folder / name)).is_relative_to(root):
            left_out.append(folder / name)
        elif is_folder:
            yield from _in_folder(folder / name, root, left_out)
        elif os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES and (folder / name).is_file():
            yield folder / name
