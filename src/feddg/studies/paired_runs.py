"""Two runs on the same images: is one more often right than chance would make it?

McNemar's test and the paired bootstrap say how sure a difference is about *these two models* on
images like these. Neither knows other seeds: that is what several seeds in a comparison are for.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy

from feddg.errors import RunError
from feddg.evaluation.metrics import Predictions, measure
from feddg.rng import numpy_stream
from feddg.studies.image_results import ImageResults

DRAWS = 2000
LEVEL = 0.95
METRICS_OF_COUNTS = ("accuracy", "balanced_accuracy", "macro_f1")
FEW_DISCORDANT = 25
"""Fewer images that only one model gets right than this, and the chi-squared value is rough."""


@dataclass(frozen=True)
class McNemar:
    """McNemar's test of two classifiers on the same images.

    Attributes:
        only_first: images that the first alone gets right.
        only_second: images that the second alone gets right.
        exact: two-sided p of the exact test, binomial with 1/2 (McNemar 1947).
        asymptotic: p of (|b - c| - 1)^2 / (b + c) under chi-squared with one degree of freedom
            (Edwards's continuity correction, 1948); 1 where no image tells them apart.
    """

    only_first: int
    only_second: int
    exact: float
    asymptotic: float


@dataclass(frozen=True)
class PairedDifference:
    """A metric of the first run minus that of the second.

    Attributes:
        metric: its name.
        aggregate: ``pooled`` (each image counts once) or ``domain_mean`` (each domain once).
        first: the first run's.
        second: the second run's.
        low: lower end of the 95 % interval of the difference, by the paired bootstrap.
        high: its upper end.
    """

    metric: str
    aggregate: str
    first: float
    second: float
    low: float
    high: float

    @property
    def difference(self) -> float:
        """First minus second."""
        return self.first - self.second


@dataclass(frozen=True)
class PairedRuns:
    """Two runs, image by image.

    Attributes:
        images: how many.
        domains: names of their domains.
        mcnemar: the test on all images together.
        differences: by metric and aggregate.
    """

    images: int
    domains: tuple[str, ...]
    mcnemar: McNemar
    differences: tuple[PairedDifference, ...]


def mcnemar(first: numpy.ndarray, second: numpy.ndarray) -> McNemar:
    """Tests whether two classifiers are right equally often.

    Args:
        first: ``(n,)`` bool, whether the first is right.
        second: ``(n,)`` bool, whether the second is, on the same images.
    """
    from scipy import stats

    b, c = int((first & ~second).sum()), int((second & ~first).sum())
    if b + c == 0:
        return McNemar(0, 0, 1.0, 1.0)
    exact = float(stats.binomtest(min(b, c), b + c, 0.5).pvalue)
    statistic = max(abs(b - c) - 1, 0) ** 2 / (b + c)
    return McNemar(b, c, exact, float(stats.chi2.sf(statistic, 1)))


def compare_images(
    first: ImageResults, second: ImageResults, split: str = "test", *, draws: int = DRAWS
) -> PairedRuns:
    """Compares two runs image by image.

    The bootstrap draws images with replacement within each domain, the same ones for both runs
    (Efron and Tibshirani 1993, chapter 16); its interval is that of the percentiles.

    Args:
        first: one run's results by image.
        second: the other's.
        split: whose images: ``test``, ``val``, ``id_val`` or ``id_test``.
        draws: bootstrap samples.

    Raises:
        RunError: they are not results on the same images, or there are none of that split.
    """
    one, other = first.of_split(split), second.of_split(split)
    _check_same(one, other, split)
    said = [one.columns["label"], one.columns["predicted"], other.columns["predicted"]]
    names = numpy.unique(numpy.concatenate(said))
    labels = numpy.searchsorted(names, one.columns["label"])
    predicted = [numpy.searchsorted(names, run.columns["predicted"]) for run in (one, other)]
    domains, of_domain = numpy.unique(one.columns["domain"], return_inverse=True)
    cells = _Cells.of(of_domain, labels, (predicted[0], predicted[1]), len(names))
    found = list(_differences(cells, draws))
    return PairedRuns(
        len(one),
        tuple(domains.tolist()),
        mcnemar(predicted[0] == labels, predicted[1] == labels),
        tuple(found),
    )


def _check_same(one: ImageResults, other: ImageResults, split: str) -> None:
    for run in (one, other):
        if not len(run):
            raise RunError(f"{run.folder} has no results on images of the split {split!r}")
    files, others = (dict(zip(run.columns["file"], _identity(run))) for run in (one, other))
    only = next((name for name in [*files, *others] if (name in files) != (name in others)), None)
    if only is not None:
        raise RunError(
            f"{one.folder} and {other.folder} were measured on different images: {len(one)} and "
            f"{len(other)} of the split {split!r}, {only} in one of them only. Compare runs that "
            "hold out the same"
        )
    changed = next((name for name in files if files[name] != others[name]), None)
    if changed is not None:
        raise RunError(
            f"{one.folder} and {other.folder} were measured on different images: {changed} has "
            "another content, class or domain"
        )
    if one.rendered != other.rendered:
        raise RunError(
            f"{one.folder} and {other.folder} were measured on different images: they are drawn "
            "differently"
        )


def _identity(run: ImageResults) -> Iterator[tuple[str, ...]]:
    return zip(*(run.columns[name].tolist() for name in ("content", "label", "domain")))


@dataclass(frozen=True, eq=False)
class _Cells:
    """Images that are alike to every metric: same domain, label and two predictions.

    Attributes:
        counts: ``(cells,)`` images of each.
        domain: ``(cells,)`` their domain.
        pairs: for each run ``(cells,)`` the place in its confusion matrix.
        classes: number of classes.
    """

    counts: numpy.ndarray
    domain: numpy.ndarray
    pairs: tuple[numpy.ndarray, numpy.ndarray]
    classes: int

    @classmethod
    def of(
        cls,
        domain: numpy.ndarray,
        labels: numpy.ndarray,
        predicted: tuple[numpy.ndarray, numpy.ndarray],
        classes: int,
    ) -> "_Cells":
        rows = numpy.stack([domain, *(labels * classes + own for own in predicted)])
        (domains, one, other), counts = numpy.unique(rows, axis=1, return_counts=True)
        return cls(counts, domains, (one, other), classes)

    def metrics(self, counts: numpy.ndarray, run: int) -> dict[tuple[str, str], float]:
        """Returns metrics by name and aggregate, with other numbers of images in the cells."""
        shape = (self.classes, self.classes)
        by_domain = [
            measure(
                Predictions(
                    numpy.bincount(
                        self.pairs[run][own], counts[own], minlength=self.classes**2
                    ).reshape(shape)
                )
            )
            for own in (self.domain == domain for domain in range(int(self.domain.max()) + 1))
        ]
        together = numpy.bincount(self.pairs[run], counts, minlength=self.classes**2)
        pooled = measure(Predictions(together.reshape(shape)))
        found = {}
        for metric in METRICS_OF_COUNTS:
            found[metric, "domain_mean"] = float(numpy.mean([own[metric] for own in by_domain]))
            found[metric, "pooled"] = pooled[metric]
        return found


def _differences(cells: _Cells, draws: int) -> Iterator[PairedDifference]:
    first, second = cells.metrics(cells.counts, 0), cells.metrics(cells.counts, 1)
    random = numpy_stream(0, "paired bootstrap")
    drawn: dict[tuple[str, str], list[float]] = {key: [] for key in first}
    places = [numpy.flatnonzero(cells.domain == d) for d in range(int(cells.domain.max()) + 1)]
    for _ in range(draws):
        counts = numpy.zeros_like(cells.counts)
        for place in places:
            own = cells.counts[place]
            counts[place] = random.multinomial(own.sum(), own / own.sum())
        one, other = cells.metrics(counts, 0), cells.metrics(counts, 1)
        for key in drawn:
            drawn[key].append(one[key] - other[key])
    tail = 100 * (1 - LEVEL) / 2
    for (metric, aggregate), values in drawn.items():
        low, high = numpy.percentile(values, [tail, 100 - tail])
        key = metric, aggregate
        yield PairedDifference(*key, first[key], second[key], float(low), float(high))
