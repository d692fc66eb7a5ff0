"""Decisions and subgroups on pages and in comparisons."""

import numpy
import pytest

import feddg
from feddg.comparison.results import Results
from feddg.report.comparison_page import comparison_page
from feddg.report.run_page import run_page
from feddg.runs.reading import read_run


def table_of(file):
    random, rows = numpy.random.default_rng(0), ["label,domain,group,scanner,a,b,c"]
    for n in range(360):
        sick, scanner = n % 3 == 0, n % 5
        values = random.normal(size=3) + 1.5 * sick * (scanner != 4)
        cells = ",".join(f"{value:.6f}" for value in values)
        rows.append(f"{'sick' if sick else 'well'},{'abcd'[n % 4]},P{n // 6},s{scanner},{cells}")
    file.write_text("\n".join(rows))
    return file


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    place = tmp_path_factory.mktemp("decided")
    base = {
        "data": {"source": "features", "root": str(table_of(place / "t.csv")), "id_val": 0.3},
        "clients": 3,
        "rounds": 1,
        "evaluate": {"decision": "sick", "specificity": 0.8},
        "subgroups": ["scanner"],
    }
    options = {"hold_out": ["a", "b"], "results": place / "r.csv", "report": False}
    return feddg.compare(["fedavg", "ridge"], place / "out", **options, **base)


def test_a_runs_page_says_what_is_decided_and_where_the_threshold_is_from(done):
    run = read_run(done.folders[0])
    sections = {section.title: section for section in run_page(run).sections}
    decision = sections["Decision"].blocks
    assert f"probability of {run.details.decision.threshold:.9g} on" in decision[0].text
    row = run.details.decision.rows[0]
    cells = [cell.text for cell in decision[1].rows[0]]
    assert cells[1].split()[0] == row.domain
    assert any(text.startswith(f"{100 * row.auroc[0]:.1f} (") for text in cells)
    others = {column.heading for column in sections["Metrics"].blocks[0].columns}
    assert "Macro-F1" in others
    assert not others & {"Sensitivity", "AUROC of the decision"}
    values = [cells[1].text for cells in sections["Subgroups"].blocks[-1].rows]
    assert sum(value == "scanner: s4" for value in values) == 3  # test and in-domain


def test_a_page_names_the_model_of_its_decision_where_it_is_another(done):
    run = read_run(done.folders[0])
    assert (run.details.which, run.details.round) == (run.default_rule.name, 1)

    def said(**changes):
        vars(run)["details"] = run.details.model_copy(update=changes)
        sections = {section.title: section for section in run_page(run).sections}
        return [sections[title].blocks[0].text for title in ("Decision", "Subgroups")]

    assert all("of the model" not in text for text in said())
    other = "This is of the model “mean of the last rounds” (round 1), not of the one that the rest"
    assert all(text.startswith(other) for text in said(which="swa"))
    unknown = "It was not recorded of which of the run's models this is."
    assert said(which=None, round=None) == [unknown] * 2


def test_a_comparison_has_the_decisions_metrics_with_paired_differences(done):
    results = done.results
    table = next(s for s in comparison_page(results).sections if s.title == "Decision").blocks[0]
    assert [column.heading for column in table.columns][1:3] == [
        "AUROC of the decision",
        "minus FedAvg",
    ]
    runs = [read_run(folder) for folder in done.folders]
    by_method = {}
    for run in runs:
        own = run.result.where(split="test").values("decision_auroc")
        by_method.setdefault(run.method, {}).update(own)
    difference = numpy.mean([by_method["ridge"][d] - by_method["fedavg"][d] for d in "ab"])
    ridge = next(row for row in table.rows if row[0].text == "Ridge")
    assert ridge[2].text.startswith(f"{100 * difference:+.1f} (")
    again = Results.read(done.folder.parent / "r.csv")
    assert again.values(again.default_rule, "sensitivity")
