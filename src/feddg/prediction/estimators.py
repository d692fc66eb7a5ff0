"""Estimates a model's accuracy at a site without labels, with an interval.

The estimates compare the model's outputs on unlabelled images with those on labelled in-domain
validation images. Their errors are measured at the federation's own sites, each left out in turn:
see :func:`left_out_sites`. A few labels improve the estimate.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import fmean
from typing import Final, NamedTuple

import numpy
import torch
from scipy.special import expit, logit, logsumexp, softmax
from torch import Tensor

from feddg.models.closed_form import extended, solved
from feddg.records import Row, Unbounded
from feddg.rng import numpy_stream
from feddg.runs.calibration import Estimate, quantile, within
from feddg.runs.energy import energy_threshold

REACH: Final = 0.05
"""A reliable interval reaches at most five points to either side."""
INSIDE: Final = 0.95
"""Share of validation images below the energy threshold for images unlike them."""


@dataclass(frozen=True)
class Outputs:
    """A model's outputs on images.

    Attributes:
        logits: ``(n, classes)`` float64.
        agreement: ``(n,)``, the share of other sites' models that predict the same class; None if
            there are no such models.
        maps: ``(n, m)``, see :func:`moments`; None if not computed.
    """

    logits: numpy.ndarray
    agreement: numpy.ndarray | None = None
    maps: numpy.ndarray | None = None

    @property
    def predicted(self) -> numpy.ndarray:
        """The most probable class of each, ``(n,)``."""
        return self.logits.argmax(1)

    @property
    def energy(self) -> numpy.ndarray:
        """The free energy of each, ``(n,)``: see :func:`feddg.runs.energy.energy`."""
        return -logsumexp(self.logits, axis=1)

    def confidence(self, temperature: float) -> numpy.ndarray:
        """Returns the largest probability of each, ``(n,)``."""
        return softmax(self.logits / temperature, axis=1).max(1)


class Reference(Row):
    """A model's statistics on labelled in-domain validation images, for the estimates.

    Attributes:
        images: number of images.
        accuracy: in [0, 1].
        temperature: divides the logits.
        confidence: the mean, after the temperature.
        confidence_threshold: as many images are below it as the model gets wrong.
        agreement: the mean; None if there are no other models.
        unlike: the energy that 5 % of images exceed; infinite if it is always the same.
    """

    images: int
    accuracy: float
    temperature: float
    confidence: float
    confidence_threshold: Unbounded
    agreement: float | None
    unlike: Unbounded

    @classmethod
    def of(cls, outputs: Outputs, labels: numpy.ndarray) -> "Reference":
        """Measures a model on images with labels ``(n,)``."""
        temperature = fitted_temperature(outputs.logits, labels)
        confidence = outputs.confidence(temperature)
        wrong = int((outputs.predicted != labels).sum())
        return cls(
            images=len(labels),
            accuracy=1 - wrong / len(labels),
            temperature=temperature,
            confidence=confidence.mean(),
            # As many stay below it as are wrong.
            confidence_threshold=numpy.append(numpy.sort(confidence), math.inf)[wrong],
            agreement=None if outputs.agreement is None else outputs.agreement.mean(),
            unlike=energy_threshold(torch.from_numpy(outputs.energy), INSIDE),
        )


def fitted_temperature(logits: numpy.ndarray, labels: numpy.ndarray) -> float:
    """Returns the temperature with the least cross-entropy (Guo et al., ICML 2017)."""
    from scipy.optimize import minimize_scalar

    rows = numpy.arange(len(labels))

    def loss(logarithm: float) -> float:
        scaled = logits / math.exp(logarithm)
        return float((logsumexp(scaled, axis=1) - scaled[rows, labels]).mean())

    return math.exp(minimize_scalar(loss, bounds=(-7, 7), method="bounded").x)


# Estimates of accuracy, each from the reference and what the model makes of unlabelled images.


def _estimates(reference: Reference, outputs: Outputs) -> dict[str, float]:
    """Returns the estimate of each estimator that has its inputs, in [0, 1]: their mean counts."""
    confidence = outputs.confidence(reference.temperature)
    mean = float(confidence.mean())
    found = {
        "confidence": mean,  # with a fitted temperature: Guo et al. 2017
        "atc": float((confidence >= reference.confidence_threshold).mean()),  # Garg et al. 2022
        "doc": reference.accuracy + mean - reference.confidence,  # Guillory et al. 2021
    }
    if outputs.agreement is not None and reference.agreement is not None:
        agreement = float(outputs.agreement.mean())  # Jiang et al. 2022
        found["agreement"] = reference.accuracy + agreement - reference.agreement
    return {name: min(1.0, max(0.0, value)) for name, value in found.items()}


# Images unlike those of all sites. A new style makes a model as doubtful as another object does,
# and its last features differ as much. The layers before tell more: what their maps are made of
# mostly changes less between styles of the same objects than between kinds of images. Not always:
# which of the two it is nobody can tell from images alone.


def moments(maps: Tensor) -> Tensor:
    """Returns means and deviations ``(B, 2 C)`` of maps' channels ``(B, C, height, width)``."""
    return torch.cat([maps.mean((2, 3)), maps.flatten(2).std(2, correction=0)], 1)


SPANNED: Final = 0.95
"""Share of the variance of a site's images that its span explains."""
DRAWS: Final = 40
"""Folders drawn from every site, of all its images and of single classes."""
LEAST_OF_A_FOLDER: Final = 10
"""The least number of a class's images at a site for folders of that class."""


class Span(NamedTuple):
    """The principal directions of a site's images.

    That middle layers notice other images best is a finding of Lee et al. (NeurIPS 2018).

    Attributes:
        scale: ``(m,)``, deviation of each moment.
        centre: ``(m,)``, mean of the scaled moments.
        basis: ``(m, r)``, orthonormal.
        variance: the total variance of the scaled moments, ``(1,)``.
    """

    scale: Tensor
    centre: Tensor
    basis: Tensor
    variance: Tensor

    @classmethod
    def of(cls, maps: Tensor) -> "Span":
        """Measures images ``(n, m)``; what one alone shows is a point."""
        scale = maps.std(0) if len(maps) > 1 else torch.zeros_like(maps[0])
        scale = scale + 0.05 * scale.mean() + 1e-9  # of a moment that never changes
        scaled = maps / scale
        centre = scaled.mean(0)
        _, values, directions = torch.linalg.svd(scaled - centre, full_matrices=False)
        shares = values.square().cumsum(0) / values.square().sum().clamp(min=1e-12)
        rank = int((shares < SPANNED).sum()) + 1
        rank %= len(scale)  # outside of all directions is nothing: then the centre is the span
        variance = values.square().sum().clamp(min=1e-12) / len(maps)
        return cls(scale, centre, directions[:rank].T.contiguous(), variance[None])

    def outside(self, maps: Tensor) -> Tensor:
        """Returns the squared length of images ``(n, m)`` outside of the span, ``(n,)``."""
        centred = maps / self.scale - self.centre
        inside = centred @ self.basis
        return (centred.square().sum(1) - inside.square().sum(1)).clamp(min=0) / self.variance


@dataclass(frozen=True)
class Familiar:
    """What a network's middle layers see in the images of its sites.

    Attributes:
        spans: of each site.
        outside: ``(n, sites)``, the sites' own images outside of each one's span.
        sites: ``(n,)``, the site of each.
        labels: ``(n,)``, the class of each.
    """

    spans: Sequence[Span]
    outside: numpy.ndarray
    sites: numpy.ndarray
    labels: numpy.ndarray

    @classmethod
    def of(cls, maps: numpy.ndarray, sites: numpy.ndarray, labels: numpy.ndarray) -> "Familiar":
        """Measures images ``(n, m)`` with their sites and classes ``(n,)``."""
        values = torch.from_numpy(maps).double()
        numbers, places = numpy.unique(sites, return_inverse=True)
        spans = [Span.of(values[torch.from_numpy(places == site)]) for site in range(len(numbers))]
        outside = torch.stack([span.outside(values) for span in spans], 1)
        return cls(spans, outside.numpy(), places, labels)

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> "Familiar":
        """Returns what :meth:`tensors` gave."""
        outside, sites, labels = (tensors[name] for name in ("outside", "sites", "labels"))
        spans = [
            Span(*(tensors[f"{name}.{site}"] for name in Span._fields))
            for site in range(outside.shape[1])
        ]
        return cls(spans, outside.numpy(), sites.numpy(), labels.numpy())

    def tensors(self) -> dict[str, Tensor]:
        """Returns all of it by name, for a file."""
        own = {name: getattr(self, name) for name in ("outside", "sites", "labels")}
        return {name: torch.from_numpy(array) for name, array in own.items()} | {
            f"{name}.{site}": tensor
            for site, span in enumerate(self.spans)
            for name, tensor in span._asdict().items()
        }

    def novelty(self, maps: numpy.ndarray) -> float:
        """Returns the logarithm of how far images ``(n, m)`` are outside of the nearest span."""
        values = torch.from_numpy(maps).double()
        return novelty_of(numpy.stack([span.outside(values).numpy() for span in self.spans], 1))

    def limit(self, images: int) -> float:
        """Returns the largest novelty of a folder of so many images of the same classes.

        Every site is a new one to the others: folders as large are drawn from it, of all its
        images and of single classes, and 95 % of them are below. The mean over sites counts,
        because the farthest of few is an accident. Infinite with fewer than two sites.
        """
        random, limits = numpy_stream(0, "folders", str(images)), list[float]()
        for site in range(len(self.spans)) if len(self.spans) > 1 else ():
            rows = numpy.flatnonzero(self.sites == site)
            if len(rows) < 2:  # which says nothing of what a site looks like
                continue
            others = numpy.delete(self.outside, site, axis=1)
            of_class = [rows[self.labels[rows] == label] for label in numpy.unique(self.labels)]
            kinds = [rows, *(part for part in of_class if len(part) >= LEAST_OF_A_FOLDER)]
            # As many folders of all images as of single classes.
            chosen = [*[rows] * DRAWS, *islice(cycle(kinds[1:] or kinds), DRAWS)]
            drawn = [novelty_of(others[random.choice(kind, images)]) for kind in chosen]
            limits.append(float(numpy.quantile(drawn, INSIDE)))
        return fmean(limits) if limits else math.inf


def novelty_of(outside: numpy.ndarray) -> float:
    """Returns the novelty of images by their distances ``(n, sites)`` from the sites' spans."""
    return math.log(max(float(outside.mean(0).min()), 1e-9))


class Signals(Row):
    """The signals of unlabelled images, compared with the reference.

    Attributes:
        estimates: by the estimator's name.
        novelty: see :meth:`Familiar.novelty`; None if unknown.
        limit: the largest that it may be, see :meth:`Familiar.limit`; None without sites.
    """

    estimates: dict[str, float]
    novelty: float | None = None
    limit: float | None = None

    @classmethod
    def of(
        cls, reference: Reference, outputs: Outputs, familiar: Familiar | None = None
    ) -> "Signals":
        """Asks every estimator; those without their inputs answer nothing."""
        estimates = _estimates(reference, outputs)
        if familiar is None or outputs.maps is None:
            return cls(estimates=estimates)
        novelty, limit = familiar.novelty(outputs.maps), familiar.limit(len(outputs.maps))
        return cls(estimates=estimates, novelty=novelty, limit=None if math.isinf(limit) else limit)

    @property
    def foreign(self) -> bool:
        """Whether the images differ more from those of the sites than a new site's usually do."""
        return self.novelty is not None and self.limit is not None and self.novelty > self.limit


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

    @classmethod
    def of(
        cls, site: str, reference: Reference, outputs: Outputs, labels: numpy.ndarray
    ) -> "LeftOutSite":
        """Measures a model at a site, by its outputs on images with labels ``(n,)``."""
        accuracy = float((outputs.predicted == labels).mean())
        signals = Signals.of(reference, outputs)
        return cls(site=site, images=len(labels), accuracy=accuracy, signals=signals)


class Part(NamedTuple):
    """Images of several sites.

    Attributes:
        features: ``(n, d)``.
        labels: ``(n,)``.
        sites: ``(n,)``, the number of each one's site.
    """

    features: Tensor
    labels: Tensor
    sites: Tensor

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
    return Outputs(logits.numpy(), None if agreement is None else agreement.numpy())


def left_out_sites(
    sums: Sums, train: Part, validation: Part, names: Sequence[str], *, agree: bool = True
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
    """
    sites = sums.largest(MOST_SITES)
    for site in sites if len(sites) > 1 else ():
        seen = validation.of(validation.sites != site)
        parts = [part.of(part.sites == site) for part in (train, validation)]
        left_out = Part(*(torch.cat(columns) for columns in zip(*parts)))
        if not len(seen.labels):
            continue
        head, others = sums.head(site), sums.others(site) if agree else []
        before, outputs = outputs_of(seen, head, others), outputs_of(left_out, head, others)
        reference = Reference.of(before, seen.labels.numpy())
        yield LeftOutSite.of(names[site], reference, outputs, left_out.labels.numpy())


# Single images, and a few labels.


def right_chances(confidence: numpy.ndarray, accuracy: float) -> numpy.ndarray:
    """Returns the probability that each answer is right, with a given accuracy as their mean.

    Args:
        confidence: ``(n,)``, after the temperature.
        accuracy: the mean; all log-odds are shifted equally to reach it.
    """
    from scipy.optimize import brentq

    odds = logit(confidence.clip(1e-6, 1 - 1e-6))
    wanted = min(1 - 1e-6, max(1e-6, accuracy))
    shift = brentq(lambda by: float(expit(odds + by).mean()) - wanted, -40, 40)
    return expit(odds + shift)


IN_A_STRATUM: Final = 10
"""The least number of labels in each stratum of confidence."""


def _strata(scores: numpy.ndarray, labels: int) -> list[numpy.ndarray]:
    """Returns the images of each stratum for so many labels, by rising score."""
    order = numpy.argsort(scores, kind="stable")
    return numpy.array_split(order, max(1, labels // IN_A_STRATUM))


def images_to_label(confidence: numpy.ndarray, count: int, seed: int = 0) -> numpy.ndarray:
    """Returns which images to label, ``(count,)``, for an unbiased estimate.

    A simple random sample of each stratum of confidence, so that doubtful images are represented in
    proportion (Cochran 1977, chapter 5). Equal steps of confidence would do so, too, but have few
    samples to choose from, whose spread no single one shows.
    """
    random, count = numpy_stream(seed, "images to label"), min(count, len(confidence))
    parts = _strata(confidence, count)
    sizes = [len(part) for part in numpy.array_split(numpy.arange(count), len(parts))]
    chosen = [random.choice(part, size, replace=False) for part, size in zip(parts, sizes)]
    return numpy.concatenate(chosen)


DOUBT: Final = 3.0
"""An estimate without labels may err this many times as much as it says, or as labels say."""


def with_labels(
    without: Estimate, chances: numpy.ndarray, labelled: numpy.ndarray, right: numpy.ndarray
) -> Estimate:
    """Returns an estimate from predictions, a few labels, and the estimate without labels.

    The mean of the chances is corrected by their error on labelled images in each stratum of
    confidence (prediction-powered inference; Angelopoulos et al., Science 2023; the stratified
    difference estimator of surveys, Cochran 1977, chapters 5 and 7). It is combined with the
    estimate without labels, weighted by certainty. That one is believed to err three times as much
    as it says, or as the labels say: nobody can check what it rests on, and labels are checks.
    The labelled images must have been chosen at random, as :func:`images_to_label` does.

    Args:
        without: the estimate without labels.
        chances: ``(n,)``, see :func:`right_chances`.
        labelled: ``(m,)`` indices of the labelled images.
        right: ``(m,)`` whether the model is right there.
    """
    estimate = labels_estimate(chances, labelled, right)
    if estimate is None:
        return without
    value, deviation = estimate
    before = max(_believed(without), DOUBT * abs(value - without.value))
    weights = numpy.array([before**-2, deviation**-2])
    middle = float(weights @ [without.value, value] / weights.sum())
    reach = quantile(max(1, len(labelled) - 1)) / math.sqrt(weights.sum())
    return within(middle, middle - reach, middle + reach)


def _believed(without: Estimate) -> float:
    """Returns the deviation that an estimate without labels is believed to have beside labels."""
    return DOUBT * max(without.reach / quantile(math.inf), 1e-9)


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
    value = variance = 0.0
    for inside in _strata(chances, count):
        in_stratum, share = numpy.isin(labelled, inside), len(inside) / len(chances)
        errors = right[in_stratum] - chances[labelled[in_stratum]]
        wrong = errors.mean() if len(errors) else (right - chances[labelled]).mean()
        mean = chances[inside].mean()
        value += share * (mean + wrong)
        # Two more answers, one right and one wrong, at the stratum's mean chance.
        more = (1 - mean - wrong) ** 2 + (mean + wrong) ** 2
        spread = (((errors - wrong) ** 2).sum() + more) / (len(errors) + 2)
        left = 1 - len(errors) / len(inside)
        variance += share**2 * spread / max(1, len(errors)) * left
    return min(1.0, max(0.0, float(value))), math.sqrt(max(variance, 1e-12))


def labels_needed(without: Estimate, chances: numpy.ndarray) -> int:
    """Returns about how many labels bring the interval to :data:`REACH` on either side.

    It assumes that the chances are right: an answer's variance is then p (1 - p), and in a stratum
    there are two more answers, as in :func:`labels_estimate`.
    """
    if without.reach <= REACH:
        return 0
    missing = (quantile(math.inf) / REACH) ** 2 - _believed(without) ** -2
    # Of n images without replacement the variance is spread (1 / labels - 1 / n).
    variances = chances * (1 - chances)
    spread = float((IN_A_STRATUM * variances + 1 - 2 * variances).mean()) / (IN_A_STRATUM + 2)
    count = math.ceil(1 / (1 / max(spread * missing, 1e-9) + 1 / len(chances)))
    return min(len(chances), max(IN_A_STRATUM, count))
