"""A selection rule is one definition: whoever shows or stores accuracies finds it."""

import pytest

from feddg.comparing.plan import Published
from feddg.errors import RunError
from feddg.report import write_report
from feddg.runs.reading import read_run
from feddg.runs.selection_rules import SELECTION_RULES, SelectionRule, add_rule
from feddg.runs.summary import summarize


@pytest.fixture
def second_round(monkeypatch):
    """A rule of a user's own; its accuracy is the mean of two rounds."""
    monkeypatch.setattr(SELECTION_RULES, "_found", dict(SELECTION_RULES))
    monkeypatch.setattr(SELECTION_RULES, "_aliases", dict(SELECTION_RULES._aliases))

    def measure(evaluations, round, split):
        found = [evaluations.accuracy(one, split) for one in (round, round + 1)]
        return None if None in found else sum(found) / 2

    return add_rule(SelectionRule("Second round", "second", lambda _: 2, measure=measure))


def test_a_new_rule_is_in_the_summary_on_the_page_and_in_plans(
    second_round, folder_maker, tmp_path
):
    maker = folder_maker()
    folder = maker.write()
    expected = sum(maker.accuracy("test", 0, round_) for round_ in (2, 3)) / 2
    summary = summarize(read_run(folder), "completed", None, {})
    assert summary["second"]["round"] == 2
    assert summary["second"]["test"]["accuracy"] == pytest.approx(expected)
    other = folder_maker("other", method="fedavg").write()
    page = write_report([folder, other], tmp_path / "report.html").read_text()
    assert "Second round" in page
    assert f"{100 * expected:.1f}" in page
    assert Published(source="paper", rule="second").rule == "Second round"


def test_an_unknown_rule_is_named():
    with pytest.raises(RunError, match=r"rule 'final rond' \(did you mean 'Final round'"):
        SELECTION_RULES.find("final rond")
    with pytest.raises(ValueError, match="unknown selection rule 'best'"):
        Published(source="paper", rule="best")
