"""Predicts new images with a run's model, writes tables, and finds the most doubtful rows."""

import csv
import heapq
import json
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy

from feddg.clients.threads import available_cores
from feddg.data.decoding import (
    Depths,
    Tile,
    UnusableImageError,
    decode_parts,
    depth_of_white,
    names_in,
    quiet_pillow,
)
from feddg.data.inspection import depth_of
from feddg.data.sets.features import read_rows
from feddg.diagnostics import Progress, emit, silent, warn
from feddg.errors import DataError, MissingPackage, RunError, nearest
from feddg.prediction.classifier import ImageClassifier, count_files, image_files, load_classifier
from feddg.prediction.model_file import ModelDescription
from feddg.readers import function
from feddg.records import Details, as_cell
from feddg.runs.diagnostics import refuse_doubtful
from feddg.runs.reading import DETAILS, is_run
from feddg.runs.table import is_same_model
from feddg.storage import FILE_MODE, alone, file_faults, replace_file, stamp
from feddg.text import command, printable
from feddg.views import Shown

BATCH_SIZE = 32
"""Images of a forward pass; 64 take a quarter more memory and no less time on a CPU."""
MOST_DECODERS = 8
Decoded = list[tuple[str, numpy.ndarray]] | str
"""A file's images with their names (several if it is cut into tiles), or why there are none."""
MOST_SHOWN = 300
MOST_FAULTS = 100


@dataclass(frozen=True)
class Prediction:
    r"""The prediction for one file, or for one tile of it.

    Attributes:
        file: the file as it was named or found, unprintable characters escaped (``\x1b``); for a
            tile with its place: ``a.tif#x512y0w512h512``.
        label: the most probable class; None if the file cannot be used.
        confidence: its probability, in [0, 1].
        probabilities: of all classes, in the order of the model's ``class_names``.
        energy: higher for images less like the training images; None if the model gives
            log-probabilities, or the run has no threshold.
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


Batch = list[tuple[Path, list[Prediction]]]
"""Files with the predictions of each."""


class PredictedImages(Shown, Iterator[Prediction]):
    """An iterator of predictions; a notebook shows the next ones without consuming them."""

    def __init__(self, found: Iterable[Prediction]) -> None:
        self._found, self._ahead = iter(found), deque[Prediction]()

    def __next__(self) -> Prediction:
        """Returns the next prediction."""
        return self._ahead.popleft() if self._ahead else next(self._found)

    def ahead(self, count: int) -> list[Prediction]:
        """Returns the next ``count`` predictions (or fewer) without consuming them."""
        self._ahead.extend(islice(self._found, max(0, count - len(self._ahead))))
        return list(islice(self._ahead, count))


class BatchPredictor:
    """Predicts batches of files with a classifier.

    Args:
        classifier: the classifier.
        bits: the bit depth of the files, or of several domains that they may be of, see
            :func:`feddg.data.decoding.depth_of_white`.
        batch_size: images per forward pass.
    """

    def __init__(
        self, classifier: ImageClassifier, bits: Depths = 0, batch_size: int = BATCH_SIZE
    ) -> None:
        self.classifier, self.batch_size, self.bits = classifier, batch_size, bits

    @property
    def files_at_once(self) -> int:
        """Number of files in a batch; one for large images that are cut into tiles."""
        return self.batch_size if self.classifier.description.tile is None else 1

    def decode(self, file: Path) -> Decoded:
        """Returns a file's images, ``(size, size, 3)`` uint8, or the reason why it has none.

        Of a table of features, returns the rows.
        """
        about, name = self.classifier.description, _written(file)
        if about.features is not None:
            try:
                rows = read_rows(file, about.columns, about.feature_names)
            except (DataError, MissingPackage) as error:
                return str(error)
            width = len(rows[0][1])
            fits = width == about.features
            return rows if fits else f"it has {width} features, the model takes {about.features}"
        side, size = about.tile, about.image_size
        names = [name] if side is None else names_in(file, name, side)
        boxes = [None] if side is None else [Tile.named(part).box for part in names]
        try:
            pixels = decode_parts(file, boxes, size, about.resize, about.reading, self.bits)
        except UnusableImageError as error:
            return error.reason
        except MissingPackage as error:
            return str(error)
        return list(zip(names, pixels))

    def __call__(self, files: Sequence[Path], decoded: Sequence[Decoded]) -> Batch:
        """Returns the predictions of each decoded file; for bad files the reason."""
        images = [image for part in decoded if not isinstance(part, str) for image in part]
        good = self.predictions(images)
        return [
            (
                file,
                [Prediction(_written(file), reason=part)]
                if isinstance(part, str)
                else list(islice(good, len(part))),
            )
            for file, part in zip(files, decoded)
        ]

    def predictions(self, images: Sequence[tuple[str, numpy.ndarray]]) -> Iterator[Prediction]:
        """Yields the predictions of images with their names, batch by batch."""
        for start in range(0, len(images), self.batch_size):
            part = images[start : start + self.batch_size]
            answers = self.classifier.answer(numpy.stack([pixels for _, pixels in part]))
            for (name, _), shares, energy in zip(part, *answers):
                yield prediction_of(self.classifier, name, shares, float(energy))


def predictor_of(
    classifier: ImageClassifier, images: Sequence[Path | str], batch_size: int
) -> BatchPredictor:
    """Returns what predicts files, with one white for all if the run knows one bit depth.

    If it knows several, each file has the white that it has when it is served: one deep file must
    not darken the others.
    """
    about = classifier.description
    depth, known = depth_of(image_files(images), about.reading), about.known_depths
    white = known if len(known) > 1 else depth_of_white(depth, known)
    if about.reading.range == "auto" and about.bits and depth not in (0, min(known)):
        warn(
            "bit-depths-differ",
            f"These images use {depth} bits, those of the run {' and '.join(map(str, known))}: "
            + (
                f"white is {2**white - 1}."
                if isinstance(white, int)
                else "white in each is that of the fewest of these bits that hold it, or of its "
                "own. So a dark image of a deeper domain becomes brighter than in training."
            ),
        )
    return BatchPredictor(classifier, white, batch_size)


def prediction_of(
    classifier: ImageClassifier, name: str, shares: numpy.ndarray, energy: float
) -> Prediction:
    """Returns the prediction for an image from its probabilities and energy; no label for NaN.

    Args:
        classifier: the classifier that computed them.
        name: name of the image.
        shares: probabilities ``(classes,)``.
        energy: energy of the image.
    """
    if not numpy.isfinite(shares).all():
        return Prediction(name, reason="the model's output for it is not finite (NaN or infinite)")
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
            :func:`feddg.prediction.classifier.image_files`.
        adapt: a test-time adaptation, as in ``feddg evaluate``; None for the method's own
            predictor.
        which: the selection rule of the model, see :func:`feddg.prediction.model.load_model`.
        device: ``cpu``, ``cuda`` or ``auto``.
        batch_size: images per forward pass.

    Returns:
        An iterator of predictions in the order of the files; bad files have a ``reason``. A
        notebook shows the first ones with their pictures.

    Raises:
        RunError: the folder has no model.
        AdaptationError: the adaptation is unknown, or does not suit the model.
        DataError: a name does not exist, or there is no image.
    """
    named = [images] if isinstance(images, str | Path) else list(images)
    count_files(named)
    classifier = load_classifier(run, adapt, device, which)
    emit(*classifier.diagnostics)
    predictor = predictor_of(classifier, named, batch_size)
    batches = predict_batches(predictor, image_files(named))
    return PredictedImages(row for batch in batches for _, rows in batch for row in rows)


def predict_batches(predictor: BatchPredictor, files: Iterable[Path]) -> Iterator[Batch]:
    """Yields the predictions batch by batch, while the next files are decoded."""
    left, tiled = iter(files), predictor.classifier.description.tile is not None
    with ThreadPoolExecutor(min(MOST_DECODERS, available_cores())) as pool:

        def begin() -> list[tuple[Path, Future[Decoded]]]:
            batch = islice(left, predictor.files_at_once)
            return [(file, pool.submit(predictor.decode, file)) for file in batch]

        # Warning filters are the process's: they are in force while files are decoded, not while
        # the caller works on what it was given.
        with quiet_pillow(tiled=tiled):
            current = begin()
            decoded = [future.result() for _, future in current]
        while current:
            with quiet_pillow(tiled=tiled):
                following = begin()
                predicted = predictor([file for file, _ in current], decoded)
                decoded = [pixels.result() for _, pixels in following]
            current = following
            yield predicted


def _written(file: Path) -> str:
    """Returns a file's name as text, for any bytes; unprintable characters are escaped."""
    return printable(os.fsencode(file).decode("utf-8", "backslashreplace"))


@dataclass(frozen=True)
class Cut:
    """A class, and from which probability on an image counts as it.

    Attributes:
        of: the class.
        threshold: in (0, 1).
    """

    of: str
    threshold: float


def cut_of(
    run: Path | str, about: ModelDescription, decision: str | None, threshold: float | None
) -> Cut | None:
    """Returns the decision to make with a model; the run's own fills in what is not given.

    Raises:
        DataError: the class is unknown, or the run has decided nothing about it with this model.
    """
    if decision is None and threshold is None:
        return None
    details = Details.read(Path(run) / DETAILS) or Details()
    made, class_names = details.decision, about.class_names
    of = decision or (made.of if made is not None else None)
    if of is None:
        raise DataError(f"{run} has no decision: name a class with --decision CLASS")
    if of not in class_names:
        raise DataError(f"no class of {run} is called {of!r}{nearest(of, class_names)}")
    if threshold is None:
        is_own = about.adaptation is None and is_same_model(details, about.model, about.round)
        if made is None or made.of != of or not is_own:
            advice = "give --threshold"
            if is_run(Path(run)):  # not a file, which holds no images to choose one by
                again = command("evaluate", str(run), "--decision", of, "--which", about.model)
                advice = f"choose one with `{again}` (for the model without --adapt), or {advice}"
            raise DataError(f"{run} has no threshold for {of} of this model: {advice}")
        threshold = made.threshold
    if threshold is None:
        raise DataError(f"{run} has no threshold for {of}: validation has none of it, or only it")
    return Cut(of, threshold)


def row_of(
    found: Prediction, class_names: Sequence[str], probabilities: bool, cut: Cut | None = None
) -> dict[str, object]:
    """Returns a prediction's values by column; None for missing ones."""
    words = {True: "yes", False: "no", None: None}
    shares = dict(zip(class_names, found.probabilities))
    row: dict[str, object] = {
        "file": found.file,
        "label": found.label,
        "confidence": rounded(found.confidence),
        "energy": rounded(found.energy),
        "unlike_training": words[found.unlike_training],
        "reason": found.reason,
    }
    if cut is not None:
        share = shares.get(cut.of)
        row[f"decision: {cut.of}"] = words[None if share is None else share >= cut.threshold]
    if probabilities:
        row |= {f"probability: {name}": rounded(shares.get(name)) for name in class_names}
    return row


def rounded(value: float | None) -> float | None:
    """Returns a number rounded to six decimals, which do not depend on the machine."""
    return None if value is None else round(value, 6)


Rows = Iterable[Mapping[str, object]]


def _write_csv(out: Path, names: Sequence[str], rows: Rows) -> None:
    """Writes CSV; text that a spreadsheet would run as a formula gets a leading ``'``."""
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: as_cell(cell) for name, cell in row.items()} for row in rows)


def _write_lines(out: Path, names: Sequence[str], rows: Rows) -> None:
    with out.open("wb") as file:
        file.writelines(map(_line, rows))


_WRITERS = {".csv": _write_csv, ".jsonl": _write_lines}


# Predicts any number of image files into one table, and goes on where it was interrupted.
#
# Until the table is whole its rows are in ``OUT.part``: a first line that says what work it is, and
# a line for every image file, with its name and its rows.


@dataclass(frozen=True)
class PredictedFiles:
    """The result of predicting files.

    Attributes:
        out: path of the table.
        files: number of image files; each has one row, or one per tile.
        failed: number of files without a label in any row.
        unlike: number of rows unlike the training images; None without an out-of-distribution
            score.
        continued: number of files done by an earlier call.
        classifier: the classifier.
        doubtful: the least confident rows, most doubtful first.
        faults: the first rows without a prediction.
        labels: number of rows with each label.
    """

    out: Path
    files: int
    failed: int
    unlike: int | None
    continued: int
    classifier: ImageClassifier
    doubtful: list[Prediction]
    faults: list[Prediction]
    labels: Counter[str]


def predict_files(
    run: Path | str,
    images: Sequence[Path | str],
    out: Path,
    *,
    html: Path | None = None,
    adapt: str | None = None,
    which: str | None = None,
    probabilities: bool = False,
    decision: str | None = None,
    threshold: float | None = None,
    device: str = "auto",
    precision: str = "float32",
    batch_size: int = BATCH_SIZE,
    strict: bool = False,
    progress: Progress = silent,
) -> PredictedFiles:
    """Writes a table with a row per file: name, label, confidence, energy, score, reason.

    The unfinished table is called ``OUT.part``. After an interruption, the next call for the same
    work continues it, with the same bytes. With an adaptation that remembers images, it starts
    again.

    Args:
        run: the run folder, or an ONNX file of ``feddg export``.
        images: files, folders, globs.
        out: the table to write; ends in ``.csv`` or ``.jsonl``. An existing one is replaced.
        html: also write a page of thumbnails to this file, least confident images first.
        adapt: a test-time adaptation, as in ``feddg evaluate``.
        which: the selection rule of the model, see :func:`feddg.prediction.model.load_model`.
        probabilities: whether to write a column for every class.
        decision: a class for which a column says yes or no; by default that of the run's own
            decision, if a threshold is given.
        threshold: the probability from which on the answer is yes, in (0, 1); by default the one
            chosen on in-domain validation, if that was for this model without an adaptation.
        device: ``cpu``, ``cuda`` or ``auto``.
        precision: ``float32``, ``bfloat16``, or ``auto``: bfloat16 where the device is fast at it.
        batch_size: files per forward pass.
        strict: whether to refuse a model with warnings.
        progress: called with the progress.

    Raises:
        RunError: the folder has no model, the table cannot be written or is being written by
            another process, or ``strict`` and there are warnings.
        AdaptationError: the adaptation is unknown, or does not suit the model.
        DataError: a name does not exist, there is no image, the suffix is unknown, or the run's
            threshold is for another model.
    """
    if out.suffix.lower() not in _WRITERS:
        raise DataError(f"{out} must end in one of {', '.join(_WRITERS)}")
    if out.is_dir():
        raise DataError(f"{out} is a folder; name a file")
    images = list(images)
    named = {Path(name).resolve() for name in images}
    if taken := named & {place.resolve() for place in (out, html) if place is not None}:
        raise DataError(f"{min(taken)} is to be predicted; name another file to write")
    total = count_files(images)
    classifier = load_classifier(run, adapt, device, which, precision)
    refuse_doubtful(classifier.diagnostics, strict)
    predictor = predictor_of(classifier, images, batch_size)
    part = part_of(out)
    cut = cut_of(run, classifier.description, decision, threshold)

    def row(found: Prediction) -> dict[str, object]:
        return row_of(found, classifier.class_names, probabilities, cut)

    names = list(row(Prediction("")))
    adaptation = classifier.description.adaptation  # that of an ONNX file is in the file
    work: list[object] = [classifier.weights, adaptation, batch_size, names, classifier.threshold]
    work += [predictor.bits, classifier.precision, *([] if cut is None else [cut.threshold])]

    def lines(done: int) -> Iterator[bytes]:
        for batch in predict_batches(predictor, islice(image_files(images), done, None)):
            for file, found in batch:
                yield _line([_written(file), [*map(row, found)], stamp(file)])
            done += len(batch)
            progress("predicting images", done, total)

    with file_faults(RunError, f"cannot write {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        busy = RunError(f"{out} is being written by another process; name another file")
        with alone(out, busy):
            done, length = 0, 0
            if not classifier.keeps_state:
                done, length = _whole_batches(part, work, images, predictor.files_at_once)
            try:
                own = partial(os.open, mode=FILE_MODE)  # names and labels may be private
                with open(part, "r+b" if done else "wb", opener=own) as table:
                    table.truncate(length)
                    table.seek(length)
                    table.writelines(chain(() if done else [_line(work)], lines(done)))
                predicted = _put_in_place(part, out, names, done, classifier)
            except KeyboardInterrupt:
                how = "begins anew" if classifier.keeps_state else "goes on where it stopped"
                raise KeyboardInterrupt(f"the same command {how}") from None
    if html is not None:
        function("write_predictions_page")(predicted, html, run, images)
    return predicted


def part_of(out: Path) -> Path:
    """Returns the path of the rows of an unfinished table."""
    return out.with_name(f"{out.name}.part")


def _line(content: object) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode() + b"\n"


def _lines(part: Path) -> Iterator[tuple[Any, int]]:
    """Yields the content of each complete line of a partial file, with its end in bytes."""
    place = 0
    with part.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):  # cut off, by a kill or a full disk
                return
            place += len(line)
            yield json.loads(line), place


def _whole_batches(
    part: Path, work: Sequence[object], images: Sequence[Path | str], files_at_once: int
) -> tuple[int, int]:
    """Returns the number of files in complete batches of a partial file, and their bytes.

    Both are 0 if there is no partial file, or if it belongs to other work. Batches count up to the
    first file that is another, or was changed since it was read.
    """
    done = length = 0
    lines = _lines(part) if part.is_file() else iter(())
    header, _ = next(lines, (None, 0))
    if header != json.loads(_line(work)):
        return 0, 0
    both = zip(image_files(images), lines)
    for number, (file, ((name, _, *read), place)) in enumerate(both, start=1):
        if name != _written(file) or read != [[*(stamp(file) or ())] or None]:
            break
        if number % files_at_once == 0:
            done, length = number, place
    return done, length


def _put_in_place(
    part: Path, out: Path, names: Sequence[str], continued: int, classifier: ImageClassifier
) -> PredictedFiles:
    """Writes the table from its partial file, which is then deleted; in constant memory."""
    faults, labels = list[Prediction](), Counter[str]()
    files = failed = unlike = 0

    def by_file() -> Iterator[list[dict[str, Any]]]:
        return (rows for (_, rows, _), _ in islice(_lines(part), 1, None))

    def usable() -> Iterator[Prediction]:
        nonlocal files, failed, unlike
        for rows in by_file():
            files += 1
            failed += all(row["label"] is None for row in rows)
            for row in rows:
                if row["reason"] is None:
                    labels[row["label"]] += 1
                    lit = row["unlike_training"] == "yes"
                    unlike += lit
                    yield Prediction(
                        row["file"], row["label"], row["confidence"], unlike_training=lit
                    )
                elif len(faults) < MOST_FAULTS:
                    faults.append(Prediction(row["file"], reason=row["reason"]))

    write, all_rows = _WRITERS[out.suffix.lower()], chain.from_iterable(by_file())
    replace_file(out, lambda aside: write(aside, names, all_rows))
    doubtful = heapq.nsmallest(MOST_SHOWN, usable(), key=lambda row: row.confidence or 0.0)
    part.unlink()
    scored = None if classifier.threshold is None else unlike
    return PredictedFiles(
        out, files, failed, scored, continued, classifier, doubtful, faults, labels
    )
