"""The summary of a run, computed from its records alone."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from feddg.records import SPLITS, EvaluationRow, MessageRow, SummaryFile
from feddg.runs.evaluations import AGGREGATES, Evaluations
from feddg.runs.facts import peak_memory
from feddg.runs.reading import RunRecord
from feddg.runs.selection_rules import SELECTION_RULES, SelectionRule


def summarize(
    record: RunRecord, status: str, error: str | None, took: Mapping[str, float]
) -> SummaryFile:
    """Returns ``summary.json``: how the run ended, accuracies by selection rule, cost, bytes.

    Args:
        record: the run.
        status: how it ended.
        error: why it failed, if it did.
        took: seconds of activities that belong to no round.
    """
    rounds = record.metrics.rounds
    seconds: dict[str, float] = defaultdict(float)
    for row in rounds:
        for name, value in row.seconds.items():
            seconds[name] += value
    images, training = sum(row.images for row in rounds), seconds.get("train", 0.0)
    return SummaryFile(
        status=status,
        rounds=record.rounds_done,
        seconds={**seconds, **took},
        images_per_second=images / training if training else 0.0,
        bytes=_bytes(record.ledger.messages),
        error=error,
        peak_memory_bytes=peak_memory(),
        **{rule.key: _chosen(record, rule) for rule in SELECTION_RULES.values()},
    )


def _chosen(record: RunRecord, rule: SelectionRule) -> dict[str, Any] | None:
    """The scores of every split after the round that a rule chooses; None when it finds none."""
    round = rule.choose(record.evaluations)
    if round is None:
        return None
    scores: dict[str, Any] = {"round": round}
    for split in SPLITS:
        rows = record.evaluations.of(rule.weights).at(round, split)
        if rows:
            scores[split] = {
                "accuracy": rule.measure(record.evaluations, round, split),
                "loss": sum(row.loss for row in rows) / len(rows),
                "metrics": _aggregates(record.evaluations.of(rule.weights), round, split),
                "domains": {row.domain: _domain(record.evaluations, row) for row in rows},
            }
    return scores


def _aggregates(evaluations: Evaluations, round: int, split: str) -> dict[str, dict[str, float]]:
    """Every metric of a split over its domains, by metric and aggregate, as far as known."""
    found = {
        metric: {
            name: value
            for name in AGGREGATES
            if (value := evaluations.value(round, split, metric, name)) is not None
        }
        for metric in evaluations.metrics(split)
    }
    return {metric: values for metric, values in found.items() if values}


def _domain(evaluations: Evaluations, row: EvaluationRow) -> dict[str, Any]:
    """The scores of one domain, with how many images of each class they rest on."""
    scores = {"accuracy": row.accuracy, "loss": row.loss, "metrics": row.metrics}
    support = evaluations.support(row.split, row.domain)
    return scores if support is None else scores | {"support": support}


def _bytes(messages: Sequence[MessageRow]) -> dict[str, float]:
    """Mean bytes per client of the setup, and per client and round of the training."""
    totals: dict[tuple[bool, str], int] = defaultdict(int)
    takers: dict[tuple[bool, str], set[tuple[int, int]]] = defaultdict(set)
    for message in messages:
        key = (message.round == 0, message.direction)
        totals[key] += message.bytes
        takers[key].add((message.round, message.client))
    mean = {key: totals[key] / len(takers[key]) for key in totals}
    return {
        "setup_up_per_client": mean.get((True, "up"), 0.0),
        "setup_down_per_client": mean.get((True, "down"), 0.0),
        "up_per_client_round": mean.get((False, "up"), 0.0),
        "down_per_client_round": mean.get((False, "down"), 0.0),
        "total": sum(totals.values()),
    }
