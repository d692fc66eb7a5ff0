"""The evaluations of a run, looked up by round, split and domain."""

import math
from collections.abc import Iterable

from feddg.rows import LAST, EvaluationRow


class Evaluations:
    """Evaluations, looked up by round, split and domain.

    When the run stopped in the middle of an evaluation, that last round lacks domains which the
    round before it has; it is left out, because a mean over fewer domains would be a different
    quantity.

    They are those of one kind of weights, of the last round's unless :meth:`of` asks for others.

    Args:
        rows: evaluations of any weights.
        weights: those that count.
    """

    def __init__(self, rows: Iterable[EvaluationRow], weights: str = LAST) -> None:
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
            whole = self if self._weights == LAST else self.of(LAST)
            found = Evaluations(self._rows, weights)
            found._keep_rounds_as_whole_as(whole)
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
        rows = self.at(round_, split) if round_ is not None else []
        if not rows:
            return None
        return math.fsum(row.accuracy for row in rows) / len(rows)
