"""Carries out an experiment: setup, rounds, evaluation, records, checkpoints."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from feddg.errors import FeddgError, in_words
from feddg.evaluation.accuracy import Evaluation, support_warning
from feddg.experiment import Experiment, load_stored
from feddg.federation.averages import served
from feddg.federation.server import Server, initial_state
from feddg.federation.transport import Ledger
from feddg.federation.validation import CHANGES, MessageChecks
from feddg.methods.base import State, has_global_model
from feddg.models.network import Network
from feddg.records import INTERPOLATED, EvaluationRow, SetupRow
from feddg.runs.alphas import write_alphas
from feddg.runs.facts import environment, give_memory_back
from feddg.runs.folder import (
    EXPERIMENT,
    FIGURES,
    SUMMARY,
    RunFolder,
)
from feddg.runs.interpolation import Interpolation
from feddg.runs.keeping import Records
from feddg.runs.kept_models import KeptModels, means_of
from feddg.runs.observer import Observer, Together
from feddg.runs.prepare import (
    cache_folder,
)
from feddg.runs.prepared import Prepare, Prepared, in_process
from feddg.runs.reading import RunRecord, read_run, require_run
from feddg.runs.round_scores import Measurer, finite_probe, predictor
from feddg.runs.same_experiment import check_identity
from feddg.runs.same_images import IMAGES, ImagesNow, check_images
from feddg.runs.spending import next_round, open_account, opened_sums
from feddg.runs.summary import summarize
from feddg.runs.unseen_figures import draw_unseen
from feddg.runs.warning_light import write_warning_light
from feddg.storage import is_file
from feddg.views import Shown

log = logging.getLogger("feddg")


@dataclass(frozen=True)
class Run(Shown):
    """An experiment carried out.

    Attributes:
        folder: everything about it on disk.
        experiment: the complete experiment.
    """

    folder: Path
    experiment: Experiment

    @property
    def record(self) -> RunRecord:
        """The run's records, read back from its folder."""
        return read_run(self.folder)

    @property
    def report(self) -> Path:
        """The HTML page."""
        return self.folder / "report.html"


def resume(
    folder: Path | str, *, observer: Observer | None = None, cache: Path | None = None
) -> Run:
    """Continues the run in ``folder`` from its last completed round.

    Raises:
        RunError: the folder holds no run, or the run of another experiment than it says, or its
            images are not those it was begun with.
    """
    path = Path(folder)
    require_run(path)
    experiment = load_stored(path / EXPERIMENT)
    check_identity(path, experiment)
    check_images(path, lambda: ImagesNow(cache or cache_folder())(experiment))
    return carry_out(path, experiment, observer=observer, cache=cache)


def carry_out(
    path: Path,
    experiment: Experiment,
    *,
    observer: Observer | None = None,
    cache: Path | None = None,
    prepare: Prepare = in_process,
    snapshots: Collection[int] = (),
    keep_unstarted: bool = False,
) -> Run:
    """Carries out an experiment in the folder ``path``, with clients wherever ``prepare`` says.

    A folder made for a run that fails before its first round is removed again, unless
    ``keep_unstarted``: a comparison's page says from it why. See :func:`feddg.api.run` for the
    other arguments and errors.
    """
    with RunFolder(path) as folder:
        folder.keep_experiment(experiment)
        if not is_complete(path):
            watching, cached = observer or Observer(), cache or cache_folder()
            try:
                _Execution(experiment, folder, watching, cached, prepare, snapshots).carry_out()
            except Exception:
                if not keep_unstarted:
                    folder.remove_unstarted()
                raise
    return Run(path, experiment)


def is_complete(folder: Path) -> bool:
    """Whether the run in ``folder`` ended with its last round."""
    return is_file(folder / SUMMARY) and read_run(folder).status == "completed"


@dataclass
class _Execution:
    """One process's work on a run."""

    experiment: Experiment
    folder: RunFolder
    observer: Observer
    cache: Path
    prepare: Prepare
    snapshots: Collection[int] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    network: Network = field(init=False)
    interpolation: Interpolation = field(init=False)
    measurer: Measurer = field(init=False)
    classes: tuple[str, ...] = ()

    def carry_out(self) -> None:
        """Runs to the end, or records why not."""
        try:
            with self.timed("total"):
                self._run()
        except KeyboardInterrupt:
            self._end("interrupted", None)
            raise
        except BaseException as error:
            kind = f"{type(error).__name__}: " if isinstance(error, FeddgError) else ""
            self._end("failed", kind + in_words(error))
            raise
        self._end("completed", None)

    def _run(self) -> None:
        experiment, folder = self.experiment, self.folder
        checkpoint = folder.load_checkpoint()
        with self.timed("prepare"):
            memories = checkpoint.memories if checkpoint else {}
            found = self.prepare(experiment, self.cache, self.observer.work, memories)
            self.network = found.worker.network
            self.classes = tuple(found.clients.classes)
            self.interpolation = Interpolation(
                experiment, found.method, self.network, found.evaluation
            )
        transport, clients = found.transport, len(found.transport.clients)
        last = checkpoint.state.round if checkpoint else -1
        layouts = folder.cut_records(last, keep_ledger=found.remote)
        state = checkpoint.state if checkpoint else self._first_state(found, clients)
        state.rounds = experiment.train.rounds
        state = state.to(found.worker.device)
        files = checkpoint.models if checkpoint else {}
        before = read_run(folder.path).metrics.evaluations
        kept = KeptModels(folder, files, before, experiment.evaluate)
        writer = Records(folder, transport, kept, self.snapshots)
        ledger = Ledger(writer.carried if found.remote else writer.entered, layouts)
        account = open_account(folder, found.guards, state.round)
        for promise in found.guards.promises:
            self.observer.promise(promise)
        checks = MessageChecks(
            found.method,
            self.network,
            clients,
            image_size=experiment.data.image_size,
            also=found.guards.sends,
            introduced=transport.introduced,
            train=experiment.train,
            style_noise=found.worker.style_noise,
        )
        server = Server(
            found.method,
            transport,
            state,
            per_round=experiment.clients.per_round,
            settings=experiment.server,
            seed=experiment.seed,
            ledger=ledger,
            checks=checks,
            guards=found.guards,
            account=account,
            opened=opened_sums(folder),
            means=means_of(experiment, found.method, self.network),
            probe=finite_probe(experiment, found.method, found.worker),
            on_client=self.observer.client,
            on_setup=lambda done, total: self.observer.work("setup", done, total),
        )
        self._listen(state.round)
        self.measurer = Measurer(
            experiment,
            self.network,
            folder,
            kept,
            found.evaluation,
            found.elsewhere,
            self.interpolation,
            self.observer,
        )
        if checkpoint is None:
            self._describe(found)
            self._setup(server, writer, found)
        self._rounds(server, writer, found.evaluation)

    def _first_state(self, found: Prepared, clients: int) -> State:
        return initial_state(
            found.method,
            self.network,
            clients,
            rounds=self.experiment.train.rounds,
            settings=self.experiment.server,
            guards=found.guards,
        )

    def _listen(self, round: int) -> None:
        from feddg.runs.tracking import trackers

        self.observer = Together([self.observer, *trackers(self.folder.path)])
        self.observer.start(self.experiment, round + 1)

    def _describe(self, found: Prepared) -> None:
        self.folder.write_json("environment.json", environment(self.experiment, found.worker))
        self.folder.write_json("clients.json", found.clients)
        if found.contents is not None:
            self.folder.write_json(IMAGES, found.contents)
        if found.evaluation is not None:
            thin = support_warning(found.evaluation, found.clients.classes)
            if thin is not None:
                log.warning("%s", thin)

    def _setup(self, server: Server, writer: "Records", found: Prepared) -> None:
        with self.timed("setup"):
            descriptions = server.setup()
        give_memory_back()
        if descriptions:
            self.folder.write_tensors("setup.safetensors", descriptions)
        row = SetupRow(seconds=self.seconds["setup"], groups=server.groups)
        measured = self.measurer.rows(server)
        self.interpolation.note(server.state, writer.models)
        writer.keep(server.state, [row, *measured])
        self._draw(lambda folder: found.draw(folder, server.state))

    def _rounds(self, server: Server, writer: "Records", evaluation: Evaluation | None) -> None:
        settings, rounds = self.experiment.evaluate, self.experiment.train.rounds
        while (row := next_round(server)) is not None:
            self.observer.round(row)
            if row.round == self.experiment.train.head_rounds:
                # The whole network changes by other lengths than its heads did.
                server.state.extras.pop(CHANGES, None)
            found: Sequence[EvaluationRow] = []
            started = time.perf_counter()
            if server.is_last or settings.after(row.round, rounds):
                found = self.measurer.rows(server)
            row = row.took(evaluate=time.perf_counter() - started)
            self.interpolation.note(server.state, writer.models)
            writer.keep(server.state, [row, *found])
        if evaluation is not None:
            weights = served(server.state, self.experiment.server.serve)
            if INTERPOLATED in writer.models.files:
                weights = writer.models.read(INTERPOLATED)
            model = predictor(server.method, self.network, weights)
            write_alphas(self.folder, server.method, self.network, evaluation)
            write_warning_light(self.folder, model, evaluation)
            if self.experiment.evaluate.pictures and has_global_model(server.method, self.network):
                self._draw(
                    lambda folder: draw_unseen(
                        folder, evaluation, model, self.classes, self.experiment.seed
                    )
                )

    def _draw(self, draw: Callable[[Path], None]) -> None:
        """Draws figures of the report."""
        try:
            draw(self.folder.path / FIGURES)
        except OSError as error:
            raise self.folder.unwritable(self.folder.path / FIGURES, error) from None

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the time its block takes to the run's seconds under ``name``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def _end(self, status: str, error: str | None) -> None:
        self.observer.end(status)
        record = read_run(self.folder.path)
        self.folder.write_json(SUMMARY, summarize(record, status, error, self.seconds))
