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


def variance_of_sum(values: numpy.ndarray, groups: numpy.ndarray | None) -> tuple[float, int]:
    """Returns the variance of a sum over whole groups, or over images, and their number.

    Cochran (1977), "Sampling Techniques", section 11.3, the ratio estimate; inf of a single one.
    """
    sums = values - values.mean()
    if groups is not None:
        sums = numpy.bincount(numbered(groups, len(values))[0], weights=sums)
    number = len(sums)
    return number / (number - 1) * float(sums @ sums) if number > 1 else math.inf, number


def effective_number(values: numpy.ndarray, groups: numpy.ndarray | None) -> float:
    """Returns how many independent images would tell as much of a mean as these do.

    The variance of a mean over whole groups beside that over images, corrected for few groups (Korn
    and Graubard 1998, "Confidence intervals for proportions with small expected number of positive
    counts").

    Args:
        values: ``(n,)`` a number of each image, such as 1 where it is classified correctly.
        groups: ``(n,)`` the group of each image, any integers; None if images are independent.

    Returns:
        Between 1 and n. Where all values are equal, the number of groups, so corrected.
    """
    count = len(values)
    if groups is None or not count:
        return float(count)
    variance, number = variance_of_sum(values, groups)
    if number < 2:
        return 1.0
    off = values - values.mean()
    variance /= count**2
    alone = float(off @ off) / count
    equal = variance <= 0 or alone < 1e-24  # but for rounding
    independent = number if equal else alone / variance
    few = (Z / student(number - 1, LEVEL)) ** 2
    return min(float(count), max(1.0, independent * few))


def numbered(groups: numpy.ndarray | None, images: int) -> tuple[numpy.ndarray, int]:
    """Returns each image's group, from 0, and their number; without groups, each has its own."""
    named = numpy.arange(images) if groups is None else groups
    names, numbers = numpy.unique(named, return_inverse=True)
    return numbers, len(names)
