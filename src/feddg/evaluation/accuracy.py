"""Accuracy of a predictor by split and domain."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from feddg.data.pixels import Pixels, as_unit
from feddg.errors import ExperimentError, RunError
from feddg.evaluation.decision import Decision, Part, decision_metrics, threshold_on
from feddg.evaluation.groups import effective_number, variance_of_sum
from feddg.evaluation.metrics import Predictions, measure, student
from feddg.models.network import Network
from feddg.models.precision import as_usual
from feddg.models.task import CLASSIFICATION, Task
from feddg.models.trained import digest_of_fixed_features
from feddg.records import LAST, MetricRow
from feddg.rng import stream

MOST_KEPT = 2**28
"""Most bytes of features that are kept for an evaluation's next passes."""
ONE_IMAGE = "one image"
"""What a predictor needs whose answer depends on nothing but the image."""
NOT_FINITE = "the model's outputs for {} are not finite (NaN or infinite): it cannot be evaluated"


def sees_batches(predictor: nn.Module) -> bool:
    """Whether a predictor's answer depends on other images, of its batch or before."""
    return keeps_state(predictor) or getattr(predictor, "needs", ONE_IMAGE) != ONE_IMAGE


def keeps_state(predictor: nn.Module) -> bool:
    """Whether a predictor remembers images until its ``reset``, as some adaptations do."""
    return getattr(predictor, "keeps_state", False)


@dataclass(frozen=True)
class Score:
    """The result of a predictor on one domain of one split.

    Attributes:
        split: ``test``, ``val`` (held-out), ``id_test`` or ``id_val`` (in-domain).
        domain: domain name.
        correct: number of images classified correctly; for another task, the sum of its scores.
        examples: number of images.
        loss: mean loss of the task; cross-entropy for classification.
        confusion: ``(classes, classes)`` counts, true class by predicted class; ``(0, 0)`` for
            another task.
        metrics: all registered metrics that are defined here, by name.
        models: number of models evaluated; ``correct`` and ``confusion`` are sums over them,
            ``loss``, ``metrics`` and ``values`` means.
        confidence: mean largest probability, in [0, 1]; NaN for another task.
        values: ``(examples,)`` the task's score of each image, in the order of the data set.
        groups: ``(examples,)`` integers, the group of each image; None if images are independent.
        counted: number of groups, and of independent images that tell as much, of images that are
            elsewhere; None each if they are independent. By default those of ``groups``.
    """

    split: str
    domain: str
    correct: float
    examples: int
    loss: float
    confusion: numpy.ndarray = field(repr=False)
    metrics: Mapping[str, float] = field(default_factory=dict)
    models: int = 1
    confidence: float = math.nan
    values: numpy.ndarray = field(default_factory=lambda: numpy.zeros(0), repr=False)
    groups: numpy.ndarray | None = field(default=None, repr=False)
    counted: tuple[int | None, float | None] = (None, None)

    def __post_init__(self) -> None:
        if self.groups is not None:
            counted = len(numpy.unique(self.groups)), effective_number(self.values, self.groups)
            object.__setattr__(self, "counted", counted)

    @property
    def accuracy(self) -> float:
        """Share of images classified correctly, in [0, 1]; for another task, its mean score."""
        return self.correct / (self.examples * self.models)

    @property
    def mean(self) -> float:
        """The task's mean score over the images."""
        return self.accuracy

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of :attr:`mean` over images of this domain, or over groups of them."""
        return _mean_and_interval(self.values, self.groups)[1]

    def minus(self, other: "Score") -> tuple[float, tuple[float, float]]:
        """Returns the mean difference to another model's score, and its 95 % interval.

        Args:
            other: the other model's score on the same images, with which it is paired.

        Raises:
            ValueError: the scores are of different numbers of images, or of other groups.
        """
        if len(self.values) != len(other.values):
            raise ValueError(
                f"only scores of the same images can be paired: these are of {len(self.values)} "
                f"and of {len(other.values)}"
            )
        groups = [score.groups for score in (self, other) if score.groups is not None]
        counts = {numpy.unique(each).size for each in groups}
        if groups and len(counts | {numpy.unique(numpy.stack(groups), axis=1).shape[1]}) > 1:
            raise ValueError("only scores of the same images can be paired: their groups differ")
        return _mean_and_interval(self.values - other.values, groups[0] if groups else None)

    def rows(
        self, round: int, with_confusion: bool = False, weights: str = LAST
    ) -> list[MetricRow]:
        """Returns the rows for the run folder's table, without what training took."""
        of = {"round": round, "weights": weights, "split": self.split, "domain": self.domain}
        of |= {"examples": self.examples, "images": 0, "bytes": 0, "seconds": 0}
        more: dict[str, Any] = {"confusion": self.confusion.tolist() if with_confusion else None}
        more["groups"], more["independent"] = self.counted
        others = {"loss": self.loss} | {n: v for n, v in self.metrics.items() if n != "accuracy"}
        return [
            MetricRow(metric="accuracy", value=self.accuracy, **of, **more),
            *(MetricRow(metric=name, value=value, **of) for name, value in others.items()),
        ]


def _mean_and_interval(
    values: numpy.ndarray, groups: numpy.ndarray | None = None
) -> tuple[float, tuple[float, float]]:
    """Returns a mean over images and its 95 % interval by Student's t, over groups if any.

    One image, or one group, leaves it unbounded.
    """
    mean, (variance, freedom) = float(values.mean()), variance_of_sum(values, groups)
    if not freedom:
        return mean, (-math.inf, math.inf)
    half = student(freedom) * math.sqrt(variance) / len(values)
    return mean, (mean - half, mean + half)


def mean_score(scores: Sequence[Score]) -> Score:
    """Returns the mean score of several models on one domain of one split, equally weighted.

    A metric that is undefined for one of them is left out.
    """
    first, count = scores[0], len(scores)
    shared = [name for name in first.metrics if all(name in score.metrics for score in scores)]
    return replace(
        first,
        correct=sum(score.correct for score in scores),
        loss=math.fsum(score.loss for score in scores) / count,
        confusion=numpy.sum([score.confusion for score in scores], axis=0),
        metrics={
            name: math.fsum(score.metrics[name] for score in scores) / count for name in shared
        },
        models=count,
        confidence=math.fsum(score.confidence for score in scores) / count,
        values=numpy.mean([score.values for score in scores], axis=0),
    )


Outputs = tuple[numpy.ndarray, Tensor]
"""Rows ``(n,)`` of a pixel store, and a model's outputs for them ``(n, ...)``."""


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated: rows of a pixel store by split, with their labels and domains.

    Attributes:
        pixels: the store.
        splits: rows by split name; empty splits are left out of the result.
        labels: ``(n,)`` class ids of all rows of the store, or another task's targets.
        domains: ``(n,)`` domain ids of all rows.
        domain_names: names of the domains, by domain id.
        classes: number of classes.
        batch_size: images per forward pass.
        device: where the predictor lives.
        autocast: opens the precision context.
        paths: file of each row of the store, for tables of single images; may be empty.
        task: gives loss and score.
        kept: what a frozen featurizer gave for each batch, by network, digest and rows.
        groups: ``(n,)`` integers, the group of all rows; None if images are independent.
        subgroups: further columns of all rows, ``(n,)`` texts by name.
        decision: what is decided about one class; None for nothing.
    """

    pixels: Pixels
    splits: Mapping[str, numpy.ndarray]
    labels: numpy.ndarray
    domains: numpy.ndarray
    domain_names: tuple[str, ...]
    classes: int
    batch_size: int
    device: torch.device
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    paths: Sequence[str] = ()
    task: Task = CLASSIFICATION
    groups: numpy.ndarray | None = None
    subgroups: Mapping[str, numpy.ndarray] = field(default_factory=dict)
    decision: Decision | None = None
    kept: dict[tuple[nn.Module, str, bytes], Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def scores(self, predictor: nn.Module, outputs: list[Outputs] | None = None) -> list[Score]:
        """Returns the scores of ``predictor``, after setting it to eval mode.

        An adaptation that remembers images is reset before every domain.

        Args:
            predictor: maps images to outputs.
            outputs: gets the rows and outputs of each part; None keeps none.
        """
        predictor.eval()
        scores = []
        outputs = [] if outputs is None and self.decision is not None else outputs
        for part, logits in zip(self.parts(), self.predictions(predictor), strict=True):
            scores.append(self._score(logits, *part))
            if outputs is not None:
                outputs.append((part[2], logits))
        if self.decision is None:
            return scores
        parts = self.sides(self.decision, outputs or [])
        threshold = threshold_on(parts, self.decision)
        return [
            replace(score, metrics={**score.metrics, **decision_metrics(part, threshold)})
            for score, part in zip(scores, parts, strict=True)
        ]

    def sides(self, decision: Decision, outputs: Sequence[Outputs]) -> list[Part]:
        """Returns the probabilities of a decision's class by part, from the outputs of all."""
        return [
            Part(
                split,
                self.domain_names[domain],
                self.labels[rows] == decision.of,
                logits.double().softmax(1)[:, decision.of].numpy(),
                None if self.groups is None else self.groups[rows],
            )
            for (split, domain, rows), (_, logits) in zip(self.parts(), outputs, strict=True)
        ]

    def predictions(self, predictor: nn.Module) -> Iterator[Tensor]:
        """Yields the logits of each part, as :meth:`predict` returns them."""
        # What other tasks predict is large: one part at a time.
        if sees_batches(predictor) or not self.task.has_classes:
            for _, _, rows in self.parts():
                if keeps_state(predictor):
                    predictor.reset()  # type: ignore[operator]
                yield self.predict(predictor, rows)
        else:
            yield from self.by_part(self.predict(predictor, rows) for rows in self.passes())

    def passes(self) -> list[numpy.ndarray]:
        """Returns the rows of each sequence that is cut into batches: a part's, as a rule.

        On an accelerator, where small batches cost as much as large ones, those of all parts.
        """
        parts = [rows for _, _, rows in self.parts()]
        across = parts and self.device.type != "cpu" and self.task.has_classes
        return [numpy.concatenate(parts)] if across else parts

    def by_part(self, outputs: Iterator[Tensor]) -> Iterator[Tensor]:
        """Yields the outputs of each part, from those of all rows in their order."""
        sizes = [len(rows) for _, _, rows in self.parts()]
        yield from torch.cat(list(outputs)).split(sizes) if sizes else ()

    def support(self) -> Iterator[tuple[str, str, list[int]]]:
        """Yields each split and domain with its number of images per class."""
        for split, domain, rows in self.parts():
            counts = numpy.bincount(self.labels[rows], minlength=self.classes)
            yield split, self.domain_names[domain], counts.tolist()

    def parts(self) -> Iterator[tuple[str, int, numpy.ndarray]]:
        """Yields each split and domain with its rows."""
        for split, rows in self.splits.items():
            for domain in numpy.unique(self.domains[rows]):
                yield split, int(domain), rows[self.domains[rows] == domain]

    def _score(self, outputs: Tensor, split: str, domain: int, rows: numpy.ndarray) -> Score:
        task, name, confusion = self.task, self.domain_names[domain], numpy.zeros((0, 0), int)
        targets = torch.from_numpy(self.labels[rows])
        # A program's loss may change what it is given; the score is of what was predicted.
        given = (outputs, targets) if task.has_classes else (outputs.clone(), targets.clone())
        loss, scored = float(task.loss(*given)), task.score(outputs, targets)
        values = scored.double().numpy()
        if not numpy.isfinite(values).all():
            bad = int(numpy.flatnonzero(~numpy.isfinite(values))[0])
            raise ExperimentError(
                f"the task's score is {values[bad]} for image {bad} of {name}; it must be a number "
                "for every image, also where there is nothing to find"
            )
        correct, of_classes = float(values.sum(dtype=float)), dict[str, Any]()
        if task.has_classes:
            if outputs.isnan().any():  # and would count as the first class
                raise RunError(NOT_FINITE.format(f"images of {name}"))
            pairs = targets * self.classes + outputs.argmax(1)
            counts = torch.bincount(pairs, minlength=self.classes**2).view(self.classes, -1)
            correct, confusion = int(correct), counts.numpy()
            of_classes["metrics"] = measure(Predictions(confusion, outputs, targets))
            of_classes["confidence"] = float(outputs.softmax(1).amax(1).mean())
        groups = None if self.groups is None else self.groups[rows]
        more = of_classes | {"values": values, "groups": groups}
        return Score(split, name, correct, len(rows), loss, confusion, **more)

    def in_float32(self) -> "Evaluation":
        """Returns the evaluation in float32 and in this process alone.

        So the model answers where it is used, in files and by `feddg predict`: what a threshold is
        taken from must be its answers there.
        """
        own = {each.name: getattr(self, each.name) for each in fields(Evaluation) if each.init}
        return Evaluation(**own | {"autocast": nullcontext})

    def predict(self, predictor: nn.Module, rows: numpy.ndarray) -> Tensor:
        """Returns the outputs ``(len(rows), ...)`` on the CPU in float32.

        If predictions depend on the batch (``needs`` is not one image), rows are shuffled, so that
        batches are not sorted by class, and batches have about equal size.
        """
        answers = self._answers(predictor)
        order = torch.arange(len(rows))
        batches = order.split(self.batch_size)
        if getattr(predictor, "needs", ONE_IMAGE) != ONE_IMAGE:
            order = torch.randperm(len(rows), generator=stream(0, "evaluation order"))
            batches = order.tensor_split(-(-len(rows) // self.batch_size))
        with as_usual(), torch.inference_mode(), self.autocast():
            parts = [answers(torch.from_numpy(rows)[batch]).float() for batch in batches]
        return torch.cat(parts).cpu()[order.argsort()]

    def _answers(self, predictor: nn.Module) -> Callable[[Tensor], Tensor]:
        """Returns what maps a batch's rows to a predictor's outputs, with its weights as they are.

        What a frozen featurizer gives is kept, up to 256 MB: the next pass is that of the head.
        """

        def images(part: Tensor) -> Tensor:
            return as_unit(self.pixels.gather(part, self.device))

        digest = digest_of_fixed_features(predictor)
        if not digest or not isinstance(predictor, Network):
            return lambda part: predictor(images(part))
        network = predictor

        def answers(part: Tensor) -> Tensor:
            key = network, digest, part.numpy().tobytes()
            features = self.kept.get(key)
            if features is None:
                features = network.featurizer(network.normalize(images(part)))
                if sum(kept.nbytes for kept in self.kept.values()) + features.nbytes <= MOST_KEPT:
                    self.kept[key] = features.cpu()
            embeddings = network.embedding(features.to(self.device))
            return network.classifier(embeddings)

        return answers
