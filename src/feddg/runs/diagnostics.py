"""Warnings about a run's accuracy, from its rows only."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import numpy

from feddg.diagnostics import Diagnostic, gravest_first, note, warning
from feddg.errors import FeddgError, RunError, first_names
from feddg.experiment import Experiment
from feddg.methods.base import METHODS
from feddg.models.backbones import FEATURES
from feddg.records import ID_TEST, ID_VAL, LAST, TEST, VAL, NumberRow
from feddg.runs.idle import NEVER_WEIGHTED, ONE_DOMAIN
from feddg.runs.intervals import ShareInterval, mean_of_intervals, mean_of_shares, wilson
from feddg.runs.reading import Run, going_on, read_run
from feddg.runs.table import SELECTION_RULES, NumberTable
from feddg.settings import IMAGENET
from feddg.text import counted

LEAST_RISE: Final = 0.01
"""Accuracy rises or falls if it does by at least this much."""
FEW: Final = 20
"""With fewer images of a class, its recall changes by more than 5 points with each image."""


MAJORITY: Final = "no-better-than-majority-class"
UNTRAINED: Final = "worse-than-untrained"
STILL_RISING: Final = "still-rising"
UNSTEADY: Final = "rounds-fluctuate"
FALLS: Final = "validation-falls"
NOTHING_GAINED: Final = "nothing-over-the-closed-form"
DIVERGED: Final = "training-diverged"
TOO_LARGE: Final = "learning-rate-too-large"
DOMAIN_AT_CHANCE: Final = "domain-at-chance"
SITE_FAR_BELOW: Final = "site-far-below"
FEW_IMAGES: Final = "few-images-of-a-class"
EARLY: Final = "ended-early"
OF_SETTINGS: Final = frozenset({ONE_DOMAIN, NEVER_WEIGHTED, EARLY})
"""What comes of settings: a method does less than its name promises, or privacy ends training."""
LEARNED_NOTHING: Final = frozenset({MAJORITY, UNTRAINED})
OF_ITS_END: Final = LEARNED_NOTHING | {
    *(STILL_RISING, UNSTEADY, FALLS, NOTHING_GAINED, DIVERGED, TOO_LARGE),
    *(DOMAIN_AT_CHANCE, SITE_FAR_BELOW),
}
"""What is said of a run as it ended: of one that went on it may no longer be true."""
CONSTANT_ANSWER: Final = "always answering the most frequent class"
IN_WORDS: Final = {
    MAJORITY: f"no better than {CONSTANT_ANSWER}",
    UNTRAINED: "worse than before training",
    STILL_RISING: "accuracy was still rising when training ended",
    ONE_DOMAIN: "clients have images of one domain, and there the method has nothing to compare",
    NEVER_WEIGHTED: "the penalty never had its weight, because annealing takes more steps",
    EARLY: "the privacy budget was spent before the last planned round",
}
"""What is found in runs, by code, where several are spoken of together."""


@dataclass(frozen=True, slots=True)
class SplitAccuracy:
    """A split's accuracy after one round, with reference values.

    All are shares in [0, 1], means over the split's domains, equally weighted; None if unknown.

    Attributes:
        round: the round.
        accuracy: accuracy with its 95 % interval over images.
        constant: accuracy of always predicting the most frequent class.
        balanced: balanced accuracy.
        balanced_interval: its interval over images; needs confusion matrices.
        guessing: balanced accuracy of guessing: one over the number of classes with images.
        predicted: share of each class among the predictions ``(classes,)``.
        true: share of each class among the images ``(classes,)``.
    """

    round: int
    accuracy: ShareInterval
    constant: float | None = None
    balanced: float | None = None
    balanced_interval: ShareInterval | None = None
    guessing: float | None = None
    predicted: Sequence[float] | None = None
    true: Sequence[float] | None = None

    @property
    def most_predicted(self) -> tuple[int, float] | None:
        """The class predicted most often, and its share of the predictions."""
        if self.predicted is None:
            return None
        most = int(numpy.argmax(self.predicted))
        return most, self.predicted[most]


def accuracy_interval(table: NumberTable) -> ShareInterval | None:
    """Returns the mean accuracy over domains with its interval; None if it is not defined.

    Args:
        table: numbers of one round, split and kind of weights.
    """
    parts = [(row.value, row.effective) for row in table.where(metric="accuracy")]
    if not parts or not all(0 <= share <= 1 and count > 0 for share, count in parts):
        return None
    return mean_of_shares(parts)


def split_accuracy(
    table: NumberTable, split: str = TEST, whole: NumberTable | None = None
) -> SplitAccuracy | None:
    """Returns the accuracy of a split after a round; None if it was not measured.

    Args:
        table: numbers of one round and kind of weights.
        split: the split.
        whole: all numbers of the run, which tell the images by class if the round does not.
    """
    table = table.where(split=split)
    rows = table.where(metric="accuracy").rows
    accuracy, round_ = accuracy_interval(table), table.round
    if round_ is None or accuracy is None:
        return None
    constant = table.value(metric="largest_class_share")
    balanced = table.value(metric="balanced_accuracy")
    confusions = [numpy.array(row.confusion, dtype=float) for row in rows if row.confusion]
    confusions = [counts for counts in confusions if counts.sum() > 0]
    found = [row.support or (whole or table).support(split, row.domain) for row in rows]
    supports = [numpy.array(support, dtype=float) for support in found if support]
    predicted = interval = None
    if len(confusions) == len(rows):
        shares = [counts.sum(axis=0) / counts.sum() for counts in confusions]
        predicted = numpy.mean(shares, axis=0).tolist()
        interval = _balanced_interval(confusions, rows)
    elif balanced is not None and len(supports) == len(rows):
        interval = ShareInterval(balanced, balanced, balanced)
    if interval is None:
        return SplitAccuracy(round_, accuracy, constant, balanced)
    true = numpy.mean([support / support.sum() for support in supports], axis=0)
    return SplitAccuracy(
        round=round_,
        accuracy=accuracy,
        # One class for all domains: the one that is most frequent in their mean.
        constant=float(true.max()),
        balanced=balanced,
        balanced_interval=interval,
        guessing=float(numpy.mean([1 / (support > 0).sum() for support in supports])),
        predicted=predicted,
        true=true.tolist(),
    )


def _balanced_interval(
    confusions: Sequence[numpy.ndarray], rows: Sequence[NumberRow]
) -> ShareInterval:
    """Returns the mean over domains of mean recall, with recalls as independent shares.

    Images of a class tell as much less than independent ones as all images of their row do.
    """
    intervals = []
    for counts, row in zip(confusions, rows):
        support = counts.sum(axis=1)
        share = row.effective / counts.sum()  # which may count the images once for each model
        parts = [
            (float(counts[index, index] / total), max(1.0, total * share))
            for index, total in enumerate(support)
            if total > 0
        ]
        intervals.append(mean_of_shares(parts))
    return mean_of_intervals(intervals)


def about_accuracy(
    table: NumberTable,
    round_: int | None,
    split: str = TEST,
    weights: str = LAST,
    *,
    trains: bool = True,
) -> list[Diagnostic]:
    """Returns warnings about the accuracy of a round, the most serious first.

    Args:
        table: all numbers of the run.
        round_: the round whose accuracy is shown; None gives no warnings.
        split: the split of the accuracy.
        weights: the weights of the accuracy; whether it rises is judged from the last weights, on
            in-domain validation if there is one, since a held-out domain must choose nothing.
        trains: whether the method trains; one in closed form has no learning rate.
    """
    numbers, of_last = table.where(weights=weights), table.where(weights=LAST)
    result = split_accuracy(numbers.where(round=round_), split, table)
    if result is None or result.round == 0:
        return []
    worse = list(_untrained(of_last, result, split, trains))
    if worse:  # it has its own advice: more of what made it worse is none, even where it recovers
        return gravest_first([*_majority(result), *worse, *_unsteady(numbers, result, split)])
    inside = split_accuracy(numbers.where(round=round_), ID_VAL, table)
    change = "train longer or with another learning rate, and "
    if split != ID_VAL and inside is not None and not any(_majority(inside)):
        change = f"in-domain it is right for {inside.accuracy.share:.1%}, so "
    elif not trains:
        change = "try other pretrained weights, and "
    majority = _majority(result, change)
    rising = [*_rising(of_last, result, split)] or _unsteady(numbers, result, split)
    # Averages may be measured in the last round alone.
    falls = _falls(numbers if len(numbers.rounds) > 1 else of_last)
    return gravest_first([*majority, *falls, *rising])


def learned_from(chance: float) -> float:
    """Returns the accuracy from which on something was learned: a sixth of the way from chance."""
    return chance + (1 - chance) / 6


def _majority(result: SplitAccuracy, change: str = "") -> Iterator[Diagnostic]:
    """Warns if accuracy is no better than the most frequent class, by images and by class mean."""
    if result.constant is None or result.accuracy.low > result.constant:
        return
    balanced = result.balanced_interval
    if balanced is None or balanced.low < learned_from(result.guessing or 0.0):
        chance = result.accuracy.high >= result.constant
        yield warning(
            MAJORITY,
            f"The model is {IN_WORDS[MAJORITY]}: that is right for {result.constant:.1%} of the "
            f"held-out images, the model for {result.accuracy.share:.1%}"
            f"{'; the difference is within chance' if chance else ''}.",
            f"Its labels mean nothing: {change}look at the images.",
        )


def _untrained(
    table: NumberTable, result: SplitAccuracy, split: str, trains: bool
) -> Iterator[Diagnostic]:
    untrained = table.where(round=0)
    start = untrained.value(split)
    if start is not None and result.accuracy.high < start:  # by more than chance
        before = split_accuracy(untrained, split, table)
        knew = before is not None and not any(_majority(before))
        keep = ", or keep the closed form (--method ridge)" if knew else ""
        yield warning(
            UNTRAINED,
            f"The model is worse than before its training: then it was right for {start:.1%} of "
            f"the held-out images, now for {result.accuracy.share:.1%}.",
            f"Training hurts: lower the learning rate{keep}."
            if trains
            else "Other pretrained weights, or larger images, help most.",
        )


def _rising(table: NumberTable, result: SplitAccuracy, split: str) -> Iterator[Diagnostic]:
    """Warns if accuracy moves almost only upwards at the end of the run, and still rises."""
    inside = table.curve(ID_VAL)
    steps = _end_steps(inside or table.curve(split))
    if result.round != table.round or not steps:
        return
    rise, path = math.fsum(steps), math.fsum(map(abs, steps))
    latest = steps[-max(1, len(steps) // 3) :]
    # It has levelled off if its last third has less than a quarter of the mean pace.
    levelled = math.fsum(latest) / len(latest) < 0.25 * rise / len(steps)
    # It rises if three quarters of all its movement are upwards.
    if rise < LEAST_RISE or rise < 0.75 * path or levelled:
        return
    rounds = table.rounds[-1] - table.rounds[-1 - len(steps)]
    yield note(
        STILL_RISING,
        f"{'In-domain validation' if inside else 'Accuracy'} was still rising when the run "
        f"stopped: by {100 * rise:.1f} points over the last {rounds} rounds.",
        "Train longer.",
    )


def _unsteady(table: NumberTable, result: SplitAccuracy, split: str) -> Iterator[Diagnostic]:
    """Notes that accuracy goes up and down at the end, by more than the choice of images does."""
    steps = _end_steps(table.curve(split))
    if result.round != table.round or not steps:
        return
    back = min(max(steps), -min(steps))
    # It both rises and falls, by five points and by more than the choice of images does.
    if back > max(0.05, result.accuracy.high - result.accuracy.low):
        yield note(
            UNSTEADY,
            f"Accuracy goes up and down by {100 * back:.1f} points and more between the last "
            "evaluations: after another round it could be another.",
            "Average the last rounds (--averaging swa), or lower the learning rate.",
        )


def _falls(table: NumberTable) -> Sequence[Diagnostic]:
    """Notes that in-domain validation falls, by more than its standard error, to the last round.

    Means over a third of the curve are compared, the best one with the last, so that the best of
    many noisy rounds is no fall. The same images validate every round: what one more sample of them
    would change is much the same at both ends.
    """
    rounds = sorted(table.where(split=ID_VAL).by("round").items())
    accuracies = [(round_, accuracy_interval(numbers)) for round_, numbers in rounds if round_ > 0]
    curve = [(round_, interval) for round_, interval in accuracies if interval is not None]
    if len(curve) < 2:
        return []
    values, width = numpy.array([interval.share for _, interval in curve]), max(1, len(curve) // 3)
    means = numpy.convolve(values, numpy.full(width, 1 / width), "valid")
    best, fall = int(means.argmax()), float(means.max() - means[-1])
    # The interval is of 95 %; bends between three neighbours have six times the variance of one.
    error = (curve[-1][1].high - curve[-1][1].low) / (2 * 1.96)
    bends = numpy.abs(numpy.diff(values, 2)).tolist() or [0.0]
    noise = statistics.median(bends) / (0.6745 * math.sqrt(6 * width))
    # Of a few rounds the peak itself is half of the bends.
    # Otherwise a fall counts from three times the noise of means over a third of the curve.
    if fall <= max(LEAST_RISE, error, noise * (3 if width > 1 else 1)):
        return []
    first, last = (curve[at + width - 1][0] for at in (best, len(means) - 1))
    return [
        note(
            FALLS,
            f"In-domain validation fell by {100 * fall:.1f} points from round {first} to round "
            f"{last}{f' (means of {width})' if width > 1 else ''}; its standard error is "
            f"{100 * error:.1f}.",
            "Try a lower rate that falls (--set train.schedule=cosine), SGD with momentum in place "
            "of an Adam that begins anew every round (--set train.optimizer=sgd --set "
            "train.momentum=0.9), or averaged weights (--averaging ema).",
        )
    ]


def about_support(
    parts: Iterable[tuple[str, str, Sequence[int]]], class_names: Sequence[str]
) -> Iterator[Diagnostic]:
    """Reports evaluated domains in which a class has fewer than 20 images or none.

    Args:
        parts: split, domain, and images of each class.
        class_names: in the order of class ids.
    """
    places = []
    for split, domain, counts in parts:
        thin = [index for index, count in enumerate(counts) if count < FEW]
        if thin:
            names = [class_names[i] if i < len(class_names) else f"class {i}" for i in thin]
            counted = [f"{name} ({counts[i]})" for name, i in zip(names, thin)]
            places.append(f"{split} {domain}: {first_names(counted, 3)}")
    if places:
        more = f"; and in {len(places) - 3} more domains" if len(places) > 3 else ""
        yield warning(
            FEW_IMAGES,
            f"Some classes have fewer than {FEW} images, or none: {'; '.join(places[:3])}{more}. "
            "Balanced accuracy, macro-F1 and AUROC are uncertain there, and leave out classes "
            "without images.",
        )


def about_domains(table: NumberTable) -> Iterator[Diagnostic]:
    """Warns of training domains that are guessed while others are learned.

    A domain is guessed if always predicting its largest class has an accuracy within the interval
    of its in-domain accuracy, and the interval is below the middle between chance and the others.
    The others are learned if their accuracy is a sixth of the way from chance to 1.

    Args:
        table: numbers of one round.
    """
    splits = [table.where(weights=LAST, split=split) for split in (ID_VAL, ID_TEST)]
    trained = NumberTable(row for part in splits for row in part)
    for domain, own in trained.by("domain").items() if table.round else ():
        parts = own.where(metric="accuracy").rows
        rest = [row for row in trained.where(metric="accuracy") if row.domain != domain]
        result, others = _pooled(parts), _pooled(rest)
        largest = own.where(metric="largest_class_share")
        if result is None or others is None or len(largest) < len(parts):
            continue
        chance = math.fsum(row.value * row.examples for row in largest)
        chance /= sum(row.examples for row in largest)
        # Of rare classes much may be known where the share of the largest is hard to beat.
        balanced = [row.value for row in own.where(metric="balanced_accuracy")]
        if result.low > chance or max(balanced, default=0.0) >= learned_from(0.5):
            continue
        learned = others.low >= learned_from(chance)
        if learned and result.high < (chance + others.low) / 2:
            yield warning(
                DOMAIN_AT_CHANCE,
                f"The training domain '{domain}' is not learned: after round {parts[0].round} the "
                f"model is right for {result.share:.1%} of its images that were set aside, no more "
                f"than chance, and for {others.share:.1%} of the other training domains'.",
                "Look at its labels (exchanged classes?) and its images (inverted, dark, empty?).",
            )


def _pooled(rows: Sequence[NumberRow]) -> ShareInterval | None:
    """Returns accuracy over all images of rows; None without rows or if undefined."""
    images = sum(row.examples for row in rows)
    if not images or not all(0 <= row.value <= 1 for row in rows):
        return None
    share = min(1.0, math.fsum(row.value * row.examples for row in rows) / images)
    return wilson(share, math.fsum(row.effective for row in rows))


def _end_steps(curve: Mapping[int, float]) -> list[float]:
    """Returns the steps between evaluations at the end, without that from the untrained model.

    They are a third of all, at least three, or all of a short run; none if they tell nothing.
    """
    values = [value for round_, value in curve.items() if round_ > 0 and math.isfinite(value)]
    steps = [after - before for before, after in pairwise(values)]
    return steps[-max(3, len(steps) // 3) :] if len(steps) >= 2 else []


# Why a model may have learned nothing, from what its run shows.


FEW_ROUNDS: Final = 50
"""At most this many rounds are too few if the training loss still falls."""


class Cause(NamedTuple):
    """A possible reason why a model did not learn.

    Attributes:
        reason: in a few words.
        evidence: what speaks for it; empty if the reason says it.
        flags: command-line flags that may remove it; empty if only other images can.
    """

    reason: str
    evidence: str
    flags: tuple[str, ...]

    @property
    def text(self) -> str:
        """The reason with its evidence."""
        return f"{self.reason} ({self.evidence})" if self.evidence else self.reason


def usual_rate(run: Run) -> float | None:
    """Returns the learning rate of the presets; None if unknown, or for another optimizer."""
    said = run.settings.get("train") or {}
    train = {name: value for name, value in said.items() if name not in ("lr", "optimizer")}
    try:
        usual = Experiment(**{**run.settings, "train": train}).train
    except FeddgError:
        return None  # another version's, or of a package that is not here
    return usual.lr if said.get("optimizer", usual.optimizer) == usual.optimizer else None


def lower_rate(run: Run) -> float:
    """Returns a smaller learning rate to try: that of the presets, or a tenth."""
    rate, usual = _rate(run), usual_rate(run)
    return usual if usual is not None and usual < rate else rate / 10


def _rate(run: Run) -> float:
    return float((run.settings.get("train") or {}).get("lr") or 0.001)


def _signs_of_a_large_rate(run: Run) -> str:
    """Returns signs of too high a learning rate in a run that learned nothing; empty without."""
    if run.has_one_round:
        return ""  # nothing is trained
    rate, usual = _rate(run), usual_rate(run)
    terms = run.rounds[-1].terms if run.rounds else {}
    loss, classes = terms.get("cross_entropy"), len(run.clients.classes) if run.clients else 0
    guessing = math.log(classes) if classes > 1 else math.inf
    signs = []
    if usual is not None and rate >= 10 * usual:
        signs.append(f"it is {rate:g}, where the preset has {usual:g}")
    if loss is not None and not math.isfinite(loss):
        signs.append("the training loss is not finite")
    elif loss is not None and loss > 1.2 * guessing and not _has_a_loss_of_its_own(run):
        # Worse than without training.
        signs.append(f"the training loss ended at {loss:.3g}, that of guessing is {guessing:.3g}")
    return " and ".join(signs)


def _has_a_loss_of_its_own(run: Run) -> bool:
    """Whether a batch's loss may be weighted, or a sum over images: it compares with no other."""
    method = run.settings.get("method")
    fields = method if isinstance(method, dict) else {}
    found = (METHODS.get(part) for part in str(fields.get("name")).split("+"))
    ours = all(part is not None and part.__module__.startswith("feddg.") for part in found)
    return not ours or (fields.get("settings") or {}).get("afl_over") == "domains"


def about_rate(run: Run) -> Iterator[Diagnostic]:
    """Reports the learning rate of a run that learned nothing, if that is the likely reason."""
    if signs := _signs_of_a_large_rate(run):
        yield warning(
            TOO_LARGE,
            f"Training diverged, probably because the learning rate is too high: {signs}.",
            f"Lower train.lr: --lr {lower_rate(run):g}.",
        )


def causes_of_failure(run: Run) -> list[Cause]:
    """Returns likely reasons why a run's model learned nothing, likeliest first; never empty."""
    lower = ("--lr", f"{lower_rate(run):g}")
    trains = not run.has_one_round
    if signs := _signs_of_a_large_rate(run):  # then nothing else is worth a try
        return [Cause("too high a learning rate", signs, lower)]
    if trains and (fall := _fall(run)):
        keep = Cause("features that are better left as they are", "", ("--method", "ridge"))
        return [Cause("training that hurts", fall, lower), keep]
    model = run.settings.get("model") or {}
    backbone, rounds = str(model.get("backbone") or ""), run.rounds_done
    network = backbone if backbone.startswith("resnet") else "resnet18"
    pretrained = ("--backbone", network, "--weights", IMAGENET)
    lacks_weights = not model.get("weights") and backbone != FEATURES
    losses = [math.fsum(row.terms.values()) for row in run.rounds if row.terms]
    causes = []
    inside = split_accuracy(run.result, ID_VAL, run.table)
    if inside is not None and inside.accuracy.low > (1 + (inside.constant or 0)) / 2:
        known = f"in-domain the model is right for {inside.accuracy.share:.1%}"
        causes.append(Cause("a held-out domain unlike the others, or with other labels", known, ()))
    if trains and not run.ended_early and rounds <= FEW_ROUNDS and _still_falls(losses):
        known = "the training loss was still falling after" if len(losses) > 2 else "only"
        evidence = f"{known} {counted(rounds, 'round')}"
        causes.append(Cause("too few rounds", evidence, ("--rounds", str(max(10, 4 * rounds)))))
    counts = [client.classes for client in run.clients.clients] if run.clients else []
    images = float(numpy.median(numpy.sum(counts, axis=0))) if counts else math.inf
    if images < 100:
        evidence = f"{images:.0f} training images per class, over all clients"
        causes.append(Cause("too few images", evidence, pretrained if lacks_weights else ()))
    if lacks_weights:
        causes.append(Cause("no pretrained weights", "", pretrained))
    if not trains:
        train = ("--method", "fedavg", "--rounds", str(FEW_ROUNDS))
        return [*causes, Cause("features that do not tell these classes apart", "", train)]
    rate = _rate(run)
    ends = len(losses) > 1 and losses[-1] < losses[0]
    word, factor = ("low", 10.0) if ends else ("high", 0.1)
    flags = ("--lr", f"{factor * rate:g}")
    causes.append(Cause(f"too {word} a learning rate", f"{rate:g}", flags))
    return causes


def _fall(run: Run) -> str:
    """Returns how held-out accuracy fell from a round that was no guess; empty if it did not."""
    numbers = run.table.where(weights=run.default_rule.weights)
    curve = numbers.curve(TEST)
    best = max(curve, key=lambda round_: curve[round_], default=None)
    ends = numbers.where(round=best), run.result
    start, after = (split_accuracy(table, whole=run.table) for table in ends)
    if start is None or after is None or after.accuracy.high >= start.accuracy.low:
        return ""
    if any(_majority(start)):
        return ""
    when = f"after {counted(start.round, 'round')}" if start.round else "before round 1"
    return f"{start.accuracy.share:.1%} right {when}, {after.accuracy.share:.1%} at the end"


def _still_falls(losses: Sequence[float]) -> bool:
    """Whether the last third is 2 % below the one before; True if there are too few rounds."""
    third = len(losses) // 3
    if third == 0:
        return True
    before, last = (math.fsum(part) for part in (losses[-2 * third : -third], losses[-third:]))
    return last < before - 0.02 * abs(before)


# What is shown wherever a run's result or its model is.


def about_sites(run: Run) -> Iterator[Diagnostic]:
    """Names clients at which the closed form of the others does far worse than at the others."""
    rows = [run.setup, *run.rounds]
    accuracies = next((row.left_out for row in reversed(rows) if row and row.left_out), {})
    images = {
        client.id: sum(client.domains) for client in (run.clients.clients if run.clients else ())
    }
    for id, share in accuracies.items() if len(accuracies) > 2 else ():
        others = statistics.median(value for other, value in accuracies.items() if other != id)
        if images.get(id) and wilson(share, images[id]).high < others / 2:
            yield warning(
                SITE_FAR_BELOW,
                f"A classifier made without '{run.client_name(id)}' is right for {share:.1%} of "
                f"its images; at the other sites, left out in turn, the median is {others:.1%}.",
                "Look at its labels and its images: if they are wrong, leave the site out.",
            )


def about_result(run: Run) -> list[Diagnostic]:
    """Returns warnings about the accuracy of the run's default model."""
    weights, trains = run.default_rule.weights, not run.has_one_round
    diagnostics = about_accuracy(run.table, run.result.round, weights=weights, trains=trains)
    if run.ended_early:  # more rounds are what it cannot have
        diagnostics = [one for one in diagnostics if one.code != STILL_RISING]
    codes = {one.code for one in diagnostics}
    gained = () if UNTRAINED in codes else _nothing_gained(run)
    diagnostics = gravest_first([*diagnostics, *gained])
    domains = about_domains(run.table.where(round=run.table.round))
    rate = about_rate(run) if LEARNED_NOTHING & codes else ()
    return [*rate, *diagnostics, *about_sites(run), *domains]


def _nothing_gained(run: Run) -> Iterator[Diagnostic]:
    """Notes that training is no better, but for chance, than the closed form it began with."""
    start = run.table.where(weights=LAST, round=0).value(TEST)
    end = split_accuracy(run.result)
    closed = (run.settings.get("train") or {}).get("head") == "ridge"
    if closed and start is not None and end is not None and end.round and end.accuracy.low <= start:
        yield note(
            NOTHING_GAINED,
            f"{counted(end.round, 'round')} of training gained no more than chance over the closed "
            f"form that came first: {start:.1%} before, {end.accuracy.share:.1%} "
            "after.",
            "The closed form alone takes one round (--method ridge).",
        )


def about_run(run: Run) -> list[Diagnostic]:
    """Returns all diagnostics of a run: its end, its result, and those it recorded."""
    result = about_result(run)
    recorded = run.summary.diagnostics if run.summary else []
    codes = {diagnostic.code for diagnostic in result}
    others = [diagnostic for diagnostic in recorded if diagnostic.code not in codes]
    return [*about_end(run), *gravest_first([*result, *others])]


def about_end(run: Run) -> Iterator[Diagnostic]:
    """Warns if a run did not reach its last round, or is damaged."""
    if run.status == "completed":
        return
    if run.damage:
        yield warning(
            "run-damaged",
            f"The run folder {run.folder} is damaged: {run.damage}.",
            "Put the file back from a copy, or delete the folder to run it again.",
        )
        return
    how = {
        "unfinished": "has not ended: it is still running, or it was cut off",
        "interrupted": "was interrupted",
        "failed": f"failed: {run.error or 'no reason was recorded'}",
    }.get(run.status, f"has the status {run.status}")
    of = f" of {run.rounds_planned}" if run.rounds_planned else ""
    yield warning(
        "run-unfinished",
        f"The run {how.rstrip('.')}. This is round {run.rounds_done}{of}, not the model that it "
        "will serve.",
        f"`{going_on(run.folder)}` goes on.",
    )


def about_divergence() -> Diagnostic:
    """Returns the warning about a run that ended because its training ran away."""
    text = "The numbers of the training became infinite, or far too large."
    return warning(DIVERGED, text, "Lower train.lr.")


def about_model(run: Path | str, which: str, round_: int) -> tuple[Diagnostic, ...]:
    """Returns the warnings about a model, for its users.

    Empty if there are none, or if nothing was evaluated. Exported files have them, and answers to
    strangers: they name neither the folder of a run that did not end, nor why it did not.

    Args:
        run: the run folder.
        which: the model's selection rule, as ``load_model`` takes it.
        round_: the round it is from.

    Raises:
        RunError: the folder is not a run folder.
    """
    weights, record = SELECTION_RULES.find(which).weights, read_run(Path(run))
    split = _held_out(record.table.where(weights=weights, round=round_))
    trains = not record.has_one_round
    diagnostics = about_accuracy(record.table, round_, split, weights, trains=trains)
    at = f"This is round {record.rounds_done} of {record.rounds_planned}"
    text = f"The run has not ended. {at}, not the model that it will serve."
    early = warning("run-unfinished", text, "`feddg resume` goes on.")
    found = [early] if record.status != "completed" else []
    return (*found, *(one for one in diagnostics if one.severity == "warning"))


def result_sentence_of(run: Path | str, which: str, round_: int) -> str:
    """Returns a sentence with a model's accuracy on held-out domains; see :func:`about_model`.

    Raises:
        RunError: the folder is not a run folder.
    """
    weights = SELECTION_RULES.find(which).weights
    record = read_run(Path(run))
    table = record.table.where(weights=weights, round=round_)
    split = _held_out(table)
    result = split_accuracy(table, split)
    if result is None:
        return "It was not measured on any domain held out of its training."
    rows = table.where(split=split, metric="accuracy").rows
    share, domains = result.accuracy, ", ".join(row.domain for row in rows)
    images = sum(row.examples for row in rows)
    right = f"right for {share.share:.1%} (95 %: {share.low:.1%} to {share.high:.1%})"
    unseen = "" if any(record.trained_on(row.domain) for row in rows) else " nobody trained on"
    if len(rows) > 1:
        return (
            f"In its own test, on average over {len(rows)} domains{unseen} ({domains}; "
            f"{images} images in all), the model was {right}."
        )
    test = f"{images} images of a domain{unseen} ({domains})"
    return f"In its own test the model was {right} of {test}."


def _held_out(table: NumberTable) -> str:
    return next((split for split in (TEST, VAL) if table.where(split=split)), TEST)


def refuse_doubtful(found: Sequence[Diagnostic], strict: bool) -> None:
    """Raises an error if ``strict`` and there are warnings about a model.

    Raises:
        RunError: there is a warning.
    """
    if strict and found:
        raise RunError(f"{found[0]} Leave out --strict if this is only a trial.")
