"""Statistics over held-out domains and seeds, as pure functions.

Intervals that stand beside a difference between methods are each about something else. The one
over *domains* says what other domains like these would give: seeds are averaged first, so that one
domain is one value. A claim about methods rests on it. The one over *seeds on these domains* says
what other seeds would give here: domains are averaged first. Domains differ much more than seeds,
and to take their product as so many independent pairs gives intervals that are far too narrow.
Domains of one data set may resemble each other; so over several data sets a third interval takes
each as one value.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from feddg.evaluation.metrics import student
from feddg.runs.intervals import holm
from feddg.settings import grouped

CONFIDENCE = 0.95
LEAST = 3
"""Fewest values for an interval: with two, Student's t is 12.7 standard errors, and two equal
values would seem certain.
"""
NO_SPREAD = 1e-6
"""Differences closer than this are equal up to rounding: files have seven digits."""
Key = tuple[str, int]
"""A column (what is held out, and conditions) and a seed, by which two methods are paired."""
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
class Interval:
    """A mean of independent values with Student's t interval (95 %, two-sided).

    Attributes:
        mean: the mean; NaN of no values.
        reach: half the interval's width; None if no interval is claimed: of fewer than ``LEAST``
            values, or if all are equal, which tells nothing about their spread.
        p: the p-value of a mean of zero (t test, two-sided), likewise.
        count: number of values.
    """

    mean: float
    reach: float | None
    p: float | None
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> "Interval":
        """Returns the interval for the mean of independent values."""
        array = np.array(list(values))
        mean, count = float(array.mean()) if len(array) else math.nan, len(array)
        if count < LEAST or np.ptp(array) <= NO_SPREAD:
            return cls(mean, None, None, count)
        from scipy.special import stdtr  # scipy.stats takes half a second to import

        error = float(array.std(ddof=1)) / math.sqrt(count)
        reach = student(count - 1, CONFIDENCE) * error
        return cls(mean, reach, float(2 * stdtr(count - 1, -abs(mean) / error)), count)

    @property
    def low(self) -> float | None:
        """The interval's lower end, if there is an interval."""
        return None if self.reach is None else self.mean - self.reach

    @property
    def high(self) -> float | None:
        """The interval's upper end, if there is an interval."""
        return None if self.reach is None else self.mean + self.reach

    @property
    def excludes_zero(self) -> bool:
        """Whether there is an interval, and zero is not in it."""
        return self.reach is not None and abs(self.mean) > self.reach


@dataclass(frozen=True)
class Margin:
    """How much better one method is than another, paired by column and seed.

    Attributes:
        domains: the mean over domains, each the mean of its own pairs, with the interval over
            domains. It is the margin's mean.
        seeds: the mean over the seeds that every common column has, each the mean of its domains,
            with the interval over seeds on these domains.
        p: the p-value over domains, corrected for the number of methods in the table where there
            are several (see :func:`margins`).
        by_domain: the difference on each domain, of which ``domains`` is the mean.
        collections: the mean over data sets, each the mean of its domains, with the interval over
            data sets; of no values unless there are several.
        comparisons: for how many comparisons ``p`` is corrected.
        other: the label of the other method, where the methods have labels.
    """

    domains: Interval
    seeds: Interval
    p: float | None
    by_domain: Mapping[str, float]
    collections: Interval = Interval(math.nan, None, None, 0)
    comparisons: int = 1
    other: str = ""

    @property
    def mean(self) -> float:
        """The mean difference: the mean over domains."""
        return self.domains.mean

    @property
    def detectable(self) -> float | None:
        """The true difference that is claimed with probability one half; None without interval.

        That is the least mean that Holm's first step claims, where domains differ as much as here:
        Student's t at 5 % divided by the number of comparisons (Bonferroni), times the standard
        error. Means fall symmetrically around the true difference, whatever the standard error, so
        half of them reach it. Whatever else is claimed first only makes it more.
        """
        if self.domains.reach is None:
            return None
        freedom = self.domains.count - 1
        corrected = student(freedom, 1 - (1 - CONFIDENCE) / self.comparisons)
        return self.domains.reach * corrected / student(freedom, CONFIDENCE)

    @property
    def decided(self) -> bool:
        """Whether a lead may be claimed: over domains, corrected for the number of methods."""
        return self.p is not None and self.p < 1 - CONFIDENCE


def spread(values: Iterable[float]) -> Spread | None:
    """Returns mean and standard deviation; None without values."""
    numbers = list(values)
    if not numbers:
        return None
    deviation = float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None
    return Spread(fmean(numbers), deviation, len(numbers))


def average_over_columns(accuracies: Accuracies, columns: Sequence[str]) -> Spread | None:
    """Returns the average over columns, with its standard deviation over seeds.

    Only seeds with every column count, because means over fewer columns are not comparable.
    """
    return spread(by_seed(accuracies, columns).values())


def by_seed(accuracies: Accuracies, columns: Sequence[str]) -> dict[int, float]:
    """Returns the mean over columns of every seed that has them all."""
    return {
        seed: fmean(accuracies[column, seed] for column in columns)
        for seed in dict.fromkeys(seed for _, seed in accuracies)
        if all((column, seed) in accuracies for column in columns)
    }


def paired_margin(
    ours: Accuracies,
    theirs: Accuracies,
    domains: Mapping[str, str],
    collections: Mapping[str, str] | None = None,
) -> Margin | None:
    """Returns how much better ``ours`` is than ``theirs``, over common columns and seeds.

    Columns of one domain that differ in a condition (heterogeneity, number of clients) are no
    further domains: a domain is the mean over its columns, each the mean over its seeds. A domain
    with fewer seeds than the others counts as much as they do. Over seeds, those count that have
    every common column, and domains weigh the same there.

    Args:
        ours: accuracies by column and seed.
        theirs: those of the other method.
        domains: what is held out, by column.
        collections: the data set of each domain, where there are several data sets.

    Returns:
        The margin, its p-value not yet corrected, or None without a common pair.
    """
    differences = {key: ours[key] - theirs[key] for key in ours if key in theirs}
    if not differences:
        return None
    by_column = grouped((column, value) for (column, _), value in differences.items())
    columns = grouped((domains[column], column) for column in by_column)
    by_domain = {
        domain: fmean(fmean(by_column[column]) for column in own) for domain, own in columns.items()
    }
    over_domains = Interval.of(by_domain.values())
    of = collections or {}
    by_collection = grouped((of[domain], by_domain[domain]) for domain in by_domain if domain in of)
    over_collections = Interval.of(map(fmean, by_collection.values()))
    by_seeds = [by_seed(differences, own) for own in columns.values()]
    seeds = [seed for seed in by_seeds[0] if all(seed in means for means in by_seeds)]
    over_seeds = Interval.of(fmean(means[seed] for means in by_seeds) for seed in seeds)
    return Margin(over_domains, over_seeds, over_domains.p, by_domain, over_collections)


def margins(
    pairs: Mapping[str, tuple[Accuracies, Accuracies]],
    domains: Mapping[str, str],
    collections: Mapping[str, str] | None = None,
) -> dict[str, Margin]:
    """Returns the margins of a table's rows, with p-values for all of them together.

    S. Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of
    Statistics 6, 1979: the chance that any of the leads is claimed wrongly is at most 5 %. Two
    methods that each stand beside the other are one comparison.

    Args:
        pairs: by row, the accuracies of a method and of what it is set beside.
        domains: what is held out, by column.
        collections: the data set of each domain, where there are several data sets.

    Returns:
        The margins by row; a row without a common column and seed has none.
    """
    uncorrected = {
        name: margin
        for name, both in pairs.items()
        if (margin := paired_margin(*both, domains, collections)) is not None
    }
    pair = {name: frozenset(map(id, pairs[name])) for name in uncorrected}
    known = {  # a tie everywhere has no p of its own, and was compared all the same
        pair[name]: 1.0 if margin.p is None else margin.p
        for name, margin in uncorrected.items()
        if margin.p is not None or (margin.domains.count >= LEAST and abs(margin.mean) <= NO_SPREAD)
    }
    corrected = dict(zip(known, holm([*known.values()])))

    def together(name: str, margin: Margin) -> Margin:
        p = None if margin.p is None else corrected[pair[name]]
        return replace(margin, p=p, comparisons=max(1, len(known)))

    return {name: together(name, margin) for name, margin in uncorrected.items()}


def leads(
    results: Mapping[str, Accuracies],
    domains: Mapping[str, str],
    base: str = "",
    collections: Mapping[str, str] | None = None,
) -> dict[str, Margin]:
    """Returns every method's margin over ``base``, or over the best other one; see :func:`margins`.

    Args:
        results: the accuracies of each method.
        domains: what is held out, by column.
        base: the method that all others are set beside; each one's best other method if empty.
        collections: the data set of each domain, where there are several data sets.
    """
    others = {name: base or best_other(name, results) or "" for name in results if name != base}
    pairs = {name: (results[name], results[o]) for name, o in others.items() if o in results}
    found = margins(pairs, domains, collections)
    # A lag behind the best of several, picked as such, is larger than by chance: p is not known.
    picked = not base and len(results) > 2
    return {
        name: replace(one, other=others[name], p=None if picked and one.mean < 0 else one.p)
        for name, one in found.items()
    }


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
    means = {n: math.fsum(v) / most for n, v in shared.items() if len(v) == most > 0}
    return max(means, key=means.__getitem__, default=None)
