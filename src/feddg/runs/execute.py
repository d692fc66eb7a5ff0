"""Carries out an experiment: setup, rounds, evaluation, records, checkpoints."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from feddg.clients.threads import threads
from feddg.clients.worker import Worker
from feddg.data.fingerprint import ImagesFile
from feddg.errors import BudgetSpent, RunError
from feddg.evaluation.accuracy import Evaluation, Score, mean_score
from feddg.evaluation.support import support_warning
from feddg.experiment import Experiment, load_stored
from feddg.federation.checks import CHANGES, MessageChecks
from feddg.federation.inprocess import InProcess
from feddg.federation.ledger import Ledger
from feddg.federation.served import MEANS, rounds_in, served
from feddg.federation.server import Server, initial_state
from feddg.federation.transport import Transport
from feddg.federation.turns import load_weights
from feddg.files import is_file
from feddg.guards.account import Account
from feddg.guards.chain import NO_GUARDS, Guards
from feddg.messages import Weights
from feddg.methods.base import Method, State, has_global_model, local_names
from feddg.models.network import Network
from feddg.randomness import stream
from feddg.rows import (
    INTERPOLATED,
    LAST,
    PRIVACY_ROWS,
    ClientsTable,
    EvaluationRow,
    LedgerRow,
    MetricsRow,
    RoundRow,
    SetupRow,
)
from feddg.runs.alphas import write_alphas
from feddg.runs.facts import clients_table, environment
from feddg.runs.figures import draw_figures
from feddg.runs.folder import (
    EXPERIMENT,
    FIGURES,
    LEDGER,
    METRICS,
    PRIVACY,
    SNAPSHOTS,
    SUMMARY,
    RunFolder,
    check_identity,
)
from feddg.runs.interpolation import Interpolation
from feddg.runs.kept_models import KeptModels, means_of
from feddg.runs.observer import Observer, Together
from feddg.runs.prepare import (
    Progress,
    build,
    build_evaluation,
    build_workers,
    cache_folder,
    guards_for,
    load_images,
)
from feddg.runs.reading import RunRecord, read_run
from feddg.runs.same_images import IMAGES, ImagesNow, check_images
from feddg.runs.summary import summarize
from feddg.runs.warning_light import write_warning_light

log = logging.getLogger("feddg")
Elsewhere = Callable[[Server, Weights, Sequence[Score]], Sequence[Score]]
"""Measures weights of the server's round where the images are; is told the scores so far."""


@dataclass(frozen=True)
class Prepared:
    """All that a run works with; where the clients live is the transport's affair.

    Attributes:
        method: what is run.
        worker: the network, on its device.
        transport: what carries the messages.
        evaluation: what the global model is measured on here, if anything.
        clients: who holds what, for ``clients.json``.
        elsewhere: measures the global model where the images are.
        draw: writes the report's figures once the method has agreed on something.
        guards: what happens to updates on their way.
        remote: whether clients are elsewhere, so that what was sent is sent, whatever came of it.
        contents: which images are trained and tested on, where they are here.
    """

    method: Method
    worker: Worker
    transport: Transport
    evaluation: Evaluation | None
    clients: ClientsTable
    elsewhere: Elsewhere = lambda server, weights, scores: ()
    draw: Callable[[Path, State], None] = lambda folder, state: None
    guards: Guards = NO_GUARDS
    remote: bool = False
    contents: ImagesFile | None = None


Prepare = Callable[[Experiment, Path, Progress, dict[int, Weights]], Prepared]
"""Prepares a run from the experiment, the cache folder and the memories of a checkpoint."""


def in_process(
    experiment: Experiment, cache: Path, progress: Progress, memories: dict[int, Weights]
) -> Prepared:
    """Prepares a run whose clients are trained in this process."""
    images = load_images(experiment, cache, progress)
    method, network = build(experiment, len(images.table.class_names))
    guards = guards_for(experiment, method, network)
    workers = build_workers(images.trained_by(experiment), network, cache)
    worker = workers[0]

    def draw(folder: Path, state: State) -> None:
        draw_figures(folder, images, method, state, experiment.seed)

    return Prepared(
        method,
        worker,
        InProcess(method, workers, len(images.partition), images.examples, memories, guards),
        build_evaluation(experiment, images, worker),
        clients_table(images),
        draw=draw if experiment.evaluate.pictures else lambda folder, state: None,
        guards=guards,
        contents=images.contents,
    )


@dataclass(frozen=True)
class Run:
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
    if not is_file(path / EXPERIMENT):
        raise RunError(f"{path} holds no run: there is no {EXPERIMENT} in it")
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
    elsewhere: Elsewhere = field(init=False)
    interpolation: Interpolation = field(init=False)

    def carry_out(self) -> None:
        """Runs to the end, or records why not."""
        try:
            with self.timed("total"):
                self._run()
        except KeyboardInterrupt:
            self._end("interrupted", None)
            raise
        except BaseException as error:
            self._end("failed", f"{type(error).__name__}: {error}")
            raise
        self._end("completed", None)

    def _run(self) -> None:
        experiment, folder = self.experiment, self.folder
        checkpoint = folder.load_checkpoint()
        with self.timed("prepare"):
            memories = checkpoint.memories if checkpoint else {}
            found = self.prepare(experiment, self.cache, self.observer.work, memories)
            self.network, self.elsewhere = found.worker.network, found.elsewhere
            self.interpolation = Interpolation(
                experiment, found.method, self.network, found.evaluation
            )
        transport, clients = found.transport, len(found.transport.clients)
        last = checkpoint.state.round if checkpoint else -1
        layouts = folder.cut_records(last, keep_ledger=found.remote)
        state = checkpoint.state if checkpoint else self._first_state(found, clients)
        state.rounds = experiment.train.rounds
        state = on_device(state, found.worker.device)
        files = checkpoint.models if checkpoint else {}
        before = read_run(folder.path).metrics.evaluations
        kept = KeptModels(folder, files, before, experiment.evaluate.select_by)
        writer = Records(folder, transport, kept, self.snapshots)
        ledger = Ledger(writer.carried if found.remote else writer.entered, layouts)
        account = self._account(found.guards, state.round)
        checks = MessageChecks(
            found.method,
            self.network,
            clients,
            image_size=experiment.data.image_size,
            also=found.guards.sends,
            introduced=transport.introduced,
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
            means=means_of(experiment, found.method, self.network),
            probe=self._probe(found),
            on_client=self.observer.client,
            on_setup=lambda done, total: self.observer.work("setup", done, total),
        )
        self._listen(state.round)
        if checkpoint is None:
            self._describe(found)
            self._setup(server, writer, found)
        self._rounds(server, writer, found.evaluation)

    def _account(self, guards: Guards, rounds: int) -> Account:
        """Returns what was spent so far, and says what the guards promise.

        Raises:
            RunError: what was spent on a round is not known any more.
        """
        folder = self.folder
        rows = PRIVACY_ROWS.read(folder.path / PRIVACY)
        if rows:
            folder.replace_rows(PRIVACY, rows)  # without a line that was cut off
        account = Account(rows, lambda row: folder.append(PRIVACY, [row]))
        missing = set(range(1, rounds + 1)) - account.rounds["update"]
        if guards.noised and missing:
            raise RunError(
                f"{folder.path / PRIVACY} lacks round {min(missing)}: what was spent on it is not "
                "known, so nothing more can be promised; put the file back, or begin a new run"
            )
        for promise in guards.promises:
            self.observer.promise(promise)
        return account

    def _first_state(self, found: Prepared, clients: int) -> State:
        return initial_state(
            found.method,
            self.network,
            clients,
            rounds=self.experiment.train.rounds,
            settings=self.experiment.server,
            guards=found.guards,
        )

    def _probe(self, found: Prepared) -> Callable[[Weights], str | None]:
        """Returns what tries weights on images of noise before they become the global model."""
        size, worker = self.experiment.data.image_size, found.worker
        noise = torch.rand(2, 3, size, size, generator=stream(self.experiment.seed, "probe"))
        images = noise.to(worker.device).contiguous(memory_format=torch.channels_last)

        def probe(weights: Weights) -> str | None:
            load_weights(self.network, weights)
            model = found.method.predictor(self.network).eval()
            with torch.inference_mode(), threads(worker.threads), worker.autocast():
                finite = bool(torch.isfinite(model(images)).all())
            return None if finite else "the fused model's predictions are not finite"

        return probe

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
        if descriptions:
            self.folder.write_tensors("setup.safetensors", descriptions)
        row = SetupRow(seconds=self.seconds["setup"], groups=server.groups)
        measured = self._evaluate(server, found.evaluation, writer)
        self.interpolation.note(server.state, writer.models)
        writer.keep(server.state, [row, *measured])
        try:
            found.draw(self.folder.path / FIGURES, server.state)
        except OSError as error:
            raise self.folder.unwritable(self.folder.path / FIGURES, error) from None

    def _rounds(self, server: Server, writer: "Records", evaluation: Evaluation | None) -> None:
        every = self.experiment.evaluate.every
        while (row := self._next_round(server)) is not None:
            self.observer.round(row)
            if row.round == self.experiment.train.head_rounds:
                # The whole network changes by other lengths than its heads did.
                server.state.extras.pop(CHANGES, None)
            found: Sequence[EvaluationRow] = []
            started = time.perf_counter()
            if self._is_last(server) or row.round % every == 0:
                found = self._evaluate(server, evaluation, writer)
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

    def _next_round(self, server: Server) -> RoundRow | None:
        """Runs a round; None after the last, and where another would cost more than may be spent.

        Of the clients whose round would have been the next nothing is released.
        """
        if server.state.round == self.experiment.train.rounds:
            return None
        try:
            row = server.round() if server.affordable else None
        except BudgetSpent as error:
            log.warning("%s", error)
            row = None
        if row is None:
            log.warning(
                "the run ends after round %d of %d: another one would cost more than "
                "privacy.epsilon %s",
                *(server.state.round, self.experiment.train.rounds),
                self.experiment.privacy.epsilon,
            )
        return row

    def _is_last(self, server: Server) -> bool:
        rounds = self.experiment.train.rounds
        return server.state.round == rounds or not server.affordable

    def _evaluate(
        self, server: Server, evaluation: Evaluation | None, writer: "Records"
    ) -> list[EvaluationRow]:
        """Measures the weights of the server's round, and what is to be measured beside them."""
        state = server.state
        last = self._is_last(server)
        rows: list[EvaluationRow] = []
        for name, weights in self._measured(server, writer, last).items():
            scores: list[Score] = []
            if evaluation is not None:
                scores += measured(evaluation, server, self.network, weights)
            scores += self.elsewhere(server, weights, scores)
            if scores and name == LAST:
                self.observer.scores(state.round, scores)
            rows += [score.row(state.round, with_confusion=last, weights=name) for score in scores]
        return rows

    def _measured(self, server: Server, writer: "Records", last: bool) -> dict[str, Weights]:
        """Returns the weights to be measured in a round, by name."""
        state, averages = server.state, self.experiment.evaluate.averages
        due = averages == "every" or (last and averages == "last_round")
        found = {LAST: state.weights}
        if not has_global_model(server.method, self.network):
            return found
        for mean in MEANS:
            wanted = due or mean == self.experiment.server.serve
            if wanted and rounds_in(state, mean):
                found[mean] = served(state, mean)
        mixture = self.interpolation.finish(state, self.folder, writer.models) if last else None
        return found if mixture is None else found | {INTERPOLATED: mixture}

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


class Records:
    """Writes a completed round: its rows first, then the checkpoint that makes it count."""

    def __init__(
        self,
        folder: RunFolder,
        transport: Transport,
        models: KeptModels,
        snapshots: Collection[int] = (),
    ) -> None:
        self._folder, self._transport, self._snapshots = folder, transport, snapshots
        self.models = models
        self._ledger_rows: list[LedgerRow] = []

    def entered(self, row: LedgerRow) -> None:
        """Keeps a row of the ledger until its round counts."""
        self._ledger_rows.append(row)

    def carried(self, row: LedgerRow) -> None:
        """Writes a row of the ledger at once: what has left for another machine has left."""
        self._folder.append(LEDGER, [row])

    def keep(self, state: State, rows: Sequence[MetricsRow]) -> None:
        """Writes metrics, ledger and checkpoint of the round in ``state``."""
        self._folder.append(METRICS, rows)
        self._folder.append(LEDGER, self._ledger_rows)
        self._ledger_rows.clear()
        if state.round in self._snapshots:
            name = f"{SNAPSHOTS}/round-{state.round}.safetensors"
            self._folder.write_tensors(name, state.weights)
        files = self.models.take_in(state, rows)
        memories, changed = self._transport.memories, self._transport.remembered
        self._folder.save_checkpoint(state, memories, changed, files)
        self._transport.remembered.clear()


def predictor(method: Method, network: Network, weights: Weights) -> nn.Module:
    """Returns a global model as a predictor, on the network that clients also use."""
    load_weights(network, weights)
    return method.predictor(network)


def measured(
    evaluation: Evaluation, server: Server, network: Network, weights: Weights
) -> list[Score]:
    """Returns the scores of the global model, or their mean over clients that share none.

    A client that has not trained yet counts with the weights it would start from.
    """
    method = server.method
    if has_global_model(method, network):
        return evaluation.scores(predictor(method, network, weights))
    memories = server.transport.memories
    ids = server.transport.clients
    local = local_names(method, network)
    waiting = sum(id not in memories for id in ids)
    found: list[list[Score]] = []
    if waiting:
        found += [evaluation.scores(predictor(method, network, weights))] * waiting
    for id in ids:
        if id in memories:
            own = {name: tensor for name, tensor in memories[id].items() if name in local}
            load_weights(network, own)
            found.append(evaluation.scores(method.predictor(network)))
    return [mean_score(scores) for scores in zip(*found, strict=True)]


def on_device(state: State, device: torch.device) -> State:
    """Returns the state with its tensors on ``device``."""
    state.weights = {name: tensor.to(device) for name, tensor in state.weights.items()}
    state.extras = {name: tensor.to(device) for name, tensor in state.extras.items()}
    return state
