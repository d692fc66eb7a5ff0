"""Tables of counts that are safe to hand out: no count below a threshold can be read or computed.

A cell of the table of true against predicted classes says something of few people when it is small:
"two images of class A were taken for B". Hiding that cell alone is not enough, since it is what is
missing from its row's total. Here every total that is given has, among what is hidden below it,
either nothing or at least the threshold (the rule of complementary suppression of statistical
offices, as in Hundepool et al., "Statistical Disclosure Control", 2012, chapter 4):

- in a row, cells that are hidden come to at least the threshold, whichever they are;
- classes whose number of images is hidden come to at least the threshold, and are two or more;
- the number of correct answers is given only if what it adds to the hidden cells, correct and
  wrong ones, comes to the threshold each, or to nothing, over at least two classes.

Zeros are given: a class that is never taken for another tells of nobody. Rounding is not needed.
"""

from dataclasses import dataclass

import numpy

from feddg.errors import DataError


@dataclass(frozen=True)
class Released:
    """What of a table may be handed out; None is hidden.

    Attributes:
        confusion: ``[true][predicted]`` counts.
        images: of each class.
        total: all images.
        correct: answers that were right.
    """

    confusion: list[list[int | None]]
    images: list[int | None]
    total: int
    correct: int | None


def release(confusion: numpy.ndarray, smallest: int) -> Released:
    """Returns a table with what is below ``smallest`` hidden, and what would give it away.

    Args:
        confusion: ``(classes, classes)`` counts, true by predicted.
        smallest: the threshold; 0 or 1 hides nothing.

    Raises:
        DataError: there are fewer images than that in all.
    """
    total = int(confusion.sum())
    if total < max(1, smallest):
        raise DataError(
            f"there are {total} images in all, fewer than the {max(1, smallest)} that may be told"
        )
    hidden_rows = _hidden_rows(confusion.sum(1), smallest)
    hidden = (confusion > 0) & (confusion < smallest)
    hidden[hidden_rows] = True
    for row, cells in enumerate(confusion):
        if not hidden_rows[row]:
            _fill(cells, hidden[row], smallest)
    told = smallest <= 1 or _make_correct_tellable(confusion, hidden, hidden_rows, smallest)
    return Released(
        [
            [None if hide else int(count) for count, hide in zip(*row)]
            for row in zip(confusion, hidden)
        ],
        [None if hide else int(count) for count, hide in zip(confusion.sum(1), hidden_rows)],
        total,
        int(confusion.trace()) if told else None,
    )


def _hidden_rows(images: numpy.ndarray, smallest: int) -> numpy.ndarray:
    """Which classes' numbers of images are hidden: the small ones, and others to cover them."""
    hidden: numpy.ndarray = (images > 0) & (images < smallest)
    _fill(images, hidden, smallest)
    return hidden


def _fill(counts: numpy.ndarray, hidden: numpy.ndarray, smallest: int) -> None:
    """Hides further counts, the smallest first, until what is hidden comes to the threshold."""
    while hidden.any() and (counts[hidden].sum() < smallest or hidden.sum() < 2):
        left = numpy.flatnonzero(~hidden & (counts > 0))
        if not len(left):
            left = numpy.flatnonzero(~hidden)  # a zero covers, too
        if not len(left):
            return
        hidden[left[counts[left].argmin()]] = True


def _make_correct_tellable(
    confusion: numpy.ndarray,
    hidden: numpy.ndarray,
    hidden_rows: numpy.ndarray,
    smallest: int,
) -> bool:
    """Hides whole classes' answers until the number of correct ones gives none of them away."""
    while True:
        right = numpy.diagonal(hidden)
        correct = int(numpy.diagonal(confusion)[right].sum())
        wrong = int(confusion[hidden].sum()) - correct
        wrong_hidden = hidden & ~numpy.eye(len(hidden), dtype=bool)
        enough = all(count >= smallest for count in (correct, wrong))
        if not hidden.any() or (enough and right.sum() >= 2 and wrong_hidden.any(1).sum() >= 2):
            return True
        if not right.any() and (wrong >= smallest or not wrong_hidden.any()):
            return True  # nothing is hidden on the diagonal: the number adds nothing
        left = [
            row
            for row, cells in enumerate(confusion)
            if not hidden[row].all() and not hidden_rows[row] and cells.any()
        ]
        if not left:
            return False
        hidden[min(left, key=lambda row: int(confusion[row].sum()))] = True
