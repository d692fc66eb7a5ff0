"""Whether what a client sends tells whose images it holds."""

import numpy
import pytest
from sklearn import metrics as theirs

from feddg.attacks.membership import roc_curve
from feddg.records import MembershipRow

pytest.importorskip("torchmetrics")

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


def test_the_curve_is_that_of_scikit_learn():
    random = numpy.random.default_rng(0)
    for others in range(1, 20):
        members = numpy.append(random.random(others) < 0.5, [True, False])
        scores = random.normal(size=others + 2).round(1)  # some are the same
        expected = theirs.roc_curve(members, scores, drop_intermediate=False)[:2]
        numpy.testing.assert_array_equal(roc_curve(members, scores), expected)


def test_membership_of_weights_and_styles(attack):
    rows = attack("pardon", "membership")
    assert [(row.entry, row.attack) for row in rows] == [
        (entry, kind)
        for entry in ("update/weights", "statistics/style")
        for kind in ("threshold", "shadow")
    ]
    for row in rows:
        assert isinstance(row, MembershipRow)
        assert 0 <= row.low <= row.auc <= row.high <= 1
        assert row.curve[0] == (0, 0) or row.curve[0][0] == 0
        assert row.curve[-1] == (1, 1)
        assert row.members == row.others
