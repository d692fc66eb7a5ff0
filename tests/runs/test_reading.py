import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddg.errors import RunError
from feddg.records import EvaluationRow
from feddg.runs.evaluations import Evaluations
from feddg.runs.reading import is_run, read_run
from feddg.runs.selection_rules import SELECTION_RULES, best_held_out, best_in_domain, final_round


def evaluation(round_, split, domain, accuracy):
    return EvaluationRow(
        round=round_, split=split, domain=domain, accuracy=accuracy, loss=1.0, examples=10
    )


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
    assert run.experiment["model"]["backbone"] == "resnet18"
    assert run.held_out("test") == ["photo"]
    assert run.held_out("val") == ["art_painting"]
    assert run.environment["torch"] == "2.15.0"
    assert len(run.clients.clients) == 10
    assert run.clients.domains == ["photo", "art_painting", "cartoon", "sketch"]
    row = run.evaluations.get(3, "id_val", "sketch")
    assert row.accuracy == maker.accuracy("id_val", 1, 3)
    assert row.examples == 401
    assert run.evaluations.at(4, "test")[0].confusion == maker.confusion()
    second = run.metrics.rounds[1]
    assert second.clients == maker.chosen(2)
    assert second.refused[0].reason == "not finite"
    assert second.terms["regularizer"] == 0.1
    assert run.metrics.setup.groups == {"style": ((0, 2, 4, 6, 8), (1, 3, 5, 7, 9))}


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
    with pytest.raises(RunError, match="It holds 1 run folder: name one of them"):
        read_run(folder.parent)


def test_a_run_that_has_only_its_experiment_is_empty_but_readable(folder_maker, tmp_path):
    full = folder_maker("full").write()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "experiment.yaml").write_bytes((full / "experiment.yaml").read_bytes())
    run = read_run(tmp_path / "begun")
    assert run.status == "unfinished"
    assert run.clients is None
    assert run.environment == {}
    assert (run.rounds_done, run.metrics.rounds, run.ledger.messages) == (0, [], [])
    assert run.pictures() == []
    assert [rule.choose(run.evaluations) for rule in SELECTION_RULES.values()] == [None] * 6


@pytest.mark.parametrize("rest", ['{"kind":"evaluat', "\0\0\0\0", '{"kind":"round","round":7,"cl'])
def test_a_last_line_that_was_cut_off_is_left_out(folder_maker, rest):
    folder = folder_maker(status=None).write()
    append(folder / "metrics.jsonl", rest)
    append(folder / "ledger.jsonl", rest)
    run = read_run(folder)
    assert run.rounds_done == 6
    assert len(run.ledger.messages) == len(read_run(folder_maker("other").write()).ledger.messages)


def test_a_letter_cut_in_half_at_the_end_is_left_out(folder_maker):
    folder = folder_maker().write()
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + '{"kind":"setup","groups":{"ü'.encode()[:-1])
    assert read_run(folder).rounds_done == 6


def test_damage_elsewhere_names_the_file_and_the_row(folder_maker):
    folder = folder_maker().write()
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], lines[2][:20], *lines[3:]]))
    with pytest.raises(RunError, match=r"metrics\.jsonl is damaged in row 3"):
        _ = read_run(folder).metrics


def test_a_row_without_a_needed_field_is_named(folder_maker):
    folder = folder_maker().write()
    append(folder / "metrics.jsonl", '{"kind":"evaluation","round":1}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl is damaged in row 62: it lacks 'split'"):
        _ = read_run(folder).metrics


@pytest.mark.parametrize("content", ["{ not: [closed", "- a\n- list\n"])
def test_an_unreadable_experiment_is_named(tmp_path, content):
    (tmp_path / "experiment.yaml").write_text(content)
    with pytest.raises(RunError, match=r"experiment\.yaml is damaged"):
        _ = read_run(tmp_path).experiment


def test_rows_written_again_replace_the_earlier_ones(folder_maker):
    maker = folder_maker(rounds=2)
    folder = maker.write()
    again = maker.evaluation_rows(2)[0].model_copy(update={"accuracy": 0.123})
    append(folder / "metrics.jsonl", again.to_json() + "\n")
    append(folder / "metrics.jsonl", maker.round_row(2).to_json() + "\n")
    run = read_run(folder)
    assert run.evaluations.accuracy(2, "test") == 0.123
    assert [row.round for row in run.metrics.rounds] == [1, 2]


def test_a_number_that_is_not_finite_may_be_written_as_null(folder_maker):
    maker = folder_maker(rounds=1)
    folder = maker.write()
    row = json.loads(maker.evaluation_rows(1)[0].to_json()) | {"loss": None}
    append(folder / "metrics.jsonl", json.dumps(row) + "\n")
    assert math.isnan(read_run(folder).evaluations.get(1, "test", "photo").loss)


def test_an_evaluation_cut_short_does_not_count_as_a_round():
    rows = [evaluation(r, "id_val", d, 0.5 + r / 10) for r in (1, 2) for d in ("a", "b")]
    rows.append(evaluation(3, "id_val", "a", 0.99))
    evaluations = Evaluations(rows)
    assert evaluations.rounds == [1, 2]
    assert final_round(evaluations) == best_in_domain(evaluations) == 2


def test_a_mean_counts_every_domain_once():
    rows = [
        EvaluationRow(round=1, split="test", domain="small", accuracy=1.0, examples=1),
        EvaluationRow(round=1, split="test", domain="large", accuracy=0.0, examples=999),
    ]
    assert Evaluations(rows).accuracy(1, "test") == 0.5


def test_ties_go_to_the_earliest_round():
    accuracies = {1: 0.5, 2: 0.7, 3: 0.6, 4: 0.7}
    evaluations = Evaluations(evaluation(r, "val", "a", value) for r, value in accuracies.items())
    assert best_held_out(evaluations) == 2
    assert best_in_domain(evaluations) is None


def test_domains_that_trade_places_are_a_tie():
    # 0.1 + 0.7 + 0.2 depends on the order in floating point; the mean must not.
    rows = [evaluation(1, "id_val", d, v) for d, v in zip("abc", (0.7, 0.1, 0.2))]
    rows += [evaluation(2, "id_val", d, v) for d, v in zip("abc", (0.1, 0.2, 0.7))]
    assert best_in_domain(Evaluations(rows)) == 1


def test_the_untrained_model_is_chosen_only_when_there_is_no_other():
    untrained = evaluation(0, "id_val", "a", 0.9)
    assert best_in_domain(Evaluations([untrained, evaluation(1, "id_val", "a", 0.3)])) == 1
    assert best_in_domain(Evaluations([untrained])) == 0


def test_a_round_whose_accuracy_is_unknown_is_not_chosen():
    rows = [evaluation(1, "val", "a", math.nan), evaluation(2, "val", "a", 0.2)]
    assert best_held_out(Evaluations(rows)) == 2


accuracy_lists = st.lists(st.integers(0, 5), min_size=1, max_size=8)


@given(accuracy_lists, st.data())
def test_the_test_split_never_selects(levels, data):
    test_levels = data.draw(st.lists(st.integers(0, 5), min_size=len(levels), max_size=len(levels)))
    rows = [evaluation(r, "id_val", "a", v / 5) for r, v in enumerate(levels, start=1)]
    rows += [evaluation(r, "val", "b", v / 5) for r, v in enumerate(reversed(levels), start=1)]
    test_rows = [evaluation(r, "test", "c", v / 5) for r, v in enumerate(test_levels, start=1)]
    with_test, without = Evaluations(rows + test_rows), Evaluations(rows)
    for rule in SELECTION_RULES.values():
        assert rule.choose(with_test) == rule.choose(without)


@given(accuracy_lists)
def test_the_best_round_is_what_a_plain_search_finds(levels):
    best = 1
    for round_, level in enumerate(levels, start=1):
        if level > levels[best - 1]:
            best = round_
    rows = [evaluation(r, "id_val", "a", v / 5) for r, v in enumerate(levels, start=1)]
    assert best_in_domain(Evaluations(rows)) == best


def test_pictures_come_in_the_order_of_their_captions(folder_maker):
    folder = folder_maker(pictures=3).write()
    captions = {"styles-2.png": "last first", "gone.png": "no file", "styles-0.png": "then this"}
    (folder / "figures" / "captions.json").write_text(json.dumps(captions))
    pictures = [(path.name, caption) for path, caption in read_run(folder).pictures()]
    assert pictures == [
        ("styles-2.png", "last first"),
        ("styles-0.png", "then this"),
        ("styles-1.png", ""),
    ]
