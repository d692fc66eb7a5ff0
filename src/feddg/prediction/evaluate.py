"""Evaluates a finished run's model again: with adaptations, and by image."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy

from feddg.data.fingerprint import ImagesFile, file_of
from feddg.diagnostics import Diagnostic, silent, warning
from feddg.errors import AdaptationError, ExperimentError, FeddgError, RunError, need, schema_faults
from feddg.evaluation.accuracy import NOT_FINITE, Evaluation, Outputs, Score
from feddg.federation.federation import build_worker
from feddg.prediction.adaptation import ADAPTATIONS, ClientEnsemble, Parts
from feddg.prediction.model import Trained, load_trained
from feddg.readers import with_page
from feddg.records import AdaptationRow, Details
from feddg.runs.details import write_details
from feddg.runs.execute import is_complete
from feddg.runs.folder import RunFolder
from feddg.runs.prepare import Images, build_evaluation, cache_folder, load_images
from feddg.runs.provenance import IMAGES, check_images
from feddg.runs.reading import ADAPTED, OWN, read_adapted, read_run, require_run
from feddg.settings import OF_DECISION, EvaluateSettings
from feddg.storage import file_faults, is_file, replace_file

FILE = "predictions.parquet"
_TEXTS = ("file", "content", "split", "domain", "label", "predicted")


@dataclass(frozen=True)
class Adaptations:
    """The result of :func:`evaluate_run`.

    Attributes:
        scores: scores by adaptation, in the requested order.
        refused: why an adaptation does not suit the model, by name.
    """

    scores: list[AdaptationRow]
    refused: dict[str, str]


def evaluate_run(
    folder: Path | str,
    adaptations: Sequence[str] | None = None,
    *,
    batch_size: int = 64,
    personal: bool = False,
    which: str | None = None,
    device: str | None = None,
    cache: Path | None = None,
) -> Adaptations:
    """Evaluates a run's model on every split and domain with test-time adaptations.

    They replace those in the folder of the same adaptation, round and batch size.

    Args:
        folder: the run's folder, with at least one completed round.
        adaptations: see :func:`feddg.prediction.adaptation.adapt`; none for all by name.
        batch_size: images per batch; it matters for adaptations that use a batch or a stream.
        personal: whether to evaluate every domain also with the statistics of its own client.
        which: the selection rule of the model, as in :func:`feddg.load_model`; by default the run's
            own.
        device: ``cpu``, ``cuda`` or ``auto``; the run's by default.
        cache: folder of decoded pixels; the user's cache by default.

    Raises:
        AdaptationError: an adaptation asked for by name is unknown or does not suit the model, or
            ``personal`` and no client keeps normalisation of its own.
        RunError: the folder has no model, or none by that rule, or the images have changed since
            the run.
    """
    path, trained, cache = _opened(folder, which, device, cache)
    if personal:
        trained.predictor(ClientEnsemble.name)  # refuses clients that keep no normalisation
    asked: list[str] = []
    refused: dict[str, str] = {}
    for spelling in dict.fromkeys(ADAPTATIONS if adaptations is None else adaptations):
        try:
            trained.predictor(spelling)
            asked.append(spelling)
        except AdaptationError as error:
            if adaptations is not None:
                raise
            refused[spelling] = str(error)
    evaluation, _ = _evaluation(path, trained, batch_size, cache)
    measured: list[AdaptationRow] = []
    for name in [*asked, *([OWN] if personal else [])]:
        scores: Iterable[tuple[int | None, Score]] = (
            _personal_scores(path, trained, evaluation)
            if name == OWN
            else ((None, score) for score in evaluation.scores(trained.predictor(name)))
        )
        for client, score in scores:
            if not math.isfinite(score.loss):
                raise RunError(NOT_FINITE.format(f"images of {score.domain}"))
            row = AdaptationRow(
                adaptation=name,
                round=trained.round,
                which=trained.which,
                batch_size=batch_size,
                split=score.split,
                domain=score.domain,
                accuracy=score.accuracy,
                examples=score.examples,
                client=client,
            )
            measured.append(row)
    new = {row.key for row in measured}
    others = [row for row in read_adapted(path) if row.key not in new]
    with RunFolder(path) as open_folder:
        open_folder.replace_rows(ADAPTED, [*others, *measured])
    return Adaptations(measured, refused)


def decide_run(
    folder: Path | str,
    decision: str | None = None,
    *,
    specificity: float | None = None,
    sensitivity: float | None = None,
    prevalence: float | None = None,
    which: str | None = None,
    batch_size: int | None = None,
    device: str | None = None,
    cache: Path | None = None,
) -> Details:
    """Decides about one class with a run's model: a threshold of in-domain validation everywhere.

    The result is kept in the run's ``details.json``, in place of an earlier one.

    Args:
        folder: the run's folder, with at least one completed round.
        decision: the class; by default the experiment's.
        specificity: what the threshold must reach on in-domain validation, in (0, 1); by default
            the experiment's value for this class, else 0.95.
        sensitivity: the same for sensitivity, in place of specificity.
        prevalence: share of the class where the model will be used, in (0, 1); by default the
            experiment's value for this class, else the class's share of the images.
        which: the selection rule of the model, as in :func:`feddg.load_model`.
        batch_size: images per batch; the experiment's by default.
        device: ``cpu``, ``cuda`` or ``auto``; the run's by default.
        cache: folder of decoded pixels; the user's cache by default.

    Raises:
        ExperimentError: there is no such class, none is named, or no in-domain validation; or
            ``specificity`` and ``sensitivity`` are both given.
        RunError: the folder has no model, or the images have changed since the run.
    """
    path, trained, cache = _opened(folder, which, device, cache)
    own = trained.experiment.evaluate
    values = (decision or own.decision, specificity, sensitivity, prevalence)
    given = {name: v for name, v in zip(OF_DECISION, values) if v is not None}
    if "decision" not in given:
        raise ExperimentError(f"{folder} has no decision: name a class with --decision CLASS")
    if given["decision"] == own.decision:
        target = "specificity" if own.sensitivity is None else "sensitivity"
        kept = {"prevalence"} if specificity or sensitivity else {"prevalence", target}
        given = own.model_dump(include=kept) | given
    with schema_faults(ExperimentError, "evaluate: ", EvaluateSettings.model_fields):
        settings = EvaluateSettings(**given)
    settings = own.model_copy(update=settings.model_dump(include={*OF_DECISION}))
    asked = trained.experiment.model_copy(update={"evaluate": settings})
    trained = replace(trained, experiment=asked)
    evaluation, _ = _evaluation(path, trained, batch_size, cache)
    before, outputs = read_run(path).details, list[Outputs]()
    replace(evaluation.in_float32(), decision=None).scores(trained.predictor(), outputs)
    with RunFolder(path) as open_folder:
        write_details(open_folder, evaluation, outputs, trained.which, trained.round)
        if (details := read_run(path).details) != before:
            open_folder.rename_card()
    return details


evaluate, decide = with_page(evaluate_run), with_page(decide_run)
"""The same, and the run's page is written anew."""


def _opened(
    folder: Path | str, which: str | None, device: str | None, cache: Path | None
) -> tuple[Path, Trained, Path]:
    """Returns a run's folder and model, with images as they were, and the folder of the cache."""
    path, cache = Path(folder), cache_folder(cache)
    require_run(path)
    trained = load_trained(path, which=which)
    if device is not None:
        own = trained.experiment.model_copy(update={"device": device})
        trained = replace(trained, experiment=own)
    check_images(path, trained.experiment, cache)
    return path, trained, cache


def _evaluation(
    path: Path, trained: Trained, batch_size: int | None, cache: Path
) -> tuple[Evaluation, Images]:
    """Returns the evaluation of a model, and its images."""
    images = load_images(trained.experiment, cache, silent)
    worker = build_worker(trained.network, trained.experiment)
    forgotten = read_run(path).forgotten
    evaluation = build_evaluation(trained.experiment, images, worker, forgotten)
    if batch_size is not None:
        evaluation = replace(evaluation, batch_size=batch_size)
    return evaluation, images


def _personal_scores(
    path: Path, trained: Trained, evaluation: Evaluation
) -> Iterator[tuple[int, Score]]:
    """Yields in-domain scores of each client's domain with the client's own statistics."""
    clients = read_run(path).clients
    assert clients is not None
    for client in clients.clients:
        part = trained.parts.clients.get(client.id)
        main = int(numpy.argmax(client.domains))
        splits = {
            name: rows[evaluation.domains[rows] == main]
            for name, rows in evaluation.splits.items()
            if name.startswith("id_")
        }
        of_client = replace(evaluation, splits={n: rows for n, rows in splits.items() if len(rows)})
        if part is None or not of_client.splits:
            continue
        parts = Parts({client.id: part}, trained.parts.seed)
        alone = ClientEnsemble(trained.predictor(), ClientEnsemble.Settings(), parts)
        for score in of_client.scores(alone):
            yield client.id, score


def results_file(folder: Path, which: str | None = None) -> Path:
    """Returns the path of a run's results by image, for its default model or another."""
    return folder / (FILE if which is None else f"predictions-{which}.parquet")


def write_image_results(
    folder: Path | str,
    *,
    which: str | None = None,
    batch_size: int | None = None,
    device: str | None = None,
    cache: Path | None = None,
) -> Path:
    """Writes a row for every image of every split except training, with its prediction.

    Columns: ``file`` (relative to the images' folder), ``content`` (a hash of the file), ``split``,
    ``domain``, ``label``, ``predicted``, and ``probability: CLASS`` of every class. Only the owner
    can read the file (0600), because file names and labels may be as private as the images.

    Args:
        folder: the run's folder, with at least one completed round.
        which: the selection rule of the model, as in :func:`feddg.load_model`; by default the run's
            own.
        batch_size: images per batch; the experiment's by default.
        device: ``cpu``, ``cuda`` or ``auto``; the run's by default.
        cache: folder of decoded pixels; the user's cache by default.

    Returns:
        The path of the file.

    Raises:
        RunError: the folder has no model, or the images have changed since the run.
        MissingPackage: PyArrow is not installed.
    """
    need("parquet", "Parquet", otherwise="leave out --predictions")
    import pyarrow
    import pyarrow.parquet

    path, trained, cache = _opened(folder, which, device, cache)
    evaluation, images = _evaluation(path, trained, batch_size, cache)
    contents = ImagesFile.read(path / IMAGES) or images.contents
    about = {
        "format": 1,
        "which": trained.which,
        "round": trained.round,
        "rendered": contents.rendered,
    }
    names = trained.class_names
    fields = [(name, pyarrow.string()) for name in _TEXTS]
    fields += [(f"probability: {name}", pyarrow.float32()) for name in names]
    schema = pyarrow.schema(fields, metadata={"feddg": json.dumps(about).encode()})
    hashes = contents.contents()

    def write(aside: Path) -> None:
        predictor = trained.predictor()
        with pyarrow.parquet.ParquetWriter(aside, schema) as writer:
            for split, domain, rows in evaluation.parts():
                logits = evaluation.predict(predictor, rows)
                if not bool(logits.isfinite().all()):
                    name = evaluation.domain_names[domain]
                    raise RunError(NOT_FINITE.format(f"images of {name}"))
                shares = logits.double().softmax(1).float().numpy()
                files = [evaluation.paths[row] for row in rows.tolist()]
                entries = (hashes.get(file_of(file)) for file in files)
                columns: list[object] = [
                    files,
                    ["" if entry is None else entry[1] for entry in entries],
                    [split] * len(rows),
                    [evaluation.domain_names[domain]] * len(rows),
                    [names[label] for label in evaluation.labels[rows].tolist()],
                    [names[label] for label in logits.argmax(1).tolist()],
                    *shares.T,
                ]
                writer.write_table(pyarrow.table(dict(zip(schema.names, columns)), schema=schema))

    out = results_file(path, which)
    with file_faults(RunError, f"cannot write {out}"):
        replace_file(out, write)
    return out


def write_missing_results(
    folders: Iterable[Path], *, cache: Path | None = None
) -> Iterator[Diagnostic]:
    """Writes missing results by image of complete runs; yields why one could not be written.

    Args:
        folders: folders of the runs.
        cache: folder of decoded pixels; the user's cache by default.
    """
    for folder in dict.fromkeys(folders):
        if not is_complete(folder) or is_file(results_file(folder)):
            continue
        try:
            write_image_results(folder, cache=cache)
        except FeddgError as error:
            yield warning("no-results-by-image", f"No results by image: {error}")
