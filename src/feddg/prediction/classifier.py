"""A trained model that predicts image files, and the lookup of these files."""

import glob
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy
import torch

import feddg
from feddg.data.images import endings, images_below, is_image
from feddg.data.pixels import as_unit
from feddg.errors import DataError, RunError, schema_faults
from feddg.methods.base import local_names
from feddg.models.precision import as_usual, autocast, choose_precision
from feddg.models.trained import fingerprint
from feddg.prediction.adaptation import Predictor
from feddg.prediction.model import Trained, load_trained
from feddg.prediction.model_file import ABOUT, ModelDescription, ModelIdentity, onnx_session
from feddg.runs.diagnostics import about_model, result_sentence_of
from feddg.runs.energy import energy
from feddg.runs.execute import read_energy_threshold
from feddg.runs.provenance import depths_of_run
from feddg.runs.reading import is_run


def describe_model(run: Path, trained: Trained) -> ModelDescription:
    """Returns the description of a run's model, without an adaptation.

    Raises:
        RunError: the folder is damaged.
    """
    if trained.about is not None:
        return trained.about
    predictor, experiment, data = trained.predictor(), trained.experiment, trained.experiment.data
    light, depths = read_energy_threshold(run, predictor), depths_of_run(run)
    names = {"feature_names": trained.feature_names} if data.features else {}
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
        **data.model_dump(include={"image_size", "resize", "range", "bands", "tile", "features"}),
        depths=depths,
        columns=data.all_options if data.features else {},
        input=f"features (batch, {data.features})"
        if data.features
        else f"RGB images (batch, 3, {data.image_size}, {data.image_size}), uint8 in 0..255",
        kept_by_clients=len(local_names(trained.method, trained.network)),
        diagnostics=about_model(run, trained.which, trained.round),
        result=result_sentence_of(run, trained.which, trained.round),
        energy_threshold=None if light is None else light.threshold,
        **names,
    )


class ImageClassifier(ABC):
    """Predicts images with a model.

    Attributes:
        description: description of the model.
        class_names: the classes in the order of the probabilities.
        threshold: images with a higher energy are unlike the training images; None if unknown.
        identity: the origin of the weights, as fields for people and tables.
        diagnostics: warnings about the model.
        result: its accuracy on held-out domains, in one sentence.
        weights: a hash of the weights.
        precision: ``float32`` or ``bfloat16``.
    """

    def __init__(self, description: ModelDescription) -> None:
        self.description = description
        self.class_names, self.threshold = description.class_names, description.energy_threshold
        self.diagnostics, self.result = description.diagnostics, description.result
        self.weights, self.precision = description.weights, "float32"
        self.identity = description.model_dump(include={*ModelIdentity.model_fields, "adaptation"})

    @property
    def keeps_state(self) -> bool:
        """Whether a prediction depends on earlier images."""
        return False

    @abstractmethod
    def answer(self, pixels: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Maps ``(B, size, size, 3)`` uint8 to probabilities ``(B, C)`` and energies ``(B,)``."""


class RunClassifier(ImageClassifier):
    """The model of a run folder or a shared model: see :func:`feddg.prediction.model.load_model`.

    Args:
        run: the folder, or ``hf:owner/name``.
        adapt: a test-time adaptation, as in ``feddg evaluate``.
        device: its device.
        which: the selection rule of the model, see :func:`feddg.prediction.model.load_model`.
        precision: ``float32``, ``bfloat16``, or ``auto``: bfloat16 where the device is fast at it.

    Attributes:
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
        precision: str = "float32",
    ) -> None:
        trained = self.trained = load_trained(run, device, which)
        description = describe_model(Path(run), trained)
        super().__init__(description.model_copy(update={"adaptation": adapt}))
        self._own = trained.predictor()
        self._model = self._own if adapt is None else trained.predictor(adapt)
        self.device = next(self._own.parameters()).device
        exact = description.features is not None
        self.precision = choose_precision(precision, self.device, exact=exact)

    @property
    def keeps_state(self) -> bool:
        """Whether a prediction depends on earlier images."""
        return isinstance(self._model, Predictor) and self._model.keeps_state

    def inputs(self, pixels: numpy.ndarray) -> torch.Tensor:
        """Returns the network's inputs: images in [0, 1], or rows of features."""
        raw = torch.from_numpy(pixels)
        rows = self.description.features is not None
        return as_unit(raw if rows else raw.permute(0, 3, 1, 2), self.device)

    def answer(self, pixels: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Maps ``(B, size, size, 3)`` uint8 to probabilities ``(B, C)`` and energies ``(B,)``.

        A model that takes features maps ``(B, d)`` float32.
        """
        images = self.inputs(pixels)
        with as_usual(), torch.inference_mode(), autocast(self.precision, self.device)():
            logits = plain = self._model(images).float().cpu()
            # The light is the trained model's, whatever is done to the images of today.
            if self._model is not self._own and self.threshold is not None:
                plain = self._own(images).float().cpu()
        return logits.double().softmax(1).numpy(), energy(plain).numpy()  # as thresholds are


class OnnxClassifier(ImageClassifier):
    """The model of an ONNX file, run by ONNX Runtime on the CPU.

    Args:
        file: a file written by ``feddg export --onnx``.

    Raises:
        RunError: the file cannot be read, is of another kind, or the extra ``export`` is not
            installed.
    """

    def __init__(self, file: Path) -> None:
        self._session = onnx_session(file)
        texts = self._session.get_modelmeta().custom_metadata_map
        with schema_faults(RunError, f"{file} was not written by `feddg export --onnx`: "):
            super().__init__(ModelDescription.model_validate_json(texts.get(ABOUT, "")))

    def answer(self, pixels: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Maps ``(B, size, size, 3)`` uint8 to probabilities ``(B, C)`` and energies ``(B,)``."""
        images = numpy.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
        probabilities, energies = self._session.run(["probabilities", "energy"], {"images": images})
        return probabilities, energies


def load_classifier(
    path: Path | str,
    adapt: str | None = None,
    device: str = "cpu",
    which: str | None = None,
    precision: str = "float32",
) -> ImageClassifier:
    """Returns the model of a run folder, a shared model, or an ONNX file of ``feddg export``.

    See :class:`RunClassifier` for the arguments; an ONNX file accepts no other adaptation.

    Raises:
        RunError: there is no model, or none by that rule.
        AdaptationError: the adaptation is unknown, or does not suit the model.
    """
    if Path(path).suffix.lower() != ".onnx":
        return RunClassifier(path, adapt, device, which, precision)
    plain = device in ("auto", "cpu") and precision in ("auto", "float32")
    if not plain or adapt is not None or which is not None:
        raise RunError(
            f"{path} holds one model as it is, for the CPU in float32; --adapt, --which, --device "
            "and --precision are for run folders"
        )
    return OnnxClassifier(Path(path))


def image_files(named: Sequence[Path | str]) -> Iterator[Path]:
    """Yields the named image files, in the order of the names.

    A named file may have any suffix. A folder gives the image files below it, as
    :func:`feddg.data.images.images_below` does. A glob (``*``, ``?``, ``[...]``, ``**``) gives its
    matches, sorted. Only the names of one folder or glob are in memory at a time.

    Args:
        named: files, folders, globs.

    Raises:
        DataError: a name does not exist, or matches nothing, is a run, or cannot be read; all but
            the last are raised before the first file.
    """
    names = [Path(os.path.expanduser(name)) for name in named]
    for name in names:
        if not name.exists() and next(glob.iglob(str(name), recursive=True), None) is None:
            kind = "matches nothing" if glob.has_magic(str(name)) else "does not exist"
            raise DataError(f"{name} {kind}; name images, folders or globs ('[[]' is a bracket)")
        if is_run(name):  # the second of a glob of runs
            raise DataError(f"{name} is a run folder, not a folder of images; name one run")
    return chain.from_iterable(map(_found, names))


def count_files(named: Sequence[Path | str]) -> int:
    """Returns how many files :func:`image_files` yields.

    Raises:
        DataError: see :func:`image_files`; or there are no image files.
    """
    count = sum(1 for _ in image_files(named))
    if not count:
        listed = ", ".join(str(name) for name in named) or "nothing"
        raise DataError(f"there is no image in {listed}; supported endings: {endings()}")
    return count


def _found(name: Path) -> Iterator[Path]:
    if name.is_dir():
        yield from images_below(name)
    elif name.exists():
        yield name
    else:
        for match in sorted(glob.iglob(str(name), recursive=True)):
            if os.path.isdir(match) and "**" not in str(name):
                yield from images_below(Path(match))
            elif is_image(os.path.basename(match)) and os.path.isfile(match):
                yield Path(match)
