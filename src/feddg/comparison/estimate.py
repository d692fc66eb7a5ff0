"""What a run would take, and how long runs will take."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from feddg.data.data_set import load_images_of
from feddg.data.pixels import ArrayPixels
from feddg.diagnostics import Diagnostic
from feddg.experiment import Experiment
from feddg.records import ClientsTable
from feddg.runs.prepare import build, clients_table, deal, guards_for
from feddg.runs.reading import RunRecord


@dataclass(frozen=True)
class Estimate:
    """Seconds that runs together will take.

    Attributes:
        seconds: of the runs that it knows of.
        known: how many have finished runs of their kind.
        unknown: how many have none, and are left out.
    """

    seconds: float
    known: int
    unknown: int


def estimate(missing: Sequence[Experiment], finished: Iterable[RunRecord], jobs: int) -> Estimate:
    """Estimates how long experiments will take: as long, a round, as others of their kind did.

    Args:
        missing: what is to run.
        finished: completed runs to learn from.
        jobs: how many go at once; their number is taken to share the machine evenly.
    """
    history = _history(finished)
    kinds = [kind_of(experiment.model_dump(mode="json")) for experiment in missing]
    known = [
        history[kind] * experiment.train.rounds
        for kind, experiment in zip(kinds, missing)
        if kind in history
    ]
    return Estimate(sum(known) / jobs, len(known), len(missing) - len(known))


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


# What a run would take, before it begins: who trains on how much, and memory.


@dataclass(frozen=True)
class Forecast:
    """What a run would take.

    Attributes:
        splits: images by role (``train``, ``id_val``, ``id_test``, ``val``, ``test``).
        clients: who holds how many training images of which domain and class.
        pixel_bytes: the decoded images of the whole data set.
        weights: how many numbers the network has.
        weight_bytes: bytes of the network, its gradients and its optimizer's memory.
        diagnostics: what the guards guarantee.
    """

    splits: dict[str, int]
    clients: ClientsTable
    pixel_bytes: int
    weights: int
    weight_bytes: int
    diagnostics: Sequence[Diagnostic] = ()


def forecast(experiment: Experiment) -> Forecast:
    """Deals out the experiment's images; nothing is decoded or trained.

    Files that cannot be used are counted: they are found when they are decoded.

    Raises:
        FeddgError: the experiment cannot be carried out as asked.
    """
    data = experiment.data
    table = load_images_of(data)
    size = data.image_size
    images = deal(experiment, table, ArrayPixels(numpy.empty((0, size, size, 3), numpy.uint8)), [])
    method, network = build(experiment, len(table.class_names))
    method.read_files()
    guards = guards_for(images.trained_by(experiment), method, network)
    weights = sum(parameter.numel() for parameter in network.parameters())
    copies = 2 + _optimizer_copies(experiment)  # the weights, their gradients, what it remembers
    roles = ("train", "id_val", "id_test", "val", "test")
    return Forecast(
        {role: len(getattr(images.splits, role)) for role in roles},
        clients_table(images),
        len(table) * size * size * 3,
        weights,
        weights * 4 * copies,
        guards.diagnostics,
    )


def _optimizer_copies(experiment: Experiment) -> int:
    if experiment.train.optimizer == "adam":
        return 2
    return 1 if experiment.train.momentum else 0
