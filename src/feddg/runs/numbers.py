"""A run's numbers as one long table, from which every table of results is made."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any

from feddg.records import (
    CONSTANT,
    FLUCTUATION,
    ID_VAL,
    LAST,
    PER_ROUND,
    RISING,
    SPLITS,
    SWA,
    TEST,
    NumberRow,
)
from feddg.runs.diagnostics import MAJORITY, STILL_RISING, about_accuracy, split_accuracy
from feddg.runs.reading import (
    AGGREGATES,
    FINAL,
    SELECTION_RULES,
    Chosen,
    Evaluations,
    Run,
    SelectionRule,
    in_order,
)


def numbers_of(run: Run, *, domains: bool = False, costs: bool = True) -> list[NumberRow]:
    """Returns the numbers of the model of every selection rule, and of the run as a whole.

    Args:
        run: the run.
        domains: whether to return those of each domain, too.
        costs: whether to say what training had taken by the chosen round.
    """
    rows = []
    for rule in SELECTION_RULES.values():
        chosen = rule.of(run.evaluations)
        if chosen.round is None:
            continue
        spent = run.spent_by(chosen.round)._asdict() if costs else {}
        about = {"rule": rule.name, "round": chosen.round, "weights": rule.weights, **spent}
        found = itertools.chain(
            _over_domains(chosen), _of_domains(chosen) if domains else (), _flags(run, rule, chosen)
        )
        rows += [NumberRow(**about, **one) for one in found if math.isfinite(one["value"])]
    return [*rows, *_of_all_rounds(run)]


def _over_domains(chosen: Chosen) -> Iterator[dict[str, Any]]:
    for split in SPLITS:
        metrics = chosen.evaluations.metrics(split)
        for metric, over in [("loss", "domain_mean"), *itertools.product(metrics, AGGREGATES)]:
            value = chosen.value(split, metric, over)
            if value is not None:
                yield {"split": split, "over": over, "metric": metric, "value": value}


def _of_domains(chosen: Chosen) -> Iterator[dict[str, Any]]:
    for row in itertools.chain.from_iterable(map(chosen.rows, SPLITS)):
        for metric, value in row.numbers.items():
            yield {"split": row.split, "domain": row.domain, "metric": metric, "value": value}


def _flags(run: Run, rule: SelectionRule, chosen: Chosen) -> Iterator[dict[str, Any]]:
    """Yields whether the model is no better than a constant one, and whether it still rose."""
    found = run.evaluations
    split = TEST if any(found.at(round, TEST) for round in found.rounds) else ID_VAL
    at = split_accuracy(chosen.evaluations, chosen.round, split)
    if at is None or at.constant is None:
        return
    codes = {one.code for one in about_accuracy(found, chosen.round, split, rule.weights)}
    yield {"metric": CONSTANT, "value": float(MAJORITY in codes)}
    if rule is FINAL:
        yield {"metric": RISING, "value": float(STILL_RISING in codes)}


def _of_all_rounds(run: Run) -> Iterator[NumberRow]:
    for weights in (LAST, SWA):
        moved = mean_step(run.evaluations.of(weights), run.rounds_done)
        if moved is not None:
            yield NumberRow(weights=weights, split=TEST, metric=FLUCTUATION, value=moved)
    rounds = run.metrics.rounds
    taken: dict[str, Sequence[float]] = {
        "seconds_per_round": [
            r.seconds.get("train", 0.0) + r.seconds.get("aggregate", 0.0) for r in rounds
        ],
        "images_per_round": [r.images for r in rounds],
        "forwards_per_round": [r.forwards for r in rounds] * all(r.forwards for r in rounds),
        "bytes_per_round": [(r.bytes_up + r.bytes_down) / max(1, len(r.clients)) for r in rounds],
    }
    for metric in PER_ROUND:
        if taken[metric]:
            yield NumberRow(metric=metric, value=fmean(taken[metric]))


def mean_step(evaluations: Evaluations, rounds: int, split: str = TEST) -> float | None:
    """Returns the mean absolute change between neighbouring evaluated rounds in the second half.

    Neighbours are rounds at the smallest distance: with ``evaluate.every_of_last`` the rounds at
    the end, which are one apart.

    Args:
        evaluations: evaluations of one kind of weights.
        rounds: rounds trained.
        split: the split whose accuracy is used, as the mean over its domains.

    Returns:
        The change, 0 to 1; None with fewer than two evaluations in the second half.
    """
    late = [
        (round, value)
        for round in evaluations.rounds
        if round > rounds / 2 and (value := evaluations.value(round, split)) is not None
    ]
    steps = [(b - a, abs(y - x)) for (a, x), (b, y) in itertools.pairwise(late)]
    closest = min((gap for gap, _ in steps), default=0)
    return fmean(step for gap, step in steps if gap == closest) if steps else None


def more_metrics(runs: Iterable[Run]) -> list[str]:
    """Returns the names of all metrics of the runs, in the order of tables."""
    return in_order(
        name for run in runs for split in SPLITS for name in run.evaluations.metrics(split)
    )
