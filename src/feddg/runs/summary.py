"""The summary of a run, computed from its records alone."""

from collections import defaultdict
from typing import Any

from feddg.runs.reading import (
    SPLITS,
    MessageEntry,
    RunRecord,
    best_held_out,
    best_in_domain,
    final_round,
)


def summarize(record: RunRecord) -> dict[str, Any]:
    """Returns the content of ``summary.json``: accuracies by selection rule, cost, bytes."""
    rounds = record.metrics.rounds
    seconds: dict[str, float] = defaultdict(float)
    for row in rounds:
        for name, value in row.seconds.items():
            seconds[name] += value
    images = sum(row.images_per_second * row.seconds.get("train", 0.0) for row in rounds)
    training = seconds.get("train", 0.0)
    return {
        "status": record.status,
        "rounds": record.rounds_done,
        "final": _at(record, final_round(record.evaluations)),
        "best_by_id_val": _at(record, best_in_domain(record.evaluations)),
        "best_by_val": _at(record, best_held_out(record.evaluations)),
        "seconds": dict(seconds),
        "images_per_second": images / training if training else 0.0,
        "bytes": _bytes(record.ledger.messages),
        "error": record.error,
    }


def _at(record: RunRecord, round: int | None) -> dict[str, Any] | None:
    """The scores of every split after ``round``; None when the rule found no round."""
    if round is None:
        return None
    scores: dict[str, Any] = {"round": round}
    for split in SPLITS:
        rows = record.evaluations.at(round, split)
        if rows:
            domains = {
                row.domain: {"accuracy": row.accuracy, "loss": _finite(row.loss)} for row in rows
            }
            accuracy = record.evaluations.accuracy(round, split)
            loss = sum(row.loss for row in rows) / len(rows)
            scores[split] = {"accuracy": accuracy, "loss": _finite(loss), "domains": domains}
    return scores


def _finite(value: float) -> float | None:
    return value if value - value == 0 else None


def _bytes(messages: list[MessageEntry]) -> dict[str, float]:
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
