""""""

import json
import math
import os
from pathlib import Path
from typing import get_args

import numpy
import pandas
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as theirs

from feddg import Experiment
from feddg.comparison.plan import Tune
from feddg.comparison.results import results_of
from feddg.diagnostics import Diagnostic
from feddg.errors import ExperimentError, RunError
from feddg.evaluation.metrics import METRICS, Predictions, measure
from feddg.records import LAST, SummaryFile
from feddg.report.page import write_report
from feddg.runs.diagnostics import about_run
from feddg.runs.execute import is_complete
from feddg.runs.reading import is_run, read_run
from feddg.runs.summary import summarize
from feddg.runs.table import (
    AGGREGATES,
    BEST_HELD_OUT,
    BEST_IN_DOMAIN,
    COLUMNS,
    SELECTION_RULES,
    NumberTable,
    SelectionRule,
    add_rule,
)
from feddg.settings import EvaluateSettings
from run_folders import UPDATE_BYTES, numbers, table_of

best_in_domain, best_held_out = BEST_IN_DOMAIN.choose, BEST_HELD_OUT.choose


def evaluation(round_, split, domain, accuracy):
    return numbers(round_, split, domain, accuracy, loss=1.0)


def append(path, text):
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def test_a_finished_run_reads_back_as_written(folder_maker):
    maker = folder_maker(rounds=4, planned=4)
    run = read_run(maker.write())
    assert (run.method, run.status, run.rounds_done, run.rounds_planned) == (
        *("pardon", "completed"),
        *(4, 4),
    )
    assert run.settings["model"]["backbone"] == "resnet18"
    assert run.held_out("test") == ["photo"]
    assert run.held_out("val") == ["art_painting"]
    assert run.environment["torch"] == "2.15.0"
    assert len(run.clients.clients) == 10
    assert run.clients.domains == ["photo", "art_painting", "cartoon", "sketch"]
    of = {"weights": "last", "metric": "accuracy"}
    (row,) = run.table.where(**of, round=3, split="id_val", domain="sketch")
    assert row.value == maker.accuracy("id_val", 1, 3)
    assert row.examples == 401
    (row,) = run.table.where(**of, round=4, split="test")
    assert row.confusion == maker.confusion()
    second = run.rounds[1]
    assert second.clients == maker.chosen(2)
    assert second.refused[0].reason == "not finite"
    assert second.terms["regularizer"] == 0.1
    assert run.setup.groups == {"style": ((0, 2, 4, 6, 8), (1, 3, 5, 7, 9))}


def test_what_was_spent_by_a_round_adds_up(folder_maker):
    maker = folder_maker(rounds=3, planned=3)
    run = read_run(maker.write())
    clients = [len(maker.chosen(round)) for round in (1, 2)]
    frame = run.frame().query("round == 2 and split == 'test' and metric == 'accuracy'")
    assert frame["images"].tolist() == [65 * sum(clients)]
    setup = sum(row.bytes for row in maker.messages() if row.round == 0)
    assert frame["bytes"].tolist() == [setup + 2 * UPDATE_BYTES * sum(clients)]
    assert frame["seconds"].tolist() == [pytest.approx(2.5 + sum(clients) + 0.2)]


def test_a_run_at_a_budget_is_as_if_it_had_ended_there(folder_maker):
    maker = folder_maker(rounds=6)
    run = read_run(maker.write())
    seen = [maker.spent(round)["images"] for round in range(7)]
    at = run.at(seen[2] + 1)
    assert (at.rounds_done, at.status, at.table.round) == (3, "completed", 3)
    assert at.accuracy == maker.accuracy("test", 0, 3)
    assert run.at(seen[-1] + 1).rounds_done == 6
    maker = folder_maker("once", method="ridge", rounds=1, planned=1)
    once, seen = read_run(maker.write()), maker.spent(1)["images"]
    assert (once.at(seen - 1), once.at(10 * seen).rounds_done) == (None, 1)


def test_the_ledger_reads_back_as_written(folder_maker):
    maker = folder_maker(rounds=3)
    ledger = read_run(maker.write()).ledger
    assert ledger.messages == maker.messages()
    assert ledger.layouts["ab03"].scalars == ("examples",)
    assert ledger.layouts["ab03"].tensors[0].shape == (64, 3, 3, 3)


def test_a_part_is_read_only_when_asked_for(folder_maker):
    folder = folder_maker().write()
    (folder / "ledger.jsonl").write_text("not json\nnot json\n")
    run = read_run(folder)
    assert run.rounds_done == 6
    with pytest.raises(RunError, match=r"ledger\.jsonl is damaged in row 1"):
        _ = run.ledger


def test_something_else_than_a_run_folder_is_named(folder_maker, tmp_path):
    with pytest.raises(RunError, match="There is no run folder"):
        read_run(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="empty holds no run"):
        read_run(tmp_path / "empty")
    folder = folder_maker("parent/a").write()
    assert is_run(folder)
    assert read_run(str(folder)).folder == folder
    with pytest.raises(RunError, match="parent holds no run"):
        read_run(folder.parent)


def test_a_run_that_has_only_its_experiment_is_empty_but_readable(folder_maker, tmp_path):
    full = folder_maker("full").write()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "experiment.yaml").write_bytes((full / "experiment.yaml").read_bytes())
    run = read_run(tmp_path / "begun")
    assert run.status == "unfinished"
    assert run.clients is None
    assert run.environment == {}
    assert (run.rounds_done, run.rounds, run.ledger.messages) == (0, [], [])
    assert run.pictures() == []
    assert [rule.of(run.table).round for rule in SELECTION_RULES.values()] == [None] * 6


@pytest.mark.parametrize("rest", ['{"round":7,"wei', "\0\0\0\0", '{"kind":"round","round":7,"cl'])
def test_a_last_line_that_was_cut_off_is_left_out(folder_maker, rest):
    folder = folder_maker(status=None).write()
    append(folder / "metrics.jsonl", rest)
    append(folder / "rounds.jsonl", rest)
    append(folder / "ledger.jsonl", rest)
    run = read_run(folder)
    assert (run.rounds_done, run.table.round) == (6, 6)
    assert len(run.ledger.messages) == len(read_run(folder_maker("other").write()).ledger.messages)


def test_a_letter_cut_in_half_at_the_end_is_left_out(folder_maker):
    folder = folder_maker(status=None).write()
    path = folder / "rounds.jsonl"
    path.write_bytes(path.read_bytes() + '{"kind":"setup","groups":{"ü'.encode()[:-1])
    assert read_run(folder).rounds_done == 6


def test_a_row_without_a_needed_field_is_named(folder_maker):
    folder = folder_maker().write()
    append(folder / "metrics.jsonl", '{"round":1}\n')
    with pytest.raises(
        RunError, match=r"metrics\.jsonl is damaged in row \d+: weights: Field required"
    ):
        _ = read_run(folder).table


def test_a_run_serves_its_mean_until_wise_ft_has_mixed_it(folder_maker):
    """What is spoken of is what ``load_model`` hands out: a run that is stopped has no mixture."""
    folder = folder_maker(status=None).write()
    settings = yaml.safe_load((folder / "experiment.yaml").read_text())
    settings["server"] = {"wise_ft": "auto", "averaging": "ema"}
    (folder / "experiment.yaml").write_text(yaml.safe_dump(settings))
    run = read_run(folder)
    assert run.default_rule.name == "ema"


def test_rows_written_again_replace_the_earlier_ones(folder_maker):
    maker = folder_maker(rounds=2)
    folder = maker.write()
    again = maker.number_rows(2)[0].model_copy(update={"value": 0.123})
    append(folder / "metrics.jsonl", again.to_json() + "\n")
    append(folder / "rounds.jsonl", maker.round_row(2).to_json() + "\n")
    run = read_run(folder)
    assert run.table.where(weights="last", round=2).value("test") == 0.123
    assert [row.round for row in run.rounds] == [1, 2]


def test_a_number_that_is_not_finite_may_be_written_as_null(folder_maker):
    maker = folder_maker(rounds=1)
    folder = maker.write()
    row = json.loads(maker.number_rows(1)[1].to_json()) | {"value": None}
    append(folder / "metrics.jsonl", json.dumps(row) + "\n")
    assert row["metric"] == "loss"
    (value,) = read_run(folder).result.where(split="test").values("loss").values()
    assert math.isnan(value)


@pytest.mark.parametrize("done", [0, 3])
def test_numbers_of_a_round_without_a_record_do_not_count(folder_maker, done):
    """A process may be killed, or a disk be full, when some of a round's numbers are written."""
    maker = folder_maker(status=None, rounds=done)
    folder = maker.write()
    row = maker.number_rows(done + 1)[0]
    append(folder / "metrics.jsonl", row.to_json() + "\n")
    assert read_run(folder).table.round == done
    (folder / "rounds.jsonl").write_text("")
    assert read_run(folder).table.round is None


def test_a_mean_counts_every_domain_once():
    small, large = (
        numbers(1, "test", "small", 1.0, examples=1),
        numbers(1, "test", "large", 0.0, examples=999),
    )
    assert table_of(small, large).value("test") == 0.5


def test_a_value_of_several_rounds_or_splits_is_refused():
    table = table_of(evaluation(1, "test", "a", 0.5), evaluation(2, "test", "a", 0.7))
    with pytest.raises(ValueError, match="choose them"):
        table.value("test")
    assert table.where(round=2).value("test") == 0.7
    assert table_of().value("test") is None


def test_ties_go_to_the_earliest_round():
    accuracies = {1: 0.5, 2: 0.7, 3: 0.6, 4: 0.7}
    table = table_of(*(evaluation(r, "val", "a", value) for r, value in accuracies.items()))
    assert best_held_out(table) == 2
    assert best_in_domain(table) is None


def test_domains_that_trade_places_are_a_tie():
    # 0.1 + 0.7 + 0.2 depends on the order in floating point; the mean must not.
    rows = [evaluation(1, "id_val", d, v) for d, v in zip("abc", (0.7, 0.1, 0.2))]
    rows += [evaluation(2, "id_val", d, v) for d, v in zip("abc", (0.1, 0.2, 0.7))]
    assert best_in_domain(table_of(*rows)) == 1


def test_the_untrained_model_is_chosen_only_when_there_is_no_other():
    untrained = evaluation(0, "id_val", "a", 0.9)
    assert best_in_domain(table_of(untrained, evaluation(1, "id_val", "a", 0.3))) == 1
    assert best_in_domain(table_of(untrained)) == 0


def test_a_round_whose_accuracy_is_unknown_is_not_chosen():
    rows = [evaluation(1, "val", "a", math.nan), evaluation(2, "val", "a", 0.2)]
    assert best_held_out(table_of(*rows)) == 2


accuracy_lists = st.lists(st.integers(0, 5), min_size=1, max_size=8)


@given(accuracy_lists, st.data())
def test_the_test_split_never_selects(levels, data):
    test_levels = data.draw(st.lists(st.integers(0, 5), min_size=len(levels), max_size=len(levels)))
    rows = [evaluation(r, "id_val", "a", v / 5) for r, v in enumerate(levels, start=1)]
    rows += [evaluation(r, "val", "b", v / 5) for r, v in enumerate(reversed(levels), start=1)]
    test_rows = [evaluation(r, "test", "c", v / 5) for r, v in enumerate(test_levels, start=1)]
    with_test, without = table_of(*rows, *test_rows), table_of(*rows)
    for rule in SELECTION_RULES.values():
        assert rule.of(with_test).round == rule.of(without).round


@given(accuracy_lists)
def test_the_best_round_is_what_a_plain_search_finds(levels):
    best = 1
    for round_, level in enumerate(levels, start=1):
        if level > levels[best - 1]:
            best = round_
    rows = [evaluation(r, "id_val", "a", v / 5) for r, v in enumerate(levels, start=1)]
    assert best_in_domain(table_of(*rows)) == best


def test_pictures_come_in_the_order_of_their_captions(folder_maker):
    folder = folder_maker(pictures=3).write()
    captions = {"styles-2.png": "last first", "gone.png": "no file", "styles-0.png": "then this"}
    (folder / "figures" / "captions.json").write_text(json.dumps(captions))
    pictures = [(path.name, caption) for path, caption in read_run(folder).pictures()]
    assert pictures == [
        ("styles-2.png", "last first"),
        ("styles-0.png", "then this"),
    ]


# Domains as one number: by hand, what must always hold, and what chooses a round by it.


def row(domain, confusion, round=1, split="test", **more):
    """The rows of a domain as an evaluation writes them."""
    counts = numpy.array(confusion)
    found = measure(Predictions(counts)) | more
    accuracy, examples = found.pop("accuracy"), int(counts.sum())
    return numbers(round, split, domain, accuracy, examples, LAST, counts.tolist(), **found)


ROWS = [
    row("a", [[3, 1], [0, 4]], calibration_error=0.1),
    row("b", [[1, 0], [1, 0]], calibration_error=0.3),
]


def test_three_aggregates_by_hand():
    found = table_of(*ROWS)
    assert found.value("test") == pytest.approx((7 / 8 + 1 / 2) / 2)
    assert found.value("test", over="pooled") == pytest.approx(8 / 10)
    assert found.value("test", over="worst_domain") == 1 / 2
    # Pooled: class 0 has 4 of 5, class 1 has 4 of 5.
    assert found.value("test", "balanced_accuracy", "pooled") == pytest.approx(0.8)
    assert found.value("test", "calibration_error", "worst_domain") == 0.3
    assert found.value("test", "calibration_error", "pooled") is None
    assert found.value("test", "largest_class_share", "worst_domain") is None
    assert found.where(round=2).value("test") is found.value("test", "mine") is None


CONFUSIONS = st.lists(
    st.lists(st.integers(0, 5), min_size=9, max_size=9).filter(any), min_size=1, max_size=5
)


@given(CONFUSIONS)
def test_pooled_is_one_domain_and_means_lie_between_the_worst_and_the_best(cells):
    counts = [numpy.reshape(cell, (3, 3)) for cell in cells]
    found = table_of(*(row(str(i), count) for i, count in enumerate(counts)))
    true, predicted = numpy.array(
        [pair for count in counts for pair in numpy.argwhere(count).repeat(count[count > 0], 0)]
    ).T
    together = theirs.f1_score(
        true, predicted, labels=numpy.unique(true), average="macro", zero_division=0
    )
    assert found.value("test", "macro_f1", "pooled") == pytest.approx(together)
    accuracy = theirs.accuracy_score(true, predicted)
    assert found.value("test", "accuracy", "pooled") == pytest.approx(accuracy)
    for metric in ("accuracy", "balanced_accuracy", "macro_f1"):
        worst, mean = (found.value("test", metric, a) for a in ("worst_domain", "domain_mean"))
        best = max(found.values(metric).values())
        assert worst - 1e-12 <= mean <= best + 1e-12


def test_without_counts_only_accuracy_is_pooled():
    bare = [one.model_copy(update={"confusion": None}) for entry in ROWS for one in entry]
    found = table_of(bare)
    assert found.value("test", "accuracy", "pooled") == pytest.approx(0.8)
    assert found.value("test", "macro_f1", "pooled") is None
    assert found.support("test", "a") is None


def test_support_is_that_of_the_images_however_many_models_were_asked():
    three = numpy.array([[3, 1], [0, 4]]) * 3
    asked = [one.model_copy(update={"examples": 8}) for one in row("a", three)]
    assert table_of(asked).support("test", "a") == [4, 4]
    assert table_of(*ROWS).support("test", "b") == [1, 1]


def test_all_metrics_are_listed_in_the_order_of_tables_and_strange_ones_last():
    found = table_of(row("a", [[1, 0], [0, 1]], mine=0.5)).metrics
    known = [name for name in METRICS if name in found]
    assert found == [*known, "mine"]
    assert set(AGGREGATES) == {"domain_mean", "pooled", "worst_domain"}


@pytest.mark.parametrize("split", ["val", "id_val"])
def test_a_round_is_chosen_by_the_metric_asked_for(split):
    # Round 1 names the commonest class always; round 2 finds the rare one, too.
    lazy, fair = [[90, 0], [10, 0]], [[70, 20], [0, 10]]
    rows = [row("a", lazy, 1, split), row("a", fair, 2, split)]
    rule = BEST_HELD_OUT if split == "val" else BEST_IN_DOMAIN
    chosen = {
        by: rule.choose(table_of(*rows, select_by=by))
        for by in ("accuracy", "balanced_accuracy", "macro_f1")
    }
    assert chosen == {"accuracy": 1, "balanced_accuracy": 2, "macro_f1": 2}


def test_every_metric_with_a_better_end_chooses_and_less_may_be_better():
    rows = [
        row("a", [[1, 1], [1, 1]], 1, "id_val", auroc=0.9, calibration_error=0.3),
        row("a", [[1, 1], [1, 1]], 2, "id_val", auroc=0.5, calibration_error=0.1),
        row("a", [[1, 1], [1, 1]], 3, "id_val", auroc=math.nan, calibration_error=math.nan),
    ]
    chosen = {
        by: BEST_IN_DOMAIN.choose(table_of(*rows, select_by=by))
        for by in ("auroc", "calibration_error", "nobody_measured")
    }
    assert chosen == {"auroc": 1, "calibration_error": 2, "nobody_measured": None}


def test_a_round_without_a_domain_is_no_better_for_it():
    hard, easy = [[1, 3], [2, 2]], [[4, 0], [0, 4]]
    rows = [row("a", easy, 1, "id_val"), row("b", hard, 1, "id_val")]
    table = table_of(*rows, row("a", easy, 2, "id_val"))
    assert BEST_IN_DOMAIN.choose(table) == 1


def test_domains_become_one_number_as_asked():
    def of(round_, small, large):
        hits = [row("a", [[small, 0], [4 - small, 0]], round_, "id_val")]
        return [*hits, row("b", [[large, 0], [40 - large, 0]], round_, "id_val")]

    rows = [*of(1, 4, 12), *of(2, 1, 30), *of(3, 2, 24)]  # means .65 .5 .55, worst .3 .25 .5
    chosen = {over: BEST_IN_DOMAIN.choose(table_of(*rows, select_over=over)) for over in AGGREGATES}
    assert chosen == {"domain_mean": 1, "pooled": 2, "worst_domain": 3}
    worst = [
        row("a", [[1, 0], [0, 1]], 1, "id_val", calibration_error=0.4),
        row("b", [[1, 0], [0, 1]], 1, "id_val", calibration_error=0.1),
        row("a", [[1, 0], [0, 1]], 2, "id_val", calibration_error=0.3),
        row("b", [[1, 0], [0, 1]], 2, "id_val", calibration_error=0.3),
    ]
    both = {
        over: BEST_IN_DOMAIN.choose(
            table_of(*worst, select_by="calibration_error", select_over=over)
        )
        for over in ("domain_mean", "worst_domain")
    }
    assert both == {"domain_mean": 1, "worst_domain": 2}


def test_the_registry_of_metrics_is_the_one_list_that_select_by_takes_from():
    able = {name for name, metric in METRICS.items() if metric.higher_is_better is not None}
    assert {"auroc", "calibration_error", "macro_f1"} <= able
    for name in able:
        made = Experiment(data="digits", hold_out="sketch", evaluate={"select_by": name})
        assert made.evaluate.select_by == name
    with pytest.raises(ExperimentError, match=r"unknown metric 'aurok' .*'auroc'"):
        Experiment(data="digits", hold_out="sketch", evaluate={"select_by": "aurok"})
    with pytest.raises(ExperimentError, match="largest_class_share describes the images"):
        Experiment(data="digits", hold_out="s", evaluate={"select_by": "largest_class_share"})
    pooled = {"select_by": "macro_f1", "select_over": "pooled"}
    with pytest.raises(ExperimentError, match="macro_f1 is not pooled during a run"):
        Experiment(data="digits", hold_out="sketch", evaluate=pooled)
    over = EvaluateSettings.model_fields["select_over"].annotation
    assert set(get_args(over)) == set(AGGREGATES)


def test_what_chooses_is_read_from_the_experiment_and_changes_the_id_only_where_it_says_new(
    folder_maker,
):
    assert read_run(folder_maker().write()).table.select_by == "accuracy"
    plain = Experiment(data="digits", hold_out="sketch")
    same = Experiment(data="digits", hold_out="sketch", evaluate={"select_by": "accuracy"})
    other = Experiment(data="digits", hold_out="sketch", evaluate={"select_by": "macro_f1"})
    assert plain.id == same.id != other.id
    worst = Experiment(data="digits", hold_out="sketch", evaluate={"select_over": "worst_domain"})
    assert len({plain.id, other.id, worst.id}) == 3


# A selection rule is one definition: whoever shows or stores accuracies finds it.


@pytest.fixture
def second_round(monkeypatch):
    """A rule of a user's own; its accuracy is the mean of two rounds."""
    monkeypatch.setattr(SELECTION_RULES, "_found", dict(SELECTION_RULES))
    monkeypatch.setattr(SELECTION_RULES, "_aliases", dict(SELECTION_RULES._aliases))

    class Second(SelectionRule):
        def of(self, table):
            second, third = (table.where(weights="last", round=round) for round in (2, 3))
            return NumberTable(
                row.model_copy(update={"value": (row.value + other.value) / 2})
                for row, other in zip(second, third)
            )

    return add_rule(Second("second", "Second round", lambda _: 2))


def test_a_new_rule_is_in_the_summary_on_the_page_and_in_plans(
    second_round, folder_maker, tmp_path
):
    maker = folder_maker()
    folder = maker.write()
    expected = sum(maker.accuracy("test", 0, round_) for round_ in (2, 3)) / 2
    summary = summarize(read_run(folder), "completed", None, {})
    of_test = ("accuracy", "second", "test", "domain_mean", "")
    (number,) = [one for one in summary.numbers if one.of == of_test]
    assert (number.round, number.value) == (2, pytest.approx(expected))
    other = folder_maker("other", method="fedavg").write()
    page = write_report([folder, other], tmp_path / "report.html").read_text()
    assert "Second round" in page
    assert f"{100 * expected:.1f}" in page
    assert Tune(settings={"train.lr": [0.1]}, rule="second").rule == "Second round"


def test_an_unknown_rule_is_named():
    with pytest.raises(RunError, match=r"rule 'final rond' \(did you mean 'Final round'"):
        SELECTION_RULES.find("final rond")
    with pytest.raises(RunError, match="unknown selection rule 'best'"):
        Tune(settings={"train.lr": [0.1]}, rule="best")


def cut(path):
    path.write_text(path.read_text()[:-20])


def emptied(path):
    path.write_text("")


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("clients.json", os.unlink, "clients.json is missing"),
        ("environment.json", os.unlink, "environment.json is missing"),
        ("metrics.jsonl", os.unlink, "metrics.jsonl is missing"),
        ("ledger.jsonl", os.unlink, "ledger.jsonl is missing"),
        ("rounds.jsonl", cut, "rounds.jsonl has 5 of 6 rounds"),
        ("metrics.jsonl", cut, "metrics.jsonl lacks numbers that summary.json has"),
        ("metrics.jsonl", emptied, "metrics.jsonl lacks numbers that summary.json has"),
    ],
)
def test_a_completed_run_that_is_damaged_is_not_believed(folder_maker, name, damage, said):
    folder = folder_maker().write()
    assert is_complete(folder)
    damage(folder / name)
    run = read_run(folder)
    assert (run.status, run.error) == ("damaged", said)
    assert about_run(run)[0].code == "run-damaged"
    with pytest.raises(RunError, match=rf"^The run folder .* is damaged: {said}\. Put the file"):
        is_complete(folder)
    assert results_of([folder, folder_maker("whole").write()]).open == [
        (folder.name, f"damaged: {said}")
    ]


def test_a_mean_over_fewer_domains_than_the_summary_has_is_not_believed(folder_maker):
    folder = folder_maker(test=["photo", "cartoon"], training=["sketch"]).write()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    gone = ('"round":6,', '"test"', '"cartoon"')
    kept = [line for line in lines if not all(part in line for part in gone)]
    assert kept != lines
    (folder / "metrics.jsonl").write_text("".join(kept))
    assert read_run(folder).status == "damaged"


def test_a_run_that_ended_early_is_only_believed_if_it_says_why(folder_maker):
    folder = folder_maker(rounds=2).write()
    assert read_run(folder).error == "rounds.jsonl has 2 of 6 rounds"
    summary = SummaryFile.read(folder / "summary.json")
    why = Diagnostic("budget-spent", "warning", "The run ends after round 2 of 6.")
    summary = summary.model_copy(update={"diagnostics": [why]})
    (folder / "summary.json").write_text(summary.to_text())
    assert read_run(folder).status == "completed"
    (folder / "metrics.jsonl").unlink()
    assert read_run(folder).status == "damaged"


def test_three_lines_of_pandas_on_the_file_give_the_headline(folder_maker):
    run = read_run(folder_maker(test=["photo", "cartoon"], training=["sketch"]).write())
    table = pandas.read_json(run.folder / "metrics.jsonl", lines=True)
    own = table.query("metric == 'accuracy' and split == 'test' and weights == 'last'")
    assert own[own["round"] == own["round"].max()]["value"].mean() == pytest.approx(run.accuracy)
    pandas.testing.assert_frame_equal(table[[*COLUMNS]], run.frame(), check_dtype=False)


def test_the_rule_of_the_guide_is_a_function_of_the_table(second_round, folder_maker):
    guide = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text("utf-8")
    (code,) = [part for part in guide.split("```") if "def lowest_loss" in part]
    exec(code.removeprefix("python\n"), {})
    maker = folder_maker()
    rule, table = SELECTION_RULES.find("Lowest validation loss"), read_run(maker.write()).table
    losses = {r: -sum(maker.accuracy("id_val", d, r) for d in (0, 1)) for r in range(7)}
    assert rule.of(table).round == min(losses, key=losses.get)
    assert not rule.of(NumberTable())
