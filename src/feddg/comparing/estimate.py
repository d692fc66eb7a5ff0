"""How long runs will take: from finished runs of the same kind, else measured on the spot."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from feddg.clients.examples import Examples
from feddg.data.images import ImageTable
from feddg.data.pixels import ArrayPixels
from feddg.data.sources import load_images_of
from feddg.errors import FeddgError
from feddg.evaluation.accuracy import Evaluation
from feddg.experiment import Experiment
from feddg.federation.checks import MessageChecks
from feddg.federation.initial import initial_state
from feddg.federation.inprocess import InProcess
from feddg.federation.ledger import Ledger
from feddg.federation.server import Server
from feddg.runs.prepare import build, build_workers
from feddg.runs.reading import RunRecord
from feddg.runs.round_scores import predictor
from feddg.settings import ServerSettings

SAMPLE_PIXELS = 64 * 64 * 32
START_SECONDS = 10.0
"""Starting a process, reading weights and the pixel cache."""
SPREAD = 1.5
"""How far off an estimate from a few batches may well be."""


@dataclass(frozen=True)
class Estimate:
    """Seconds that all runs together will take.

    Attributes:
        low: if things go well.
        high: if they do not.
        known: how many runs the estimate takes from finished runs of the same kind.
        measured: how many it takes from a measurement made just now.
        unknown: how many it knows nothing of, and leaves out.
    """

    low: float
    high: float
    known: int
    measured: int
    unknown: int


@dataclass(frozen=True)
class Speed:
    """Seconds per image: in the exchange before training, of training, of evaluation."""

    setup: float
    train: float
    evaluate: float

    def or_quicker(self, other: "Speed | None") -> "Speed":
        """Returns the quicker of two measurements, part by part."""
        if other is None:
            return self
        return Speed(
            min(self.setup, other.setup),
            min(self.train, other.train),
            min(self.evaluate, other.evaluate),
        )


def estimate(missing: Sequence[Experiment], finished: Iterable[RunRecord], jobs: int) -> Estimate:
    """Estimates how long experiments will take.

    Args:
        missing: what is to run.
        finished: completed runs to learn from.
        jobs: how many go at once; their number is taken to share the machine evenly, with the
            threads that torch now uses in this process.
    """
    history = _history(finished)
    speeds: dict[str, Speed | None] = {}
    tables: dict[str, ImageTable | None] = {}
    low = high = 0.0
    known = measured = unknown = 0
    for experiment in missing:
        kind = kind_of(experiment.model_dump(mode="json"))
        if kind in history:
            seconds = history[kind] * experiment.train.rounds
            low, high, known = low + seconds / 1.1, high + seconds * 1.1, known + 1
            continue
        table = _table(experiment, tables)
        if table is not None and kind not in speeds:
            speeds[kind] = measured_speed(experiment, len(table.class_names))
        speed = speeds.get(kind)
        if table is None or speed is None:
            unknown += 1
            continue
        seconds = START_SECONDS + _seconds(experiment, table, speed)
        low, high, measured = low + seconds / SPREAD, high + seconds * SPREAD, measured + 1
    return Estimate(low / jobs, high / jobs, known, measured, unknown)


def kind_of(experiment: dict[str, Any]) -> str:
    """Returns what a run's time per round depends on, as one text."""
    clients, train = experiment["clients"], experiment["train"]
    parts: list[Any] = [experiment["method"], experiment["data"]["source"]]
    parts += [experiment["data"]["image_size"], experiment["model"]["backbone"]]
    parts += [clients["number"], clients["per_round"], train["local_epochs"]]
    evaluate = experiment["evaluate"]
    parts += [train["local_steps"], train["batch_size"]]
    parts += [evaluate["every"], evaluate.get("every_of_last", 0)]
    parts += [len(experiment["hold_out"]["test"]) + len(experiment["hold_out"]["val"])]
    return repr(parts)


def _history(finished: Iterable[RunRecord]) -> dict[str, float]:
    """Seconds per round by kind, over the runs that say."""
    sums: dict[str, list[float]] = {}
    for record in finished:
        summary = record.summary
        total, rounds = (summary.seconds.get("total"), summary.rounds) if summary else (None, 0)
        if total and rounds:
            sums.setdefault(kind_of(record.experiment), []).append(total / rounds)
    return {kind: sum(values) / len(values) for kind, values in sums.items()}


def _table(experiment: Experiment, tables: dict[str, ImageTable | None]) -> ImageTable | None:
    data = experiment.data
    key = repr((data.source, data.root, data.options, data.leave_out))
    if key not in tables:
        try:
            tables[key] = load_images_of(data)
        except FeddgError:
            tables[key] = None  # the run itself will say what is wrong
    return tables[key]


def _training_images(experiment: Experiment, table: ImageTable) -> float:
    held = {*experiment.hold_out.test, *experiment.hold_out.val}
    counts: dict[str, int] = dict(zip(table.domain_names, table.counts().sum(axis=1).tolist()))
    seen = sum(count for name, count in counts.items() if name not in held)
    return seen * (1 - experiment.data.id_val - experiment.data.id_test)


def images_per_round(experiment: Experiment, table: ImageTable) -> float:
    """Returns how many images go through training in a round, each as often as it does."""
    train, clients = experiment.train, experiment.clients
    share = min(1.0, (clients.per_round or clients.number) / clients.number)
    if train.local_steps:
        return train.local_steps * train.batch_size * share * clients.number
    return _training_images(experiment, table) * share * train.local_epochs


def _seconds(experiment: Experiment, table: ImageTable, speed: Speed) -> float:
    train = experiment.train
    training, per_round = _training_images(experiment, table), images_per_round(experiment, table)
    evaluated = len(table) - training
    times = 1 + sum(experiment.evaluate.after(r + 1, train.rounds) for r in range(train.rounds))
    return (
        training * speed.setup
        + train.rounds * per_round * speed.train
        + times * evaluated * speed.evaluate
    )


def measured_speed(experiment: Experiment, classes: int) -> Speed | None:
    """Has made-up clients go through the setup and a round, twice; the quicker time counts.

    Two clients, or as many as work at once. On a busy machine a few batches may by chance take
    many times as long as usual, never less.
    """
    try:
        bare = experiment.model_copy(
            update={"model": experiment.model.model_copy(update={"weights": None})}
        )
        method, network = build(bare, classes)
        workers = build_workers(bare, network, None)
        worker, clients = workers[0], max(2, len(workers))
        size = experiment.data.image_size
        own = max(4, min(experiment.train.batch_size, SAMPLE_PIXELS // size**2))
        count = own * clients
        random = numpy.random.default_rng(0)
        pixels = ArrayPixels(random.integers(0, 256, (count, size, size, 3), numpy.uint8))
        labels = torch.arange(count) % classes

        def examples(client: int) -> Examples:
            rows = torch.arange(client * own, (client + 1) * own)
            return Examples(pixels, rows, labels[rows], torch.full((own,), client), classes)

        evaluation = Evaluation(
            pixels,
            {"test": numpy.arange(count)},
            labels.numpy(),
            numpy.zeros(count, numpy.int64),
            ("noise",),
            classes,
            count,
            worker.device,
            worker.autocast,
        )
        speed = None
        for _ in range(2):
            state = initial_state(
                method,
                network,
                clients,
                rounds=experiment.train.rounds,
                settings=ServerSettings(),
            )
            transport = InProcess(method, workers, clients, examples)
            server = Server(
                method,
                transport,
                state,
                per_round=None,
                settings=ServerSettings(),
                seed=0,
                ledger=Ledger(lambda row: None),
                checks=MessageChecks(method, network, clients, image_size=size),
            )
            started = time.perf_counter()
            server.setup()
            ready = time.perf_counter()
            record = server.round()
            trained = time.perf_counter()
            evaluation.scores(predictor(method, network, server.state.weights))
            ended = time.perf_counter()
            passes = record.examples * experiment.train.local_epochs
            if experiment.train.local_steps:
                steps = experiment.train.local_steps
                passes = steps * min(own, experiment.train.batch_size) * clients
            took = Speed(
                (ready - started) / count, (trained - ready) / passes, (ended - trained) / count
            )
            speed = took.or_quicker(speed)
    except (FeddgError, RuntimeError):
        return None  # the run itself will say what is wrong
    return speed
