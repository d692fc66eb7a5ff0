"""Statistics over seeds and scenarios, as pure functions."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
LEAST_PAIRS = 3
"""Fewest pairs for an interval: with two, Student's t is 12.7 standard errors, and two equal pairs
would seem certain.
"""
NO_SPREAD = 1e-9
"""Differences closer than this are equal up to rounding."""
Key = tuple[str, int]
"""A column (scenario and conditions) and a seed, by which two methods are paired."""
Accuracies = Mapping[Key, float]


@dataclass(frozen=True)
class Spread:
    """A mean with its standard deviation over seeds.

    Attributes:
        mean: the mean.
        deviation: the sample standard deviation (divided by n - 1); None for a single value.
        count: number of values.
    """

    mean: float
    deviation: float | None
    count: int


@dataclass(frozen=True)
class Margin:
    """The mean difference between two methods over pairs, with a confidence interval.

    Attributes:
        mean: mean difference.
        low: lower end of the interval; None if there is none: with fewer than ``LEAST_PAIRS``
            pairs, or if all differences are equal, which tells nothing about their spread.
        high: upper end, likewise.
        pairs: number of pairs.
    """

    mean: float
    low: float | None
    high: float | None
    pairs: int

    @property
    def decided(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low is not None and self.high is not None and self.low * self.high > 0

    @property
    def why_no_interval(self) -> str:
        """The reason why there is no interval, in a few words; empty if there is one."""
        if self.low is not None:
            return ""
        if self.pairs < LEAST_PAIRS:
            return "one pair only" if self.pairs == 1 else f"only {self.pairs} pairs"
        return "all differences equal"


def spread(values: Iterable[float]) -> Spread | None:
    """Returns mean and standard deviation; None without values."""
    numbers = list(values)
    if not numbers:
        return None
    deviation = float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None
    return Spread(math.fsum(numbers) / len(numbers), deviation, len(numbers))


def average_over_columns(accuracies: Accuracies, columns: Sequence[str]) -> Spread | None:
    """Returns the average over columns, with its standard deviation over seeds.

    Only seeds with every column count, because means over fewer columns are not comparable.
    """
    seeds = dict.fromkeys(seed for _, seed in accuracies)
    return spread(
        math.fsum(accuracies[column, seed] for column in columns) / len(columns)
        for seed in seeds
        if all((column, seed) in accuracies for column in columns)
    )


def paired_margin(ours: Accuracies, theirs: Accuracies) -> Margin | None:
    """Returns how much better ``ours`` is than ``theirs``, over common columns and seeds.

    The interval is Student's t for the mean of paired differences (two-sided, 95 %), each column
    and seed one pair. It tells how far the margin may change with other seeds and scenarios like
    these, not with other data sets.

    Returns:
        The margin, or None without a common pair.
    """
    return mean_interval(ours[key] - theirs[key] for key in ours if key in theirs)


def mean_interval(values: Iterable[float]) -> Margin | None:
    """Returns the mean of values with Student's t interval (95 %, two-sided); None if empty."""
    found = np.array(list(values))
    count = len(found)
    if not count:
        return None
    mean = float(found.mean())
    if count < LEAST_PAIRS or np.ptp(found) <= NO_SPREAD:
        return Margin(mean, None, None, count)
    from scipy import stats  # half a second

    error = float(found.std(ddof=1)) / math.sqrt(count)
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * error
    return Margin(mean, mean - reach, mean + reach, count)


def best_other(method: str, results: Mapping[str, Accuracies]) -> str | None:
    """Returns the other method with the best mean over the pairs it shares with this one.

    Only methods that share the largest number of pairs with ``method`` are considered.
    """
    ours = results[method]
    shared = {
        name: [theirs[key] for key in theirs if key in ours]
        for name, theirs in results.items()
        if name != method
    }
    most = max(map(len, shared.values()), default=0)
    means = {
        name: math.fsum(values) / most for name, values in shared.items() if len(values) == most > 0
    }
    return max(means, key=lambda name: means[name], default=None)


def ranks(results: Mapping[str, Accuracies]) -> dict[str, dict[Key, float]]:
    """Returns every method's rank, 1 for the best, per column and seed that all methods have.

    Tied methods get the mean of their ranks.
    """
    names = list(results)
    if not names:
        return {}
    keys = [key for key in results[names[0]] if all(key in results[name] for name in names)]
    from scipy import stats

    ranked: dict[str, dict[Key, float]] = {name: {} for name in names}
    for key in keys:
        places = stats.rankdata([-results[name][key] for name in names])
        for name, place in zip(names, places):
            ranked[name][key] = float(place)
    return ranked
