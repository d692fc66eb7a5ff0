"""The rules that choose the round whose model counts; none of them looks at the test split.

A new rule is one definition here, or in another package under the entry-point group
``feddg.selection_rules``: tables, pages, plans and ``summary.json`` find it by themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from feddg.errors import RunError
from feddg.registry import Registry
from feddg.rows import ID_VAL, VAL
from feddg.runs.evaluations import Evaluations

Measure = Callable[[Evaluations, int | None, str], float | None]


@dataclass(frozen=True, slots=True)
class SelectionRule:
    """A named way to choose the round whose model counts.

    Attributes:
        name: how tables and plans call it.
        key: how ``summary.json`` calls it.
        choose: from evaluations to a round, or None when the needed split was not evaluated.
        split: the split that decides, or None where the decision needs no accuracy.
        measure: the accuracy of a split once the round is chosen; that of the round by default.
    """

    name: str
    key: str
    choose: Callable[[Evaluations], int | None]
    split: str | None = None
    measure: Measure = Evaluations.accuracy


SELECTION_RULES: Final = Registry[SelectionRule](
    "selection rule", group="feddg.selection_rules", error=RunError
)


def add_rule(rule: SelectionRule) -> SelectionRule:
    """Registers a rule under its name and its key, and returns it."""
    return SELECTION_RULES.add(rule.name, rule, (rule.key,))


def final_round(evaluations: Evaluations) -> int | None:
    """The last evaluated round, or None before any evaluation."""
    return evaluations.rounds[-1] if evaluations.rounds else None


def best_in_domain(evaluations: Evaluations) -> int | None:
    """The round with the best in-domain validation (``select_by``, mean over domains)."""
    return _best_round(evaluations, ID_VAL)


def best_held_out(evaluations: Evaluations) -> int | None:
    """The round with the best held-out validation (``select_by``, mean over domains)."""
    return _best_round(evaluations, VAL)


def _best_round(evaluations: Evaluations, split: str) -> int | None:
    """The earliest of the best rounds; the untrained model stands only if nothing else does."""
    metric = evaluations.select_by
    scores = {r: evaluations.value(r, split, metric) for r in evaluations.rounds}
    known = {r: score for r, score in scores.items() if score is not None and score == score}
    trained = {r: score for r, score in known.items() if r > 0} or known
    return max(trained, key=lambda r: (trained[r], -r), default=None)


FINAL: Final = add_rule(SelectionRule("Final round", "final", final_round))
BEST_IN_DOMAIN: Final = add_rule(
    SelectionRule("Best in-domain validation", "best_by_id_val", best_in_domain, ID_VAL)
)
BEST_HELD_OUT: Final = add_rule(
    SelectionRule("Best held-out validation", "best_by_val", best_held_out, VAL)
)
