"""Accuracy by subgroup: the values of further columns, such as a scanner, a sex or an age band."""

import math
from collections.abc import Mapping, Sequence

import numpy
import torch

from feddg.evaluation.accuracy import Evaluation, Outputs
from feddg.evaluation.groups import effective_number
from feddg.records import SubgroupRow
from feddg.runs.intervals import holm, wilson


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
