"""Privacy accounting: epsilon of releases with Gaussian noise, and the account of a run."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from feddg.diagnostics import warn
from feddg.errors import BudgetSpent, ExperimentError, RunError
from feddg.privacy.defence import RowsFolder
from feddg.records import PRIVACY, PRIVACY_ROWS, PrivacyRow
from feddg.settings import PrivacySettings

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


@cache
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
    """

    def __init__(self, write: Callable[[PrivacyRow], None] = lambda row: None) -> None:
        self._write = write
        self._known: dict[tuple[str, Unit], dict[int, list[float]]] = defaultdict(dict)
        self._secret: dict[tuple[str, Unit], list[tuple[float, float]]] = defaultdict(list)

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
        """Returns the single noise that costs as much as the client charged most has spent."""
        spent_before = self._known[release.message, release.unit]
        more_noise = [release.noise] * release.times
        taking_part = {id: spent_before.get(id, []) + more_noise for id in release.clients}
        # What others spent stays; no client may have spent more than is said.
        spent = [together(noises) for noises in (spent_before | taking_part).values()]
        return min(spent, default=math.inf)

    def enter(self, row: PrivacyRow) -> None:
        """Adds a row that is already stored."""
        key = row.message, row.unit
        if row.rate < 1:
            self._secret[key].append((row.noise, row.rate))
            return
        for id in row.clients:
            self._known[key].setdefault(id, []).append(row.noise)


def open_account(folder: RowsFolder, rounds: int, *, every_round: bool) -> Account:
    """Returns the account of a run, continued from the rows in its folder.

    Args:
        folder: the run's.
        rounds: completed rounds in the checkpoint.
        every_round: whether each of them must have cost something.

    Raises:
        RunError: the privacy cost of a round was lost, or a row is damaged.
    """
    path, rows = folder.path / PRIVACY, PRIVACY_ROWS.read(folder.path / PRIVACY)
    if rows:
        folder.replace_rows(PRIVACY, rows)  # without a line that was cut off
    account = Account(write=lambda row: folder.append(PRIVACY, [row]))
    missing = set(range(1, rounds + 1)) - {row.round for row in rows if row.message == "update"}
    if every_round and missing:
        raise RunError(
            f"{path} lacks round {min(missing)}: what was spent on it is not known, so nothing "
            "more can be promised; put the file back, or begin a new run"
        )
    for row in rows:
        account.enter(row)
    return account


def require_meaning(privacy: PrivacySettings, clients: int) -> None:
    """Warns about an epsilon that protects nothing; refuses styles that would be only noise.

    Args:
        privacy: the settings.
        clients: number of clients.

    Raises:
        ExperimentError: a style would be only noise; the message says which epsilon is possible.
    """
    epsilons = {
        name: value
        for name in ("epsilon", "style_epsilon", "record_epsilon")
        if (value := getattr(privacy, name)) is not None
    }
    for name, epsilon in epsilons.items():
        if epsilon > WEAKEST:
            warn(
                "epsilon-too-large",
                f"privacy.{name} {epsilon:g} protects nothing.",
                "Choose 1 for strong, 8 for weak protection.",
            )
    if epsilons and privacy.delta * clients >= 1:
        warn(
            "delta-too-large",
            f"delta {privacy.delta:g} allows one of {clients} clients to be given away.",
            f"Set privacy.delta below {1 / clients:g}.",
        )
    if privacy.style_epsilon is not None:
        noise = gaussian_noise(privacy.style_epsilon, privacy.delta)
        least = gaussian_epsilon(MOST_STYLE_NOISE, privacy.delta)
        require_bearable("style_epsilon", privacy.style_epsilon, noise, least, MOST_STYLE_NOISE)


def require_bearable(
    name: str, epsilon: float, noise: float, least: float, most: float = MOST_NOISE
) -> None:
    """Raises ExperimentError if an epsilon needs so much noise that nothing is left.

    Args:
        name: the field of ``privacy``.
        epsilon: the requested value.
        noise: the noise it needs, over the sensitivity.
        least: the smallest possible epsilon.
        most: the largest useful noise.
    """
    if noise > most:
        raise ExperimentError(
            f"privacy.{name} {epsilon:g} would need noise of {noise:.3g} times the norm, under "
            f"which nothing is learned; {least:.2g} is the least that can be met"
        )


def require_afforded(privacy: PrivacySettings, once: float) -> None:
    """Raises ExperimentError if a single round, which costs ``once``, exceeds epsilon."""
    if privacy.epsilon is not None and once > privacy.epsilon:
        raise ExperimentError(
            f"privacy.epsilon {privacy.epsilon:g} cannot be met with noise_multiplier "
            f"{privacy.noise_multiplier:g}: one round costs {once:.4g}. Set epsilon to at "
            f"least {once * 1.0005:.4g}, or leave out noise_multiplier: it is chosen then"
        )
