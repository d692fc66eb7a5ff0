"""Whether what a client sends tells whose images it holds."""

import pytest

from extras import needs
from feddg.attacks import senders
from feddg.records import MembershipRow

pytestmark = [
    needs("torchmetrics"),
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
]


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


def test_a_client_without_shadows_does_not_hide_what_was_learnt_of_the_others(attack, monkeypatch):
    real, alone = senders._shadows, []

    def shadows(like, *others):
        alone.append(like)
        return iter(()) if len(alone) == 1 else real(like, *others)

    monkeypatch.setattr(senders, "_shadows", shadows)
    rows = attack("pardon", "membership", again=True)
    assert [row.clients for row in rows if row.attack == "threshold"] == [2, 2]
    assert [row.clients for row in rows if row.attack == "shadow"] == [1, 1]
