"""Privacy accounting: epsilon of releases with Gaussian noise, and the account of a run."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from feddg.diagnostics import Diagnostic, warn, warning
from feddg.errors import BudgetSpent, ExperimentError
from feddg.records import PRIVACY, PRIVACY_ROWS, PrivacyRow
from feddg.settings import PrivacySettings, grouped

MOST_NOISE = 1e4
"""Largest noise, as a multiple of the sensitivity; with more a release says nothing."""
_DIGITS = 4
_FINEST, _RELATIVE = 1e-4, 2.5e-5
"""Grid step of the privacy-loss distribution: absolute, and as a share of epsilon."""
_ROUNDING = 1 + 1e-6
WEAKEST = 50.0
"""An epsilon above this protects nothing: an output may be e^50 times as likely."""
MOST_STYLE_NOISE = 1e3
"""Noise above this multiple of the sensitivity hides even a style of thousands of images."""


@cache
def gaussian_epsilon(noise: float, delta: float) -> float:
    """Returns the exact epsilon of one release at a delta (Balle and Wang, Theorem 8).

    Infinite without noise; 0 for infinite noise, which is no release.
    """
    from dp_accounting import get_epsilon_gaussian  # it takes seconds, here as below

    return float(get_epsilon_gaussian(noise, delta))


@cache
def gaussian_noise(epsilon: float, delta: float) -> float:
    """Returns the smallest noise of one release with at most ``epsilon`` at ``delta``."""
    from dp_accounting import get_sigma_gaussian

    return float(get_sigma_gaussian(epsilon, delta))


def together(noises: Sequence[float]) -> float:
    """Returns the noise of a single release that costs a client as much as several together.

    0 if one of them had no noise; infinite if there are no releases.
    """
    if any(noise <= 0 for noise in noises):
        return 0.0
    total = math.fsum(noise**-2 for noise in noises)
    return total**-0.5 if total else math.inf


def accountants_epsilon(noise: float, delta: float) -> float:
    """Returns the epsilon of one release at a delta, computed by dp-accounting.

    This is the reported value: an upper bound that exceeds :func:`gaussian_epsilon` in the fourth
    digit.
    """
    return sampled_epsilon(((noise, 1.0),), delta)


@cache
def sampled_epsilon(releases: tuple[tuple[float, float], ...], delta: float) -> float:
    """Returns the epsilon of releases with secret (Poisson) sampling, by dp-accounting.

    Args:
        releases: noise and participation probability of each release.
        delta: above 0.

    Returns:
        An upper bound, within 0.1 % of the exact value. Infinite if a release has no noise.
    """
    # Losses are counted on a grid. What public draws cost says how wide it may be at first; the
    # epsilon found on it, how fine it must be.
    bound = gaussian_epsilon(together([noise for noise, _ in releases]), delta)
    while 0 < bound < math.inf:
        epsilon = _by_distributions(releases, delta, max(_FINEST, _RELATIVE * bound))
        if epsilon > bound / 4 or _RELATIVE * bound <= _FINEST:
            return epsilon
        bound = epsilon
    return bound


@cache
def sampled_noise(epsilon: float, delta: float, rate: float, rounds: int) -> float:
    """Returns the noise with which ``rounds`` releases with secret sampling cost ``epsilon``.

    Rounded up.
    """
    from scipy.optimize import brentq

    def excess(logarithm: float) -> float:
        reached = sampled_epsilon(((math.exp(logarithm), rate),) * rounds, delta)
        return math.log(min(max(reached, 1e-9), 1e9) / epsilon)

    # All clients in every round need no less.
    low = math.log(gaussian_noise(epsilon, delta) * math.sqrt(rounds) * 1.01)
    while excess(low) <= 0:
        low -= 1
    return rounded_up(math.exp(brentq(excess, low, low + 1, xtol=1e-3) + 1e-3))


def rounded_up(noise: float) -> float:
    """Returns the noise rounded up to four digits, to allow for rounding in the accountant."""
    enough = noise * (1 + 5e-4)
    unit = 10.0 ** (math.floor(math.log10(enough)) - _DIGITS + 1)
    return float(f"{math.ceil(enough / unit) * unit:.{_DIGITS}g}")


def _by_distributions(
    releases: Sequence[tuple[float, float]], delta: float, interval: float
) -> float:
    import dp_accounting
    from dp_accounting import pld

    accountant = pld.PLDAccountant(value_discretization_interval=interval)
    for (noise, rate), times in Counter(releases).items():
        event: object = dp_accounting.GaussianDpEvent(noise)
        if rate < 1:
            event = dp_accounting.PoissonSampledDpEvent(rate, event)
        accountant.compose(event, times)
    return float(accountant.get_epsilon(delta))


# The account of a run: what its noised releases have cost, and whether it can afford the next.
#
# A row is written before a release is made, and none is ever taken back: a round that was
# interrupted, or is done again, has cost what it has cost. So a resumed run goes on counting from
# the rows of its folder.


Unit = Literal["client", "image"]


@dataclass(frozen=True)
class Release:
    """A noised message that is about to be released.

    Attributes:
        message: the kind of message, as in the ledger.
        round: the round it belongs to; 0 before the first.
        clients: ids of the clients whose data it contains.
        noise: standard deviation over sensitivity; 0 for none.
        unit: what is protected.
        noised_at: where the noise is added.
        rate: probability that a client took part, if participation is secret; otherwise 1.
        times: how often each client's data is used in it.
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
    """The privacy cost of a run so far, by kind of message and unit.

    Args:
        write: stores a row; it is on disk when the call returns.
        rows: those that are stored already.
    """

    def __init__(
        self,
        write: Callable[[PrivacyRow], None] = lambda row: None,
        rows: Sequence[PrivacyRow] = (),
    ) -> None:
        self._write, self._rows = write, [*rows]

    def charge(self, release: Release, delta: float, budget: float | None = None) -> None:
        """Records a release before it is made.

        Args:
            release: the release.
            delta: the delta at which epsilon is computed.
            budget: largest total epsilon for this kind and unit; None for no limit.

        Raises:
            BudgetSpent: it would exceed the budget; nothing is recorded, and the release must not
                be made.
        """
        epsilon = self.after(release, delta)
        if budget is not None and epsilon > budget * _ROUNDING:
            raise BudgetSpent(
                f"round {release.round} is not released: with it epsilon would be {epsilon:.4g}, "
                f"and the budget is {budget:g} (at delta {delta:g})"
            )
        fields = vars(release) | {"clients": list(release.clients), "delta": delta}
        row = PrivacyRow(**fields, epsilon=epsilon, budget=budget)
        for _ in range(release.times):
            self._write(row)
            self._rows.append(row)

    def lacks(self, rounds: int) -> set[int]:
        """Returns which of the first rounds have no row for their updates."""
        known = {row.round for row in self._rows if row.message == "update"}
        return set(range(1, rounds + 1)) - known

    def affords(self, release: Release, delta: float, budget: float | None) -> bool:
        """Whether a release would stay within a budget."""
        return budget is None or self.after(release, delta) <= budget * _ROUNDING

    def after(self, release: Release, delta: float) -> float:
        """Returns the epsilon of all releases of this kind and unit, with this one."""
        kind = release.message, release.unit
        before = [row for row in self._rows if (row.message, row.unit) == kind]
        releases: list[PrivacyRow | Release] = [*before, *[release] * release.times]
        if any(one.rate < 1 for one in releases):
            return sampled_epsilon(tuple(sorted((r.noise, r.rate) for r in releases)), delta)
        spent = grouped((id, one.noise) for one in releases for id in one.clients)
        # No client may have spent more than is said, also of those that are not in this one.
        return accountants_epsilon(min(map(together, spent.values()), default=math.inf), delta)


def open_account(folder: Any) -> Account:
    """Returns the account of a run, continued from the rows in its folder.

    Args:
        folder: the run's, see :meth:`feddg.privacy.defence.Defence.keep_in`.

    Raises:
        RunError: a row is damaged.
    """
    rows = PRIVACY_ROWS.read(folder.path / PRIVACY)
    if rows:
        folder.replace_rows(PRIVACY, rows)  # without a line that was cut off
    return Account(lambda row: folder.append(PRIVACY, [row]), rows)


def require_meaning(privacy: PrivacySettings) -> None:
    """Warns about an epsilon that protects nothing."""
    for name in ("epsilon", "style_epsilon", "record_epsilon"):
        epsilon = getattr(privacy, name)
        if epsilon is not None and epsilon > WEAKEST:
            warn(
                "epsilon-too-large",
                f"privacy.{name} {epsilon:g} protects nothing.",
                "Choose 1 for strong, 8 for weak protection.",
            )


def about_delta(privacy: PrivacySettings, sizes: Sequence[int]) -> Iterator[Diagnostic]:
    """Warns of a delta that allows somebody to be given away whom an epsilon is to protect.

    Args:
        privacy: the settings.
        sizes: the number of images of each client.
    """
    protected: dict[str, int] = {}
    if privacy.epsilon is not None or (privacy.style_epsilon and privacy.style_unit == "client"):
        protected["clients"] = len(sizes)
    if privacy.hides_images:
        protected["images"] = sum(sizes)
    for whom, number in protected.items():
        if privacy.delta * number >= 1:
            text = f"delta {privacy.delta:g} allows one of {number} {whom} to be given away."
            yield warning("delta-too-large", text, f"Set privacy.delta below {1 / number:.1g}.")


def bearable_noise(
    privacy: PrivacySettings,
    name: str,
    releases: int = 1,
    sensitivity: int = 1,
    most: float = MOST_NOISE,
) -> float:
    """Returns the noise with which several releases together meet an epsilon, rounded up.

    Args:
        privacy: the settings.
        name: its field with the epsilon.
        releases: how many releases have data of the same client or image.
        sensitivity: the distance between neighbouring data sets, in norms.
        most: the largest useful noise.

    Raises:
        ExperimentError: under it nothing is left; the message says which epsilon is possible.
    """
    epsilon, delta = getattr(privacy, name), privacy.delta
    noise = rounded_up(gaussian_noise(epsilon, delta) * math.sqrt(releases) * sensitivity)
    if noise > most:
        least = gaussian_epsilon(most / math.sqrt(releases), delta)
        raise ExperimentError(
            f"privacy.{name} {epsilon:g} would need noise of {noise:.3g} times the norm, under "
            f"which nothing is learned; {least:.2g} is the least that can be met"
        )
    return noise
