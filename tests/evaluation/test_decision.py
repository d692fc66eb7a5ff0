"""A decision's threshold against every other one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from feddg.evaluation.decision import threshold_for
from rankings import rankings


@given(rankings(), st.floats(0.05, 0.99))
def test_a_threshold_reaches_its_target_and_no_laxer_one_does_better(ranking, target):
    positive, scores = ranking
    least = threshold_for(positive, scores, specificity=target)
    assert (scores[~positive] < least).mean() >= target - 1e-9
    most = threshold_for(positive, scores, sensitivity=target)
    assert (scores[positive] >= most).mean() >= target - 1e-9
    for other in np.unique(scores):
        if (scores[~positive] < other).mean() >= target:
            assert (scores[positive] >= other).mean() <= (scores[positive] >= least).mean()
        if (scores[positive] >= other).mean() >= target:
            assert (scores[~positive] < other).mean() <= (scores[~positive] < most).mean()
