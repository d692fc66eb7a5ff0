"""What accuracy to expect at one more site, with an interval: from sites left out in turn."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy

from feddg.evaluation.metrics import student
from feddg.records import ClientsTable

REAL_CLIENTS: Final = ("client", "natural")
"""The partition, and its other name, whose clients are who really holds the images."""
LEVEL: Final = 0.9
"""How often an interval should contain the truth."""
quantile = partial(student, level=LEVEL)
ERROR: Final = 0.1
"""The assumed error of estimates before any site was measured: ten points, ..."""
AS_IF: Final = 2
"""... with the weight of two sites."""
OFFSET, SLOPE = 0.1, 0.5
"""Prior deviations of the calibration's offset from 0 and slope from 1."""
LEAST_SITES: Final = 3
"""Fewer sites that took no part do not show how far one is from another."""
ENOUGH_SITES: Final = round(LEVEL / (1 - LEVEL))
"""From nine sites on, the interval is jackknife+'s, which assumes no distribution of errors."""


class Estimate(NamedTuple):
    """An accuracy with the interval that contains it about nine times in ten, all in [0, 1]."""

    value: float
    low: float
    high: float

    @property
    def reach(self) -> float:
        """The distance to the farther end of the interval."""
        return max(self.high - self.value, self.value - self.low)

    def __str__(self) -> str:
        ends = f"between {self.low:.0%} and {self.high:.0%}"
        return f"{self.value:.0%}, {ends} about nine times in ten"


Line = tuple[float, float, float]
"""What :func:`calibration` returns."""


def calibration(signals: numpy.ndarray, truths: numpy.ndarray, correct: bool = True) -> Line:
    """Returns offset, slope minus 1, and centre of a line through sites, shrunk to the identity.

    The line has the largest posterior probability if errors, offset and slope are normal with the
    deviations above. It is the identity if signals alone are nearer to the truth than such lines
    are at left-out sites: then the sites err in different directions.

    Args:
        signals: ``(sites,)`` estimates.
        truths: ``(sites,)`` accuracies.
        correct: False gives the identity.
    """
    if not correct or len(signals) < 2:
        return 0.0, 0.0, 0.0
    centre = float(signals.mean())
    rows = numpy.stack([numpy.ones_like(signals), signals - centre], 1)
    inverse = numpy.linalg.inv(rows.T @ rows + numpy.diag([ERROR / OFFSET, ERROR / SLOPE]) ** 2)
    offset, slope = inverse @ rows.T @ (truths - signals)
    errors = truths - signals
    fitted = errors - rows @ [offset, slope]
    left_out = fitted / (1 - numpy.einsum("ij,jk,ik->i", rows, inverse, rows))
    if left_out @ left_out >= errors @ errors:
        return 0.0, 0.0, centre
    return float(offset), float(slope), centre


def calibrated(
    signal: float,
    signals: Sequence[float],
    truths: Sequence[float],
    images: int,
    *,
    correct: bool = True,
) -> Estimate:
    """Returns the estimate at a new site with its interval.

    From nine sites on, the interval is jackknife+ (Barber et al., Annals of Statistics 2021) over
    sites. With fewer sites that would be unbounded; the interval is then Student's, from the errors
    at each site of the line through the others, and a prior worth two sites. It is never narrower
    than labels of all the images would justify.

    Args:
        signal: the estimate at the new site.
        signals: the estimates at left-out sites.
        truths: the accuracies there.
        images: number of images at the new site.
        correct: whether sites correct the estimate. Those of another model do not: they say how far
            estimates are off, not in which direction.
    """
    measured, true = numpy.array(signals, float), numpy.array(truths, float)
    middle = _on(calibration(measured, true, correct), signal)
    errors = numpy.abs(errors_at_sites(signals, truths, correct=correct))
    if len(measured) >= ENOUGH_SITES:
        lines = _lines_without_a_site(measured, true, correct)
        there = numpy.array([_on(line, signal) for line in lines])
        rank = math.ceil(LEVEL * (len(measured) + 1) - 1e-9)
        low = float(numpy.sort(there - errors)[len(measured) - rank])
        high = float(numpy.sort(there + errors)[rank - 1])
    else:
        weight = AS_IF + len(measured)
        deviation = math.sqrt((AS_IF * ERROR**2 + (errors**2).sum()) / weight)
        low, high = middle - quantile(weight) * deviation, middle + quantile(weight) * deviation
    least = quantile(math.inf) * math.sqrt((middle * (1 - middle) + 0.25 / images) / images)
    return within(middle, min(low, middle - least), max(high, middle + least))


def _lines_without_a_site(
    signals: numpy.ndarray, truths: numpy.ndarray, correct: bool
) -> list[Line]:
    every = range(len(signals))
    return [calibration(numpy.delete(signals, i), numpy.delete(truths, i), correct) for i in every]


def _on(line: Line, value: float) -> float:
    offset, slope, centre = line
    return min(1.0, max(0.0, value + offset + slope * (value - centre)))


def errors_at_sites(
    signals: Sequence[float], truths: Sequence[float], *, correct: bool = True
) -> list[float]:
    """Returns by how much estimates are above the truth at left-out sites, each a new one.

    The arguments are those of :func:`calibrated`; each estimate is corrected by the other sites.
    """
    measured, true = numpy.array(signals, float), numpy.array(truths, float)
    lines = _lines_without_a_site(measured, true, correct)
    return [float(_on(line, measured[i]) - true[i]) for i, line in enumerate(lines)]


def apart(clients: ClientsTable | None, partition: str | None) -> set[int]:
    """Returns the clients that are sites of their own: who left out, they are new to the others.

    They are who really holds images, or nobody else holds images of their domains: other shards of
    the same images are no new site.

    Args:
        clients: the clients' data; None if unknown.
        partition: the setting ``clients.partition``.
    """
    rows = clients.clients if clients else []
    holders = numpy.sum([numpy.sign(row.domains) for row in rows], axis=0)
    alone = {row.id for row in rows if (holders[numpy.array(row.domains) > 0] == 1).all()}
    return {row.id for row in rows} if partition in REAL_CLIENTS else alone


def at_a_new_site(accuracies: Sequence[float]) -> Estimate:
    """Returns the expected accuracy at one more site, before anything is known of it.

    The interval is Student's for one more site, with a prior worth two that are ten points off.

    Args:
        accuracies: at left-out sites, at least one.
    """
    shares = numpy.array(accuracies, float)
    mean, freedom = float(shares.mean()), AS_IF + len(shares) - 1
    variance = (AS_IF * ERROR**2 + ((shares - mean) ** 2).sum()) / freedom
    reach = quantile(freedom) * math.sqrt(variance * (1 + 1 / len(shares)))
    return within(mean, mean - reach, mean + reach)


def within(value: float, low: float, high: float) -> Estimate:
    """Returns an estimate whose interval contains it and stays in [0, 1]."""
    return Estimate(value, max(0.0, min(low, value)), min(1.0, max(high, value)))
