"""How many images of each class the numbers rest on, and a warning where they are few."""

from collections.abc import Iterator, Sequence

import numpy

from feddg.evaluation.accuracy import Evaluation

FEW = 20
"""Fewer images of a class than this, and its recall moves by more than 5 points with each."""


def support_warning(evaluation: Evaluation, class_names: Sequence[str]) -> str | None:
    """Says in which evaluated domains a class has fewer than 20 images or none, or None.

    Args:
        evaluation: what will be measured.
        class_names: in the order of class ids.
    """
    told = list(_thin_parts(evaluation, class_names))
    if not told:
        return None
    more = f"; and in {len(told) - 3} more domains" if len(told) > 3 else ""
    return (
        f"numbers by class rest on few images (fewer than {FEW}, or none): "
        f"{'; '.join(told[:3])}{more}. Balanced accuracy, macro-F1 and AUROC are uncertain there, "
        "and leave out classes without images"
    )


def _thin_parts(evaluation: Evaluation, class_names: Sequence[str]) -> Iterator[str]:
    for split, domain, rows in evaluation.parts():
        counts = numpy.bincount(evaluation.labels[rows], minlength=evaluation.classes)
        thin = numpy.flatnonzero(counts < FEW)
        if len(thin):
            named = ", ".join(f"{class_names[i]} ({counts[i]})" for i in thin[:3])
            more = f" and {len(thin) - 3} more" if len(thin) > 3 else ""
            yield f"{split} {evaluation.domain_names[domain]}: {named}{more}"
