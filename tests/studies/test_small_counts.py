"""What is hidden stays hidden: no small count can be computed from what is handed out."""

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import Bounds, LinearConstraint, milp

from feddg.errors import DataError
from feddg.studies.small_counts import release

SMALLEST = 5


def reachable(told, classes):
    """For every cell and row total, the smallest and largest value that fits what was told."""
    size = classes * classes
    rows, values = [], []

    def known(cells, value):
        row = numpy.zeros(size)
        row[cells] = 1
        rows.append(row)
        values.append(value)

    known(range(size), told.total)
    for i in range(classes):
        if told.images[i] is not None:
            known(range(i * classes, (i + 1) * classes), told.images[i])
        for j in range(classes):
            if told.confusion[i][j] is not None:
                known([i * classes + j], told.confusion[i][j])
    if told.correct is not None:
        known([i * classes + i for i in range(classes)], told.correct)
    constraints = LinearConstraint(numpy.array(rows), values, values)

    def ends(goal):
        found = [
            milp(sign * goal, constraints=constraints, integrality=1, bounds=Bounds(0, numpy.inf))
            for sign in (1, -1)
        ]
        assert all(one.success for one in found)
        return [round(sign * one.fun) for sign, one in zip((1, -1), found)]

    for i in range(classes):
        whole = numpy.zeros(size)
        whole[i * classes : (i + 1) * classes] = 1
        yield ("row", i), ends(whole)
        for j in range(classes):
            goal = numpy.zeros(size)
            goal[i * classes + j] = 1
            yield (i, j), ends(goal)


@settings(max_examples=60)
@given(arrays(numpy.int64, (3, 3), elements=st.sampled_from((0, 0, 1, 2, 4, 5, 9, 30))))
def test_no_small_count_can_be_computed(confusion):
    if confusion.sum() < SMALLEST:
        with pytest.raises(DataError, match="fewer than"):
            release(confusion, SMALLEST)
        return
    told = release(confusion, SMALLEST)
    for what, (low, high) in reachable(told, 3):
        count = confusion[what[1]].sum() if what[0] == "row" else confusion[what]
        assert low <= count <= high
        assert not (0 < count < SMALLEST) or low < high, (what, count, told)


@given(arrays(numpy.int64, (3, 3), elements=st.integers(0, 40)))
def test_without_a_threshold_everything_is_told(confusion):
    if not confusion.any():
        return
    told = release(confusion, 0)
    assert told.confusion == confusion.tolist()
    assert told.images == confusion.sum(1).tolist()
    assert told.correct == confusion.trace()


def test_what_is_large_is_told():
    confusion = numpy.array([[90, 10, 0], [8, 70, 22], [0, 12, 60]])
    assert release(confusion, SMALLEST).confusion == confusion.tolist()


def test_a_common_table_keeps_its_accuracy():
    confusion = numpy.array([[90, 2, 3], [1, 70, 4], [2, 3, 60]])
    told = release(confusion, SMALLEST)
    assert told.correct == 220
    assert told.images == [95, 75, 65]
    cells = [cell for row in told.confusion for cell in row]
    assert all(cell is None or cell == 0 or cell >= SMALLEST for cell in cells)
