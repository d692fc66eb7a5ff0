"""A model measured on the images of a site that took no part: what leaves is counts, no image.

The site needs the run folder, or an ONNX file of ``feddg export``, and its own images in folders by
class. What comes out names no file and holds nothing of a single image.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy
from pydantic import ConfigDict, Field

from feddg.data.data_set import load_source
from feddg.data.decoding import Tile
from feddg.data.images import ImageTable, from_class_folders
from feddg.data.inspection import survey
from feddg.errors import DataError
from feddg.evaluation.metrics import Predictions, measure
from feddg.records import JsonFile, Row
from feddg.runs.findings import wilson
from feddg.studies.classifier import ImageClassifier, load_classifier, unknown_classes
from feddg.studies.prediction import BATCH_SIZE, BatchPredictor, Prediction, predict_batches
from feddg.studies.small_counts import release


class ModelIdentity(Row):
    """Whose weights were measured."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    experiment: str = ""
    method: str = ""
    backbone: str = ""
    model: str = ""
    round: int = 0
    weights: str = ""


class DomainValidation(Row):
    """One domain of a site's images; None is hidden because it counts too few.

    Attributes:
        domain: what the site calls it.
        images: how many were answered.
        unusable: files that could not be read.
        correct: answers that were right.
        accuracy: their share, in [0, 1].
        interval: 95 % Wilson interval of it.
        class_images: images of each class.
        confusion: ``[true][predicted]`` counts.
        metrics: further numbers from the whole table; empty where something of it is hidden.
        mean_confidence: of the answers; to be compared with the accuracy.
        unlike_training: images above the warning light's threshold; None without one, too.
    """

    domain: str
    images: int
    unusable: int
    correct: int | None
    accuracy: float | None
    interval: tuple[float, float] | None
    class_images: list[int | None]
    confusion: list[list[int | None]]
    metrics: dict[str, float] = Field(default_factory=dict)
    mean_confidence: float
    unlike_training: int | None


class ValidationFile(JsonFile):
    """What a site hands back.

    Attributes:
        kind: says what the file is.
        feddg: the version that measured.
        model: whose weights.
        classes: the model's, in the order of the tables.
        hidden_below: counts under this, and what would give them away, are hidden; 0 for none.
        cautions: what must be said of the model.
        domains: of the site.
    """

    kind: str = "feddg validation"
    feddg: str
    model: ModelIdentity
    classes: tuple[str, ...]
    hidden_below: int = 0
    cautions: tuple[str, ...] = ()
    domains: list[DomainValidation]


def validate(
    model: Path | str,
    images: Path | str,
    *,
    domain: str | None = None,
    hide_below: int = 0,
    device: str = "cpu",
    which: str | None = None,
    batch_size: int = BATCH_SIZE,
) -> ValidationFile:
    """Measures a model on a folder of images, in constant memory; nothing is cached.

    Args:
        model: the run folder, or an ONNX file of ``feddg export``.
        images: ``root/class/*`` with ``domain``, ``root/domain/class/*`` without.
        domain: what the images of ``root/class/*`` are called.
        hide_below: see :func:`feddg.studies.small_counts.release`.
        device: ``cpu``, ``cuda`` or ``auto``.
        which: the model by a selection rule.
        batch_size: images per forward pass.

    Raises:
        RunError: there is no model.
        DataError: the images cannot be used, or are fewer than may be told.
        FeddgError: there is a class that the model does not know.
    """
    import feddg

    classifier = load_classifier(model, None, device, which)
    table = _table(images, domain)
    unknown_classes(classifier, table.class_names)
    depths = survey(table).depths
    found = [
        _domain(classifier, table, name, depths.get(name, 0), hide_below, batch_size)
        for name in table.domain_names
    ]
    return ValidationFile(
        feddg=feddg.__version__,
        model=ModelIdentity.model_validate(dict(classifier.identity)),
        classes=classifier.class_names,
        hidden_below=hide_below,
        cautions=classifier.cautions,
        domains=found,
    )


def _table(images: Path | str, domain: str | None) -> ImageTable:
    if domain is not None:
        return from_class_folders(Path(images), domain)
    return load_source("folder", Path(images))


def _domain(
    classifier: ImageClassifier,
    table: ImageTable,
    name: str,
    bits: int,
    hide_below: int,
    batch_size: int,
) -> DomainValidation:
    classes = len(classifier.class_names)
    confusion = numpy.zeros((classes, classes), numpy.int64)
    unusable = unlike = 0
    confidence = 0.0
    for label, said in _answers(classifier, table, name, bits, batch_size):
        if said.label is None:
            unusable += 1
            continue
        confusion[label, classifier.class_names.index(said.label)] += 1
        confidence += said.confidence or 0.0
        unlike += said.unlike_training is True
    if not confusion.any():
        raise DataError(f"no image of domain '{name}' can be used ({unusable} cannot be read)")
    told = release(confusion, hide_below)
    accuracy = None if told.correct is None else told.correct / told.total
    interval = None if accuracy is None else wilson(accuracy, told.total)
    whole = not any(cell is None for row in told.confusion for cell in row)
    return DomainValidation(
        domain=name,
        images=told.total,
        unusable=unusable,
        correct=told.correct,
        accuracy=accuracy,
        interval=None if interval is None else (interval.low, interval.high),
        class_images=told.images,
        confusion=told.confusion,
        metrics=measure(Predictions(confusion)) if whole else {},
        mean_confidence=round(confidence / told.total, 4),
        unlike_training=None
        if classifier.threshold is None or _is_small(unlike, told.total, hide_below)
        else unlike,
    )


def _answers(
    classifier: ImageClassifier, table: ImageTable, domain: str, bits: int, batch_size: int
) -> Iterator[tuple[int, Prediction]]:
    """Yields the true class, by the model's numbers, and the answer of every image of a domain."""
    assert table.root is not None
    rows = numpy.flatnonzero(table.domains == table.domain_id(domain)).tolist()
    place = {name: i for i, name in enumerate(classifier.class_names)}
    labels = [place[table.class_names[table.labels[row]]] for row in rows]
    files = [table.root / Tile.named(table.paths[row]).file for row in rows]
    batches = predict_batches(BatchPredictor(classifier, bits, batch_size), files)
    found = (of_file for batch in batches for of_file in batch)
    for label, of_file in zip(labels, found):
        for said in of_file:
            yield label, said


def _is_small(count: int, total: int, smallest: int) -> bool:
    return any(0 < part < smallest for part in (count, total - count))
