"""What a run works with, wherever its clients live; and how it is put together in this process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from feddg.clients.client import Worker
from feddg.data.fingerprint import ImagesFile
from feddg.data.inspection import Remark, say
from feddg.evaluation.accuracy import Evaluation, Score
from feddg.experiment import Experiment
from feddg.federation.inprocess import InProcess
from feddg.federation.server import Server
from feddg.federation.transport import Transport
from feddg.messages import Weights
from feddg.methods.base import Method, State
from feddg.methods.composition import build_method
from feddg.privacy.building import NO_GUARDS, Guards
from feddg.records import ClientsTable
from feddg.runs.facts import clients_table
from feddg.runs.figures import draw_figures
from feddg.runs.prepare import (
    Progress,
    build,
    build_evaluation,
    build_workers,
    guards_for,
    load_images,
)

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


def say_of_method(method: Method, experiment: Experiment) -> None:
    """Logs what a method says against a result of its experiment, a line each."""
    say(Remark("warning", text) for text in method.remarks(experiment))


Prepare = Callable[[Experiment, Path, Progress, dict[int, Weights]], Prepared]
"""Prepares a run from the experiment, the cache folder and the memories of a checkpoint."""


def in_process(
    experiment: Experiment, cache: Path, progress: Progress, memories: dict[int, Weights]
) -> Prepared:
    """Prepares a run whose clients are trained in this process."""
    build_method(experiment.method.name, experiment.method.settings).read_files()
    images = load_images(experiment, cache, progress)
    method, network = build(experiment, len(images.table.class_names))
    say_of_method(method, experiment)
    experiment = images.trained_by(experiment)
    guards = guards_for(experiment, method, network)
    workers = build_workers(experiment, network, cache)
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
