"""Results class by class, each with the number of images behind it."""

from collections.abc import Sequence

import numpy

from feddg.report.blocks import Cell, Column, Fold, Table
from feddg.report.charts import Counts
from feddg.report.wording import MISSING, counted, number, percent, readable


def class_table(counts: Counts, classes: Sequence[str], name: str) -> Fold:
    """Recall and precision of every class, and what it is taken for most often.

    Args:
        counts: ``(classes, classes)`` numbers of images by true and predicted class.
        classes: names of the classes.
        name: whose images they are.
    """
    columns = [
        Column("Class", numeric=False),
        Column("Images"),
        Column("Recall", "of its images, %"),
        Column("Precision", "of what got its name, %"),
        Column("Predicted", "times"),
        Column("Mostly taken for", "its images, %", numeric=False),
    ]
    rows = [_class_row(counts, classes, index) for index in range(len(classes))]
    caption = (
        "Recall: how many images of the class were recognised. Precision: how many of the images "
        "given its name are of it; a class that was never named has none. Few images make both "
        "uncertain."
    )
    title = f"{counted(len(classes), 'class', 'classes')} of {name}, one by one"
    return Fold(title, [Table(columns, rows, caption)])


def _class_row(counts: Counts, classes: Sequence[str], index: int) -> list[Cell]:
    right, support = float(counts[index, index]), float(counts[index].sum())
    named = float(counts[:, index].sum())
    return [
        Cell(readable(classes[index])),
        Cell(number(support)),
        Cell(percent(right / support if support else None)),
        Cell(percent(right / named if named else None)),
        Cell(number(named)),
        Cell(_most_taken_for(counts[index], classes, index)),
    ]


def _most_taken_for(row: Counts, classes: Sequence[str], index: int) -> str:
    others = numpy.where(numpy.arange(len(row)) == index, 0, row)
    if not others.any():
        return MISSING
    most = int(others.argmax())
    return f"{readable(classes[most])} ({percent(float(others[most] / row.sum()))})"
