"""Validates a model at a site that took no part; only counts that are safe to release are kept."""

from dataclasses import dataclass
from pathlib import Path

import numpy
from pydantic import Field

from feddg.data.data_set import load_source
from feddg.data.decoding import Tile, depth_of_white
from feddg.data.groups import with_groups
from feddg.data.images import ImageTable, from_class_folders
from feddg.data.inspection import survey
from feddg.diagnostics import Diagnostic
from feddg.errors import DataError, FeddgError
from feddg.evaluation.groups import effective_number
from feddg.evaluation.metrics import Predictions, measure
from feddg.prediction.classifier import load_classifier
from feddg.prediction.model_file import ModelIdentity
from feddg.prediction.predict import BATCH_SIZE, BatchPredictor, predict_batches
from feddg.records import JsonFile, Row
from feddg.runs.intervals import wilson
from feddg.storage import replace_text

# Counts that are safe to hand out: no count below a threshold can be read or computed.
#
# A cell of the table of true against predicted classes says something of few people when it is
# small: "two images of class A were taken for B". What is left of its row would tell it, so the
# whole table is left out; likewise images per class, and correct answers beside wrong ones. What
# is given then still leaves several values open for every small count.
#
# Zeros are given: a class that is never taken for another tells of nobody. Rounding is not needed.


@dataclass(frozen=True)
class Released:
    """The part of a confusion matrix that may be released; None is hidden.

    Attributes:
        confusion: ``[true][predicted]`` counts.
        images: images per class.
        total: number of images.
        correct: number of correct predictions.
    """

    confusion: list[list[int | None]]
    images: list[int | None]
    total: int
    correct: int | None


def release(confusion: numpy.ndarray, smallest: int) -> Released:
    """Returns what may be told of a table: its parts without any count below ``smallest``.

    Args:
        confusion: ``(classes, classes)`` counts, true by predicted.
        smallest: the threshold, at least 3; 0 or 1 hides nothing.

    Raises:
        DataError: there are fewer than ``smallest`` images in total, or it is 2.
    """
    if smallest == 2:
        raise DataError(
            "hiding only counts below 2 would reveal that they are 1: hide_below must be at least 3"
        )
    images, total, correct = confusion.sum(1), int(confusion.sum()), int(confusion.trace())
    if total < max(1, smallest):
        raise DataError(
            f"there are only {total} images, fewer than the {max(1, smallest)} that may be revealed"
        )

    def has_small(*counts: int) -> bool:
        return any(0 < count < smallest for count in counts)

    return Released(
        numpy.ma.masked_array(confusion, has_small(*confusion.ravel())).tolist(),
        numpy.ma.masked_array(images, has_small(*images)).tolist(),
        total,
        None if has_small(correct, total - correct) else correct,
    )


class DomainValidation(Row):
    """One domain of a site's images; None is hidden because of small counts.

    Attributes:
        domain: the site's name for it.
        images: number of predicted images.
        unusable: number of files that could not be read.
        correct: number of correct predictions.
        accuracy: share of correct predictions, in [0, 1].
        interval: 95 % Wilson interval of the accuracy.
        class_images: images per class.
        confusion: ``[true][predicted]`` counts.
        metrics: further metrics of the table; empty if it is hidden.
        mean_confidence: mean confidence of the predictions, to compare with the accuracy.
        unlike_training: number of images above the out-of-distribution threshold; None also if the
            model has none.
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
    """The result file of a site.

    Attributes:
        kind: identifies the kind of file.
        feddg: version of feddg.
        model: origin of the weights.
        adaptation: the test-time adaptation inside an exported file; None for a run.
        classes: the model's classes, in the order of the tables.
        hidden_below: tables with smaller counts are hidden; 0 for none.
        diagnostics: warnings about the model.
        domains: the site's domains.
    """

    kind: str = "feddg validation"
    feddg: str
    model: ModelIdentity
    adaptation: str | None = None
    classes: tuple[str, ...]
    hidden_below: int = 0
    diagnostics: tuple[Diagnostic, ...] = ()
    domains: list[DomainValidation]


def validate(
    model: Path | str,
    images: Path | str,
    *,
    out: Path | None = None,
    domain: str | None = None,
    hide_below: int = 0,
    group_by: str | None = None,
    device: str = "auto",
    which: str | None = None,
    batch_size: int = BATCH_SIZE,
) -> ValidationFile:
    """Evaluates a model on a folder of images, in constant memory and without a cache.

    :func:`release` hides small counts.

    Args:
        model: the run folder, or an ONNX file of ``feddg export``.
        images: ``root/class/*`` with ``domain``, ``root/domain/class/*`` without.
        out: the JSON file to write, to be handed back; none by default.
        domain: name of the domain for images in ``root/class/*``.
        hide_below: leave out tables in which a count of images (of files, where these are cut into
            tiles) is below this number, which is at least 3; 0 leaves nothing out.
        group_by: which images belong together and count once in the interval, as in training
            (``data.group_by``); by default those of a patient in DICOM files.
        device: ``cpu``, ``cuda`` or ``auto``.
        which: the selection rule of the model.
        batch_size: images per forward pass.

    Raises:
        RunError: there is no model.
        DataError: the images cannot be used, or are too few to release.
        FeddgError: the images have a class that the model lacks.
    """
    import feddg

    classifier = load_classifier(model, None, device, which)
    root = Path(images)
    table = load_source("folder", root) if domain is None else from_class_folders(root, domain)
    table = with_groups(table, group_by)
    strange = sorted({*table.class_names} - {*classifier.class_names})
    if strange:
        raise FeddgError(
            f"the model knows no class {strange[0]!r}; its classes are "
            f"{', '.join(classifier.class_names)}: rename the folders, or remove those it cannot "
            "know"
        )
    about = classifier.description
    depths = survey(table, about.reading).depths
    whites = {n: depth_of_white(used, about.known_depths) for n, used in depths.items()}
    domains = []
    for name in table.domain_names:
        predictor = BatchPredictor(classifier, whites.get(name, about.bits), batch_size)
        domains.append(_domain(predictor, table, name, hide_below))
    measured = ValidationFile(
        feddg=feddg.__version__,
        model=ModelIdentity.model_validate(dict(classifier.identity)),
        adaptation=about.adaptation,
        classes=classifier.class_names,
        hidden_below=hide_below,
        diagnostics=classifier.diagnostics,
        domains=domains,
    )
    if out is not None:
        replace_text(out, measured.to_text())
    return measured


def _domain(
    predictor: BatchPredictor, table: ImageTable, name: str, hide_below: int
) -> DomainValidation:
    assert table.root is not None
    rows = numpy.flatnonzero(table.domains == table.domain_id(name))
    classifier = predictor.classifier
    place = {of: number for number, of in enumerate(classifier.class_names)}
    confusion = numpy.zeros((len(place), len(place)), numpy.int64)
    unusable = unlike = 0
    confidence = 0.0
    right, files = [], []
    labels = [table.class_names[label] for label in table.labels[rows]]
    paths = [table.root / Tile.named(table.paths[row]).file for row in rows.tolist()]
    batches = predict_batches(predictor, paths)
    answered = (answers for batch in batches for _, answers in batch)
    for file, (label, answers) in enumerate(zip(labels, answered)):
        for answer in answers:
            if answer.label is None:
                unusable += 1
                continue
            confusion[place[label], place[answer.label]] += 1
            right.append(float(label == answer.label))
            files.append(file)
            confidence += answer.confidence or 0.0
            unlike += answer.unlike_training is True
    if not confusion.any():
        raise DataError(f"no image of domain '{name}' can be used ({unusable} cannot be read)")
    # More tiles than the largest files have, all but one of so many, are of so many files at least.
    largest = numpy.sort(numpy.bincount(files))[::-1][: max(0, hide_below - 1)]
    least = max(hide_below, int(largest.sum()) + 1)
    released = release(confusion, least)
    accuracy = None if released.correct is None else released.correct / released.total
    groups = (rows if table.groups is None else table.groups[rows])[files]  # tiles are their file's
    alone = len(numpy.unique(groups)) == len(groups)
    independent = effective_number(numpy.array(right), None if alone else groups)
    interval = None if accuracy is None else wilson(accuracy, independent)[1:]
    whole = released.confusion[0][0] is not None
    return DomainValidation(
        domain=name,
        images=released.total,
        unusable=unusable,
        correct=released.correct,
        accuracy=accuracy,
        interval=interval,
        class_images=released.images,
        confusion=released.confusion,
        metrics=measure(Predictions(confusion)) if whole else {},
        mean_confidence=round(confidence / released.total, 4),
        unlike_training=None
        if classifier.threshold is None
        or any(0 < part < least for part in (unlike, released.total - unlike))
        else unlike,
    )
