"""What a run's model makes of new images: rows of a table, the most doubtful of them found."""

import csv
import hashlib
import heapq
import io
import json
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy

from feddg.clients.threads import available_cores
from feddg.data.decoding import Tile, UnusableImageError, decode_parts, names_in, quiet_pillow
from feddg.data.inspection import depth_of
from feddg.diagnostics import emit
from feddg.errors import DataError, RunError
from feddg.prediction.classifier import ImageClassifier, count_files, image_files, load_classifier
from feddg.records import JsonFile, as_cell, from_cell
from feddg.runs.diagnostics import refuse_doubtful
from feddg.storage import alone, replace_file, replace_text, sync, why
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
            :func:`feddg.prediction.classifier.image_files`.
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
    """Logs the warnings about a model before its labels are believed."""
    emit(*classifier.diagnostics)


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


# Predictions as rows of CSV, JSON lines or Parquet.


TEXT_SUFFIXES = (".csv", ".jsonl")
SUFFIXES = (*TEXT_SUFFIXES, ".parquet")
ROWS_AT_ONCE = 4096


def columns(class_names: Sequence[str], probabilities: bool) -> list[str]:
    """Returns the names of the columns."""
    names = ["file", "label", "confidence", "energy", "unlike_training", "reason"]
    return names + [f"probability: {name}" for name in class_names if probabilities]


def cells(row: Prediction, classes: int, probabilities: bool) -> list[Any]:
    """Returns what a prediction holds, column by column; None where there is nothing."""
    unlike = None if row.unlike_training is None else ("yes" if row.unlike_training else "no")
    found = [row.file, row.label, rounded(row.confidence), rounded(row.energy), unlike]
    shares = row.probabilities or (None,) * classes
    return [*found, row.reason, *(rounded(share) for share in shares if probabilities)]


def csv_text(rows: Sequence[Sequence[Any]]) -> str:
    """Returns rows as lines of CSV; texts that a spreadsheet would compute begin with ``'``."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([as_cell(cell) for cell in row] for row in rows)
    return text.getvalue()


def json_lines(rows: Sequence[Sequence[Any]], names: Sequence[str]) -> str:
    """Returns rows as JSON lines, one object each."""
    objects = (dict(zip(names, row)) for row in rows)
    return "".join(json.dumps(found, ensure_ascii=False) + "\n" for found in objects)


def check_suffix(out: Path) -> None:
    """Makes sure that a file can be written as its ending says.

    Raises:
        DataError: the ending is unknown, its extra is not installed, or a folder is in the way.
    """
    if out.suffix.lower() not in SUFFIXES:
        raise DataError(f"{out} must end in one of {', '.join(SUFFIXES)}")
    if out.is_dir():
        raise DataError(f"{out} is a folder; name a file")
    if out.suffix.lower() == ".parquet":
        parquet()


def parquet(otherwise: str = "let --out end in .csv") -> Any:
    """Returns PyArrow, with its Parquet module loaded.

    Args:
        otherwise: what else the user can do, for the message.

    Raises:
        DataError: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"Parquet needs PyArrow: pip install 'feddg[parquet]'; or {otherwise}"
        ) from None
    return pyarrow


class ParquetRows:
    """A Parquet file that grows by batches of rows.

    Args:
        path: the file.
        names: of its columns; numbers are float64, everything else text.
    """

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        arrow = parquet()
        number, text = arrow.float64(), arrow.string()
        kinds = [
            (name, number if name in ("confidence", "energy") or ": " in name else text)
            for name in names
        ]
        self._arrow, self._schema = arrow, arrow.schema(kinds)
        self._writer = arrow.parquet.ParquetWriter(path, self._schema)

    def append(self, rows: Sequence[Sequence[Any]]) -> None:
        """Writes rows as one group."""
        table = [dict(zip(self._schema.names, row)) for row in rows]
        self._writer.write_table(self._arrow.Table.from_pylist(table, schema=self._schema))

    def close(self) -> None:
        """Writes the file's end."""
        self._writer.close()


def write_parquet(lines: Path, out: Path, names: Sequence[str]) -> None:
    """Writes a table of JSON lines as Parquet, some thousand rows at a time.

    Args:
        lines: the table as :func:`json_lines` writes it.
        out: the Parquet file.
        names: of the columns.
    """
    rows = ParquetRows(out, names)
    with lines.open(encoding="utf-8", newline="\n") as table:
        while group := list(islice(table, ROWS_AT_ONCE)):
            rows.append([list(json.loads(line).values()) for line in group])
    rows.close()


def rounded(value: float | None) -> float | None:
    """Returns six decimals of a number: the digits that do not depend on the machine."""
    return None if value is None else round(value, 6)


# Predicts any number of image files into one table, and goes on where it was interrupted.


SECONDS_BETWEEN_NOTES = 1.0
"""An interrupted table loses at most the rows of so much time."""
OnBad = Callable[[str], None]


class Interrupted(JsonFile):
    """How far a table has come that is not whole yet.

    Attributes:
        work: what is written, by whose weights: a table of other work is not continued.
        files: image files done.
        bytes: length of the table up to their rows.
        failed: how many of them could not be used.
        unlike: how many of them are unlike training.
        names: hash of their names.
    """

    work: str
    files: int = 0
    bytes: int = 0
    failed: int = 0
    unlike: int = 0
    names: str = ""


@dataclass(frozen=True)
class PredictedFiles:
    """What came of it.

    Attributes:
        out: the table.
        files: image files; each has a row, or one for every tile.
        failed: files that could not be used.
        unlike: rows unlike training; None where the run has no warning light.
        continued: files that an earlier call had done.
        classifier: whose labels they are.
    """

    out: Path
    files: int
    failed: int
    unlike: int | None
    continued: int
    classifier: ImageClassifier


def predict_files(
    run: Path | str,
    images: Sequence[Path | str],
    out: Path,
    *,
    adapt: str | None = None,
    which: str | None = None,
    probabilities: bool = False,
    device: str = "cpu",
    batch_size: int = BATCH_SIZE,
    strict: bool = False,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    on_bad: OnBad = lambda line: None,
) -> PredictedFiles:
    """Writes a row for every image file: file, label, confidence, energy, warning light, reason.

    Until it is whole the table is called ``OUT.part``; a Parquet table grows as JSON lines. One
    that was interrupted is continued by the next call for the same work, to the same bytes. Under
    an adaptation that remembers the images before it begins anew.

    Args:
        run: the run folder, or an ONNX file of ``feddg export``.
        images: files, folders, globs.
        out: the table; ends in ``.csv``, ``.jsonl`` or ``.parquet``. One that exists is replaced.
        adapt: a test-time adaptation, as in ``feddg evaluate``.
        which: the model by a selection rule, see :func:`feddg.runs.model.load_model`.
        probabilities: whether every class has a column.
        device: ``cpu``, ``cuda`` or ``auto``.
        batch_size: files per forward pass.
        progress: is told how far it has come.
        on_bad: is told of each file that cannot be used, in one line.

        strict: whether to refuse a model about which there is a warning.

    Raises:
        RunError: the folder holds no model, the table cannot be written or is being written by
            somebody else, or ``strict``.
        AdaptationError: the adaptation is unknown, or does not suit the model.
        DataError: something named does not exist, there is no image, or the ending is unknown.
    """
    check_suffix(out)
    total = count_files(images)
    classifier = load_classifier(run, adapt, device, which)
    if strict:
        refuse_doubtful(classifier.diagnostics)
    predictor = BatchPredictor(classifier, depth_of(image_files(images)), batch_size)
    table = _Table(predictor, out, adapt, probabilities, progress, on_bad)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        busy = RunError(f"{out} is being written by another process; name another file")
        with alone(out, busy):
            return table.write(images, total)
    except OSError as error:
        raise RunError(f"cannot write {out}: {error.strerror or error}") from None


def note_of(out: Path) -> Path:
    """Returns the file that says how far an interrupted table has come; there is none otherwise."""
    return out.with_name(f"{out.name}.part.json")


class _Table:
    """One table in the making."""

    def __init__(
        self,
        predictor: BatchPredictor,
        out: Path,
        adapt: str | None,
        probabilities: bool,
        progress: Callable[[str, int, int], None],
        on_bad: OnBad,
    ) -> None:
        classifier = predictor.classifier
        self._predictor, self._out, self._probabilities = predictor, out, probabilities
        self._classifier, self._progress, self._on_bad = classifier, progress, on_bad
        self._part = out.with_name(f"{out.name}.part")
        self._note = note_of(out)
        self._columns = columns(classifier.class_names, probabilities)
        said: list[Any] = [
            classifier.weights,
            adapt,
            predictor.batch_size,
            out.suffix.lower(),
            self._columns,
        ]
        said += [classifier.threshold, predictor.bits]
        self._work = hashlib.blake2b(json.dumps(said).encode()).hexdigest()[:24]
        self._names = hashlib.blake2b(digest_size=16)

    def write(self, images: Sequence[Path | str], total: int) -> PredictedFiles:
        """Writes or continues the table beside its place, then puts it there."""
        files = image_files(images)
        done = self._known()
        if done.files and not self._same_names(files, done):
            files, done = image_files(images), Interrupted(work=self._work)
            self._names = hashlib.blake2b(digest_size=16)
        before = done.files
        with self._part.open("r+b" if before else "wb") as table:
            table.truncate(done.bytes)
            table.seek(done.bytes)
            if not before and self._out.suffix.lower() == ".csv":
                table.write(csv_text([self._columns]).encode())
            done = self._continue(table, files, done, total)
        if self._out.suffix.lower() == ".parquet":
            replace_file(self._out, lambda to: write_parquet(self._part, to, self._columns))
            self._part.unlink()
        else:
            self._part.replace(self._out)
        self._note.unlink(missing_ok=True)
        return self._result(done, before)

    def _known(self) -> Interrupted:
        """How far an earlier call for the same work has come."""
        nothing = Interrupted(work=self._work)
        if self._classifier.keeps_state or not self._part.is_file():
            return nothing
        try:
            found = Interrupted.read(self._note)
        except RunError:  # cut off by a full disk: begin anew
            return nothing
        if found is None or found.work != self._work:
            return nothing
        return found if os.path.getsize(self._part) >= found.bytes else nothing

    def _same_names(self, files: Iterator[Path], done: Interrupted) -> bool:
        """Takes the files off that are done, and says whether they are the same ones."""
        taken = 0
        for file in islice(files, done.files):
            self._called(os.fsencode(file))
            taken += 1
        return taken == done.files and self._names.hexdigest() == done.names

    def _continue(
        self, table: BinaryIO, files: Iterator[Path], done: Interrupted, total: int
    ) -> Interrupted:
        noted = time.monotonic()
        try:
            for batch, names in self._batches(files):
                table.write(self._text(batch))
                after = self._after(done, batch, total)
                done = after.model_copy(update={"bytes": table.tell(), "names": names})
                if time.monotonic() - noted > SECONDS_BETWEEN_NOTES:
                    self._keep(table, done)
                    noted = time.monotonic()
        finally:
            self._keep(table, done)
        return done

    def _batches(self, files: Iterator[Path]) -> Iterator[tuple[list[list[Prediction]], str]]:
        """Yields batches with the hash of all names up to their end."""
        ahead: list[list[bytes]] = []

        def noted() -> Iterator[Path]:
            for number, file in enumerate(files):
                if number % self._predictor.files_at_once == 0:
                    ahead.append([])
                ahead[-1].append(os.fsencode(file))
                yield file

        for batch in predict_batches(self._predictor, noted()):
            for name in ahead.pop(0):
                self._called(name)
            yield batch, self._names.hexdigest()

    def _called(self, name: bytes) -> None:
        self._names.update(name + b"\0")

    def _keep(self, table: BinaryIO, done: Interrupted) -> None:
        sync(table)
        if not self._classifier.keeps_state:
            replace_text(self._note, done.to_text())

    def _text(self, batch: Sequence[Sequence[Prediction]]) -> bytes:
        rows = self._cells(batch)
        csv_wanted = self._out.suffix.lower() == ".csv"
        return (csv_text(rows) if csv_wanted else json_lines(rows, self._columns)).encode()

    def _cells(self, batch: Sequence[Sequence[Prediction]]) -> list[list[object]]:
        classes = len(self._classifier.class_names)
        return [cells(row, classes, self._probabilities) for rows in batch for row in rows]

    def _after(
        self, done: Interrupted, batch: Sequence[Sequence[Prediction]], total: int
    ) -> Interrupted:
        """Counts a batch, and says what of it could not be used."""
        rows = [row for found in batch for row in found]
        for row in rows:
            if row.reason is not None:
                self._on_bad(f"{row.file}: {row.reason}")
        counts = {
            "files": done.files + len(batch),
            "failed": done.failed + sum(row.reason is not None for row in rows),
            "unlike": done.unlike + sum(row.unlike_training is True for row in rows),
        }
        self._progress("predicting images", counts["files"], total)
        return done.model_copy(update=counts)

    def _result(self, done: Interrupted, before: int) -> PredictedFiles:
        unlike = done.unlike if self._classifier.threshold is not None else None
        return PredictedFiles(self._out, done.files, done.failed, unlike, before, self._classifier)


# A table of predictions read back: its most doubtful rows, and what all of them come to.


MOST_SHOWN = 300
MOST_FAULTS = 100


@dataclass(frozen=True)
class PredictedRow:
    """A row of a table of predictions.

    Attributes:
        file: as in the table.
        label: the most probable class; empty where the file cannot be used.
        confidence: its probability, in [0, 1].
        unlike_training: whether the warning light is on; None without one.
        reason: why the file cannot be used; empty where it can.
    """

    file: str
    label: str
    confidence: float
    unlike_training: bool | None
    reason: str


@dataclass(frozen=True)
class Doubtful:
    """What a table comes to.

    Attributes:
        rows: the least confident rows, the most doubtful first.
        faults: the first rows that cannot be used.
        total: rows of the table.
        failed: of them, how many cannot be used.
        unlike: on how many the warning light is on; None without one.
        labels: how many rows have each label.
    """

    rows: list[PredictedRow]
    faults: list[PredictedRow]
    total: int
    failed: int
    unlike: int | None
    labels: Counter[str]


def doubtful(table: Path, most: int = MOST_SHOWN) -> Doubtful:
    """Reads a table of ``feddg predict``, in memory that does not grow with it.

    Args:
        table: the file, CSV, JSON lines or Parquet.
        most: how many doubtful rows are kept.

    Raises:
        DataError: it cannot be read.
    """
    faults: list[PredictedRow] = []
    labels: Counter[str] = Counter()
    total = failed = unlike = 0
    lit = False

    def usable() -> Iterator[PredictedRow]:
        nonlocal total, failed, unlike, lit
        for row in _rows(table):
            total += 1
            if row.reason:
                failed += 1
                if len(faults) < MOST_FAULTS:
                    faults.append(row)
                continue
            labels[row.label] += 1
            unlike += row.unlike_training is True
            lit = lit or row.unlike_training is not None
            yield row

    try:
        rows = heapq.nsmallest(most, usable(), key=lambda row: row.confidence)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{table} is no table of `feddg predict`: {why(error)}") from None
    return Doubtful(rows, faults, total, failed, unlike if lit else None, labels)


def _rows(table: Path) -> Iterator[PredictedRow]:
    check_suffix(table)
    for row in _READERS[table.suffix.lower()](table):
        unlike = row["unlike_training"]
        yield PredictedRow(
            row["file"],
            row["label"] or "",
            float(row["confidence"] or 0),
            None if not unlike else unlike == "yes",
            row["reason"] or "",
        )


def _read_csv(table: Path) -> Iterator[dict[str, Any]]:
    with table.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            yield {name: from_cell(cell or "") for name, cell in row.items()}


def _read_lines(table: Path) -> Iterator[dict[str, Any]]:
    with table.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def _read_parquet(table: Path) -> Iterator[dict[str, Any]]:
    wanted = ["file", "label", "confidence", "unlike_training", "reason"]
    for batch in parquet().parquet.ParquetFile(table).iter_batches(columns=wanted):
        yield from batch.to_pylist()


_READERS = {".csv": _read_csv, ".jsonl": _read_lines, ".parquet": _read_parquet}
