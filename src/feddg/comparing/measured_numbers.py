"""The numbers of a finished run that outlive its folder."""

import itertools
import math
from typing import Final

from feddg.records import ID_VAL, LAST, SPLITS, TAIL, TEST
from feddg.runs.findings import FindingKind, findings, standing
from feddg.runs.reading import FINAL, SELECTION_RULES, Evaluations, RunRecord, SelectionRule

SCORE: Final = "score"
"""Begins the name of a metric that is not the tables' accuracy; it may be below 0."""
CONSTANT: Final = "constant"
"""Begins the name of what says whether a model is no better than a constant one: 1, or 0."""
RISING: Final = "rising"
"""Whether accuracy was still rising at the last round: 1, or 0."""


def measured_numbers(run: RunRecord) -> dict[str, float]:
    """Returns the numbers of a finished run that tables need.

    Returns:
        All to seven digits, so that a number is the same once it was written and read.

        Accuracies from 0 to 1 as ``SPLIT_RULE``. ``score_RULE``: what chooses rounds, on in-domain
        validation, where that is something else (see :func:`score_name`). ``constant_RULE`` and
        ``rising``: 1 where the model is no better on the test domains than one that always names
        the same class, and where its accuracy there was still rising at the last round, else 0
        (see :mod:`feddg.runs.findings`); where no test domain is held out, as in the trials of a
        ``tune`` section, this is of in-domain validation. ``movement_last`` and
        ``movement_tail``: by how much the accuracy on the test domains changes from one evaluated
        round to the next, mean over the second half of the rounds, of the last weights and of the
        tail's mean. By round, means: ``seconds`` of training and aggregation, ``images`` of
        training steps, each once a step, ``passes`` of images through the networks where they were
        counted, ``bytes`` that a client sends and is sent.
    """
    numbers: dict[str, float] = {}
    found = run.evaluations
    judged = TEST if any(found.at(round, TEST) for round in found.rounds) else ID_VAL
    for rule in SELECTION_RULES.values():
        chosen = rule.choose(found)
        for split in SPLITS:
            value = rule.measure(found, chosen, split)
            if value is not None and math.isfinite(value):
                numbers[f"{split}_{rule.key}"] = value
        name = score_name(rule, found.select_by, found.select_over)
        score = found.of(rule.weights).score(chosen, ID_VAL)
        if score is not None and math.isfinite(score):
            numbers[name] = score
        at = standing(found.of(rule.weights), chosen, judged)
        if at is not None and at.constant is not None:
            said = {one.kind for one in findings(found, chosen, judged, rule.weights)}
            numbers[constant_name(rule)] = float(FindingKind.CONSTANT in said)
            if rule is FINAL:
                numbers[RISING] = float(FindingKind.RISING in said)
    for weights in (LAST, TAIL):
        moved = mean_step(found.of(weights), run.rounds_done)
        if moved is not None:
            numbers[f"movement_{weights}"] = moved
    rounds = run.metrics.rounds
    if rounds:
        trained = [r.seconds.get("train", 0.0) + r.seconds.get("aggregate", 0.0) for r in rounds]
        sent = [(r.bytes_up + r.bytes_down) / max(1, len(r.clients)) for r in rounds]
        numbers["seconds"] = math.fsum(trained) / len(rounds)
        numbers["images"] = math.fsum(r.images for r in rounds) / len(rounds)
        if all(r.passes for r in rounds):
            numbers["passes"] = math.fsum(r.passes for r in rounds) / len(rounds)
        numbers["bytes"] = math.fsum(sent) / len(rounds)
    return {name: float(f"{number:.7g}") for name, number in numbers.items()}


def constant_name(rule: SelectionRule) -> str:
    """Returns which number of a run says whether a rule's model is no better than a constant."""
    return f"{CONSTANT}_{rule.key}"


def score_name(rule: SelectionRule, select_by: str, select_over: str) -> str:
    """Returns which number of a run says how well it does on in-domain validation under a rule.

    Args:
        rule: which round and which weights count.
        select_by: the run's ``evaluate.select_by``.
        select_over: its ``evaluate.select_over``.
    """
    tables_show_it = (select_by, select_over) == ("accuracy", "domain_mean")
    return f"{ID_VAL if tables_show_it else SCORE}_{rule.key}"


def mean_step(evaluations: Evaluations, rounds: int, split: str = TEST) -> float | None:
    """Returns the mean absolute change between neighbouring evaluated rounds of the second half.

    Neighbours are the rounds that lie closest together: with ``evaluate.every_of_last`` those of
    the end, which are one apart.

    Args:
        evaluations: of one kind of weights.
        rounds: rounds trained.
        split: whose accuracy, mean over its domains.

    Returns:
        The change, 0 to 1; None with fewer than two evaluations in the second half.
    """
    values = {round: evaluations.accuracy(round, split) for round in evaluations.rounds}
    known = [(round, value) for round, value in values.items() if value is not None]
    pairs = list(itertools.pairwise((round, value) for round, value in known if round > rounds / 2))
    if not pairs:
        return None
    closest = min(b - a for (a, _), (b, _) in pairs)
    steps = [abs(y - x) for (a, x), (b, y) in pairs if b - a == closest]
    return math.fsum(steps) / len(steps)
