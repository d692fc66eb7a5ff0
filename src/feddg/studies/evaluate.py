"""A finished run's model, evaluated again: under test-time adaptations, client by client.

What is measured is written to ``adaptation.jsonl`` in the run's folder before anything is shown.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy

from feddg.errors import AdaptationError
from feddg.evaluation.accuracy import Evaluation, Score
from feddg.evaluation.adaptation import ADAPTATIONS, ClientEnsemble, NoSettings, Parts, read
from feddg.records import AdaptationRow
from feddg.runs.figures import write_alphas
from feddg.runs.folder import RunFolder
from feddg.runs.model import Trained, load_trained
from feddg.runs.prepare import Progress, build_evaluation, build_worker, cache_folder, load_images
from feddg.runs.provenance import ImagesNow, check_images
from feddg.runs.reading import ADAPTED, OWN, read_adapted, read_run


@dataclass(frozen=True)
class Adaptations:
    """The result of :func:`evaluate_run`.

    Attributes:
        scores: in the order in which they were asked for.
        refused: reasons of the adaptations that do not suit the model, by name.
    """

    scores: list[AdaptationRow]
    refused: dict[str, str]


def evaluate_run(
    folder: Path | str,
    adaptations: Sequence[str] | None = None,
    *,
    batch_size: int = 64,
    personal: bool = False,
    alphas: bool = False,
    which: str | None = None,
    cache: Path | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Adaptations:
    """Measures a run's model on every split and domain under test-time adaptations.

    What its folder already holds about the same round and batch size is not measured again.

    Args:
        folder: the run's, with at least one completed round.
        adaptations: see :func:`feddg.evaluation.adaptation.adapt`; none for all by name.
        batch_size: images per batch; it matters to those that need a batch or a stream.
        personal: whether to measure each client's domain under the client's own statistics too.
        alphas: whether to write how much each layer adapts to each image, ``alphas.csv``.
        which: the model by a selection rule, as in :func:`feddg.load_model`; by default what the
            run serves.
        cache: folder of decoded pixels; the user's cache by default.
        progress: is told how decoding goes on.

    Raises:
        AdaptationError: an adaptation asked for by name is unknown or does not suit the model.
        RunError: the folder holds no model, or none by that rule, or its images are not those it
            was begun with.
    """
    path = Path(folder)
    wanted = list(ADAPTATIONS if adaptations is None else adaptations)
    for spelling in wanted:
        read(spelling)
    trained = load_trained(path, which=which)
    check_images(path, lambda: ImagesNow(cache or cache_folder())(trained.experiment))
    about = (trained.round, batch_size, trained.which)
    found, refused = _known(path, about), {}
    measure = _Measurement(path, trained, batch_size, cache, progress)
    for spelling in wanted:
        if spelling in found:
            continue
        try:
            found[spelling] = list(measure.adapted(spelling))
        except AdaptationError as error:
            if adaptations is not None:
                raise
            refused[spelling] = str(error)
    if personal and OWN not in found:
        found[OWN] = list(measure.personal())
    new = {(name, *about) for name in found}
    kept = [row for row in read_adapted(path) if row.key not in new]
    scores = [score for rows in found.values() for score in rows]
    with RunFolder(path) as open_folder:
        open_folder.replace_rows(ADAPTED, (*kept, *scores))
        if alphas:
            write_alphas(open_folder, trained.method, trained.network, measure.evaluation)
    asked = [*wanted, *([OWN] if personal else [])]
    return Adaptations([score for name in asked for score in found.get(name, [])], refused)


def _known(path: Path, about: tuple[int, int, str]) -> dict[str, list[AdaptationRow]]:
    known: dict[str, list[AdaptationRow]] = {}
    for row in read_adapted(path):
        if row.key == (row.adaptation, *about):
            known.setdefault(row.adaptation, []).append(row)
    return known


class _Measurement:
    """Evaluates one run's model; its images are loaded when first needed."""

    def __init__(
        self,
        path: Path,
        trained: Trained,
        batch_size: int,
        cache: Path | None,
        progress: Callable[[str, int, int], None],
    ) -> None:
        self._path, self._trained = path, trained
        self._batch_size, self._cache, self._progress = batch_size, cache, progress
        self._evaluation: Evaluation | None = None

    @property
    def evaluation(self) -> Evaluation:
        """What the model is measured on."""
        if self._evaluation is None:
            cache, experiment = self._cache or cache_folder(), self._trained.experiment
            images = load_images(experiment, cache, self._progress)
            worker = build_worker(experiment, self._trained.network, cache)
            evaluation = build_evaluation(experiment, images, worker)
            self._evaluation = replace(evaluation, batch_size=self._batch_size)
        return self._evaluation

    def adapted(self, spelling: str) -> Iterator[AdaptationRow]:
        """Scores of every split and domain under one adaptation."""
        self._trained.predictor(spelling)  # refuses before any image is decoded
        evaluation = self.evaluation
        predictor = self._trained.predictor(spelling)  # the device may have changed
        for score in evaluation.scores(predictor):
            yield self._row(spelling, score)

    def personal(self) -> Iterator[AdaptationRow]:
        """In-domain scores of each client's domains under its own statistics."""
        trained, evaluation = self._trained, self.evaluation
        clients = read_run(self._path).clients
        assert clients is not None
        for client in clients.clients:
            part = trained.parts.clients.get(client.id)
            main = int(numpy.argmax(client.domains))
            splits = {
                name: rows[evaluation.domains[rows] == main]
                for name, rows in evaluation.splits.items()
                if name.startswith("id_")
            }
            own = replace(evaluation, splits={n: rows for n, rows in splits.items() if len(rows)})
            if part is None or not own.splits:
                continue
            parts = Parts({client.id: part}, trained.parts.seed)
            for score in own.scores(ClientEnsemble(trained.network, NoSettings(), parts)):
                yield self._row(OWN, score, client.id)

    def _row(self, name: str, score: Score, client: int | None = None) -> AdaptationRow:
        return AdaptationRow(
            adaptation=name,
            round=self._trained.round,
            which=self._trained.which,
            batch_size=self._batch_size,
            split=score.split,
            domain=score.domain,
            accuracy=score.accuracy,
            examples=score.examples,
            client=client,
        )
