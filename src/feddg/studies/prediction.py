"""What a run's model makes of new images: label, confidence, and a warning light."""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy
import torch
from torch import Tensor, nn

from feddg.clients.threads import available_cores
from feddg.data.decoding import UnusableImageError, decode_image, quiet_pillow
from feddg.data.pixels import as_unit
from feddg.evaluation.energy import energy
from feddg.evaluation.predictors import Predictor
from feddg.runs.model import Trained, load_trained
from feddg.runs.warning_light import fingerprint, read_warning_light
from feddg.studies.image_files import image_files

BATCH_SIZE = 64
MOST_DECODERS = 8


@dataclass(frozen=True)
class Prediction:
    """What the model says about one file.

    Attributes:
        file: as it was named or found.
        label: the most probable class; None where the file cannot be used.
        confidence: its probability, in [0, 1].
        probabilities: of all classes, in the order of the model's ``class_names``.
        energy: the higher, the less it is like images of training; None where the model gives
            log-probabilities, or the run keeps no threshold.
        unlike_training: whether the energy is above the run's threshold.
        reason: why the file cannot be used.
    """

    file: str
    label: str | None = None
    confidence: float | None = None
    probabilities: tuple[float, ...] = ()
    energy: float | None = None
    unlike_training: bool | None = None
    reason: str | None = None


class BatchPredictor:
    """A run's model, ready for batches of files.

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
        self.experiment, self.class_names = trained.experiment, trained.class_names
        self._own = trained.predictor()
        self._model: nn.Module = self._own if adapt is None else trained.predictor(adapt)
        self._adapted = adapt is not None
        self._device = next(self._own.parameters()).device
        self.light = read_warning_light(Path(run), self._own)
        self.fingerprint = fingerprint(self._own)

    @property
    def keeps_state(self) -> bool:
        """Whether an answer depends on the images before it."""
        return isinstance(self._model, Predictor) and self._model.keeps_state

    def decode(self, file: Path) -> numpy.ndarray | str:
        """Returns a file's pixels ``(size, size, 3)`` uint8 as in training, or why it has none."""
        data = self.experiment.data
        try:
            return decode_image(file, data.image_size, data.resize)
        except UnusableImageError as error:
            return str(error)

    def __call__(
        self, files: Sequence[Path], decoded: Sequence[numpy.ndarray | str]
    ) -> list[Prediction]:
        """Returns predictions of decoded files, bad ones with the reason."""
        pixels = [image for image in decoded if not isinstance(image, str)]
        good = iter(self._predict(numpy.stack(pixels)) if pixels else ())
        rows = []
        for file, image in zip(files, decoded):
            name = os.fsencode(file).decode("utf-8", "backslashreplace")
            if isinstance(image, str):
                rows.append(Prediction(name, reason=image))
            else:
                rows.append(self._row(name, *next(good)))
        return rows

    def _predict(self, pixels: numpy.ndarray) -> Iterator[tuple[list[float], float]]:
        """Yields probabilities and energy of each image of ``(B, size, size, 3)`` uint8."""
        images = as_unit(torch.from_numpy(pixels).permute(0, 3, 1, 2), self._device)
        with torch.inference_mode():
            logits: Tensor = self._model(images).float().cpu()
            # The light is the trained model's, whatever is done to the images of today.
            plain = self._own(images).float().cpu() if self._adapted and self.light else logits
        probabilities = logits.softmax(1)
        return zip(probabilities.tolist(), energy(plain).tolist())

    def _row(self, name: str, probabilities: list[float], found: float) -> Prediction:
        best = max(range(len(probabilities)), key=probabilities.__getitem__)
        known = self.light is not None
        return Prediction(
            name,
            self.class_names[best],
            probabilities[best],
            tuple(probabilities),
            found if known else None,
            found > self.light.threshold if self.light is not None else None,
        )


def predict(
    run: Path | str,
    images: Path | str | Sequence[Path | str],
    *,
    adapt: str | None = None,
    which: str | None = None,
    device: str = "cpu",
    batch_size: int = BATCH_SIZE,
) -> Iterator[Prediction]:
    """Predicts image files with a run's model, one after another, in constant memory.

    Args:
        run: the run folder.
        images: files, folders (with all below them) or globs; see
            :func:`feddg.studies.image_files.image_files`.
        adapt: a test-time adaptation, as in ``feddg evaluate``; none for the method's own way.
        which: the model by a selection rule, see :func:`feddg.runs.model.load_model`.
        device: ``cpu``, ``cuda`` or ``auto``.
        batch_size: files per forward pass.

    Returns:
        An iterator of predictions in the order of the files; bad files have a ``reason``.

    Raises:
        RunError: the folder holds no model.
        AdaptationError: the adaptation is unknown, or does not suit the model.
        DataError: something named does not exist.
    """
    named = [images] if isinstance(images, str | Path) else images
    files, predictor = image_files(named), BatchPredictor(run, adapt, device, which)
    return chain.from_iterable(predict_batches(predictor, files, batch_size))


def predict_batches(
    predictor: BatchPredictor, files: Iterable[Path], batch_size: int = BATCH_SIZE
) -> Iterator[list[Prediction]]:
    """Yields the predictions of every ``batch_size`` files; the next are decoded meanwhile."""
    left = iter(files)
    with ThreadPoolExecutor(min(MOST_DECODERS, available_cores())) as pool:

        def begin() -> list[tuple[Path, Future[numpy.ndarray | str]]]:
            batch = islice(left, batch_size)
            return [(file, pool.submit(predictor.decode, file)) for file in batch]

        # Warning filters are the process's: they are in force while files are decoded, not while
        # the caller works on what it was given.
        with quiet_pillow():
            current = begin()
            decoded = [pixels.result() for _, pixels in current]
        while current:
            with quiet_pillow():
                following = begin()
                found = predictor([file for file, _ in current], decoded)
                decoded = [pixels.result() for _, pixels in following]
            current = following
            yield found
