"""Odd folders: each leads to what it should, in lines that name the thing and the remedy."""

import pytest

from odd_folders import CASES, try_out


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.group}: {case.what}")
def test_what_is_said(case, tmp_path):
    outcome, lines = try_out(case, tmp_path)
    assert outcome == case.outcome, lines
    said = "\n".join(lines)
    assert case.said in said
    for line in lines:
        assert line.count("\n") == 0
        assert "Traceback" not in line
        assert "Error(" not in line
