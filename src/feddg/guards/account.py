"""The account of a run: what its noised releases have cost, and whether it can afford the next.

A row is written before a release is made, and none is ever taken back: a round that was
interrupted, or is done again, has cost what it has cost. So a resumed run goes on counting from the
rows of its folder.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from feddg.errors import BudgetSpent
from feddg.guards.accounting import (
    accountants_epsilon,
    gaussian_epsilon,
    sampled_epsilon,
    together,
)
from feddg.records import PrivacyRow

Unit = Literal["client", "image"]
_ROUNDING = 1 + 1e-6


@dataclass(frozen=True)
class Release:
    """Something noised that is about to leave.

    Attributes:
        message: the kind of message, as the ledger's purposes.
        round: the round it belongs to; 0 before the first.
        clients: whose data is in it.
        noise: deviation over sensitivity; 0 for none.
        unit: what is hidden.
        noised_at: where the noise is added.
        rate: with which probability each client took part, where who did is secret; 1 elsewhere.
        times: how often each client's data is in it.
    """

    message: str
    round: int
    clients: Sequence[int]
    noise: float
    unit: Unit = "client"
    noised_at: Literal["server", "client"] = "server"
    rate: float = 1.0
    times: int = 1


class Account:
    """What a run has spent, by kind of message and unit.

    Args:
        rows: of earlier parts of the run.
        write: keeps a row, so that it is on disk when the call returns.
    """

    def __init__(
        self,
        rows: Iterable[PrivacyRow] = (),
        write: Callable[[PrivacyRow], None] = lambda row: None,
    ) -> None:
        self._write = write
        self._known: dict[tuple[str, Unit], dict[int, list[float]]] = defaultdict(dict)
        self._secret: dict[tuple[str, Unit], list[tuple[float, float]]] = defaultdict(list)
        for row in rows:
            self.enter(row)

    def charge(self, release: Release, delta: float, budget: float | None = None) -> None:
        """Enters a release that is about to be made.

        Args:
            release: it.
            delta: at which epsilon is counted.
            budget: the epsilon that may be spent on releases of this kind and unit; None for any.

        Raises:
            BudgetSpent: it would cost more; nothing is entered, and it must not be made.
        """
        epsilon = self.after(release, delta)
        if budget is not None and epsilon > budget * _ROUNDING:
            raise BudgetSpent(
                f"round {release.round} is not released: with it epsilon would be {epsilon:.4g}, "
                f"and the budget is {budget:g} (at delta {delta:g})"
            )
        once = replace(release, times=1)
        for left in reversed(range(release.times)):
            row = PrivacyRow(
                message=release.message,
                round=release.round,
                clients=list(release.clients),
                unit=release.unit,
                noised_at=release.noised_at,
                noise=release.noise,
                rate=release.rate,
                # Up to the last one the closed form is enough: it is what a resumed run compares.
                epsilon=gaussian_epsilon(self._least_noise(once), delta) if left else epsilon,
                delta=delta,
                budget=budget,
            )
            self._write(row)
            self.enter(row)

    def affords(self, release: Release, delta: float, budget: float | None) -> bool:
        """Whether a release would stay within a budget."""
        return budget is None or self.after(release, delta) <= budget * _ROUNDING

    def after(self, release: Release, delta: float) -> float:
        """Returns the epsilon of all releases of this kind and unit, with this one."""
        key = release.message, release.unit
        if release.rate < 1 or self._secret[key]:
            more = [(release.noise, release.rate)] * release.times
            return sampled_epsilon(tuple(sorted(self._secret[key] + more)), delta)
        return accountants_epsilon(self._least_noise(release), delta)

    def _least_noise(self, release: Release) -> float:
        """Noise of the one release that costs what the client has spent that spent most."""
        known = self._known[release.message, release.unit]
        more_noise = [release.noise] * release.times
        taking_part = {id: known.get(id, []) + more_noise for id in release.clients}
        # What others spent stays; no client may have spent more than is said.
        spent = [together(noises) for noises in (known | taking_part).values()]
        return min(spent, default=math.inf)

    def contradicts(self, row: PrivacyRow) -> bool:
        """Whether a row that comes next says another epsilon than its own noise costs.

        Rows of secret draws are believed: counting each again takes too long.
        """
        key = row.message, row.unit
        if row.rate < 1 or self._secret[key]:
            return not 0 <= row.rate <= 1
        release = Release(row.message, row.round, row.clients, row.noise, row.unit)
        exact = gaussian_epsilon(self._least_noise(release), row.delta)
        return not (exact == row.epsilon or math.isclose(exact, row.epsilon, rel_tol=0.01))

    def enter(self, row: PrivacyRow) -> None:
        """Enters a row that is kept already."""
        key = row.message, row.unit
        if row.rate < 1:
            self._secret[key].append((row.noise, row.rate))
            return
        for id in row.clients:
            self._known[key].setdefault(id, []).append(row.noise)
