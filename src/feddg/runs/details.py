"""What a model gives by decision about one class and by subgroup of images, with intervals.

Subgroups are the values of further columns, such as a scanner, a sex or an age band. Intervals are
over groups of images if there are any (patients), else over images.
"""

import math
from collections.abc import Mapping, Sequence

import numpy
import torch

from feddg.evaluation.accuracy import Evaluation, Outputs
from feddg.evaluation.decision import Decision, Part, ranked, threshold_on
from feddg.evaluation.groups import LEVEL, effective_number, freedom_of, numbered
from feddg.evaluation.metrics import area_under_roc, ranks, student
from feddg.records import DecisionRow, DecisionTable, Details, SubgroupRow
from feddg.rng import numpy_stream
from feddg.runs.folder import RunFolder
from feddg.runs.intervals import ShareInterval, holm, wilson
from feddg.runs.reading import DETAILS

RESAMPLES = 500
"""Resamples of the bootstrap for average precision."""
BINS = 10
"""Bins of a reliability curve, with about as many images each."""


def write_details(
    folder: RunFolder,
    evaluation: Evaluation,
    outputs: Sequence[Outputs],
    which: str,
    round: int | None,
) -> None:
    """Writes what a model gives by decision and subgroup.

    Args:
        folder: the run's folder.
        evaluation: the images.
        outputs: the model's, for all parts of the evaluation.
        which: the selection rule of the model.
        round: the round it is from.
    """
    asked, subgroups = evaluation.decision, by_subgroup(evaluation, outputs)
    decision = None if asked is None else decide(evaluation.sides(asked, outputs), asked)
    details = Details(which=which, round=round, decision=decision, subgroups=subgroups)
    folder.write_json(DETAILS, details)


def decide(parts: Sequence[Part], decision: Decision) -> DecisionTable:
    """Returns a decision's threshold, from in-domain validation, and what it gives everywhere."""
    threshold = threshold_on(parts, decision)
    return DecisionTable(
        of=decision.name,
        target=decision.target,
        reached=decision.reached,
        threshold=threshold,
        rows=[decision_row(part, threshold, decision.prevalence) for part in parts],
    )


def decision_row(
    part: Part, threshold: float | None, prevalence: float | None = None
) -> DecisionRow:
    """Returns what a threshold gives on a domain of a split, with intervals.

    Args:
        part: the images.
        threshold: from this score on an image is called positive; None if it is not known.
        prevalence: where the model is used; None for the share of the class among these images.
    """
    positive, scores, groups = part.positive, part.scores, part.groups
    share = float(positive.mean()) if prevalence is None else prevalence
    sensitivity = specificity = ppv = npv = None
    if threshold is not None:
        called = scores >= threshold
        cases, others = (None if groups is None else groups[side] for side in (positive, ~positive))
        sensitivity = share_interval(called[positive], cases)
        specificity = share_interval(~called[~positive], others)
    if sensitivity is not None and specificity is not None and 0 < share < 1:
        found = predictive_values(sensitivity, specificity, share)
        # Of nobody called positive, or negative, no share is right.
        ppv, npv = found[0] if called.any() else None, found[1] if not called.all() else None
    return DecisionRow(
        split=part.split,
        domain=part.domain,
        images=len(scores),
        positives=int(positive.sum()),
        groups=None if groups is None else len(numpy.unique(groups)),
        auroc=auroc_interval(positive, scores, groups),
        average_precision=average_precision_interval(positive, scores, groups),
        sensitivity=sensitivity,
        specificity=specificity,
        prevalence=share,
        ppv=ppv,
        npv=npv,
        reliability=[
            (mean, *point, count) for mean, point, count in reliability(positive, scores, groups)
        ],
    )


def auroc_interval(
    positive: numpy.ndarray, scores: numpy.ndarray, groups: numpy.ndarray | None = None
) -> ShareInterval | None:
    """Returns the area under the ROC curve with its 95 % interval; None if a side is empty.

    The variance is DeLong's (DeLong et al. 1988, Biometrics 44), for groups Obuchowski's (1997,
    Biometrics 53, "Nonparametric analysis of clustered ROC curve data"); the ends are those of the
    area's logit, with Student's t (Satterthwaite 1946). Where that gives no spread, as where all
    are ranked rightly, they are Wilson's for the smaller number of groups with and without the
    class.

    Args:
        positive: ``(n,)`` bool.
        scores: ``(n,)``; the higher, the more likely positive.
        groups: ``(n,)`` any integers; None if images are independent.
    """
    if positive.all() or not positive.any():
        return None
    area = area_under_roc(positive, scores)
    (group_of, number), every = numbered(groups, len(scores)), ranks(scores)
    sums, sizes = numpy.zeros((2, number)), numpy.zeros((2, number))
    counts = positive.sum(), (~positive).sum()
    for side, mask in enumerate((positive, ~positive)):
        above = (every[mask] - ranks(scores[mask])) / counts[1 - side]
        share = above if side == 0 else 1 - above  # of the other side that is ranked rightly
        sums[side] = numpy.bincount(group_of[mask], share - area, number)
        sizes[side] = numpy.bincount(group_of[mask], minlength=number)
    least = int((sizes > 0).sum(axis=1).min())
    if min(area, 1 - area) <= 0 or least < 2:
        return wilson(area, least)
    # Residuals of large groups are widened, see variance_of_sum.
    sums /= (numpy.sqrt(1 - sizes.T / counts) * counts).T
    parts = (sums**2).sum(axis=1)
    variance = parts.sum() + 2 * sums[0] @ sums[1]
    if variance <= 1e-12:  # of groups, parts may cancel
        return wilson(area, least)
    error = math.sqrt(variance) / (area * (1 - area))
    freedoms = numpy.array([freedom_of(side[side > 0]) for side in sizes])
    freedom = float(parts.sum() ** 2 / (parts**2 / freedoms).sum())
    reach, middle = student(freedom, LEVEL) * error, math.log(area / (1 - area))
    return ShareInterval(area, _expit(middle - reach), _expit(middle + reach))


FEW_GROUPS = 20
"""Below so many groups with a class, its interval is at least that of a share of them."""


def average_precision_interval(
    positive: numpy.ndarray, scores: numpy.ndarray, groups: numpy.ndarray | None = None
) -> ShareInterval | None:
    """Returns average precision with its 95 % interval; None if a side is empty.

    The interval is that of the logit, with its standard deviation over resamples of whole groups
    (500, always the same). Where all are ranked rightly, or one group has the class, it is Wilson's
    for the number of groups with the class, of which a large one among small ones counts for them;
    below ``FEW_GROUPS``, or where nearly all are ranked rightly, it is at least that.

    Args:
        positive: ``(n,)`` bool.
        scores: ``(n,)``; the higher, the more likely positive.
        groups: ``(n,)`` any integers; None if images are independent.
    """
    if positive.all() or not positive.any():
        return None
    order, precision = ranked(positive, scores)
    value = precision(numpy.ones(len(scores)))
    group_of, number = numbered(None if groups is None else groups[order], len(scores))
    sizes = numpy.unique(group_of[positive[order]], return_counts=True)[1]
    with_class = 1 + freedom_of(sizes) if len(sizes) > 1 else 1.0  # as many, if they were equal
    known = wilson(value, with_class)
    if value >= 1 or len(sizes) < 2:  # no resample varies one group
        return known
    random, resampled = numpy_stream(0, "average precision"), []
    for _ in range(RESAMPLES):
        drawn = numpy.bincount(random.integers(number, size=number), minlength=number)
        resampled.append(precision(drawn[group_of].astype(float)))
    least = 1 / (4 * with_class)  # a resample without a mistake is no certainty
    logits = numpy.array([_logit(share, least) for share in resampled if not math.isnan(share)])
    reach = student(math.inf, LEVEL) * float(logits.std(ddof=1)) if len(logits) > 1 else math.inf
    middle = _logit(value, least)
    low, high = _expit(middle - reach), _expit(middle + reach)
    if with_class < FEW_GROUPS or value >= 1 - 1 / with_class:  # resamples are too alike
        low, high = min(low, known.low), max(high, known.high)
    return ShareInterval(value, min(value, low), max(value, high))


def _logit(share: float, least: float) -> float:
    inside = min(share, 1 - least)  # no floor: of a rare class every share may be below it
    return math.log(inside / (1 - inside))


def _expit(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value > -700 else 0.0


def share_interval(hits: numpy.ndarray, groups: numpy.ndarray | None) -> ShareInterval | None:
    """Returns the share of ``(n,)`` bool with its interval over groups or images; None if empty."""
    if not len(hits):
        return None
    return wilson(float(hits.mean()), effective_number(hits.astype(float), groups))


def predictive_values(
    sensitivity: ShareInterval, specificity: ShareInterval, prevalence: float
) -> tuple[ShareInterval, ShareInterval]:
    """Returns the positive and the negative predictive value at a prevalence, with intervals.

    PPV = 1 / (1 + (1 - p) / p / LR+), LR+ = sensitivity / (1 - specificity); the ends of the
    likelihood ratios are recovered from those of their parts (Zou and Donner 2008).

    Args:
        sensitivity: share of the images with the class that are called positive.
        specificity: share of those without it that are called negative.
        prevalence: share of the class where the model is used, in (0, 1).
    """
    odds = math.log(prevalence / (1 - prevalence))
    positive = (_expit(odds + ratio) for ratio in _log_ratio(sensitivity, specificity))
    negative = (_expit(-odds + ratio) for ratio in _log_ratio(specificity, sensitivity))
    return ShareInterval(*positive), ShareInterval(*negative)


def _log_ratio(above: ShareInterval, other: ShareInterval) -> tuple[float, float, float]:
    """Returns the logarithm of a share over one minus another, with its ends."""
    below = 1 - other.share, 1 - other.high, 1 - other.low
    a, b = ([math.log(max(share, 1e-300)) for share in part] for part in (above, below))
    value = a[0] - b[0]
    low = value - math.hypot(a[0] - a[1], b[2] - b[0])
    high = value + math.hypot(a[2] - a[0], b[0] - b[1])
    return value, low, high


def reliability(
    positive: numpy.ndarray, scores: numpy.ndarray, groups: numpy.ndarray | None = None
) -> list[tuple[float, ShareInterval, int]]:
    """Returns the points of a reliability curve: mean score, share of positives, images.

    The images, in the order of their scores, are cut into ten bins of about equal size; images of
    equal scores stay together.
    """
    points, order = [], numpy.argsort(scores, kind="stable")
    ends = numpy.cumsum([len(rows) for rows in numpy.array_split(order, BINS)])
    known = scores[order]
    cuts = numpy.unique(numpy.searchsorted(known, known[ends[ends < len(known)]]))
    for rows in numpy.split(order, cuts):
        share = share_interval(positive[rows], None if groups is None else groups[rows])
        if share is not None:
            points.append((float(scores[rows].mean()), share, len(rows)))
    return points


def by_subgroup(evaluation: Evaluation, outputs: Sequence[Outputs]) -> list[SubgroupRow]:
    """Returns accuracy by subgroup of every split, from the outputs of all parts."""
    by_split: dict[str, list[tuple[numpy.ndarray, numpy.ndarray]]] = {}
    for (split, _, rows), (_, logits) in zip(evaluation.parts(), outputs, strict=True):
        targets = torch.from_numpy(evaluation.labels[rows])
        values = evaluation.task.score(logits, targets).numpy()
        by_split.setdefault(split, []).append((rows, values))
    table: list[SubgroupRow] = []
    for split, parts in by_split.items():
        rows, values = (numpy.concatenate(part) for part in zip(*parts))
        columns = {name: column[rows] for name, column in evaluation.subgroups.items()}
        groups = None if evaluation.groups is None else evaluation.groups[rows]
        table += subgroup_rows(split, columns, values, groups)
    return table


def subgroup_rows(
    split: str,
    columns: Mapping[str, numpy.ndarray],
    correct: numpy.ndarray,
    groups: numpy.ndarray | None = None,
) -> list[SubgroupRow]:
    """Returns the accuracy of every subgroup of a split, beside that of all its other images.

    Differences are tested by the interval of Agresti and Caffo (2000, The American Statistician 54)
    with as many independent images as tell as much, and corrected for all subgroups (Holm 1979), so
    that many small subgroups do not give false alarms.

    Args:
        split: the split.
        columns: ``(n,)`` texts by name; an empty text is no subgroup.
        correct: ``(n,)`` a score of each image in [0, 1], such as whether it is classified rightly.
        groups: ``(n,)`` integers; None if images are independent.
    """
    subgroups: list[tuple[str, str, numpy.ndarray]] = [
        (name, value, column == value)
        for name, column in columns.items()
        for value in numpy.unique(column).tolist()
        if value
    ]
    tested = [_difference(correct, mask, groups) for _, _, mask in subgroups]
    # Two halves are one comparison.
    halves = [min(mask.tobytes(), (~mask).tobytes()) for *_, mask in subgroups]
    known = {half: p for half, (_, p) in zip(halves, tested) if p is not None}
    corrected = dict(zip(known, holm([*known.values()])))
    rows = []
    for (name, value, mask), (difference, _), half in zip(subgroups, tested, halves):
        inside = None if groups is None else groups[mask]
        share = wilson(float(correct[mask].mean()), effective_number(correct[mask], inside))
        rows.append(
            SubgroupRow(
                split=split,
                column=name,
                value=value,
                images=int(mask.sum()),
                groups=None if inside is None else len(numpy.unique(inside)),
                accuracy=share,
                difference=difference,
                p=corrected.get(half),
            )
        )
    return rows


def _difference(
    correct: numpy.ndarray, mask: numpy.ndarray, groups: numpy.ndarray | None
) -> tuple[float | None, float | None]:
    """Returns a subgroup's accuracy minus that of the others, and p; None where there are none."""
    if mask.all():
        return None, None
    pulled, variance = [], 0.0
    for side in (mask, ~mask):
        number = effective_number(correct[side], None if groups is None else groups[side])
        share = (float(correct[side].mean()) * number + 1) / (number + 2)
        pulled.append(share)
        variance += share * (1 - share) / (number + 2)
    difference = float(correct[mask].mean() - correct[~mask].mean())
    return difference, math.erfc(abs(pulled[0] - pulled[1]) / math.sqrt(2 * variance))


def worst(rows: Sequence[SubgroupRow]) -> SubgroupRow | None:
    """Returns the subgroup with the least accuracy of those shown to be worse; else None."""
    worse = [
        row for row in rows if row.p is not None and row.p < 0.05 and (row.difference or 0) < 0
    ]
    return min(worse, key=lambda row: row.accuracy[0], default=None)
