"""What releases with Gaussian noise cost: epsilon at a delta, and the noise that an epsilon needs.

Noise is said as a multiple of the sensitivity. Two ways to count:

- *who takes part is known* (our draws come from the experiment's seed, which every client has):
  nothing is gained by the draw. A client pays for the rounds it takes part in, and only for them,
  since who does is drawn without looking at the data. Releases with noise z_1, z_2, ... cost what
  one with ``(sum z_i^-2)^(-1/2)`` costs (Dong, Roth and Su, "Gaussian Differential Privacy", 2022,
  Corollary 3.3), and that is known exactly (Balle and Wang, "Improving the Gaussian Mechanism for
  Differential Privacy", ICML 2018, Theorem 8)::

      delta(epsilon) = F(1/(2z) - epsilon z) - e^epsilon F(-1/(2z) - epsilon z)

- *who takes part is secret* (every client by itself with probability q, Poisson sampling): the draw
  hides, too. No closed form; privacy loss distributions of ``dp-accounting`` (Google), whose
  discretisation errs to the safe side.

A draw of a fixed number without replacement is never credited: a client in the round stands in
for another one, so that a round differs by two clients' updates, twice the sensitivity.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from scipy.special import log_ndtr

MOST_NOISE = 1e4
"""Beyond this multiple of the sensitivity nobody would learn anything from a release."""
_DIGITS = 4
_COUNTED = 200.0
"""Epsilon up to which losses are counted one by one; a larger one would not fit into memory."""


def gaussian_delta(epsilon: float, noise: float) -> float:
    """Returns the delta of one release at an epsilon, exactly (Balle and Wang, Theorem 8).

    Args:
        epsilon: 0 or above.
        noise: deviation over sensitivity, above 0.
    """
    near, far = 1 / (2 * noise) - epsilon * noise, -1 / (2 * noise) - epsilon * noise
    # e^epsilon overflows long before the product does.
    return float(math.exp(log_ndtr(near)) - math.exp(min(0.0, epsilon + log_ndtr(far))))


@cache
def gaussian_epsilon(noise: float, delta: float) -> float:
    """Returns the epsilon of one release at a delta, exactly; infinite without noise.

    Infinite noise, that of no release at all, costs nothing.
    """
    if noise <= 0:
        return math.inf
    if math.isinf(noise) or gaussian_delta(0.0, noise) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while gaussian_delta(high, noise) > delta:
        high *= 2
    return _bisected(lambda epsilon: gaussian_delta(epsilon, noise) <= delta, low, high)


@cache
def gaussian_noise(epsilon: float, delta: float) -> float:
    """Returns the least noise of one release that costs no more than ``epsilon`` at ``delta``."""
    high = 1.0
    while gaussian_delta(epsilon, high) > delta:
        high *= 2
    return _bisected(lambda noise: gaussian_delta(epsilon, noise) <= delta, 0.0, high)


def together(noises: Sequence[float]) -> float:
    """Returns the noise of the one release that costs what several cost a client.

    0 where one of them had none; infinite where there are none.
    """
    if any(noise <= 0 for noise in noises):
        return 0.0
    total = math.fsum(noise**-2 for noise in noises)
    return total**-0.5 if total else math.inf


@cache
def accountants_epsilon(noise: float, delta: float) -> float:
    """Returns the epsilon of one release at a delta, as dp-accounting finds it.

    It is what we report: an upper bound, in the fourth digit above :func:`gaussian_epsilon`, which
    stands in for it where epsilon is so large that it says nothing any more.
    """
    exact = gaussian_epsilon(noise, delta)
    if math.isinf(noise) or exact > _COUNTED:
        return exact
    return _by_distributions([(noise, 1.0)], delta)


@cache
def sampled_epsilon(releases: tuple[tuple[float, float], ...], delta: float) -> float:
    """Returns the epsilon of releases from secret draws (Poisson sampling), by dp-accounting.

    Args:
        releases: noise, and the probability with which a client takes part, of each.
        delta: above 0.

    Returns:
        An upper bound; where it is so large that it says nothing, that of public draws.
    """
    if not releases:
        return 0.0
    public = gaussian_epsilon(together([noise for noise, _ in releases]), delta)
    return public if public > _COUNTED else _by_distributions(releases, delta)


@cache
def sampled_noise(epsilon: float, delta: float, rate: float, rounds: int) -> float:
    """Returns the noise with which so many releases from secret draws cost at most ``epsilon``.

    Three digits are enough: it is rounded up.
    """

    def is_enough(noise: float) -> bool:
        return sampled_epsilon(((noise, rate),) * rounds, delta) <= epsilon

    # All clients in every round need no less.
    high = gaussian_noise(epsilon, delta) * math.sqrt(rounds) * 1.01
    # From above: the less noise, the longer an answer takes.
    while is_enough(high / 1.5):
        high /= 1.5
    return rounded_up(_bisected(is_enough, high / 1.5, high, 2e-3))


def rounded_up(noise: float) -> float:
    """Returns a noise of four digits that is a little larger: room for an accountant's rounding."""
    enough = noise * (1 + 5e-4)
    unit = 10.0 ** (math.floor(math.log10(enough)) - _DIGITS + 1)
    return float(f"{math.ceil(enough / unit) * unit:.{_DIGITS}g}")


def _by_distributions(releases: Sequence[tuple[float, float]], delta: float) -> float:
    # Imported when it is needed: it takes seconds.
    import dp_accounting
    from dp_accounting import pld

    accountant = pld.PLDAccountant()
    for (noise, rate), times in Counter(releases).items():
        event: Any = dp_accounting.GaussianDpEvent(noise)
        if rate < 1:
            event = dp_accounting.PoissonSampledDpEvent(rate, event)
        accountant.compose(event, times)
    return float(accountant.get_epsilon(delta))


def _bisected(
    is_enough: Callable[[float], bool], low: float, high: float, tolerance: float = 1e-10
) -> float:
    """Returns the least value that is enough, to a relative tolerance from above."""
    while high - low > tolerance * high:
        middle = (low + high) / 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high
