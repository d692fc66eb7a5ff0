"""How long runs will take, from finished runs of the same kind."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from feddg.experiment import Experiment
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
