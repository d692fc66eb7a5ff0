"""What speaks against a run's accuracy, from its rows alone; intervals for shares."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Final

import numpy

from feddg.diagnostics import Diagnostic, gravest_first
from feddg.errors import FeddgError, RunError
from feddg.evaluation.metrics import Predictions, measure
from feddg.experiment import Experiment, fewest_fields
from feddg.records import LAST, TEST, VAL, EvaluationRow
from feddg.runs.reading import Evaluations, RunRecord, find_rule, read_run
from feddg.text import command

# Intervals for shares of counted things: what one run's accuracy leaves open.


LEVEL: Final = 0.95
_Z: Final = NormalDist().inv_cdf((1 + LEVEL) / 2)


@dataclass(frozen=True, slots=True)
class ShareInterval:
    """A share with the ends of its 95 % confidence interval, all in [0, 1]."""

    share: float
    low: float
    high: float

    def includes(self, share: float) -> bool:
        """Whether a share lies between the ends, both taken in."""
        return self.low <= share <= self.high


def wilson(share: float, examples: int) -> ShareInterval:
    """Returns the interval of Wilson (1927), Journal of the American Statistical Association 22.

    It says how far a share may be from the one that endless examples of the same kind would give.
    It knows nothing of other seeds, clients or domains.

    Args:
        share: the share found, in [0, 1].
        examples: of how many; at least 1.

    Raises:
        ValueError: there are no examples, or the share is none.
    """
    if examples < 1 or not 0 <= share <= 1:
        raise ValueError(f"no share of examples: {share} of {examples}")
    pull = _Z**2 / examples
    middle = (share + pull / 2) / (1 + pull)
    reach = _Z * math.sqrt(share * (1 - share) / examples + pull / (4 * examples)) / (1 + pull)
    # The ends of 0 and 1 are exact; rounding must not push the share itself outside.
    return ShareInterval(
        share, min(share, max(0.0, middle - reach)), max(share, min(1.0, middle + reach))
    )


def mean_of_shares(parts: Sequence[tuple[float, int]]) -> ShareInterval:
    """Returns the mean of independent shares with its interval; for a single one, Wilson's.

    Args:
        parts: the shares, each with the number of its examples; at least one.

    Raises:
        ValueError: a part has no examples, or there is no part.
    """
    return mean_of_intervals([wilson(share, examples) for share, examples in parts])


def mean_of_intervals(parts: Sequence[ShareInterval]) -> ShareInterval:
    """Returns the mean of independent shares, each counted once, with its interval.

    The ends recover the variances from the parts' own ends (Zou and Donner 2008, Statistics in
    Medicine 27, "method of variance estimates recovery").

    Raises:
        ValueError: there is no part.
    """
    if not parts:
        raise ValueError("the mean of no shares")
    mean = math.fsum(part.share for part in parts) / len(parts)
    below = math.hypot(*(part.share - part.low for part in parts)) / len(parts)
    above = math.hypot(*(part.high - part.share for part in parts)) / len(parts)
    return ShareInterval(mean, max(0.0, mean - below), min(1.0, mean + above))


NEARLY_ALL: Final = 0.8
"""A share of the predictions from which on one class counts as nearly all of them ..."""
TOO_OFTEN: Final = 0.2
"""... when it is that much more often predicted than true."""
WINDOW: Final = 3
"""The end of a run: a third of its steps from one evaluation to the next, these at least ..."""
LEAST_STEPS: Final = 2
"""... or, in a short run, as many as there are, but no fewer than these."""
ONE_WAY: Final = 0.75
"""A rise is a rise when it is this part, or more, of all the movement up and down ..."""
LEAST_RISE: Final = 0.01
"""... and a point of accuracy at least ..."""
NOT_LEVELLED: Final = 0.25
"""... and its last third went on at this part, or more, of its mean pace."""
FAR_ABOVE: Final = 10
"""So many times the preset's learning rate, and one is named where nothing was learned."""
ABOVE_GUESSING: Final = 1.2
"""So many times the cross-entropy of guessing, and training went astray."""


MAJORITY: Final = "no-better-than-majority-class"
ONE_CLASS: Final = "nearly-always-one-class"
UNTRAINED: Final = "worse-than-untrained"
STILL_RISING: Final = "still-rising"
TOO_LARGE: Final = "learning-rate-too-large"
LEARNED_NOTHING: Final = frozenset({MAJORITY, ONE_CLASS, UNTRAINED})


@dataclass(frozen=True, slots=True)
class SplitAccuracy:
    """The accuracy of one split after one round, with its reference values.

    All are shares in [0, 1], means over the split's domains, each counted once; None where the
    rows do not tell.

    Attributes:
        round: after which round.
        accuracy: with its 95 % interval over images.
        constant: what always answering the most frequent class reaches.
        balanced: balanced accuracy.
        balanced_interval: its interval over images; needs the confusions.
        chance: balanced accuracy of guessing: one over the classes that have images.
        predicted: share of each class among the predictions ``(classes,)``.
        true: share of each class among the images ``(classes,)``.
    """

    round: int
    accuracy: ShareInterval
    constant: float | None = None
    balanced: float | None = None
    balanced_interval: ShareInterval | None = None
    chance: float | None = None
    predicted: Sequence[float] | None = None
    true: Sequence[float] | None = None

    @property
    def most_predicted(self) -> tuple[int, float] | None:
        """The class named most often, and its share of the predictions."""
        if self.predicted is None:
            return None
        most = int(numpy.argmax(self.predicted))
        return most, self.predicted[most]


def accuracy_interval(rows: Sequence[EvaluationRow]) -> ShareInterval | None:
    """Returns the mean accuracy of rows with its interval; None where one is no accuracy."""
    parts = [(row.accuracy, row.examples) for row in rows]
    if not parts or not all(0 <= share <= 1 and count > 0 for share, count in parts):
        return None
    return mean_of_shares(parts)


def measured(row: EvaluationRow, name: str) -> float | None:
    """Returns a metric of a row, computed from its confusion where it was not recorded."""
    if name in row.metrics or row.confusion is None:
        return row.metrics.get(name)
    return measure(Predictions(numpy.array(row.confusion))).get(name)


def mean_measured(rows: Sequence[EvaluationRow], name: str) -> float | None:
    """Returns the mean of a metric over rows; None where one of them lacks it."""
    values = [value for row in rows if (value := measured(row, name)) is not None]
    return math.fsum(values) / len(rows) if rows and len(values) == len(rows) else None


def split_accuracy(
    evaluations: Evaluations, round_: int | None, split: str = TEST
) -> SplitAccuracy | None:
    """Returns the accuracy of a split after a round; None where it was not evaluated."""
    rows = evaluations.at(round_, split) if round_ is not None else []
    accuracy = accuracy_interval(rows)
    if round_ is None or accuracy is None:
        return None
    constant = mean_measured(rows, "largest_class_share")
    balanced = mean_measured(rows, "balanced_accuracy")
    confusions = [numpy.array(row.confusion, dtype=float) for row in rows if row.confusion]
    confusions = [counts for counts in confusions if counts.sum() > 0]
    if len(confusions) < len(rows):
        return SplitAccuracy(round_, accuracy, constant, balanced)
    true = numpy.mean([counts.sum(axis=1) / counts.sum() for counts in confusions], axis=0)
    predicted = numpy.mean([counts.sum(axis=0) / counts.sum() for counts in confusions], axis=0)
    seen = [counts[counts.sum(axis=1) > 0] for counts in confusions]
    return SplitAccuracy(
        round=round_,
        accuracy=accuracy,
        # One class for all domains: the one that is most frequent in their mean.
        constant=float(true.max()),
        balanced=balanced,
        balanced_interval=_balanced_interval(confusions),
        chance=float(numpy.mean([1 / len(counts) for counts in seen])),
        predicted=predicted.tolist(),
        true=true.tolist(),
    )


def _balanced_interval(confusions: Sequence[numpy.ndarray]) -> ShareInterval:
    """Mean over domains of the mean recall, each recall an independent share of its images."""
    found = []
    for counts in confusions:
        support = counts.sum(axis=1)
        parts = [
            (float(counts[index, index] / total), int(total))
            for index, total in enumerate(support)
            if total > 0
        ]
        found.append(mean_of_shares(parts))
    return mean_of_intervals(found)


def about_accuracy(
    evaluations: Evaluations,
    round_: int | None,
    split: str = TEST,
    weights: str = LAST,
    classes: Sequence[str] = (),
) -> list[Diagnostic]:
    """Returns what must be known beside the accuracy of a round, the gravest first.

    Args:
        evaluations: the run's.
        round_: the round whose accuracy is shown; of None there is nothing to know.
        split: whose accuracy.
        weights: whose accuracy is shown; how it rose over the rounds is the last weights' matter.
        classes: names of the classes, where they are known.
    """
    found = split_accuracy(evaluations.of(weights), round_, split)
    if found is None:
        return []
    trained = (
        ()
        if found.round == 0
        else (
            *_majority(found),
            *_one_class(found, classes),
            *_untrained(evaluations, found, split),
        )
    )
    return gravest_first([*trained, *_rising(evaluations, found, split)])


def _majority(found: SplitAccuracy) -> Iterator[Diagnostic]:
    """No better than the most frequent class: by images, or by the mean over classes."""
    if found.constant is None:
        return
    by_images = found.accuracy.low <= found.constant
    by_classes = found.balanced_interval is not None and (
        found.balanced_interval.low <= (found.chance or 0.0)
    )
    if by_images or by_classes:
        yield Diagnostic(
            MAJORITY,
            "warning",
            "The model is no better than always answering the most frequent class: that is right "
            f"for {found.constant:.1%} of the held-out images, the model for "
            f"{found.accuracy.share:.1%}, and chance explains the difference in images or in "
            "balanced accuracy.",
            "Its labels mean nothing: train longer or with another learning rate, and look at the "
            "images.",
        )


def _one_class(found: SplitAccuracy, classes: Sequence[str]) -> Iterator[Diagnostic]:
    if found.most_predicted is None or found.true is None:
        return
    index, share = found.most_predicted
    true = found.true[index]
    if share >= NEARLY_ALL and share - true >= TOO_OFTEN:
        name = f"the class '{classes[index]}'" if index < len(classes) else "one class"
        yield Diagnostic(
            ONE_CLASS,
            "note",
            f"{share:.1%} of the predictions are {name}, to which {true:.1%} of the images belong.",
        )


def _untrained(evaluations: Evaluations, found: SplitAccuracy, split: str) -> Iterator[Diagnostic]:
    start = evaluations.accuracy(0, split)
    if start is not None and found.accuracy.share < start:
        yield Diagnostic(
            UNTRAINED,
            "warning",
            f"The model is worse than before its training: then it was right for {start:.1%} of "
            f"the held-out images, now for {found.accuracy.share:.1%}.",
            "Its labels mean nothing: try another learning rate.",
        )


def _rising(evaluations: Evaluations, found: SplitAccuracy, split: str) -> Iterator[Diagnostic]:
    """Whether, over the end of the run, nearly all movement went upwards, and still does."""
    steps = _end_steps(evaluations, split)
    if found.round != evaluations.rounds[-1] or len(steps) < LEAST_STEPS:
        return
    rise, path = math.fsum(steps), math.fsum(map(abs, steps))
    latest = steps[-max(1, len(steps) // 3) :]
    levelled = math.fsum(latest) / len(latest) < NOT_LEVELLED * rise / len(steps)
    if rise < LEAST_RISE or rise < ONE_WAY * path or levelled:
        return
    rounds = evaluations.rounds[-1] - evaluations.rounds[-1 - len(steps)]
    yield Diagnostic(
        STILL_RISING,
        "note",
        f"Accuracy was still rising when the run stopped: by {100 * rise:.1f} points over the last "
        f"{rounds} rounds.",
        "Train longer.",
    )


def fluctuation(evaluations: Evaluations, split: str = TEST) -> float | None:
    """Returns how far accuracy moves from one evaluation to the next at the end of a run.

    The mean distance of the steps of a run's last third from their mean, which is the trend and no
    unrest: a share in [0, 1]; None where there are too few.
    """
    steps = _end_steps(evaluations, split)
    if len(steps) < LEAST_STEPS:
        return None
    trend = math.fsum(steps) / len(steps)
    return math.fsum(abs(step - trend) for step in steps) / len(steps)


def about_fluctuation(moved: float | None, margin: float) -> Iterator[Diagnostic]:
    """Says so where accuracy fluctuates by more than two methods differ.

    Args:
        moved: :func:`fluctuation`, a mean over the runs of both.
        margin: difference of the two accuracies.
    """
    if moved is not None and moved > abs(margin):
        yield Diagnostic(
            "rounds-fluctuate",
            "note",
            "From one evaluation to the next, accuracy strays from its trend by "
            f"{100 * moved:.1f} points on average, more than the {100 * abs(margin):.1f} points "
            "between the methods: which round is looked at decides which is better.",
        )


def _end_steps(evaluations: Evaluations, split: str) -> list[float]:
    """Steps between evaluations at the end; that from the untrained model is another matter."""
    values = [evaluations.accuracy(round_, split) for round_ in evaluations.rounds if round_ > 0]
    curve = [value for value in values if value is not None and math.isfinite(value)]
    steps = [after - before for before, after in pairwise(curve)]
    return steps[-max(WINDOW, len(steps) // 3) :]


# What is shown wherever a run's result or its model is.


def about_result(run: RunRecord) -> list[Diagnostic]:
    """Returns what must be known beside the accuracy of the model that the run serves."""
    rule = run.default_rule
    classes = run.clients.classes if run.clients else ()
    chosen = rule.choose(run.evaluations)
    found = about_accuracy(run.evaluations, chosen, weights=rule.weights, classes=classes)
    astray = LEARNED_NOTHING & {one.code for one in found}
    return [*(about_rate(run, len(classes)) if astray else ()), *found]


def usual_rate(run: RunRecord) -> float | None:
    """Returns the learning rate that presets would fill in; None where they are not known."""
    try:
        fields = fewest_fields(Experiment(**run.experiment))
        train = {k: v for k, v in fields.get("train", {}).items() if k != "lr"}
        return Experiment(**{**fields, "train": train}).train.lr
    except FeddgError:
        return None  # another version's, or of a package that is not here


def about_rate(run: RunRecord, classes: int) -> Iterator[Diagnostic]:
    """Names the learning rate of a run that learned nothing, where that is the likely reason.

    Args:
        run: the run.
        classes: how many there are; 0 where that is not known.
    """
    rate, usual = float((run.experiment.get("train") or {}).get("lr") or 0), usual_rate(run)
    terms = run.metrics.rounds[-1].terms if run.metrics.rounds else {}
    loss, guessing = terms.get("cross_entropy"), math.log(classes) if classes > 1 else math.inf
    signs = []
    if usual is not None and rate >= FAR_ABOVE * usual:
        signs.append(f"it is {rate:g}, where the preset has {usual:g}")
    if loss is not None and not loss <= ABOVE_GUESSING * guessing:
        signs.append(
            f"the training loss ended at {loss:.3g}, where guessing has {guessing:.3g}"
            if math.isfinite(loss)
            else "the training loss is not finite"
        )
    if rate and signs:
        lower = usual if usual is not None and usual < rate else rate / 10
        yield Diagnostic(
            TOO_LARGE,
            "warning",
            f"Training went astray, probably by too large a learning rate: {' and '.join(signs)}.",
            f"Lower train.lr: --lr {lower:g}.",
        )


def about_run(run: RunRecord) -> list[Diagnostic]:
    """Returns all that is to be known of a run: how it ended, its result, what it said itself."""
    result = about_result(run)
    recorded = run.summary.diagnostics if run.summary else []
    known = {one.code for one in result}
    others = [one for one in recorded if one.code not in known]
    return [*about_end(run), *gravest_first([*result, *others])]


def about_end(run: RunRecord) -> Iterator[Diagnostic]:
    """Says so where a run has not ended with its last round, or is not whole any more."""
    if run.status == "completed":
        return
    if run.damage:
        yield Diagnostic(
            "run-damaged",
            "warning",
            f"The run folder {run.folder} is damaged: {run.damage}.",
            "Put the file back from a copy, or delete the folder to run it again.",
        )
        return
    how = {
        "unfinished": "has not ended: it is still going on, or it was cut off",
        "interrupted": "was interrupted",
        "failed": f"failed: {run.error or 'no reason was recorded'}",
    }.get(run.status, f"has the status {run.status}")
    of = f" of {run.rounds_planned}" if run.rounds_planned else ""
    yield Diagnostic(
        "run-unfinished",
        "warning",
        f"The run {how.rstrip('.')}. This is round {run.rounds_done}{of}, not the model that it "
        "will serve.",
        f"`{command('resume', str(run.folder))}` goes on.",
    )


def about_model(run: Path | str, which: str, round_: int) -> tuple[Diagnostic, ...]:
    """Returns the warnings about a model, for whoever uses it.

    Empty where nothing speaks against it, or where nothing was measured.

    Args:
        run: the run folder.
        which: the model's selection rule, as ``load_model`` takes it.
        round_: the round it is from.

    Raises:
        RunError: the folder holds no run.
    """
    weights = find_rule(which).weights
    evaluations, split = _held_out(run, weights, round_)
    found = about_accuracy(evaluations, round_, split, weights)
    warnings = (one for one in found if one.severity == "warning")
    return (*about_end(read_run(Path(run))), *warnings)


def result_sentence_of(run: Path | str, which: str, round_: int) -> str:
    """Returns how good a model was on held-out domains, with its interval; see :func:`about_model`.

    Raises:
        RunError: the folder holds no run.
    """
    weights = find_rule(which).weights
    evaluations, split = _held_out(run, weights, round_)
    evaluations = evaluations.of(weights)
    found = split_accuracy(evaluations, round_, split)
    if found is None:
        return "It was measured on no domain that was held out of its training."
    rows = evaluations.at(round_, split)
    share, domains = found.accuracy, ", ".join(row.domain for row in rows)
    return (
        f"It was right for {share.share:.1%} (95 %: {share.low:.1%} to {share.high:.1%}) of "
        f"{sum(row.examples for row in rows)} images of a domain nobody trained on ({domains})."
    )


def _held_out(run: Path | str, weights: str, round_: int) -> tuple[Evaluations, str]:
    evaluations = read_run(Path(run)).evaluations
    own = evaluations.of(weights)
    split = next((split for split in (TEST, VAL) if own.at(round_, split)), TEST)
    return evaluations, split


def refuse_doubtful(found: Sequence[Diagnostic]) -> None:
    """Ends with an error where there is a warning about a model.

    Raises:
        RunError: there is one.
    """
    if found:
        raise RunError(f"{found[0]} Leave --strict away if it is only a trial.")
