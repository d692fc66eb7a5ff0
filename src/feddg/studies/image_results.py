"""What a run's model makes of every image that measures it: a Parquet file, written and read."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy

from feddg.data.fingerprint import ImagesFile, file_of
from feddg.errors import FeddgError, RunError
from feddg.runs.execute import is_complete
from feddg.runs.model import load_trained
from feddg.runs.prepare import Progress, build_evaluation, build_worker, cache_folder, load_images
from feddg.runs.provenance import IMAGES, ImagesNow, check_images
from feddg.storage import is_file, replace_file, why
from feddg.studies.prediction_rows import parquet

FILE = "predictions.parquet"
_TEXTS = ("file", "content", "split", "domain", "label", "predicted")
_ABOUT = b"feddg"
_FORMAT = 1


@dataclass(frozen=True, eq=False)
class ImageResults:
    """What one model made of images, column by column.

    Attributes:
        folder: the run's folder.
        which: the model by its selection rule.
        round: the round it is from.
        rendered: a hash of all images, where they do not come from files.
        columns: ``file``, ``content`` (a hash; empty for rendered images), ``split``, ``domain``,
            ``label`` and ``predicted``: ``(n,)`` texts.
    """

    folder: Path
    which: str
    round: int
    rendered: str
    columns: Mapping[str, numpy.ndarray]

    def of_split(self, split: str) -> "ImageResults":
        """Returns the rows of one split, ordered by file."""
        rows = numpy.flatnonzero(self.columns["split"] == split)
        rows = rows[numpy.argsort(self.columns["file"][rows], kind="stable")]
        own = {name: column[rows] for name, column in self.columns.items()}
        return ImageResults(self.folder, self.which, self.round, self.rendered, own)

    def __len__(self) -> int:
        return len(self.columns["file"])


def results_file(folder: Path, which: str | None = None) -> Path:
    """Returns where a run's results by image are: of the model it serves, or of another."""
    return folder / (FILE if which is None else f"predictions-{which}.parquet")


def write_image_results(
    folder: Path | str,
    *,
    which: str | None = None,
    batch_size: int | None = None,
    cache: Path | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Path:
    """Writes a row for every image of every split but training: who it is, and what was predicted.

    Columns: ``file`` (relative to the images' folder), ``content`` (a hash of the file), ``split``,
    ``domain``, ``label``, ``predicted``, and ``probability: CLASS`` of every class. The file is for
    its owner alone (0600): names of files and labels may be as private as the images.

    Args:
        folder: the run's, with at least one completed round.
        which: the model by a selection rule, as in :func:`feddg.load_model`; by default what the
            run serves.
        batch_size: images per batch; the experiment's by default.
        cache: folder of decoded pixels; the user's cache by default.
        progress: is told how decoding goes on.

    Returns:
        The file.

    Raises:
        RunError: the folder holds no model, or its images are not those it was begun with.
        DataError: PyArrow is not installed.
    """
    arrow, path = parquet("leave out --predictions"), Path(folder)
    trained = load_trained(path, which=which)
    kept = cache or cache_folder()
    check_images(path, lambda: ImagesNow(kept)(trained.experiment))
    images = load_images(trained.experiment, kept, progress)
    worker = build_worker(trained.experiment, trained.network, kept)
    evaluation = build_evaluation(trained.experiment, images, worker)
    if batch_size is not None:
        evaluation = replace(evaluation, batch_size=batch_size)
    contents = ImagesFile.read(path / IMAGES) or images.contents
    about = {
        "format": _FORMAT,
        "which": trained.which,
        "round": trained.round,
        "rendered": contents.rendered if contents is not None else "",
    }
    names = trained.class_names
    schema = _schema(arrow, names, about)
    hashes = {} if contents is None else contents.contents()

    def write(aside: Path) -> None:
        predictor = trained.predictor()
        with arrow.parquet.ParquetWriter(aside, schema) as writer:
            for split, domain, rows in evaluation.parts():
                logits = evaluation.predict(predictor, rows)
                shares = logits.double().softmax(1).float().numpy()
                files = [evaluation.paths[row] for row in rows.tolist()]
                known = (hashes.get(file_of(file)) for file in files)
                columns: list[Any] = [
                    files,
                    ["" if found is None else found[1] for found in known],
                    [split] * len(rows),
                    [evaluation.domain_names[domain]] * len(rows),
                    [names[label] for label in evaluation.labels[rows].tolist()],
                    [names[label] for label in logits.argmax(1).tolist()],
                    *shares.T,
                ]
                writer.write_table(
                    arrow.table(
                        [arrow.array(c, f.type) for c, f in zip(columns, schema)], schema=schema
                    )
                )

    out = results_file(path, which)
    try:
        replace_file(out, write)
    except OSError as error:
        raise RunError(f"cannot write {out}: {why(error)}") from None
    return out


def write_missing_results(folders: Iterable[Path], *, cache: Path | None = None) -> Iterator[str]:
    """Writes the results by image of complete runs that have none; yields why one could not be.

    Args:
        folders: the runs'.
        cache: folder of decoded pixels; the user's cache by default.
    """
    for folder in dict.fromkeys(folders):
        if not is_complete(folder) or is_file(results_file(folder)):
            continue
        try:
            write_image_results(folder, cache=cache)
        except FeddgError as error:
            yield f"no results by image: {error}"


def _schema(arrow: Any, class_names: tuple[str, ...], about: Mapping[str, Any]) -> Any:
    texts = [(name, arrow.string()) for name in _TEXTS]
    shares = [(f"probability: {name}", arrow.float32()) for name in class_names]
    return arrow.schema([*texts, *shares], metadata={_ABOUT: json.dumps(about).encode()})


def read_image_results(folder: Path | str, which: str | None = None) -> ImageResults:
    """Reads what :func:`write_image_results` wrote.

    Args:
        folder: the run's.
        which: see :func:`write_image_results`.

    Raises:
        RunError: there is no such file, or it is damaged or none of ours.
        DataError: PyArrow is not installed.
    """
    arrow, path = parquet("compare runs by their tables"), Path(folder)
    file = results_file(path, which)
    if not is_file(file):
        also = "" if which is None else f" --which {which}"
        raise RunError(
            f"{path} holds no results by image; write them: feddg evaluate {path} --predictions"
            f"{also}"
        )
    try:
        table = arrow.parquet.read_table(file, columns=list(_TEXTS), partitioning=None)
        about = json.loads((table.schema.metadata or {})[_ABOUT])
        columns = {name: _texts(table.column(name)) for name in _TEXTS}
        return ImageResults(
            path, str(about["which"]), int(about["round"]), str(about["rendered"]), columns
        )
    except (OSError, arrow.ArrowException, KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{file} is damaged or no results by image ({type(error).__name__}); write it again: "
            f"feddg evaluate {path} --predictions"
        ) from None


def _texts(column: Any) -> numpy.ndarray:
    values = column.to_pylist()
    if any(not isinstance(value, str) for value in values):
        raise ValueError("a text is missing")
    return numpy.array(values, dtype=str)
