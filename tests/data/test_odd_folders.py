"""Odd folders: each leads to what it should, in lines that name the thing and the remedy."""

import pytest

from odd_folders import CASES, PAGE, _cell, try_out

TRIED: dict[str, tuple[str, list[str]]] = {}


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
    row = f"| {case.what} | {outcome} | {'<br>'.join(map(_cell, lines))} |"
    assert row in PAGE.read_text("utf-8"), "run `python tests/odd_folders.py`"


def test_the_page_lists_every_case_and_no_other():
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    listed = [row.split(" | ")[0].removeprefix("| ") for row in rows]
    assert [name for name in listed if name != "folder"] == [case.what for case in CASES]
    assert len(CASES) >= 60
    assert len({(case.group, case.what) for case in CASES}) == len(CASES)
