"""A run's numbers as one long table, and the rules that choose a round from it."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy

from feddg.errors import RunError
from feddg.evaluation.metrics import METRICS, Predictions, measure
from feddg.records import EMA, ID_VAL, LAST, SPLITS, SWA, VAL, WISE_FT, Details, NumberRow
from feddg.registry import Registry
from feddg.settings import grouped

if TYPE_CHECKING:
    from pandas import DataFrame

COLUMNS: Final = (
    *("round", "weights", "split", "domain", "metric", "value", "images", "bytes", "seconds"),
)
"""What a number of a run is of, the number, and what training had taken by then."""


class NumberTable:
    """Numbers of a run, one a row: of a round, weights, a split, a domain and a metric.

    The same numbers grouped by selection rule have the rule, and how they were taken over domains.

    >>> run.table.where(round=20, weights="last", split="test").value()  # doctest: +SKIP
    0.8125

    Args:
        rows: the rows, in the order of writing.
        select_by: the metric that chooses a round.
        select_over: the aggregate over a split's domains for that, a name of :data:`AGGREGATES`.
    """

    def __init__(
        self,
        rows: Iterable[NumberRow] = (),
        select_by: str = "accuracy",
        select_over: str = "domain_mean",
    ) -> None:
        self.rows: Sequence[NumberRow] = tuple(rows)
        self.select_by, self.select_over = select_by, select_over
        self._parts: dict[str, dict[Any, NumberTable]] = {}

    def __iter__(self) -> Iterator[NumberRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def _with(self, rows: Iterable[NumberRow]) -> "NumberTable":
        return NumberTable(rows, self.select_by, self.select_over)

    def by(self, column: str) -> "dict[Any, NumberTable]":
        """Returns the rows with each value of a column, the values in the order of writing."""
        if column not in self._parts:
            parts = grouped((getattr(row, column), row) for row in self.rows)
            self._parts[column] = {value: self._with(rows) for value, rows in parts.items()}
        return self._parts[column]

    def where(self, **columns: Any) -> "NumberTable":
        """Returns the rows with these values in these columns."""
        table = self
        for column, value in columns.items():
            table = table.by(column).get(value) or self._with(())
        return table

    def between(self, first: int, last: int) -> "NumberTable":
        """Returns the rows of rounds from a first to a last one."""
        return self._with(row for row in self.rows if first <= (row.round or 0) <= last)

    @property
    def rounds(self) -> list[int]:
        """The measured rounds, ascending."""
        return sorted(self.by("round"))

    @property
    def round(self) -> int | None:
        """The last measured round; None without rows."""
        return max(self.by("round"), default=None)

    @property
    def domains(self) -> list[str]:
        """The measured domains, in the order of writing."""
        return list(self.by("domain"))

    @property
    def metrics(self) -> list[str]:
        """The metrics without the loss, in the order of tables; accuracy is always one."""
        return in_order({"accuracy", *self.by("metric")} - {"loss"})

    def values(self, metric: str = "accuracy") -> dict[str, float]:
        """Returns a metric by domain; the rows are of one round, split and kind of weights."""
        return {row.domain: row.value for row in self.where(metric=metric)}

    def value(
        self, split: str | None = None, metric: str = "accuracy", over: str = "domain_mean"
    ) -> float | None:
        """Returns a metric over the domains of a split; None if it was not measured on them all.

        Args:
            split: one of ``SPLITS``; None where the rows are of one split.
            metric: a name of :data:`feddg.evaluation.metrics.METRICS`.
            over: a name of :data:`AGGREGATES`.

        Raises:
            ValueError: the rows are of several rounds, splits or kinds of weights.
        """
        table = self if split is None else self.where(split=split)
        if max(len(table.by(column)) for column in ("round", "weights", "split")) > 1:
            raise ValueError(
                "these numbers are of several rounds, splits or weights, and one number is of one "
                'each: choose them, as in table.where(round=5, weights="last", split="test")'
            )
        return AGGREGATES[over](table, metric) if table else None

    def curve(self, split: str) -> dict[int, float]:
        """Returns the mean accuracy over a split's domains after each round that has them all."""
        table = self.where(split=split)
        return {
            round: value
            for round, numbers in sorted(table.by("round").items())
            if (value := numbers.value()) is not None and len(numbers.domains) == len(table.domains)
        }

    def support(self, split: str, domain: str) -> list[int] | None:
        """Returns the number of images per class in a domain; None if unknown."""
        rows = self.where(split=split, domain=domain, metric="accuracy").rows
        return next((row.support for row in reversed(rows) if row.support is not None), None)

    def summed_up(self) -> Iterator[NumberRow]:
        """Yields every metric over the domains of each split, in every way to take it over them."""
        for split in SPLITS:
            table = self.where(split=split)
            ways = [(metric, over) for metric in table.metrics for over in AGGREGATES]
            for metric, over in [("loss", "domain_mean"), *ways]:
                value = table.value(metric=metric, over=over)
                if value is not None and math.isfinite(value):
                    yield NumberRow(split=split, over=over, metric=metric, value=value)

    def frame(self) -> "DataFrame":
        """Returns the rows as a pandas table with the columns :data:`COLUMNS`."""
        from pandas import DataFrame  # a third of a second, and a run needs none of it

        rows = ([getattr(row, name) for name in COLUMNS] for row in self.rows)
        return DataFrame(rows, columns=[*COLUMNS])


def _values(table: NumberTable, metric: str) -> list[float] | None:
    """Returns a metric of each domain, or None if one lacks it."""
    values = [row.value for row in table.where(metric=metric)]
    return values if values and len(values) == len(table.domains) else None


def _domain_mean(table: NumberTable, metric: str) -> float | None:
    values = _values(table, metric)
    return math.fsum(values) / len(values) if values else None


def _worst_domain(table: NumberTable, metric: str) -> float | None:
    values = _values(table, metric)
    if _higher_is_better(metric) is None or not values or any(map(math.isnan, values)):
        return None
    return min(values, key=lambda value: preferred(value, metric))


def _pooled(table: NumberTable, metric: str) -> float | None:
    rows = table.where(metric="accuracy").rows
    images = sum(row.examples for row in rows)
    if metric == "accuracy":
        total = math.fsum(row.value * row.examples for row in rows)
        return total / images if images else None
    counts = [row.confusion for row in rows if row.confusion is not None]
    if not _values(table, metric) or len(counts) < len(rows):
        return None
    together = numpy.sum([numpy.array(count) for count in counts], axis=0)
    return measure(Predictions(together)).get(metric)


AGGREGATES: Final[dict[str, Callable[[NumberTable, str], float | None]]] = {
    "domain_mean": _domain_mean,
    "pooled": _pooled,
    "worst_domain": _worst_domain,
}
"""How the domains of a split become one number, by name.

``domain_mean`` weights domains equally; ``pooled`` weights images equally, as if the split were one
domain; ``worst_domain`` is the worst domain's value. Other metrics than accuracy can be pooled only
if rows have a confusion matrix (the last round's do) and it suffices for them.
"""


def preferred(value: float, metric: str) -> float:
    """Returns a metric's value with the sign changed if less is better."""
    return -value if _higher_is_better(metric) is False else value


def _higher_is_better(metric: str) -> bool | None:
    return METRICS[metric].higher_is_better if metric in METRICS else True


def in_order(metrics: Iterable[str]) -> list[str]:
    """Returns the names of metrics, each once, in the order of tables."""
    names = set(metrics)
    return [name for name in METRICS if name in names] + sorted(names - METRICS.keys())


# The rules that choose the model that counts; none of them looks at the test split.
#
# A rule is a function from a run's table to a round, and says which weights of that round: those
# the federation trained, or a mean over rounds that it keeps beside them. A new rule is one
# definition here, or in another package under the entry-point group ``feddg.selection_rules``:
# tables, pages, plans, ``summary.json`` and ``load_model(which=...)`` find it by themselves.


@dataclass(frozen=True)
class SelectionRule:
    """A named rule that selects a model.

    Attributes:
        name: its name for ``load_model``, in model files, plans and tables of numbers.
        title: its name in tables for reading.
        choose: returns the round from the table of its weights, or None if the needed split was not
            measured.
        split: the split that decides; None if no accuracy is needed.
        weights: the weights of the chosen round, as in a row of the table.
        when: words for a sentence, after an accuracy.
        needs: what a run must have for such a model, for an error where it has none.
    """

    name: str
    title: str
    choose: Callable[[NumberTable], int | None]
    split: str | None = None
    weights: str = LAST
    when: str = ""
    needs: str = "a round that the rule chooses while it trains"

    @property
    def aliases(self) -> tuple[str]:
        """Its title finds it, too."""
        return (self.title,)

    def of(self, table: NumberTable) -> NumberTable:
        """Returns the numbers of the model that it chooses; none if there is none to choose."""
        numbers = table.where(weights=self.weights)
        return numbers.where(round=self.choose(numbers))


SELECTION_RULES: Final = Registry[SelectionRule](
    "selection rule", group="feddg.selection_rules", error=RunError, made_of=SelectionRule
)


add_rule = SELECTION_RULES.register
"""Registers a rule under its name and title, and returns it."""


def final_round(table: NumberTable) -> int | None:
    """Returns the last measured round, or None before any evaluation."""
    return table.round


def preferences(table: NumberTable, split: str) -> dict[int, float]:
    """Returns the value that chooses rounds, larger being better, of each round that has one.

    It is the metric ``select_by`` of the split, aggregated by ``select_over``, with its sign
    changed if less is better.
    """
    by, over = table.select_by, table.select_over
    rounds = sorted(table.where(split=split).by("round").items())
    values = {round: numbers.value(metric=by, over=over) for round, numbers in rounds}
    return {r: preferred(v, by) for r, v in values.items() if v is not None and not math.isnan(v)}


def best_round(table: NumberTable, split: str) -> int | None:
    """Returns the round with the best validation on a split (``select_by``, ``select_over``).

    The first of the best; the untrained model only if there is no other. Rounds count that measured
    most of the domains: without the site of a hard one, a round would seem better than it is.
    """
    scores = preferences(table, split)
    trained = {r: score for r, score in scores.items() if r > 0} or scores
    rounds = table.where(split=split).by("round")
    return max(trained, key=lambda r: (len(rounds[r].domains), trained[r], -r), default=None)


def _of_weights(weights: str, title: str, when: str, needs: str) -> SelectionRule:
    """Returns the rule that selects the named weights after the last round."""
    when = f"by {when}"
    return SelectionRule(weights, title, final_round, weights=weights, when=when, needs=needs)


def _of_validation(name: str, split: str, of: str, needs: str) -> SelectionRule:
    title, when = f"Best {of} validation", f"after the round that is best on {of} validation"
    choose = partial(best_round, split=split)
    needs = f"{needs} on which evaluate.select_by is defined"
    return SelectionRule(name, title, choose, split, when=when, needs=needs)


_A_MEAN: Final = "evaluate.averages or server.averaging, and a round in which the mean has begun"


FINAL: Final = add_rule(
    SelectionRule("final", "Final round", final_round, when="after the final round")
)
SWA_MEAN: Final = add_rule(
    _of_weights(SWA, "Mean of the last rounds", "the mean of the last rounds' models", _A_MEAN)
)
EMA_MEAN: Final = add_rule(
    _of_weights(EMA, "Exponential mean", "the exponential mean of the rounds' models", _A_MEAN)
)
BEST_IN_DOMAIN: Final = add_rule(
    _of_validation(
        "best_in_domain", ID_VAL, "in-domain", "in-domain validation images (data.id_val)"
    )
)
BEST_HELD_OUT: Final = add_rule(
    _of_validation("best_held_out", VAL, "held-out", "a held-out validation domain (hold_out.val)")
)
WISE_FT_RULE: Final = add_rule(
    _of_weights(
        WISE_FT,
        "WiSE-FT",
        "a mix of the final model and the one it began from",
        "server.wise_ft, and the run's last round",
    )
)


def is_same_model(details: Details, which: str, round: int | None) -> bool:
    """Whether a run's details are of the model that a rule chose, of a round; False if unknown."""
    if details.which is None or details.round != round:
        return False
    return SELECTION_RULES.find(details.which).weights == SELECTION_RULES.find(which).weights


def rules_asked(server: Mapping[str, Any]) -> list[SelectionRule]:
    """Returns the rules of a run's default model from its ``server`` settings, the first first."""
    names = [WISE_FT] if str(server.get("wise_ft") or "none") != "none" else []
    names += {str(server.get("averaging"))} & {SWA, EMA}
    return [*map(SELECTION_RULES.find, names), FINAL]
