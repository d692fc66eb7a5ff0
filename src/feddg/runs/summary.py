"""The summary of a run: how it ended, what it took, and the numbers of each rule's model."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from feddg.diagnostics import Diagnostic
from feddg.records import (
    CONSTANT,
    ENDED_EARLY,
    FLUCTUATION,
    ID_VAL,
    LAST,
    RISING,
    SPLITS,
    SWA,
    TEST,
    MessageRow,
    NumberRow,
    SummaryFile,
)
from feddg.runs.diagnostics import (
    MAJORITY,
    OF_ITS_END,
    STILL_RISING,
    about_accuracy,
    about_result,
    split_accuracy,
)
from feddg.runs.prepare import peak_memory
from feddg.runs.reading import Run
from feddg.runs.table import FINAL, SELECTION_RULES, NumberTable, SelectionRule


def summarize(
    record: Run,
    status: str,
    error: str | None,
    took: Mapping[str, float],
    diagnostics: Sequence[Diagnostic] = (),
) -> SummaryFile:
    """Returns ``summary.json``: how the run ended, numbers by selection rule, cost, bytes.

    Args:
        record: the run.
        status: how it ended.
        error: why it failed, if it did.
        took: seconds of activities outside rounds.
        diagnostics: findings during the run.
    """
    rounds = record.rounds
    seconds: dict[str, float] = defaultdict(float)
    if record.setup is not None:
        seconds["setup"] = record.setup.seconds
    for row in rounds:
        for name, value in row.seconds.items():
            seconds[name] += value
    # What was said before it went on, if it did.
    earlier = record.summary.diagnostics if record.summary else []
    before = [one for one in earlier if one.code not in OF_ITS_END]
    images, training = sum(row.images for row in rounds), seconds.get("train", 0.0)
    return SummaryFile(
        status=status,
        rounds=record.rounds_done,
        seconds={**seconds, **took},
        images_per_second=images / training if training else 0.0,
        bytes=_bytes(record.ledger.messages, len(record.clients.clients) if record.clients else 0),
        error=error,
        peak_memory_bytes=peak_memory(),
        diagnostics=[
            *about_result(record),
            *dict.fromkeys([*before, *diagnostics]),
        ],
        numbers=numbers_by_rule(record, costs=False),
    )


def _bytes(messages: Sequence[MessageRow], clients: int) -> dict[str, float]:
    """Mean bytes per client of the setup, and per client and round of the training; and all."""
    totals: dict[tuple[bool, str], int] = defaultdict(int)
    takers: dict[tuple[bool, str], set[tuple[int, int]]] = defaultdict(set)
    for message in messages:
        if not 0 <= message.client < clients:
            continue  # a node that is no site, or one that only evaluates
        key = (message.round == 0, message.direction)
        totals[key] += message.bytes
        takers[key].add((message.round, message.client))
    mean = {key: totals[key] / len(takers[key]) for key in totals}
    return {
        "setup_up_per_client": mean.get((True, "up"), 0.0),
        "setup_down_per_client": mean.get((True, "down"), 0.0),
        "up_per_client_round": mean.get((False, "up"), 0.0),
        "down_per_client_round": mean.get((False, "down"), 0.0),
        "total": sum(message.bytes for message in messages),
    }


def numbers_by_rule(run: Run, *, domains: bool = False, costs: bool = True) -> list[NumberRow]:
    """Returns the run's table grouped by selection rule, and the numbers of the run as a whole.

    Args:
        run: the run.
        domains: whether to return the numbers of each domain, too.
        costs: whether to say what training had taken by the chosen round.
    """
    rows = []
    for rule in SELECTION_RULES.values():
        table = rule.of(run.table)
        spent = ("images", "bytes", "seconds") if costs else ()
        for row in table.rows[:1]:
            about = {"rule": rule.name, "round": row.round, "weights": rule.weights}
            about |= {name: getattr(row, name) for name in spent}
            rows_of = (row for split in SPLITS for row in table.where(split=split))
            of_domains = [row for row in rows_of if math.isfinite(row.value)] if domains else []
            parts = itertools.chain(table.summed_up(), of_domains, _flags(run, rule, table))
            of = ("split", "domain", "over", "metric", "value")
            rows += [NumberRow(**about, **{n: getattr(part, n) for n in of}) for part in parts]
    return [*rows, *_of_all_rounds(run)]


def _flags(run: Run, rule: SelectionRule, table: NumberTable) -> Iterator[NumberRow]:
    """Yields whether the model is no better than a constant one, and whether it still rose."""
    split = TEST if run.table.where(weights=LAST, split=TEST) else ID_VAL
    at = split_accuracy(table, split, run.table)
    if at is None or at.constant is None:
        return
    codes = {one.code for one in about_accuracy(run.table, at.round, split, rule.weights)}
    yield NumberRow(metric=CONSTANT, value=float(MAJORITY in codes))
    if rule is FINAL:
        yield NumberRow(metric=RISING, value=float(STILL_RISING in codes))


def _of_all_rounds(run: Run) -> Iterator[NumberRow]:
    if run.ended_early:
        yield NumberRow(metric=ENDED_EARLY, value=1.0)
    for weights in (LAST, SWA):
        moved = mean_step(run.table.where(weights=weights), run.rounds_done)
        if moved is not None:
            yield NumberRow(weights=weights, split=TEST, metric=FLUCTUATION, value=moved)
    rounds = run.rounds
    taken: dict[str, Sequence[float]] = {
        "seconds_per_round": [
            r.seconds.get("train", 0.0) + r.seconds.get("aggregate", 0.0) for r in rounds
        ],
        "images_per_round": [r.images for r in rounds],
        "bytes_per_round": [(r.bytes_up + r.bytes_down) / max(1, len(r.clients)) for r in rounds],
    }
    yield from (NumberRow(metric=name, value=fmean(of)) for name, of in taken.items() if of)


def mean_step(table: NumberTable, rounds: int) -> float | None:
    """Returns the mean absolute change between neighbouring measured rounds in the second half.

    It is that of test accuracy, the mean over domains. Neighbours are rounds at the smallest
    distance: with ``evaluate.every_of_last`` the rounds at the end, which are one apart.

    Args:
        table: numbers of one kind of weights.
        rounds: rounds trained.

    Returns:
        The change, 0 to 1; None with fewer than two evaluations in the second half.
    """
    late = [(round, value) for round, value in table.curve(TEST).items() if round > rounds / 2]
    steps = [(b - a, abs(y - x)) for (a, x), (b, y) in itertools.pairwise(late)]
    closest = min((gap for gap, _ in steps), default=0)
    return fmean(step for gap, step in steps if gap == closest) if steps else None
