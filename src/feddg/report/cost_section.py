"""What a run took: time, memory, bytes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from feddg.comparison.results import Results
from feddg.report.blocks import Cell, Column, Shares, Table
from feddg.report.wording import duration, number, readable, size, spelled
from feddg.runs.reading import RunRecord

ACTIVITIES = {
    "prepare": "preparing the images",
    "setup": "the exchange before training",
    "train": "training",
    "aggregate": "aggregation",
    "evaluate": "evaluation",
    "other": "everything else",
}
VISIBLE_SHARE = 0.002
COSTS = (
    ("To a client, per round", "down_per_client_round"),
    ("From a client, per round", "up_per_client_round"),
    ("To a client, before training", "setup_down_per_client"),
    ("From a client, before training", "setup_up_per_client"),
    ("All messages", "total"),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a run took, from its summary or, before there is one, from the rows so far."""

    seconds: Mapping[str, float]
    total_seconds: float
    images_per_second: float | None
    passes_per_image: float | None
    peak_memory: int | None
    bytes: Mapping[str, Any]


def cost_of(run: RunRecord) -> Cost:
    """The cost of a run so far."""
    summary = run.summary
    seconds = dict((summary and summary.seconds) or _seconds_so_far(run))
    total = max(seconds.pop("total", 0.0), sum(seconds.values()))
    rest = total - sum(seconds.values())
    if rest > 0.005 * total:
        seconds["other"] = rest
    order = list(ACTIVITIES)
    known = sorted(seconds, key=lambda name: order.index(name) if name in order else len(order))
    return Cost(
        {name: seconds[name] for name in known},
        total,
        (summary and summary.images_per_second) or _mean_speed(run),
        _passes_per_image(run),
        summary.peak_memory_bytes if summary else None,
        (summary and summary.bytes) or _bytes_so_far(run),
    )


def _seconds_so_far(run: RunRecord) -> dict[str, float]:
    seconds = {"setup": run.metrics.setup.seconds} if run.metrics.setup else {}
    for row in run.metrics.rounds:
        for activity, value in row.seconds.items():
            seconds[activity] = seconds.get(activity, 0.0) + value
    return seconds


def _mean_speed(run: RunRecord) -> float | None:
    images = sum(row.images for row in run.metrics.rounds)
    seconds = sum(row.seconds.get("train", 0.0) for row in run.metrics.rounds)
    return images / seconds if seconds > 0 else None


def _passes_per_image(run: RunRecord) -> float | None:
    """How often an image of a training step goes through the networks; None if not counted."""
    counted = [row for row in run.metrics.rounds if row.passes and row.images]
    images = sum(row.images for row in counted)
    return sum(row.passes for row in counted) / images if images else None


def _bytes_so_far(run: RunRecord) -> dict[str, float]:
    rounds = run.metrics.rounds
    asked = sum(len(row.clients) for row in rounds)
    if not asked:
        return {}
    up, down = sum(row.bytes_up for row in rounds), sum(row.bytes_down for row in rounds)
    return {
        "up_per_client_round": up / asked,
        "down_per_client_round": down / asked,
        "total": up + down,
    }


def cost_of_runs(runs: Sequence[RunRecord], labels: Sequence[str]) -> Table:
    """What each run took, one column per run."""
    costs = [cost_of(run) for run in runs]
    columns = [Column("", numeric=False), *(Column(label) for label in labels)]
    activities = dict.fromkeys(name for cost in costs for name in cost.seconds)
    rows = [_cost_row("Time in all", [duration(cost.total_seconds) for cost in costs], strong=True)]
    rows += [
        _cost_row(f"Time for {activity_text(name)}", [duration(c.seconds.get(name)) for c in costs])
        for name in activities
    ]
    rows += [
        _cost_row("Images per second of training", [number(c.images_per_second) for c in costs]),
        _cost_row("Passes through the network per image", [_times(c) for c in costs]),
        _cost_row("Peak memory", [size(cost.peak_memory) for cost in costs]),
    ]
    rows += [_cost_row(text, [size(cost.bytes.get(key)) for cost in costs]) for text, key in COSTS]
    return Table(columns, rows)


def _times(cost: Cost) -> str:
    times = cost.passes_per_image
    return number(None) if times is None else f"{times:.2f}"


def _cost_row(text: str, values: Sequence[str], strong: bool = False) -> list[Cell]:
    return [Cell(text), *(Cell(value, strong) for value in values)]


def activity_text(name: str) -> str:
    """What an activity's seconds were spent on, in words."""
    return ACTIVITIES.get(name, readable(name))


def time_shares(cost: Cost) -> Shares:
    """Where the time went, as one divided bar."""
    parts = [
        (activity_text(name), value / cost.total_seconds, duration(value))
        for name, value in cost.seconds.items()
        if value > VISIBLE_SHARE * cost.total_seconds
    ]
    return Shares(parts, f"Where the time went: {duration(cost.total_seconds)} in all.")


def cost_table(results: Results) -> Table:
    """What a run of each method took, mean over its runs."""
    heads = [
        Column("Method", numeric=False),
        Column("Time", "a run"),
        Column("Training", "a round"),
        Column("Fusing", "a round"),
        Column("Before training"),
        Column("Images", "per second"),
        Column("From a client", "per round"),
        Column("From a client", "before training"),
        Column("Peak memory"),
    ]
    rows = [_cost_cells(method, [r.run for r in results.of(method)]) for method in results.methods]
    return Table(heads, rows, "Mean over the runs of a method.")


def _cost_cells(method: str, runs: Sequence[RunRecord]) -> list[Cell]:
    costs = [cost_of(run) for run in runs]
    rounds = [max(1, run.rounds_done) for run in runs]

    def seconds(activity: str, per_round: bool) -> float | None:
        values = [cost.seconds.get(activity, 0.0) for cost in costs]
        return _mean([v / r for v, r in zip(values, rounds)] if per_round else values)

    def mean_bytes(name: str) -> float | None:
        return _mean([cost.bytes.get(name, 0.0) for cost in costs])

    texts = [
        spelled(method),
        duration(_mean([cost.total_seconds for cost in costs])),
        duration(seconds("train", per_round=True)),
        duration(seconds("aggregate", per_round=True)),
        duration(seconds("setup", per_round=False)),
        number(_mean([cost.images_per_second or 0.0 for cost in costs])),
        size(mean_bytes("up_per_client_round")),
        size(mean_bytes("setup_up_per_client")),
        size(_mean([float(cost.peak_memory or 0) for cost in costs])),
    ]
    return [Cell(text) for text in texts]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
