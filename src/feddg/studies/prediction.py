"""What a run's model makes of new images: label, confidence, and a warning light."""

import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy

from feddg.clients.threads import available_cores
from feddg.data.decoding import Tile, UnusableImageError, decode_parts, names_in, quiet_pillow
from feddg.data.inspection import depth_of
from feddg.studies.classifier import ImageClassifier, load_classifier
from feddg.studies.image_files import image_files
from feddg.views import Shown

log = logging.getLogger("feddg")
BATCH_SIZE = 64
MOST_DECODERS = 8
Decoded = list[tuple[str, numpy.ndarray]] | str
"""A file's images with their names, several where it is cut into tiles; or why it has none."""


@dataclass(frozen=True)
class Prediction:
    """What the model says about one file, or about one tile of it.

    Attributes:
        file: as it was named or found; of a tile, with its place: ``a.tif#x512y0w512h512``.
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


class PredictedImages(Shown, Iterator[Prediction]):
    """Predictions one after another; a notebook shows the next ones without taking them."""

    def __init__(self, found: Iterable[Prediction]) -> None:
        self._found, self._ahead = iter(found), deque[Prediction]()

    def __next__(self) -> Prediction:
        """Returns the next prediction."""
        return self._ahead.popleft() if self._ahead else next(self._found)

    def ahead(self, count: int) -> list[Prediction]:
        """Returns the next ``count``, or as many as there are; they stay to be iterated over."""
        self._ahead.extend(islice(self._found, max(0, count - len(self._ahead))))
        return list(islice(self._ahead, count))


class BatchPredictor:
    """A classifier, ready for batches of files.

    Args:
        classifier: answers.
        bits: the depth that the files use, see :func:`feddg.data.inspection.depth_of`.
        batch_size: images per forward pass.
    """

    def __init__(
        self, classifier: ImageClassifier, bits: int = 0, batch_size: int = BATCH_SIZE
    ) -> None:
        self.classifier, self.batch_size, self.bits = classifier, batch_size, bits

    @property
    def files_at_once(self) -> int:
        """Files of a batch; of large images that are cut into tiles, one."""
        return self.batch_size if self.classifier.preparation.reading.tile is None else 1

    def decode(self, file: Path) -> Decoded:
        """Returns a file's images ``(size, size, 3)`` uint8 as in training, or why it has none."""
        look, name = self.classifier.preparation, _written(file)
        side = look.reading.tile
        names = [name] if side is None else names_in(file, name, side)
        boxes = [None] if side is None else [Tile.named(part).box for part in names]
        try:
            pixels = decode_parts(file, boxes, look.size, look.resize, look.reading, self.bits)
        except UnusableImageError as error:
            return str(error)
        return list(zip(names, pixels))

    def __call__(self, files: Sequence[Path], decoded: Sequence[Decoded]) -> list[list[Prediction]]:
        """Returns the predictions of each decoded file, bad ones with the reason."""
        images = [image for found in decoded if not isinstance(found, str) for image in found]
        good = iter(self._predictions(images))
        return [
            [Prediction(_written(file), reason=found)]
            if isinstance(found, str)
            else list(islice(good, len(found)))
            for file, found in zip(files, decoded)
        ]

    def _predictions(self, images: Sequence[tuple[str, numpy.ndarray]]) -> Iterator[Prediction]:
        for start in range(0, len(images), self.batch_size):
            part = images[start : start + self.batch_size]
            found = self.classifier.answer(numpy.stack([pixels for _, pixels in part]))
            for (name, _), shares, energy in zip(part, *found):
                yield prediction_of(self.classifier, name, shares, float(energy))


def prediction_of(
    classifier: ImageClassifier, name: str, shares: numpy.ndarray, energy: float
) -> Prediction:
    """Returns what an answer says.

    Args:
        classifier: whose answer it is.
        name: of the image.
        shares: probabilities ``(classes,)``.
        energy: of the image.
    """
    best, threshold = int(shares.argmax()), classifier.threshold
    return Prediction(
        name,
        classifier.class_names[best],
        float(shares[best]),
        tuple(map(float, shares)),
        energy if threshold is not None else None,
        energy > threshold if threshold is not None else None,
    )


def predict(
    run: Path | str,
    images: Path | str | Sequence[Path | str],
    *,
    adapt: str | None = None,
    which: str | None = None,
    device: str = "cpu",
    batch_size: int = BATCH_SIZE,
) -> PredictedImages:
    """Predicts image files with a run's model, one after another, in constant memory.

    Args:
        run: the run folder, or an ONNX file of ``feddg export``.
        images: files, folders (with all below them) or globs; see
            :func:`feddg.studies.image_files.image_files`.
        adapt: a test-time adaptation, as in ``feddg evaluate``; none for the method's own way.
        which: the model by a selection rule, see :func:`feddg.runs.model.load_model`.
        device: ``cpu``, ``cuda`` or ``auto``.
        batch_size: images per forward pass.

    Returns:
        An iterator of predictions in the order of the files; bad files have a ``reason``. A
        notebook shows the first ones with their pictures.

    Raises:
        RunError: the folder holds no model.
        AdaptationError: the adaptation is unknown, or does not suit the model.
        DataError: something named does not exist.
    """
    named = [images] if isinstance(images, str | Path) else images
    files, classifier = image_files(named), load_classifier(run, adapt, device, which)
    warn(classifier)
    predictor = BatchPredictor(classifier, depth_of(image_files(named)), batch_size)
    batches = predict_batches(predictor, files)
    return PredictedImages(chain.from_iterable(chain.from_iterable(batches)))


def warn(classifier: ImageClassifier) -> None:
    """Logs what must be said of a model before its labels are believed."""
    for said in classifier.cautions:
        log.warning("%s", said)


def predict_batches(
    predictor: BatchPredictor, files: Iterable[Path]
) -> Iterator[list[list[Prediction]]]:
    """Yields the predictions of every few files; the next are decoded meanwhile."""
    left, tiled = iter(files), predictor.classifier.preparation.reading.tile is not None
    with ThreadPoolExecutor(min(MOST_DECODERS, available_cores())) as pool:

        def begin() -> list[tuple[Path, Future[Decoded]]]:
            batch = islice(left, predictor.files_at_once)
            return [(file, pool.submit(predictor.decode, file)) for file in batch]

        # Warning filters are the process's: they are in force while files are decoded, not while
        # the caller works on what it was given.
        with quiet_pillow(tiled=tiled):
            current = begin()
            decoded = [found.result() for _, found in current]
        while current:
            with quiet_pillow(tiled=tiled):
                following = begin()
                found = predictor([file for file, _ in current], decoded)
                decoded = [pixels.result() for _, pixels in following]
            current = following
            yield found


def _written(file: Path) -> str:
    """A file's name as text, whatever bytes it is of."""
    return os.fsencode(file).decode("utf-8", "backslashreplace")
