"""The rules that choose the model that counts; none of them looks at the test split.

A rule chooses a round, and which weights of that round: those the federation trained, or a mean
over rounds that it keeps beside them. A new rule is one definition here, or in another package
under the entry-point group ``feddg.selection_rules``: tables, pages, plans, ``summary.json`` and
``load_model(which=...)`` find it by themselves.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from feddg.errors import RunError
from feddg.records import EMA, ID_VAL, INTERPOLATED, LAST, TAIL, VAL
from feddg.registry import Registry
from feddg.runs.evaluations import Evaluations

Measure = Callable[[Evaluations, int | None, str], float | None]


@dataclass(frozen=True, slots=True)
class SelectionRule:
    """A named way to choose the model that counts.

    Attributes:
        name: how tables and plans call it.
        key: how ``summary.json`` calls it.
        choose: from evaluations to a round, or None when the needed split was not evaluated.
        split: the split that decides, or None where the decision needs no accuracy.
        measure: the accuracy of a split once the round is chosen; that of the round by default.
        which: how ``load_model`` and model files call it; its key if empty.
        weights: the weights of the chosen round that count, as in an evaluation's row.
        optional: tables leave it out where no run has evaluated its weights.
        when: how a sentence says it, behind an accuracy.
    """

    name: str
    key: str
    choose: Callable[[Evaluations], int | None]
    split: str | None = None
    measure: Measure = Evaluations.accuracy
    which: str = ""
    weights: str = LAST
    optional: bool = False
    when: str = ""

    @property
    def model(self) -> str:
        """How ``load_model`` and model files call it."""
        return self.which or self.key


SELECTION_RULES: Final = Registry[SelectionRule](
    "selection rule", group="feddg.selection_rules", error=RunError
)


def add_rule(rule: SelectionRule) -> SelectionRule:
    """Registers a rule under its name and what else it is called, and returns it."""
    return SELECTION_RULES.add(rule.name, rule, tuple(dict.fromkeys((rule.key, rule.model))))


def find_rule(which: str) -> SelectionRule:
    """Returns the rule whose model is called ``which``, by any of its names.

    Raises:
        RunError: there is none; says which there are.
    """
    for rule in SELECTION_RULES.values():
        if which in (rule.model, rule.key, rule.name):
            return rule
    known = ", ".join(rule.model for rule in SELECTION_RULES.values())
    raise RunError(f"no selection rule is called {which!r}; which= takes one of: {known}")


def rules_for(runs: Iterable[Evaluations]) -> list[SelectionRule]:
    """Returns the rules that tables of these runs show: optional ones where a run follows them."""
    found = list(runs)
    return [
        rule
        for rule in SELECTION_RULES.values()
        if not rule.optional or any(rule.choose(evaluations) is not None for evaluations in found)
    ]


def final_round(evaluations: Evaluations) -> int | None:
    """The last evaluated round, or None before any evaluation."""
    return evaluations.rounds[-1] if evaluations.rounds else None


def best_in_domain(evaluations: Evaluations) -> int | None:
    """The round with the best in-domain validation (``select_by``, ``select_over``)."""
    return _best_round(evaluations, ID_VAL)


def best_held_out(evaluations: Evaluations) -> int | None:
    """The round with the best held-out validation (``select_by``, ``select_over``)."""
    return _best_round(evaluations, VAL)


def _best_round(evaluations: Evaluations, split: str) -> int | None:
    """The earliest of the best rounds; the untrained model stands only if nothing else does."""
    scores = {r: evaluations.preference(r, split) for r in evaluations.rounds}
    known = {r: score for r, score in scores.items() if score is not None}
    trained = {r: score for r, score in known.items() if r > 0} or known
    return max(trained, key=lambda r: (trained[r], -r), default=None)


def served_rule(experiment: Mapping[str, Any], evaluations: Evaluations) -> SelectionRule:
    """Returns the rule of the model that a run serves: the one a user is handed.

    Args:
        experiment: the resolved experiment, nested.
        evaluations: the run's; where the served weights are not measured yet, the final round's
            count.
    """
    server = experiment.get("server") or {}
    wanted = {TAIL: TAIL_MEAN, EMA: EMA_MEAN}.get(str(server.get("serve")), FINAL)
    if str(server.get("interpolate") or "none") != "none":
        wanted = INTERPOLATION
    return wanted if wanted.choose(evaluations) is not None else FINAL


def _rule_of_weights(name: str, weights: str, when: str) -> SelectionRule:
    """Returns the rule that the named weights count, as they are after the last round."""
    parts: dict[str, Any] = {"which": weights, "weights": weights, "optional": True, "when": when}
    return SelectionRule(
        name,
        weights,
        lambda evaluations: final_round(evaluations.of(weights)),
        measure=lambda evaluations, round, split: evaluations.of(weights).accuracy(round, split),
        **parts,
    )


FINAL: Final = add_rule(
    SelectionRule("Final round", "final", final_round, when="after the final round")
)
TAIL_MEAN: Final = add_rule(
    _rule_of_weights("Mean of the tail", TAIL, "by the mean of the later rounds' models")
)
EMA_MEAN: Final = add_rule(
    _rule_of_weights("Exponential mean", EMA, "by the exponential mean of the rounds' models")
)
BEST_IN_DOMAIN: Final = add_rule(
    SelectionRule(
        "Best in-domain validation",
        "best_by_id_val",
        best_in_domain,
        ID_VAL,
        which="best_in_domain",
        when="after the round that is best on in-domain validation",
    )
)
BEST_HELD_OUT: Final = add_rule(
    SelectionRule(
        "Best held-out validation",
        "best_by_val",
        best_held_out,
        VAL,
        which="best_held_out",
        when="after the round that is best on held-out validation",
    )
)
INTERPOLATION: Final = add_rule(
    _rule_of_weights(
        "Interpolated", INTERPOLATED, "by a mix of the final model and the one it began from"
    )
)
