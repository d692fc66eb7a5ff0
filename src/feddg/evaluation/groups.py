"""Images in groups, such as a patient's, are not independent: how much they tell of a mean."""

import math
import statistics
from typing import Final

import numpy

from feddg.evaluation.metrics import student

LEVEL: Final = 0.95
"""How often an interval should contain the truth."""
Z: Final = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2)
"""Half the width of such an interval of a normal distribution, in standard deviations."""


def variance_of_sum(values: numpy.ndarray, groups: numpy.ndarray | None) -> tuple[float, float]:
    """Returns the variance of a sum over whole groups, or over images, and its degrees of freedom.

    A group pulls the mean towards itself by its share of the images, and its residual is widened by
    that: the estimate "CR2" of Bell and McCaffrey (2002, Survey Methodology 28). Of groups of equal
    size it is Cochran's (1977, "Sampling Techniques", section 11.3). A single group gives inf and
    0.
    """
    off, each = values - values.mean(), numpy.ones(len(values))
    group_of, number = numbered(groups, len(values))
    sums, sizes = (numpy.bincount(group_of, part, number) for part in (off, each))
    if len(sums) < 2:
        return math.inf, 0.0
    return float(sums**2 @ (1 / (1 - sizes / len(values)))), freedom_of(sizes)


def freedom_of(sizes: numpy.ndarray) -> float:
    """Returns the degrees of freedom of a variance over groups, see :func:`variance_of_sum`.

    Satterthwaite's, for images that are independent; of equal groups, their number less one.

    Args:
        sizes: ``(g,)`` images of each group; at least two groups.
    """
    whole = sizes.sum()
    shared = sizes**2 / (whole - sizes)
    return float(whole**2 / ((sizes**2).sum() + shared.sum() ** 2 - (shared**2).sum()))


def effective_number(values: numpy.ndarray, groups: numpy.ndarray | None) -> float:
    """Returns how many independent images would tell as much of a mean as these do.

    The variance of a mean over whole groups beside that over images, corrected for few groups (Korn
    and Graubard 1998, "Confidence intervals for proportions with small expected number of positive
    counts"); a large group among small ones counts as few groups, too.

    Args:
        values: ``(n,)`` a number of each image, such as 1 where it is classified correctly.
        groups: ``(n,)`` the group of each image, any integers; None if images are independent.

    Returns:
        Between 1 and n. Where all values are equal, the number of groups, so corrected.
    """
    count = len(values)
    if groups is None or not count:
        return float(count)
    variance, freedom = variance_of_sum(values, groups)
    if not freedom:
        return 1.0
    off = values - values.mean()
    variance /= count**2
    alone = float(off @ off) / count
    equal = variance <= 0 or alone < 1e-24  # but for rounding
    independent = freedom + 1 if equal else alone / variance
    few = (Z / student(freedom, LEVEL)) ** 2
    return min(float(count), max(1.0, independent * few))


def numbered(groups: numpy.ndarray | None, images: int) -> tuple[numpy.ndarray, int]:
    """Returns each image's group, from 0, and their number; without groups, each has its own."""
    named = numpy.arange(images) if groups is None else groups
    names, numbers = numpy.unique(named, return_inverse=True)
    return numbers, len(names)
