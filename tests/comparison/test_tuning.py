"""Tuning: what is tried, what is picked, and that held-out images are never opened for it."""

import io
import itertools
import json
import re
import shutil

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from feddg.api import compare
from feddg.cli import app
from feddg.comparison.plan import expand_plan, load_plan, table_cells, trials_of
from feddg.comparison.pool import Watcher
from feddg.comparison.results import ComparisonFile, read_comparison
from feddg.comparison.trials import prepare_trials
from feddg.comparison.tuning import TriedRow, TuningFile
from feddg.errors import ExperimentError, RunError
from feddg.progress import print_plan
from feddg.report.page import write_comparison
from feddg.report.tables import MARK, MEANING, to_markdown, tuning_section, tuning_table
from feddg.runs.prepare import load_images
from feddg.runs.reading import read_rows, read_run
from image_folders import make_folder, noise
from published_trees import hospital, write_table

RATES = (0.003, 1e-5)


def plan(root=None, **more):
    data = {"source": "digits", "image_size": 8, "id_val": 0.2}
    if root is not None:
        data = {"source": "folder", "root": str(root), "image_size": 16, "id_val": 0.3}
    return {
        "name": "tuned",
        "base": {
            "data": data,
            "clients": {"number": 2},
            "model": {"backbone": "cnn", "weights": None},
            "train": {"rounds": 3, "local_steps": 4, "batch_size": 64},
            "evaluate": {"every": 3},  # the last round is always evaluated
        },
        "methods": ["fedavg", {"name": "fedprox", "experiment": {"train": {"lr": 0.001}}}],
        "hold_out": ["sketch", "ink"],
        "tune": {"settings": {"train.lr": RATES, "method.mu": (0.0, 0.5)}, "rounds": 2},
        **more,
    }


def test_the_best_on_in_domain_validation_is_picked_and_run(tmp_path):
    out, brief = tmp_path / "out", plan()
    brief["base"]["train"] |= {"local_steps": 2, "batch_size": 32}
    done = compare(brief, out, cache=tmp_path / "cache", report=False)
    assert not done.failures
    tuning = json.loads((out / "tuning.json").read_text())
    tried = {
        (row["method"], row["held_out"], *row["values"].values()): row for row in tuning["tried"]
    }
    # FedAvg has no mu, and FedProx's entry fixes its learning rate.
    assert set(tried) == {
        (method, held_out, value)
        for method, values in (("fedavg", ("0.003", "1e-05")), ("fedprox", ("0", "0.5")))
        for held_out in ("sketch", "ink")
        for value in values
    }
    by_hand = {}
    for folder in (out / "tuning").glob("*-*"):
        run = read_run(folder)
        rows = read_rows(folder / "metrics.jsonl")
        assert {row["split"] for row in rows} == {"id_val", "id_test"}
        last = [*run.table.where(weights="last", round=2, split="id_val").values().values()]
        assert len(last) == 3  # the domains that are left
        value = (
            f"{run.settings['train']['lr']:g}"
            if run.method == "fedavg"
            else f"{run.settings['method']['settings']['mu']:g}"
        )
        (left_out,) = run.settings["data"]["leave_out"]
        assert left_out not in {row["domain"] for row in rows}
        by_hand[run.method, left_out, value] = sum(last) / 3
    assert set(by_hand) == set(tried)
    for key, accuracy in by_hand.items():
        assert tried[key]["trials"] == 1
        assert tried[key]["score"] == pytest.approx(accuracy)
    for method, held_out in itertools.product(("fedavg", "fedprox"), ("sketch", "ink")):
        own = {key: row for key, row in tried.items() if key[:2] == (method, held_out)}
        best = max(own, key=lambda key: own[key]["score"])
        assert [key for key, row in own.items() if row["picked"]] == [best]
        field = "lr" if method == "fedavg" else "mu"
        for cell in done.cells:
            if (cell.method, cell.held_out) == (method, held_out):
                ran = read_run(cell.folder).settings
                found = ran["train"]["lr"] if field == "lr" else ran["method"]["settings"]["mu"]
                assert f"{found:g}" == best[2]
                assert ran["train"]["rounds"] == 3
    page = write_comparison(out).read_text()
    assert "What was tuned" in page
    again = compare(brief, out, cache=tmp_path / "cache", report=False)
    assert not again.outcomes
    assert "tune:" in (out / "plan.yaml").read_text()


def row(method, held_out, accuracy, picked=False, **values):
    return TriedRow(
        method=method,
        held_out=held_out,
        values=values,
        score=accuracy,
        trials=1,
        picked=picked,
    )


def test_what_is_tried_of_one_methods_own_settings_is_shown(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    print_plan(console, prepare_trials(load_plan(plan()), tmp_path))
    shown = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["train.lr", "2", "0.003,", "1e-05"] in shown
    assert ["mu", "2", "0,", "0.5"] in shown


def test_a_choice_at_the_end_of_its_grid_is_warned_about():
    tried = (
        row("fedavg", "ink", 0.5, lr="1e-05"),
        row("fedavg", "ink", 0.7, lr="0.003", picked=True),
        row("fedavg", "ink", 0.6, lr="0.0001"),
        row("fedavg", "sketch", 0.5, lr="1e-05"),
        row("fedavg", "sketch", 0.6, lr="0.003"),
        row("fedavg", "sketch", 0.7, lr="0.0001", picked=True),
        row("fedprox", "chalk", 0.7, mu="0", picked=True),
        row("fedprox", "chalk", 0.6, mu="0.1"),
        row("fedprox", "ink", 0.7, optimizer="sgd", picked=True),
        row("fedprox", "ink", 0.6, optimizer="adam"),
        row("ridge", "ink", 0.6, lr="1e-05", picked=True),  # takes no step: it makes no difference
        row("ridge", "ink", 0.6, lr="0.003"),
    )
    file = TuningFile(rule="Final round", seeds=(0,), tried=tried)
    assert list(map(str, file.diagnostics())) == [
        "fedavg, ink held out: lr 0.003 is the highest that was tried. Try a higher one, too.",
    ]
    section = tuning_section(file)
    assert "is the highest that was tried" in section.blocks[1].text


def test_trials_with_a_privacy_budget_say_what_they_come_to_with_the_run_they_pick_for(tmp_path):
    brief = plan(hold_out=["sketch"], methods=["fedavg"], seeds=2)
    brief["base"] |= {"privacy": {"epsilon": 8.0}, "model": {"backbone": "cnn_gn"}}
    brief["base"]["train"] |= {"rounds": 1, "local_steps": 1}
    brief["tune"] = {"settings": {"train.lr": (0.01, 0.001, 0.1)}, "seeds": 2}
    done = compare(brief, tmp_path / "out", cache=tmp_path / "cache")
    tuning = TuningFile.read(tmp_path / "out" / "tuning.json")
    assert [(row.trials, row.epsilons) for row in tuning.tried] == [(2, {"privacy.epsilon": 8})] * 3
    said = "those of one method and hold-out, and one run with the values that they picked, "
    said += "together cost at most privacy.epsilon 56 "
    assert said in done.report.read_text("utf-8")
    private = TriedRow(method="x", values={}, trials=4, picked=True, epsilons={"a": 2, "b": 1})
    open_ = TriedRow(method="x", values={}, trials=4, picked=False)
    file = TuningFile(rule="final", seeds=(0,), tried=(private, open_))
    costs = [str(one) for one in file.diagnostics() if one.code == "trials-cost-privacy"]
    assert ["at most a 10 " in costs[0], "at most b 5 " in costs[1]] == [True, True]


def test_what_an_earlier_plan_tuned_in_a_folder_is_not_said_of_a_later_one(tmp_path):
    tried = (row("fedavg", "ink", 0.7, picked=True, lr="0.003"),)
    tuning = TuningFile(rule="Final round", seeds=(0,), tried=tried)
    (tmp_path / "tuning.json").write_text(tuning.to_text())
    (tmp_path / "comparison.json").write_text(ComparisonFile(name="x", cells=[]).to_text())
    assert read_comparison(tmp_path).tuning == tuning
    for tune, kept in ({"settings": {"train.lr": [0.003]}}, tuning), (None, None):
        (tmp_path / "plan.yaml").write_text(load_plan(plan(tune=tune)).to_yaml())
        assert read_comparison(tmp_path).tuning == kept


def test_a_choice_among_models_that_learned_nothing_is_warned_about(tmp_path):
    """Trials too short to learn anything: their values are noise, and so is the choice."""
    short = plan(
        methods=["fedavg"],
        hold_out=["sketch"],
        tune={"settings": {"train.lr": (1e-9, 0.003)}, "rounds": 2},
    )
    short["base"]["train"] |= {"local_steps": 25, "batch_size": 32}
    out, file = tmp_path / "out", tmp_path / "results.csv"
    compare(short, out, cache=tmp_path / "cache", report=False, results=file)
    tuning = TuningFile.read(out / "tuning.json")
    # Of a network whose weights stay as they were drawn, and of one that learns.
    assert {one.values["train.lr"]: one.constant for one in tuning.tried} == {
        "1e-09": 1,
        "0.003": 0,
    }
    assert not any(one.code == "tuned-on-nothing-learned" for one in tuning.diagnostics())
    text = to_markdown(tuning_table(tuning))
    assert [MARK.strip() in line for line in text.splitlines()[2:]] == [True, False]
    worse = short | {"tune": {"settings": {"train.lr": (1e-9, 1e-8)}, "rounds": 2}}
    worse["base"]["train"]["local_steps"] = 1
    compare(worse, tmp_path / "worse", cache=tmp_path / "cache", report=False, results=file)
    tuning = TuningFile.read(tmp_path / "worse" / "tuning.json")
    found = tuning.diagnostics()
    assert any("most frequent class in 1 of 1 trials" in one.text for one in found)
    section = tuning_section(tuning)
    assert any(MEANING in getattr(block, "text", "") for block in section.blocks)


def test_an_earlier_file_does_not_say_whether_a_model_was_constant():
    file = TuningFile(rule="Final round", seeds=(0,), tried=(row("fedavg", "ink", 0.5, lr="1"),))
    assert file.tried[0].constant is None
    assert MARK not in to_markdown(tuning_table(file))


def test_a_plan_of_one_domain_out_is_tuned_without_a_held_out_validation():
    """There is no validation domain; the trials validate in the domains that are left."""
    trials = trials_of(load_plan(plan(hold_out="lodo")))
    assert {trial.experiment.data.leave_out for trial in trials} == {
        (domain,) for domain in ("ink", "chalk", "photo", "sketch")
    }
    assert all(trial.experiment.data.id_val == 0.2 for trial in trials)


def test_a_budget_more_changes_no_trial_of_a_plan_that_says_their_rounds(tmp_path):
    root = make_folder(tmp_path / "images", domains=("ink", "chalk", "sketch"))

    def trials(*budgets):
        tune = {"settings": {"train.lr": [0.1, 0.01]}, "rounds": 1}
        methods = ["fedavg", "ridge"]
        asked = load_plan(plan(root, methods=methods, tune=tune, budgets=budgets))
        return [trial.experiment.id for trial in trials_of(asked)]

    assert trials(60) == trials(60, 300)


def test_trials_never_open_held_out_images(tmp_path):
    root = make_folder(tmp_path / "images", domains=("ink", "chalk", "sketch"))
    for file in (root / "sketch").rglob("*.png"):
        file.write_bytes(b"no image")
    trials = trials_of(load_plan(plan(root)))
    trial = next(cell.experiment for cell in trials if cell.held_out == "sketch")
    assert trial.data.leave_out == ("sketch",)
    assert not trial.hold_out.test
    images = load_images(trial, None, lambda *_: None)
    assert images.table.domain_names == ("chalk", "ink")
    assert not images.bad, "an image of the held-out domain was opened"
    assert not len(images.splits.test)
    assert not [path for path in images.table.paths if "sketch" in path]


@pytest.mark.parametrize(
    ("held", "split"),
    [
        ("north", {"west": "test"}),  # the split holds another one out
        ("west", {"west": "test"}),  # without its test domain the split holds nothing out
        ("north", {}),  # a split within domains, which both use
    ],
)
def test_trials_are_split_as_the_tables_run_is_whatever_split_the_data_set_has(
    tmp_path, held, split
):
    rows = [[*row[:4], split.get(row[2], row[4])] for row in hospital(tmp_path)]
    data = {"source": "table", "root": str(write_table(tmp_path / "t.csv", rows)), "id_val": 0.3}
    base = {"data": data, "model": {"backbone": "cnn", "weights": None}}
    tune = {"settings": {"train.lr": [0.1]}}
    asked = load_plan({"base": base, "methods": "fedavg", "hold_out": [held], "tune": tune})
    assert_split_alike(asked)


def assert_split_alike(asked):
    """A trial trains and validates on the very images that the table's run does."""
    splits = []
    for cell in (*expand_plan(asked), *trials_of(asked)):
        images = load_images(cell.experiment, None, lambda *_: None)
        rows = [getattr(images.splits, role) for role in ("train", "id_val", "id_test")]
        splits.append([[images.table.paths[row] for row in of_role] for of_role in rows])
    assert splits[0] == splits[1]
    return splits[0]


@pytest.mark.parametrize("grouped", [False, True])
def test_what_a_trial_chooses_by_is_no_test_of_the_tables_run(tmp_path, grouped):
    """Whatever is in the held-out domain, and wherever its name stands."""
    root = make_folder(tmp_path / "images", ("b", "c"), ("x", "y"), 23)
    (root / "a/y").mkdir(parents=True)
    for number in range(7):
        noise(1000 + number).save(root / f"a/y/{number}.png")
    (root / "b/x/99.png").write_bytes(b"no image")
    data = {"source": "folder", "root": str(root), "image_size": 8, "id_val": 0.3, "id_test": 0.2}
    data |= {"group_by": r"(?P<group>\d)\."} if grouped else {}
    base = {"data": data, "model": {"backbone": "cnn", "weights": None}, "clients": 2}
    tune = {"settings": {"train.lr": [0.1]}}
    asked = {"base": base, "methods": "fedavg", "hold_out": ["a"], "tune": tune}
    assert all(assert_split_alike(load_plan(asked)))
    data["leave_out"] = ["c"]
    assert_split_alike(load_plan(asked))


def test_an_own_split_without_validation_is_said_before_the_first_trial(tmp_path):
    rows = [[*row[:4], "train" if row[4] == "val" else row[4]] for row in hospital(tmp_path)]
    data = {"source": "table", "root": str(write_table(tmp_path / "t.csv", rows)), "id_val": 0.3}
    tune = {"settings": {"train.lr": [0.1]}}
    asked = {"base": {"data": data}, "methods": "fedavg", "hold_out": ["north"], "tune": tune}
    with pytest.raises(ExperimentError, match=r"no images for in-domain validation; .*own_split"):
        trials_of(load_plan(asked))


def test_without_tune_there_are_no_trials_and_the_cells_are_those_of_before():
    alone = plan()
    del alone["tune"]
    assert trials_of(load_plan(alone)) == []
    assert len(expand_plan(load_plan(alone))) == 4


def test_a_table_may_have_every_value_of_every_method():
    found = {
        (cell.method, cell.held_out, cell.experiment.train.lr, str(cell.experiment.method))
        for cell in table_cells(load_plan(plan()))
    }
    assert len(found) == 2 * 2 * 2
    assert {rate for method, _, rate, _ in found if method == "fedavg"} == set(RATES)


class Names(Watcher):
    """Remembers which runs ended."""

    def __init__(self):
        self.begun = []

    def ended(self, outcome):
        self.begun.append(outcome.cell.experiment)


def mean_accuracy(rows):
    found = [row["value"] for row in rows if row["metric"] == "accuracy"]
    return sum(found) / len(found)


def worst_calibration(rows):
    return max(row["value"] for row in rows if row["metric"] == "calibration_error")


@pytest.mark.parametrize(
    ("rule", "evaluate", "weights", "score", "best_of"),
    [
        ("Mean of the last rounds", {}, "swa", mean_accuracy, max),
        (
            "Final round",
            {"select_by": "calibration_error", "select_over": "worst_domain"},
            "last",
            worst_calibration,
            min,
        ),
    ],
)
def test_what_chooses_rounds_picks_values_too_and_no_trial_is_run_again(
    tmp_path, rule, evaluate, weights, score, best_of
):
    """On another machine, without their folders: with the same scores and the same choice."""
    fields = plan(methods=["fedavg"], hold_out=["sketch"])
    fields["tune"] = {"settings": {"train.lr": [1e-4, 0.01]}, "rounds": 2, "rule": rule}
    if evaluate:  # long enough that accuracy would pick the other
        fields["base"]["evaluate"] |= evaluate
        fields["base"]["data"]["image_size"], fields["base"]["train"]["local_steps"] = 16, 12
    fields["base"]["server"] = {"averaging": "swa"}
    out, table, first, second = tmp_path / "a", tmp_path / "table.csv", Names(), Names()
    where = {"cache": tmp_path / "cache", "report": False, "results": table}
    compare(fields, out, watcher=first, drop_weights=True, **where)
    assert len(first.begun) == 3
    assert not list(out.rglob("*.safetensors")), "trials' weights are dropped, too"

    last = {}
    for folder in (out / "tuning").glob("*-*"):
        last[f"{read_run(folder).settings['train']['lr']:g}"] = [
            row
            for row in read_rows(folder / "metrics.jsonl")
            if (row["split"], row["round"], row["weights"]) == ("id_val", 2, weights)
        ]
    by_hand = {value: score(rows) for value, rows in last.items()}
    tried = TuningFile.read(out / "tuning.json").tried
    assert {row.values["train.lr"]: row.score for row in tried} == pytest.approx(by_hand)
    (best,) = (row.values["train.lr"] for row in tried if row.picked)
    assert best == best_of(by_hand, key=by_hand.get)
    if evaluate:
        accuracies = {value: mean_accuracy(rows) for value, rows in last.items()}
        assert best != max(accuracies, key=accuracies.get), "accuracy would have picked the same"
        page = write_comparison(out).read_text()
        assert "in-domain validation: ECE (worst domain), final round" in page

    shutil.rmtree(out)
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(fields))
    words = ["compare", str(tmp_path / "plan.yaml"), "--results", str(table), "--dry-run"]
    shown = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "dry")])
    assert "2 complete, 0 to continue, 0 to start" in shown.stderr
    assert not (tmp_path / "dry").exists(), "a dry run writes nothing"
    written = (tmp_path / "table.tuning.json").read_text("utf-8")
    done = compare(fields, tmp_path / "b", watcher=second, **where)
    assert not second.begun
    assert not done.outcomes
    assert (tmp_path / "table.tuning.json").read_text("utf-8") == written
    assert (tmp_path / "b" / "tuning.json").read_text("utf-8") == written

    third, other = Names(), tmp_path / "other.csv"
    where = {"cache": tmp_path / "cache", "report": False, "results": [other, table]}
    compare(fields, tmp_path / "c", watcher=third, **where)
    assert not third.begun, "another table's trials count, too"
    assert (tmp_path / "other.tuning.json").read_text("utf-8") == written


def test_a_table_that_is_tuned_column_by_column_keeps_every_choice(tmp_path):
    table = tmp_path / "table.csv"
    fields = plan(methods=["fedavg"])
    fields["tune"] = {"settings": {"train.lr": [1e-4, 0.01]}, "rounds": 1}
    where = {"cache": tmp_path / "cache", "report": False, "results": table}

    def chosen(**changes):
        compare(fields | changes, tmp_path / "out", **where)
        tried = TuningFile.read(tmp_path / "table.tuning.json").tried
        return {(row.held_out, row.values["train.lr"]): row.score for row in tried}

    sketch = chosen(hold_out=["sketch"])
    both = chosen(hold_out=["ink"])
    assert {held_out for held_out, _ in both} == {"sketch", "ink"}
    assert both.items() >= sketch.items()
    longer = chosen(hold_out=["ink"], tune=fields["tune"] | {"rounds": 2})
    assert {held_out for held_out, _ in longer} == {"ink"}, "choices of other trials are gone"


def test_trials_and_results_of_images_that_changed_are_said_before_any_trial_is_run(tmp_path):
    """Whatever will be picked, and whether or not the trials' own file is there."""
    root = make_folder(tmp_path / "images", domains=("ink", "chalk", "sketch"))
    table, trials, watcher = tmp_path / "table.csv", tmp_path / "table.trials.csv", Names()
    fields = plan(root, methods=["fedavg"], hold_out=["sketch"])
    fields["tune"] = {"settings": {"train.lr": [1e-4, 0.01]}, "rounds": 1}
    where = {"cache": tmp_path / "cache", "report": False, "results": table}
    compare(fields, tmp_path / "a", **where)
    changed = next((root / "ink").rglob("*.png"))
    shutil.copy(next((root / "chalk").rglob("*.png")), changed)
    before = trials.read_text("utf-8")
    for there in (True, False):
        if not there:
            trials.unlink()
        with pytest.raises(RunError, match=r"table\.csv: 1 of its results were made with files"):
            compare(fields, tmp_path / "b", watcher=watcher, **where)
    assert not watcher.begun
    trials.write_text(before, "utf-8")
    compare(fields, tmp_path / "b", again=True, watcher=watcher, **where)
    assert len(watcher.begun) == 3
    # the folders of the first time are beside, too
    compare(fields, tmp_path / "a", again=True, **where)


@pytest.mark.parametrize("name", ["table.trials.csv", "table.tuning.json"])
def test_a_damaged_file_of_trials_is_said_before_anything_runs(tmp_path, name):
    (tmp_path / name).write_text("{}", "utf-8")
    watcher = Names()
    with pytest.raises(RunError, match=re.escape(name)):
        compare(plan(), tmp_path / "out", results=tmp_path / "table.csv", watcher=watcher)
    assert not watcher.begun


@pytest.mark.parametrize(
    ("tune", "fault"),
    [
        ({"settings": {}}, "tune.settings: Dictionary should have at least 1 item"),
        ({"settings": {"train.lr": []}}, "train.lr: Tuple should have at least 1 item"),
        ({"settings": {"train.lr": [0.1]}, "rule": "best_held_out"}, "held-out images"),
        ({"settings": {"train.lr": [0.1]}, "rounds": 0}, "tune.rounds"),
        ({"settings": {"method.nothing": [1]}}, "method.nothing is tried for no method"),
        ({"settings": {"train.lr": [-1.0]}}, "train.lr"),
        ({"settings": {"train.speed": [1]}}, "speed"),
    ],
)
def test_what_cannot_be_tried_is_said_before_anything_runs(tmp_path, tune, fault):
    with pytest.raises(ExperimentError, match=re.escape(fault)):
        compare(plan(tune=tune), tmp_path / "out", cache=tmp_path / "cache")
    assert not list(tmp_path.glob("out/*-*"))
