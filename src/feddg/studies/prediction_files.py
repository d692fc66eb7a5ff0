"""Predicts any number of image files into one table, and goes on where it was interrupted."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from feddg.data.inspection import depth_of
from feddg.errors import RunError
from feddg.records import JsonFile
from feddg.runs.findings import refuse_doubtful
from feddg.storage import alone, replace_file, replace_text, sync
from feddg.studies.classifier import ImageClassifier, load_classifier
from feddg.studies.image_files import count_files, image_files
from feddg.studies.prediction import (
    BATCH_SIZE,
    BatchPredictor,
    Prediction,
    predict_batches,
)
from feddg.studies.prediction_rows import (
    cells,
    check_suffix,
    columns,
    csv_text,
    json_lines,
    write_parquet,
)

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

        strict: whether to refuse a model that is no better than a constant one.

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
        refuse_doubtful(classifier.cautions)
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
