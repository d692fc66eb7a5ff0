"""The evaluations of a run, looked up by round, split and domain."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy

from feddg.evaluation.metrics import METRICS, Metric, Predictions, measure
from feddg.records import LAST, EvaluationRow

Aggregate = Callable[[Sequence[EvaluationRow], str], float | None]
"""One number for the domains of a split, from their rows and the name of a metric."""


def _values(rows: Sequence[EvaluationRow], metric: str) -> list[float] | None:
    """A metric of each row, or None unless all have it."""
    found = [row.metric(metric) for row in rows]
    known = [value for value in found if value is not None]
    return known if known and len(known) == len(found) else None


def _domain_mean(rows: Sequence[EvaluationRow], metric: str) -> float | None:
    values = _values(rows, metric)
    return math.fsum(values) / len(values) if values else None


def _worst_domain(rows: Sequence[EvaluationRow], metric: str) -> float | None:
    kind: Metric | None = METRICS.get(metric)
    if kind is not None and kind.higher_is_better is None:
        return None
    values = _values(rows, metric)
    if not values or any(math.isnan(value) for value in values):
        return None
    return min(values) if kind is None or kind.higher_is_better else max(values)


def _pooled(rows: Sequence[EvaluationRow], metric: str) -> float | None:
    images = sum(row.examples for row in rows)
    values = _values(rows, metric)
    if metric == "accuracy":
        total = math.fsum(row.accuracy * row.examples for row in rows)
        return total / images if images else None
    counts = [row.confusion for row in rows if row.confusion is not None]
    if not values or len(counts) < len(rows):
        return None
    together = numpy.sum([numpy.array(count) for count in counts], axis=0)
    return measure(Predictions(together)).get(metric)


AGGREGATES: Final[dict[str, Aggregate]] = {
    "domain_mean": _domain_mean,
    "pooled": _pooled,
    "worst_domain": _worst_domain,
}
"""How the domains of a split become one number, by name.

``domain_mean`` counts each domain once; ``pooled`` counts each image once, as if the split were one
domain; ``worst_domain`` is the domain that does worst. Metrics other than accuracy can be pooled
only where rows hold who was taken for whom (the last round's do) and counts are enough for them.
"""


def preferred(value: float, metric: str) -> float:
    """Returns a value of a metric such that more is better: its sign is changed where less is."""
    kind: Metric | None = METRICS.get(metric)
    return -value if kind is not None and kind.higher_is_better is False else value


class Evaluations:
    """Evaluations, looked up by round, split and domain.

    When the run stopped in the middle of an evaluation, that last round lacks domains which the
    round before it has; it is left out, because a mean over fewer domains would be a different
    quantity.

    They are those of one kind of weights, of the last round's unless :meth:`of` asks for others.

    Args:
        rows: evaluations of any weights.
        weights: those that count.
        select_by: the metric that chooses a round.
        select_over: how a split's domains become one number for that, a name of
            :data:`AGGREGATES`.
    """

    def __init__(
        self,
        rows: Iterable[EvaluationRow],
        weights: str = LAST,
        *,
        select_by: str = "accuracy",
        select_over: str = "domain_mean",
    ) -> None:
        self.select_by, self.select_over = select_by, select_over
        self._rows, self._weights = list(rows), weights
        self._others: dict[str, Evaluations] = {weights: self}
        self._by_round: dict[int, dict[tuple[str, str], EvaluationRow]] = {}
        for row in self._rows:
            if row.weights == weights:
                self._by_round.setdefault(row.round, {})[row.split, row.domain] = row
        self.rounds: list[int] = sorted(self._by_round)
        self._drop_unfinished_round()

    def _drop_unfinished_round(self) -> None:
        if len(self.rounds) < 2:
            return
        before, last = (self._by_round[round_].keys() for round_ in self.rounds[-2:])
        if not before <= last:
            self._by_round.pop(self.rounds.pop())

    def of(self, weights: str) -> "Evaluations":
        """The evaluations of other weights: ``last``, ``tail``, ``ema``, ``interpolated``.

        Only whole rounds: those in which all was measured that was measured of the last weights.
        """
        if weights not in self._others:
            found = Evaluations(
                self._rows, weights, select_by=self.select_by, select_over=self.select_over
            )
            if weights != LAST:
                found._keep_rounds_as_whole_as(self.of(LAST))
            found._others = self._others
            self._others[weights] = found
        return self._others[weights]

    def _keep_rounds_as_whole_as(self, others: "Evaluations") -> None:
        for round_ in self.rounds:
            wanted = others._by_round.get(round_)
            if wanted is None or not wanted.keys() <= self._by_round[round_].keys():
                del self._by_round[round_]
        self.rounds = sorted(self._by_round)

    def domains(self, split: str) -> list[str]:
        """Names of the domains evaluated in a split, in the order of writing."""
        names = (
            domain for rows in self._by_round.values() for part, domain in rows if part == split
        )
        return list(dict.fromkeys(names))

    def get(self, round_: int, split: str, domain: str) -> EvaluationRow | None:
        """The evaluation of one domain after one round, or None if there is none."""
        return self._by_round.get(round_, {}).get((split, domain))

    def at(self, round_: int, split: str) -> list[EvaluationRow]:
        """The evaluations of a split after one round, one per domain."""
        rows = self._by_round.get(round_, {})
        return [row for (part, _), row in rows.items() if part == split]

    def accuracy(self, round_: int | None, split: str) -> float | None:
        """Accuracy of a split after one round: the mean over its domains, each counted once."""
        return self.value(round_, split)

    def value(
        self,
        round_: int | None,
        split: str,
        metric: str = "accuracy",
        aggregate: str = "domain_mean",
    ) -> float | None:
        """A metric of a split after one round, over its domains; None where it is not known.

        Args:
            round_: the round; None for none.
            split: one of ``SPLITS``.
            metric: a name of :data:`feddg.evaluation.metrics.METRICS`.
            aggregate: a name of :data:`AGGREGATES`.
        """
        rows = self.at(round_, split) if round_ is not None else []
        return AGGREGATES[aggregate](rows, metric) if rows else None

    def preference(self, round_: int, split: str) -> float | None:
        """How much a round is preferred by what chooses rounds; None where that is not known.

        The metric ``select_by`` of the split, over its domains as ``select_over`` says, with its
        sign changed where less is better.
        """
        value = self.score(round_, split)
        return None if value is None or math.isnan(value) else preferred(value, self.select_by)

    def score(self, round_: int | None, split: str) -> float | None:
        """The metric ``select_by`` of a split after a round, over its domains; None if unknown."""
        return self.value(round_, split, self.select_by, self.select_over)

    def metrics(self, split: str) -> list[str]:
        """Names of the metrics that a split's evaluations hold, in the order of tables."""
        rows = (row for r in self.rounds for row in self.at(r, split))
        found = {"accuracy", *(name for row in rows for name in row.metrics)}
        return [name for name in METRICS if name in found] + sorted(found - METRICS.keys())

    def support(self, split: str, domain: str) -> list[int] | None:
        """Images of each class in a domain of a split; None before the last round counted them."""
        for round_ in reversed(self.rounds):
            row = self.get(round_, split, domain)
            if row is not None and row.support is not None:
                return row.support
        return None
