"""Estimates a model's accuracy at a site without labels, with an interval.

The estimates compare the model's outputs on unlabelled images with those on labelled in-domain
validation images. Their errors are measured at the federation's own sites, each left out in turn:
see :func:`left_out_sites`. A few labels improve the estimate.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy
import torch
from torch import Tensor

from feddg.models.closed_form import extended, solved
from feddg.records import Row
from feddg.rng import numpy_stream

LEVEL: Final = 0.9
"""How often an interval should contain the truth."""
INSIDE: Final = 0.95
"""Share of validation images below the energy threshold for images unlike them."""


@dataclass(frozen=True)
class Outputs:
    """A model's outputs on images.

    Attributes:
        logits: ``(n, classes)`` float64.
        features: ``(n, d)``, the input of its classifier.
        agreement: ``(n,)``, the share of other sites' models that predict the same class; None if
            there are no such models.
        looks: ``(n, 12)``, see :func:`appearance`; None if not computed.
    """

    logits: numpy.ndarray
    features: numpy.ndarray
    agreement: numpy.ndarray | None = None
    looks: numpy.ndarray | None = None

    @property
    def predicted(self) -> numpy.ndarray:
        """The most probable class of each, ``(n,)``."""
        best: numpy.ndarray = self.logits.argmax(1)
        return best

    @property
    def energy(self) -> numpy.ndarray:
        """The free energy of each, ``(n,)``: see :func:`feddg.evaluation.accuracy.energy`."""
        total = _log_sum(self.logits)
        return -total

    def confidence(self, temperature: float) -> numpy.ndarray:
        """Returns the largest probability of each, ``(n,)``."""
        largest: numpy.ndarray = _shares(self.logits, temperature).max(1)
        return largest

    def dispersity(self, temperature: float) -> float:
        """Returns the nuclear norm of the probability matrix over its maximum, in [0, 1]."""
        shares = _shares(self.logits, temperature)
        largest = math.sqrt(len(shares) * min(shares.shape))
        return float(numpy.linalg.svd(shares, compute_uv=False).sum() / largest)


class Reference(Row):
    """A model's statistics on labelled in-domain validation images, for the estimates.

    Attributes:
        images: number of images.
        accuracy: in [0, 1].
        temperature: divides the logits.
        confidence: the mean, after the temperature.
        confidence_threshold: as many images are below it as the model gets wrong.
        energy_threshold: as many images are above it as the model gets wrong.
        agreement: the mean; None if there are no other models.
        dispersity: see :meth:`Outputs.dispersity`.
        unlike: the energy that 5 % of images exceed.
        mean: of the features, ``d`` numbers.
        spread: the square root of their total variance.
    """

    images: int
    accuracy: float
    temperature: float
    confidence: float
    confidence_threshold: float
    energy_threshold: float
    agreement: float | None
    dispersity: float
    unlike: float
    mean: tuple[float, ...]
    spread: float

    @classmethod
    def of(cls, outputs: Outputs, labels: numpy.ndarray) -> "Reference":
        """Measures a model on images with labels ``(n,)``."""
        temperature = fitted_temperature(outputs.logits, labels)
        confidence, energy = outputs.confidence(temperature), outputs.energy
        wrong = int((outputs.predicted != labels).sum())
        return cls(
            images=len(labels),
            accuracy=1 - wrong / len(labels),
            temperature=temperature,
            confidence=confidence.mean(),
            confidence_threshold=_passed_by_all_but(wrong, confidence),
            energy_threshold=-_passed_by_all_but(wrong, -energy),
            agreement=None if outputs.agreement is None else outputs.agreement.mean(),
            dispersity=outputs.dispersity(temperature),
            unlike=numpy.quantile(energy, INSIDE),
            mean=tuple(outputs.features.mean(0).tolist()),
            spread=math.sqrt(outputs.features.var(0).sum()),
        )


def fitted_temperature(logits: numpy.ndarray, labels: numpy.ndarray) -> float:
    """Returns the temperature with the least cross-entropy (Guo et al., ICML 2017)."""
    from scipy.optimize import minimize_scalar

    rows = numpy.arange(len(labels))

    def loss(logarithm: float) -> float:
        scaled = logits / math.exp(logarithm)
        return float((_log_sum(scaled) - scaled[rows, labels]).mean())

    return math.exp(minimize_scalar(loss, bounds=(-7, 7), method="bounded").x)


def _log_sum(logits: numpy.ndarray) -> numpy.ndarray:
    from scipy.special import logsumexp

    total: numpy.ndarray = logsumexp(logits, axis=1)
    return total


def _shares(logits: numpy.ndarray, temperature: float) -> numpy.ndarray:
    from scipy.special import softmax

    shares: numpy.ndarray = softmax(logits / temperature, axis=1)
    return shares


def _passed_by_all_but(wrong: int, scores: numpy.ndarray) -> float:
    """Returns the score that ``wrong`` of them stay below."""
    return float(numpy.sort(scores)[wrong]) if wrong < len(scores) else math.inf


# Estimates of accuracy, each from the reference and what the model makes of unlabelled images.


class Estimator(NamedTuple):
    """One way to estimate accuracy without labels.

    Attributes:
        title: its name.
        source: the paper it is from.
        estimate: its value, in [0, 1]; None if its inputs are missing.
    """

    title: str
    source: str
    estimate: Callable[[Reference, Outputs], float | None]


def _moved(reference: Reference, before: float, now: float) -> float:
    return min(1.0, max(0.0, reference.accuracy + now - before))


def _confidence(reference: Reference, outputs: Outputs) -> float:
    return float(outputs.confidence(reference.temperature).mean())


def _thresholded(reference: Reference, outputs: Outputs) -> float:
    passed = outputs.confidence(reference.temperature) >= reference.confidence_threshold
    return float(passed.mean())


def _agreement(reference: Reference, outputs: Outputs) -> float | None:
    if outputs.agreement is None or reference.agreement is None:
        return None
    return _moved(reference, reference.agreement, float(outputs.agreement.mean()))


ESTIMATORS: Final[Mapping[str, Estimator]] = {
    "validation": Estimator(
        "in-domain validation accuracy", "what people read", lambda reference, _: reference.accuracy
    ),
    "confidence": Estimator("mean confidence, temperature fitted", "Guo et al. 2017", _confidence),
    "atc": Estimator("ATC", "Garg et al. 2022", _thresholded),
    "doc": Estimator(
        "DoC",
        "Guillory et al. 2021",
        lambda reference, outputs: _moved(
            reference, reference.confidence, _confidence(reference, outputs)
        ),
    ),
    "agreement": Estimator("agreement of models without a site", "Jiang et al. 2022", _agreement),
    "energy": Estimator(
        "energy, thresholded",
        "Liu et al. 2020",
        lambda reference, outputs: float((outputs.energy <= reference.energy_threshold).mean()),
    ),
    "dispersity": Estimator(
        "nuclear norm",
        "Deng et al. 2023",
        lambda reference, outputs: _moved(
            reference, reference.dispersity, outputs.dispersity(reference.temperature)
        ),
    ),
}
COMBINED: Final = ("confidence", "atc", "doc", "agreement")
"""The estimates whose mean is calibrated on sites."""


# Other objects in a familiar style. A new style makes a model as doubtful as a new object does, so
# how images look is told from what they show: by numbers of their pixels alone. Images that look
# like those of a site, and are something else to the model, show other objects.


def appearance(images: Tensor) -> Tensor:
    """Returns the appearance ``(n, 12)`` of images ``(n, 3, height, width)`` in [0, 1].

    Mean and deviation of each colour; mean change of brightness from pixel to pixel, across and
    down; mean and deviation of saturation; mean curvature of brightness; share of flat pixels.
    """
    brightness = images.mean(1)
    across = brightness.diff(dim=2).abs()
    down = brightness.diff(dim=1).abs()
    saturation = images.amax(1) - images.amin(1)
    inner, sides = brightness[:, 1:-1, 1:-1], brightness[:, 1:-1, :-2] + brightness[:, 1:-1, 2:]
    curvature = 4 * inner - sides - brightness[:, :-2, 1:-1] - brightness[:, 2:, 1:-1]
    own = [
        across.mean((1, 2)),
        down.mean((1, 2)),
        saturation.mean((1, 2)),
        saturation.flatten(1).std(1),
        curvature.abs().mean((1, 2)),
        (across < 0.01).float().mean((1, 2)),
    ]
    colours = [images.mean((2, 3)), images.flatten(2).std(2)]
    return torch.cat([*colours, torch.stack(own, 1)], 1)


class Content(Row):
    """The distances of images from the site that looks most like them.

    Attributes:
        looks: between means of appearance, in deviations within a site.
        doubt: mean share of validation images with a larger score, the largest logit after
            subtracting the mean of all; a half if images are like them.
        apart: between means of features, given the predicted class, in deviations within.
    """

    looks: float
    doubt: float
    apart: float


ALIKE, DOUBTFUL, APART = 1.0, 0.7, 0.2
"""Images look like a site's below the first, and show other objects above both others."""


def shows_other_objects(content: Content | None, known: Iterable[Content | None]) -> bool:
    """Whether images look like those of a site but show other objects.

    Args:
        content: of the images.
        known: of left-out sites; if one looks like the others, images of other objects must be
            more doubtful than it.
    """
    if content is None or content.looks >= ALIKE:
        return False
    doubts = [one.doubt for one in known if one is not None and one.looks < ALIKE]
    return content.doubt > max(DOUBTFUL, *doubts, 0.0) and content.apart > APART


LEAST_OF_A_CELL: Final = 3
"""The least number of a class's images at a site for their mean to count."""


@dataclass(frozen=True)
class Familiar:
    """A model's statistics on validation images by site, for :class:`Content`.

    Attributes:
        looks: ``(sites, 12)``, mean appearance.
        looks_spread: ``(12,)``, its deviation within sites.
        centre: ``(classes,)``, mean logits.
        scores: ``(n,)`` in ascending order, the largest logits with each site's mean at the centre.
        means: ``(sites, classes, d)``, of features by predicted class; NaN if images are few.
        noise: ``(sites, classes)``, the squared errors of these means.
        spread: the total variance of features within cells.
    """

    looks: numpy.ndarray
    looks_spread: numpy.ndarray
    centre: numpy.ndarray
    scores: numpy.ndarray
    means: numpy.ndarray
    noise: numpy.ndarray
    spread: numpy.ndarray

    @classmethod
    def of(cls, outputs: Outputs, sites: numpy.ndarray) -> "Familiar | None":
        """Measures a model on validation images of sites ``(n,)``; None if none is large enough.

        Raises:
            ValueError: the outputs have no appearance.
        """
        if outputs.looks is None:
            raise ValueError("content needs the appearance of images")
        names, place = numpy.unique(sites, return_inverse=True)
        centre = outputs.logits.mean(0)
        logits, looks = outputs.logits.copy(), outputs.looks.astype(float)
        means_of_looks = numpy.stack([looks[place == site].mean(0) for site in range(len(names))])
        for site in range(len(names)):
            logits[place == site] += centre - logits[place == site].mean(0)
        classes, width = outputs.logits.shape[1], outputs.features.shape[1]
        means = numpy.full((len(names), classes, width), numpy.nan, numpy.float32)
        noise = numpy.full((len(names), classes), numpy.nan)
        squares, count = 0.0, 0
        for site, label in numpy.ndindex(noise.shape):
            cell = outputs.features[(place == site) & (outputs.predicted == label)]
            if len(cell) >= LEAST_OF_A_CELL:
                means[site, label], variance = cell.mean(0), float(cell.var(0, ddof=1).sum())
                noise[site, label] = variance / len(cell)
                squares, count = squares + variance * (len(cell) - 1), count + len(cell) - 1
        if not squares:
            return None
        within = (looks - means_of_looks[place]).std(0)
        return cls(
            looks=means_of_looks,
            looks_spread=numpy.maximum(within, 1e-6),
            centre=centre,
            scores=numpy.sort(logits.max(1)),
            means=means,
            noise=noise,
            spread=numpy.array(squares / count),
        )

    def content(self, outputs: Outputs) -> Content | None:
        """Returns the distances of images; None if no class has enough images."""
        if outputs.looks is None:
            return None
        far = (outputs.looks.mean(0) - self.looks) / self.looks_spread
        distances = numpy.sqrt((far**2).mean(1))
        site = int(distances.argmin())
        scores = (outputs.logits - outputs.logits.mean(0) + self.centre).max(1)
        squares, count = 0.0, 0
        for label in range(self.means.shape[1]):
            cell = outputs.features[outputs.predicted == label]
            if len(cell) < LEAST_OF_A_CELL or numpy.isnan(self.noise[site, label]):
                continue
            # What two means of like images are apart by chance is taken off.
            own = cell.var(0, ddof=1).sum() / len(cell)
            apart = ((cell.mean(0) - self.means[site, label]) ** 2).sum()
            squares += len(cell) * float(apart - own - self.noise[site, label])
            count += len(cell)
        if not count:
            return None
        larger = 1 - numpy.searchsorted(self.scores, scores) / len(self.scores)
        return Content(
            looks=float(distances[site]),
            doubt=float(larger.mean()),
            apart=math.sqrt(max(0.0, squares / count / float(self.spread))),
        )


class Signals(Row):
    """The signals of unlabelled images, compared with the reference.

    Attributes:
        estimates: by the estimator's name.
        distance: of the features' means, in units of the validation images' spread.
        unlike: share of images above the energy that 5 % of validation images exceed.
        content: their distances from the most similar site; None if unknown.
    """

    estimates: dict[str, float]
    distance: float
    unlike: float
    content: Content | None = None

    @classmethod
    def of(
        cls, reference: Reference, outputs: Outputs, familiar: Familiar | None = None
    ) -> "Signals":
        """Asks every estimator."""
        apart = numpy.linalg.norm(outputs.features.mean(0) - numpy.array(reference.mean))
        return cls(
            estimates=estimates_of(reference, outputs),
            distance=float(apart / max(reference.spread, 1e-12)),
            unlike=float((outputs.energy > reference.unlike).mean()),
            content=None if familiar is None else familiar.content(outputs),
        )

    @property
    def combined(self) -> float:
        """The mean of the estimates that are calibrated."""
        return combined(self.estimates, [name for name in COMBINED if name in self.estimates])


def estimates_of(reference: Reference, outputs: Outputs) -> dict[str, float]:
    """Returns all available estimates, by the estimator's name."""
    found = {name: one.estimate(reference, outputs) for name, one in ESTIMATORS.items()}
    return {name: value for name, value in found.items() if value is not None}


def combined(estimates: Mapping[str, float], names: Sequence[str]) -> float:
    """Returns the mean of some estimates."""
    return math.fsum(estimates[name] for name in names) / len(names)


# Sites as if they had taken no part: a classifier in closed form from all others, on frozen
# features. Their accuracies are known.


class LeftOutSite(Row):
    """A site left out of a model.

    Attributes:
        site: its name.
        images: number of its images.
        accuracy: of the model there, in [0, 1].
        signals: the signals of its images without their labels.
    """

    site: str
    images: int
    accuracy: float
    signals: Signals


class Part(NamedTuple):
    """Images of several sites.

    Attributes:
        features: ``(n, d)``.
        labels: ``(n,)``.
        sites: ``(n,)``, the number of each one's site.
        looks: ``(n, 12)``, see :func:`appearance`.
    """

    features: Tensor
    labels: Tensor
    sites: Tensor
    looks: Tensor

    def of(self, chosen: Tensor) -> "Part":
        """Returns some rows."""
        return Part(*(column[chosen] for column in self))


Head = tuple[Tensor, Tensor]
"""A linear classifier: weight ``(classes, d)`` and bias ``(classes,)``, float64."""
PENALTY: Final = 1.0
OTHERS: Final = 4
"""Number of models that a model's answers are compared with."""
MOST_SITES: Final = 30
"""Most sites to leave out, those with the most images."""


class Sums:
    """The sums of each site that classifiers are solved from.

    Args:
        train: images of training.
        classes: how many there are.
    """

    def __init__(self, train: Part, classes: int) -> None:
        self._own: dict[int, tuple[Tensor, Tensor]] = {}
        for site in train.sites.unique().tolist():
            part = train.of(train.sites == site)
            rows = extended(part.features)
            cross = rows.new_zeros(rows.shape[1], classes)
            self._own[site] = rows.T @ rows, cross.index_add_(1, part.labels, rows.T)
        self._total = [torch.stack(list(all)).sum(0) for all in zip(*self._own.values())]

    def head(self, *left_out: int) -> Head:
        """Returns the classifier of all sites except some."""
        gram, cross = self._total
        for site in left_out:
            gram, cross = gram - self._own[site][0], cross - self._own[site][1]
        weight, bias = next(solved(gram / gram[-1, -1], cross / gram[-1, -1], [PENALTY]))
        return weight, bias

    def largest(self, most: int) -> list[int]:
        """Returns the sites with the most images, in the order of their numbers."""
        sizes = {site: float(gram[-1, -1]) for site, (gram, _) in self._own.items()}
        return sorted(sorted(sizes, key=lambda site: -sizes[site])[:most])

    def others(self, *left_out: int) -> list[Head]:
        """Returns a few classifiers, each without one more site."""
        left = [site for site in self.largest(MOST_SITES) if site not in left_out]
        if len(left) < 2:
            return []
        step = max(1, len(left) // OTHERS)
        return [self.head(*left_out, site) for site in left[::step][:OTHERS]]


def agreement_with(predicted: Tensor, features: Tensor, others: Sequence[Head]) -> Tensor | None:
    """Returns the share of other classifiers that predict the same class, ``(n,)``, if any."""
    if not others:
        return None
    same = [(features @ weight.T + bias).argmax(1) == predicted for weight, bias in others]
    return torch.stack(same).double().mean(0)


def outputs_of(part: Part, head: Head, others: Sequence[Head]) -> Outputs:
    """Returns a classifier's outputs on images."""
    features = part.features.double()
    logits = features @ head[0].T + head[1]
    agreement = agreement_with(logits.argmax(1), features, others)
    return Outputs(
        logits.numpy(),
        features.numpy(),
        None if agreement is None else agreement.numpy(),
        part.looks.numpy(),
    )


def left_out_sites(
    sums: Sums,
    train: Part,
    validation: Part,
    names: Sequence[str],
    *,
    agree: bool = True,
    alike: bool = False,
) -> Iterator[LeftOutSite]:
    """Yields every site, evaluated with a model that it was left out of.

    The model is a classifier in closed form on frozen features of all other sites; its reference
    is their validation images. The site's training and validation images are all new to it.

    Args:
        sums: of the training images.
        train: images of training.
        validation: in-domain validation images.
        names: of the sites.
        agree: whether to compute the agreement of models without one more site.
        alike: whether sites look alike, as clients of one domain do.
    """
    sites = sums.largest(MOST_SITES)
    for site in sites if len(sites) > 1 else ():
        seen = validation.of(validation.sites != site)
        parts = [part.of(part.sites == site) for part in (train, validation)]
        own = Part(*(torch.cat(columns) for columns in zip(*parts)))
        if not len(seen.labels):
            continue
        head, others = sums.head(site), sums.others(site) if agree else []
        before, outputs = outputs_of(seen, head, others), outputs_of(own, head, others)
        reference = Reference.of(before, seen.labels.numpy())
        looks = torch.zeros_like(seen.sites) if alike else seen.sites
        familiar = Familiar.of(before, looks.numpy())
        yield LeftOutSite(
            site=names[site],
            images=len(own.labels),
            accuracy=float((outputs.predicted == own.labels.numpy()).mean()),
            signals=Signals.of(reference, outputs, familiar),
        )


# The calibrated estimate and its interval.


ERROR: Final = 0.1
"""The assumed error of estimates before any site was measured: ten points, ..."""
AS_IF: Final = 2
"""... with the weight of two sites."""
OFFSET, SLOPE = 0.1, 0.5
"""Prior deviations of the calibration's offset from 0 and slope from 1."""
ENOUGH_SITES: Final = math.ceil(LEVEL / (1 - LEVEL))
"""From nine sites on, the interval is jackknife+'s, which assumes no distribution of errors."""


class Estimate(NamedTuple):
    """An accuracy with the interval that contains it nine times out of ten, all in [0, 1]."""

    value: float
    low: float
    high: float

    @property
    def reach(self) -> float:
        """The distance to the farther end of the interval."""
        return max(self.high - self.value, self.value - self.low)


def calibration(signals: numpy.ndarray, truths: numpy.ndarray) -> tuple[float, float, float]:
    """Returns offset, slope minus 1, and centre of a line through sites, shrunk to the identity.

    The line has the largest posterior probability if errors, offset and slope are normal with the
    deviations above. It is the identity if signals alone are nearer to the truth than such lines
    are at left-out sites: then the sites err in different directions.

    Args:
        signals: ``(sites,)`` estimates.
        truths: ``(sites,)`` accuracies.
    """
    if len(signals) < 2:
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
    signal: float, signals: Sequence[float], truths: Sequence[float], images: int
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
    """
    own, true = numpy.array(signals, float), numpy.array(truths, float)

    def at(value: float, line: tuple[float, float, float]) -> float:
        offset, slope, centre = line
        return min(1.0, max(0.0, value + offset + slope * (value - centre)))

    middle = at(signal, calibration(own, true))
    lines = [calibration(numpy.delete(own, i), numpy.delete(true, i)) for i in range(len(own))]
    errors = numpy.array([abs(true[i] - at(own[i], line)) for i, line in enumerate(lines)])
    if len(own) >= ENOUGH_SITES:
        there = numpy.array([at(signal, line) for line in lines])
        rank = math.ceil(LEVEL * (len(own) + 1) - 1e-9)
        low = float(numpy.sort(there - errors)[len(own) - rank])
        high = float(numpy.sort(there + errors)[rank - 1])
    else:
        weight = AS_IF + len(own)
        deviation = math.sqrt((AS_IF * ERROR**2 + (errors**2).sum()) / weight)
        low, high = middle - _student(weight) * deviation, middle + _student(weight) * deviation
    least = _student(math.inf) * math.sqrt((middle * (1 - middle) + 0.25 / images) / images)
    return _within(middle, min(low, middle - least), max(high, middle + least))


def at_a_new_site(accuracies: Sequence[float]) -> Estimate:
    """Returns the expected accuracy at one more site, before anything is known of it.

    The interval is Student's for one more site, with a prior worth two that are ten points off.

    Args:
        accuracies: at left-out sites, at least one.
    """
    own = numpy.array(accuracies, float)
    mean, freedom = float(own.mean()), AS_IF + len(own) - 1
    variance = (AS_IF * ERROR**2 + ((own - mean) ** 2).sum()) / freedom
    reach = _student(freedom) * math.sqrt(variance * (1 + 1 / len(own)))
    return _within(mean, mean - reach, mean + reach)


def _student(freedom: float) -> float:
    from scipy import stats

    return float((stats.norm if math.isinf(freedom) else stats.t(freedom)).ppf((1 + LEVEL) / 2))


def _within(value: float, low: float, high: float) -> Estimate:
    return Estimate(value, max(0.0, min(low, value)), min(1.0, max(high, value)))


# Single images, and a few labels.


def right_chances(confidence: numpy.ndarray, accuracy: float) -> numpy.ndarray:
    """Returns the probability that each answer is right, with a given accuracy as their mean.

    Args:
        confidence: ``(n,)``, after the temperature.
        accuracy: the mean; all log-odds are shifted equally to reach it.
    """
    from scipy.optimize import brentq
    from scipy.special import expit, logit

    odds = logit(confidence.clip(1e-6, 1 - 1e-6))
    wanted = min(1 - 1e-6, max(1e-6, accuracy))
    shift = brentq(lambda by: float(expit(odds + by).mean()) - wanted, -40, 40)
    chances: numpy.ndarray = expit(odds + shift)
    return chances


def images_to_label(confidence: numpy.ndarray, count: int, seed: int = 0) -> numpy.ndarray:
    """Returns which images to label, ``(count,)``, for an unbiased estimate.

    Systematic sampling in the order of confidence, from a random start: all images are equally
    likely, and doubtful ones are represented in proportion (Cochran 1977, chapter 8).
    """
    order = numpy.argsort(confidence, kind="stable")
    count = min(count, len(order))
    start = numpy_stream(seed, "images to label").random()
    places = ((start + numpy.arange(count)) * len(order) / max(1, count)).astype(int)
    chosen: numpy.ndarray = order[places.clip(max=len(order) - 1)]
    return chosen


IN_A_STRATUM: Final = 10
"""The least number of labels in each stratum of confidence."""


def with_labels(
    without: Estimate, chances: numpy.ndarray, labelled: numpy.ndarray, right: numpy.ndarray
) -> Estimate:
    """Returns an estimate from predictions, a few labels, and the estimate without labels.

    The mean of the chances is corrected by their error on labelled images in each stratum of
    confidence (prediction-powered inference; Angelopoulos et al., Science 2023; the stratified
    difference estimator of surveys, Cochran 1977, chapters 5 and 7). It is combined with the
    estimate without labels, weighted by certainty. The labelled images must have been chosen at
    random, as :func:`images_to_label` does.

    Args:
        without: the estimate without labels.
        chances: ``(n,)``, see :func:`right_chances`.
        labelled: ``(m,)`` indices of the labelled images.
        right: ``(m,)`` whether the model is right there.
    """
    found = labels_estimate(chances, labelled, right)
    if found is None:
        return without
    value, deviation = found
    before = max(without.reach / _student(math.inf), 1e-9)
    weights = numpy.array([before**-2, deviation**-2])
    middle = float(weights @ [without.value, value] / weights.sum())
    reach = _student(max(1, len(labelled) - 1)) / math.sqrt(weights.sum())
    return _within(middle, middle - reach, middle + reach)


def labels_estimate(
    chances: numpy.ndarray, labelled: numpy.ndarray, right: numpy.ndarray
) -> tuple[float, float] | None:
    """Returns the prediction-powered estimate alone, with its standard deviation.

    The spread within a stratum is pooled with that of two more answers, one right and one wrong,
    because a few right answers are no certainty. None with fewer than two labels.
    """
    count = len(labelled)
    if count < 2:
        return None
    strata = max(1, count // IN_A_STRATUM)
    place = numpy.empty(len(chances), int)
    place[numpy.argsort(chances, kind="stable")] = numpy.arange(len(chances))
    stratum = place * strata // len(chances)
    own = stratum[labelled]
    value = variance = 0.0
    for number in range(strata):
        inside = stratum == number
        share = inside.mean()
        errors = right[own == number] - chances[labelled[own == number]]
        wrong = errors.mean() if len(errors) else (right - chances[labelled]).mean()
        value += share * (chances[inside].mean() + wrong)
        # Two more answers, one right and one wrong, at the stratum's mean chance.
        mean = chances[inside].mean()
        more = (1 - mean - wrong) ** 2 + (mean + wrong) ** 2
        spread = (((errors - wrong) ** 2).sum() + more) / (len(errors) + 2)
        left = 1 - len(errors) / inside.sum()
        variance += share**2 * spread / max(1, len(errors)) * left
    return min(1.0, max(0.0, float(value))), math.sqrt(max(variance, 1e-12))


def labels_needed(without: Estimate, chances: numpy.ndarray, reach: float = 0.05) -> int:
    """Returns about how many labels bring the interval to ``reach`` on either side.

    It assumes that the chances are right: an answer's variance is then p (1 - p).
    """
    quantile = _student(math.inf)
    before = (quantile / max(without.reach, 1e-9)) ** 2
    missing = (quantile / reach) ** 2 - before
    if missing <= 0:
        return 0
    # Of n images without replacement the variance is spread (1 / labels - 1 / n).
    spread = float((chances * (1 - chances)).mean())
    count = math.ceil(1 / (1 / max(spread * missing, 1e-9) + 1 / len(chances)))
    return min(len(chances), max(IN_A_STRATUM, count))
