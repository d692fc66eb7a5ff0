"""Results kept as CSV: what is in the file, that it comes back, and that nothing is run twice."""

import csv
import itertools
import json
import re
import shutil
from dataclasses import replace

import pytest
import yaml
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

import feddg
from feddg.api import compare
from feddg.cli import app
from feddg.comparison.compare import prepare_comparison
from feddg.comparison.plan import Plan, expand_plan, load_plan
from feddg.comparison.results import (
    Results,
    _remedy,
    about_budgets,
    about_method,
    read_comparison,
    results_of,
)
from feddg.comparison.results_file import (
    COLUMNS,
    ResultRow,
    add_rows,
    read_results,
    results_files,
    to_text,
)
from feddg.data.fingerprint import ImagesFile
from feddg.diagnostics import Diagnostic
from feddg.errors import ExperimentError, RunError
from feddg.models.backbones import SmallCNN
from feddg.records import NumberRow
from feddg.report.charts import accuracy_against, learning_curves
from feddg.report.comparison_page import comparison_page
from feddg.report.tables import about_results, budget_table, conclusion
from feddg.runs.diagnostics import MAJORITY, Cause, about_result
from feddg.runs.reading import read_run
from feddg.runs.summary import mean_step
from feddg.runs.table import FINAL, SWA_MEAN
from feddg.settings import merge
from feddg.text import duration, percent
from run_folders import ConstantMaker, FolderMaker, RisingMaker, numbers, table_of

PLAN = {
    "name": "mine",
    "base": {
        "data": {"source": "digits", "image_size": 8},
        "clients": {"number": 3},
        "train": {"rounds": 4, "local_steps": 1, "batch_size": 64},
        "evaluate": {"every": 1, "averages": "every"},
    },
    "methods": ["fedavg", "fedprox"],
    "hold_out": ["sketch"],
}
PRINTED = st.characters(exclude_categories=["C", "Z"], include_characters=" ")
TEXT = st.text(PRINTED, min_size=1, max_size=12)
SHARE = st.integers(0, 99999).map(lambda number: number / 100_000)
NUMBERS = st.builds(
    NumberRow,
    rule=st.sampled_from(["", "final", "swa"]),
    round=st.none() | st.integers(0, 99),
    weights=st.sampled_from(["", "last", "swa"]),
    split=st.sampled_from(["", "test", "val"]),
    domain=st.just("") | TEXT,
    over=st.sampled_from(["", "domain_mean"]),
    metric=st.sampled_from(["fluctuation", "macro_f1"]),
    value=SHARE,
    images=st.none() | st.integers(0, 10**9),
    bytes=st.none() | st.floats(0, 1e12),
    seconds=st.none() | st.floats(0, 1e7),
)
ACCURACIES = [
    NumberRow(rule=rule, split=split, over="domain_mean", metric="accuracy", value=0.5)
    for rule, split in itertools.product(("final", "swa"), ("test", "val"))
]
RESULTS = st.builds(
    ResultRow,
    experiment=st.from_regex("^[0-9a-f]{8}$", fullmatch=True),
    method=TEXT,
    held_out=TEXT,
    conditions=st.dictionaries(TEXT, TEXT, max_size=2),
    seed=st.integers(0, 2**31),
    budget=st.none() | st.integers(1, 10**9),
    machine=TEXT,
    hashes=st.dictionaries(TEXT, TEXT, max_size=2),
    numbers=st.lists(NUMBERS, max_size=4, unique_by=lambda one: (one.of, one.weights)).map(
        lambda numbers: (*numbers, *ACCURACIES, NumberRow(metric="bytes_per_round", value=0.5))
    ),
)


def results_file(tmp_path, name="kept.csv", text=None):
    path = tmp_path / name
    if text is not None:
        path.write_text(text, "utf-8")
    return path


@settings(max_examples=40)
@given(st.lists(RESULTS, max_size=4, unique_by=lambda row: row.key))
def test_what_is_written_comes_back(tmp_path_factory, results):
    path = results_file(tmp_path_factory.mktemp("kept"), text=to_text(results))
    assert read_results(path) == results


def accuracy_of(row, rule=FINAL):
    """A run's accuracy on its test domains in a results file."""
    return row.table.where(rule=rule.name, over="domain_mean").value("test")


def number_of(row, metric, rule=""):
    """A number of a run in a results file that is not one of a split."""
    (found,) = row.table.where(rule=rule, metric=metric, split="")
    return found.value


def test_fluctuation_is_the_mean_change_of_the_second_half():
    by_round = {1: (0.9, 0.1), 2: (0.1, 0.1), 3: (0.2, 0.4), 4: (0.6, 0.4), 5: (0.5, 0.1)}
    rows = [
        numbers(round, "test", domain, value)
        for round, values in by_round.items()
        for domain, value in zip("ab", values)
    ]
    # Of five rounds 3, 4 and 5 are the second half; their means are 0.3, 0.5 and 0.3.
    assert mean_step(table_of(*rows), 5) == pytest.approx((0.2 + 0.2) / 2)
    assert mean_step(table_of(*rows[:6]), 5) is None
    late = ((8, 0.9), (9, 0.8), (10, 0.7))
    apart = [*rows[4:], *(numbers(round, "test", "a", value) for round, value in late)]
    only_a = table_of(*apart).where(domain="a")
    assert mean_step(only_a, 5) == pytest.approx((0.4 + 0.1 + 0.1 + 0.1) / 4)


def test_a_comparison_keeps_its_results_and_never_runs_them_again(tmp_path, caplog):
    path, out, cache = results_file(tmp_path), tmp_path / "out", tmp_path / "cache"
    done = compare(PLAN, out, cache=cache, report=False, results=path)
    assert len(done.outcomes) == 2
    found = {result.method: result for result in read_results(path)}
    assert set(found) == {"fedavg", "fedprox"}
    for cell in done.cells:
        run = read_run(cell.folder)
        result = found[cell.method]
        assert result.experiment == cell.experiment.portable_id
        assert (result.held_out, result.seed, result.conditions) == ("sketch", 0, {})
        of_test = run.frame().query("split == 'test' and metric == 'accuracy' and round == 4")
        for rule, weights in ((FINAL, "last"), (SWA_MEAN, "swa")):
            (last,) = of_test.query(f"weights == '{weights}'")["value"]
            assert accuracy_of(result, rule) == pytest.approx(last, abs=1e-6)
        images = [row.images for row in run.rounds]
        assert number_of(result, "images_per_round") == pytest.approx(sum(images) / 4)
    # runs that were complete before are added to a file that is named later
    later = compare(
        PLAN, out, cache=cache, report=False, results=results_file(tmp_path, "later.csv")
    )
    assert not later.outcomes
    assert read_results(results_file(tmp_path, "later.csv")) == read_results(path)
    shutil.rmtree(out)
    text = path.read_text()
    again = compare(PLAN, out, cache=cache, results=path)
    assert "of feddg" not in " ".join(caplog.messages), "all of this version"
    caplog.clear()
    earlier = [row.model_copy(update={"version": "0.0.7"}) for row in read_results(path)]
    other = results_file(tmp_path, "other.csv", to_text(earlier))
    taken = prepare_comparison(PLAN, out, cache=cache, results=[tmp_path / "x.csv", other])
    assert not taken.missing
    (said,) = (line for line in caplog.messages if "of feddg" in line)
    assert "2 of its results are of feddg 0.0.7" in said
    assert f"this is {feddg.__version__}" in said
    assert not again.outcomes
    assert path.read_text() == text
    left_out = read_comparison(out)
    assert ([row.run for row in left_out.rows], left_out.open) == ([None, None], [])
    assert left_out.rows[0].numbers == found["fedavg"].numbers
    page = again.report.read_text()
    assert "2 runs known from a results file alone" in page
    assert f"{100 * accuracy_of(found['fedavg']):.1f}" in page
    assert len(again.frame().query("metric == 'accuracy' and rule == 'final'")) == 6
    more = PLAN | {"seeds": 2}
    work = prepare_comparison(more, out, cache=cache, results=[path])
    assert [cell.experiment.seed for cell in work.missing] == [1, 1]
    # how long the rest takes is estimated without the folders that are gone
    (tmp_path / "more.yaml").write_text(yaml.safe_dump(more))
    command = ["compare", str(tmp_path / "more.yaml"), "--results", str(path), "--dry-run"]
    shown = CliRunner().invoke(app, [*command, "--out", str(out)])
    assert shown.exit_code == 0, shown.output
    assert "4 runs: 2 complete, 0 to continue, 2 to start" in " ".join(shown.output.split())


def painted(folder, shade=0):
    """Two domains of two classes, six plain pictures each."""
    for number, (domain, label) in enumerate(itertools.product(("ink", "oil"), ("cat", "dog"))):
        for index in range(6):
            path = folder / domain / label / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (16, 16), (40 * number + shade, 10 * index, 0)).save(path)
    return folder


def plan_on(root, **base):
    return {
        "name": "mine",
        "base": {
            "data": {"source": "folder", "root": str(root), "image_size": 16},
            "clients": {"number": 2},
            "train": {"rounds": 1, "batch_size": 4},
            "model": {"backbone": "cnn", "weights": None},
            **base,
        },
        "methods": ["fedavg"],
        "hold_out": ["oil"],
    }


@pytest.mark.parametrize("one_file", [True, False])
def test_a_run_that_stands_in_another_table_is_copied_and_not_run_again(tmp_path, one_file):
    first, cache = results_file(tmp_path), tmp_path / "cache"
    plan = plan_on(painted(tmp_path / "images")) | {"methods": ["fedavg", "fedprox"]}
    relabelled = plan | {
        "name": "other",
        "methods": [{"name": "fedavg", "label": "plain averaging"}, "fedavg"],
    }
    compare(plan, tmp_path / "first", cache=cache, report=False, results=first)
    ran = read_results(first)
    path = first if one_file else results_file(tmp_path, "other.csv")
    files = [path] if one_file else [path, first]
    before = first.read_text()

    done = compare(relabelled, tmp_path / "other", cache=cache, results=files)

    assert not done.outcomes
    table = Results.read(path, load_plan(relabelled))
    assert [result.method for result in table.rows] == ["plain averaging", "fedavg"]
    for result in table.rows:
        assert result.model_copy(update={"method": "fedavg"}) == ran[0]
    rows = read_comparison(tmp_path / "other").rows
    assert len({row.folder for row in rows if row.run is None}) == 1  # one run, in two cells
    if not one_file:
        assert first.read_text() == before
        assert len(read_results(path)) == 2  # fedprox is no method of this plan

    again = path.read_text()
    compare(relabelled, tmp_path / "other", cache=cache, report=False, results=files)
    assert path.read_text() == again


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--results", "own.csv", "--results", "gone.csv"], "There is no results file gone"),
        (["--results", "own.csv", "--results", "damaged.csv"], "damaged.csv, line 2"),
        (["--results", "damaged.csv"], "damaged.csv, line 2"),
    ],
)
def test_a_fault_in_a_file_of_results_is_said_before_anything_is_tried(
    tmp_path, monkeypatch, arguments, fault
):
    monkeypatch.chdir(tmp_path)
    results_file(tmp_path, "there.csv", HEADS + GOOD)
    results_file(tmp_path, "damaged.csv", HEADS + GOOD.replace("0.5", "half"))
    tuned = PLAN | {"tune": {"settings": {"train.lr": [0.01, 0.1]}, "rounds": 1}}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(tuned))
    shown = CliRunner().invoke(app, ["compare", "plan.yaml", *arguments])
    assert shown.exit_code == 1
    assert fault in str(shown.exception)
    assert not (tmp_path / "comparisons").exists()


def test_a_result_says_what_it_was_made_with_and_one_that_does_not_is_warned_about(
    tmp_path, caplog
):
    path, plan, cache = (
        results_file(tmp_path),
        plan_on(painted(tmp_path / "images")),
        tmp_path / "c",
    )
    # Paths may be text, as a notebook writes them.
    done = compare(plan, str(tmp_path / "out"), cache=str(cache), report=False, results=str(path))
    images = ImagesFile.read(done.cells[0].folder / "images.json")
    (result,) = read_results(path)
    assert result.hashes == {"images": images.fingerprint()}
    for here in (done.results.rows[0], results_of([done.cells[0].folder]).rows[0]):
        assert here.machine == result.machine != ""
        assert here.version == result.version
        assert here.hashes == result.hashes
    assert images.model_copy(update={"root": "elsewhere"}).fingerprint() == images.fingerprint()
    assert images.model_copy(update={"labels": "other"}).fingerprint() != images.fingerprint()
    path.write_text(to_text([result.model_copy(update={"hashes": {}})]))
    assert not prepare_comparison(plan, tmp_path / "other", cache=cache, results=[path]).missing
    assert "does not record for 1 of its results which images" in caplog.text


def test_results_of_images_that_changed_are_not_taken_for_new_ones(tmp_path, caplog):
    """One's own are refused until they are to be replaced, another table's passed over."""
    path, root, cache = results_file(tmp_path), painted(tmp_path / "images"), tmp_path / "cache"
    plan, own, out = plan_on(root), results_file(tmp_path, "own.csv"), tmp_path / "out"
    compare(plan, tmp_path / "first", cache=cache, report=False, results=path)
    before, (old,) = path.read_text(), read_results(path)
    shutil.rmtree(tmp_path / "first")

    painted(root, shade=90)
    with pytest.raises(
        RunError, match=r"1 of its results were made with files that have changed.*images of fedavg"
    ):
        prepare_comparison(plan, out, cache=cache, results=[path])
    done = compare(plan, tmp_path / "other", cache=cache, report=False, results=[own, path])
    assert [outcome.status for outcome in done.outcomes] == ["completed"]
    assert "kept.csv: 1 of its results were made with files that have changed" in caplog.text
    assert "they are not used" in caplog.text
    assert path.read_text() == before
    (new,) = read_results(own)
    assert (old.experiment, old.place) == (new.experiment, new.place)
    assert old.hashes != new.hashes

    done = compare(plan, out, cache=cache, report=False, results=path, again=True)
    assert [outcome.status for outcome in done.outcomes] == ["completed"]
    (after,) = read_results(path)
    assert (after.experiment, after.hashes) == (old.experiment, new.hashes)
    shutil.rmtree(out)
    assert not prepare_comparison(plan, out, cache=cache, results=[path]).missing
    shutil.rmtree(root)  # what is in the file needs no images
    assert not prepare_comparison(plan, out, cache=cache, results=[path]).missing


def some_weights(path, shift=0.0):
    """A file of weights for the small CNN."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {name: value.clone() for name, value in NETWORK.state_dict().items()}
    state["blocks.0.2.bias"] += shift
    save_file(state, path)
    return str(path)


NETWORK = SmallCNN()


def test_a_result_is_found_wherever_the_same_images_and_weights_lie(tmp_path, monkeypatch):
    """As on another machine: both moved, the plan names them otherwise, the cache is empty."""
    here, there = tmp_path / "here", tmp_path / "there"
    path, settings = results_file(tmp_path), {"backbone": "cnn", "normalization": "frozen"}

    def plan(place):
        weights = [str(place / "a.safetensors"), str(place / "b.safetensors")]
        axes = {"settings": {"model.weights": weights}}
        return plan_on(place / "images", model=settings) | axes

    painted(here / "images")
    for name, shift in (("a", 0.0), ("b", 0.5)):
        some_weights(here / f"{name}.safetensors", shift)
    compare(plan(here), tmp_path / "out", cache=tmp_path / "cache", report=False, results=path)
    before, ran = path.read_text(), read_results(path)
    assert len({row.experiment for row in ran}) == 1
    assert len({row.hashes["model.weights"] for row in ran}) == 2

    here.rename(there)
    moved = {"cache": tmp_path / "other", "results": [results_file(tmp_path, "new.csv"), path]}
    own = moved["results"][0]
    done = compare(plan(there), tmp_path / "elsewhere", report=False, **moved)
    assert not done.outcomes
    for cell, old, new in zip(done.cells, ran, read_results(own)):
        assert new.conditions == dict(cell.conditions) != old.conditions
        assert new.model_copy(update={"conditions": old.conditions}) == old  # a is a, b is b
    ids = [cell.portable_id for cell in expand_plan(load_plan(plan(there)))]
    assert [row.experiment for row in Results.read(own, load_plan(plan(there))).rows] == ids
    # one more seed is all that is missing; what was there stays as it was
    more = {"seeds": [0, 1]} | plan(there)
    work = prepare_comparison(
        more, tmp_path / "elsewhere", cache=tmp_path / "other", results=moved["results"]
    )
    assert [cell.experiment.seed for cell in work.missing] == [1, 1]
    assert path.read_text() == before

    # exchanged, they are others: neither is taken for the other
    there.joinpath("a.safetensors").rename(there / "c")
    there.joinpath("b.safetensors").rename(there / "a.safetensors")
    there.joinpath("c").rename(there / "b.safetensors")
    with pytest.raises(
        RunError, match=r"2 of its results were made with files that have changed.*model\.weights"
    ):
        prepare_comparison(plan(there), tmp_path / "third", cache=tmp_path / "other", results=[own])
    done = prepare_comparison(
        plan(there),
        tmp_path / "third",
        cache=tmp_path / "other",
        results=[results_file(tmp_path, "third.csv"), path],
    )
    assert not done.missing
    assert [done.rows[cell.experiment.id][None].hashes["model.weights"] for cell in done.cells] == [
        row.hashes["model.weights"] for row in reversed(ran)
    ]


def test_processes_that_keep_results_in_one_file_do_not_lose_each_others(tmp_path):
    """As two terminals that carry out a column of the same plan each."""
    path, out, cache = results_file(tmp_path), tmp_path / "out", tmp_path / "cache"
    plan = plan_on(painted(tmp_path / "images")) | {"seeds": [0, 1]}
    plans = [plan | {"hold_out": [column]} for column in ("oil", "ink")]
    works = [prepare_comparison(one, out, cache=cache, results=[path]) for one in plans]
    for one in plans:
        compare(one, out, cache=cache, report=False)
    for turn in (0, 1):
        for work in works:
            work.keep([work.cells[turn].folder])
    found = read_results(path)
    assert [(row.held_out, row.seed) for row in found] == [
        ("oil", 0),
        ("ink", 0),
        ("oil", 1),
        ("ink", 1),
    ]
    # what one of them leaves out as outdated is gone, and nothing else
    for other, outdated in (("0" * 8, []), ("1" * 8, found[:1])):
        add_rows(path, [found[3].model_copy(update={"experiment": other})], outdated)
    after = read_results(path)
    assert after[:3] == found[1:]
    assert [row.experiment for row in after[3:]] == ["0" * 8, "1" * 8]
    assert [file.name for file in tmp_path.glob(".*")] == [".kept.csv.lock"]


def test_a_file_that_another_process_holds_is_waited_for_and_then_named(tmp_path, monkeypatch):
    path = results_file(tmp_path)
    row = ResultRow(experiment="0" * 8, method="fedavg", held_out="ink", seed=0)
    monkeypatch.setattr("feddg.comparison.results_file.WAIT", 0.1)
    with (
        FileLock(tmp_path / ".kept.csv.lock"),
        pytest.raises(RunError, match=r"kept\.csv is being written by another process"),
    ):
        add_rows(path, [row])
    assert not path.exists()
    add_rows(path, [row])
    assert len(read_results(path)) == 1


HEADS = ",".join(COLUMNS) + "\n"
GOOD = "0123abcd,fedavg,sketch,,0,,final,4,last,test,,domain_mean,accuracy,0.5,,,,cpu,1,\n"


def test_a_damaged_file_is_named_with_its_line(subtests, tmp_path_factory):
    for text, fault in [
        ("a,b\n", "is no results file"),
        ("", "is no results file"),
        (HEADS.replace("metric", "test_final") + GOOD, "is no results file"),
        (HEADS + GOOD + "0123abcd,fedavg\n", "line 3: 2 cells, not 20"),
        (HEADS + GOOD + GOOD, "line 3: fedavg, sketch, seed 0 of experiment 0123abcd is in line 2"),
        (HEADS + GOOD.replace("0123abcd", "../../etc"), "line 2 is damaged: experiment"),
        (HEADS + GOOD.replace(",,0,,", ",,zero,,"), "line 2 is damaged: seed"),
        (HEADS + GOOD.replace("0.5", "half"), "line 2 is damaged: value"),
        (HEADS + GOOD.replace("accuracy", ""), "line 2 is damaged: metric"),
        (HEADS + GOOD.replace("sketch,,", "sketch,[1],"), "line 2 is damaged: conditions"),
        (HEADS + GOOD.replace("sketch,,", "sketch,{,"), "line 2 is damaged"),
        (
            HEADS + GOOD.replace("fedavg", '"fed\navg"'),
            "line 2 is damaged: method: must be one line",
        ),
        (
            HEADS + GOOD.replace("sketch", "ske\x1btch"),
            "line 2 is damaged: held_out: must be one line",
        ),
        (HEADS + GOOD.replace("0.5", "nan"), "line 2 is damaged: value"),
        (HEADS + GOOD.replace("0.5", "inf"), "line 2 is damaged: value"),
    ]:
        with subtests.test(text=text, fault=fault):
            tmp_path = tmp_path_factory.mktemp("case")
            with pytest.raises(RunError, match=re.escape(fault)) as caught:
                read_results(results_file(tmp_path, text=text))
            assert "kept.csv" in str(caught.value)
            assert "\n" not in str(caught.value)


def test_a_run_that_lost_lines_is_named_and_not_taken_for_whole(tmp_path):
    plan, path = PLAN | {"methods": ["fedavg", "fedprox"]}, results_file(tmp_path)
    compare(plan, tmp_path / "out", cache=tmp_path / "cache", report=False, results=path)
    whole = path.read_text().splitlines(keepends=True)
    assert all("bytes_per_round" in whole[at] for at in (len(whole) // 2, -1))
    of_accuracy = [whole[0], *(line for line in whole if ",accuracy," in line)]
    at_test = ",test,,domain_mean,accuracy,"
    for kept, method in (
        (whole[:-1], "fedprox"),
        (whole[: len(whole) // 2 + 4], "fedprox"),
        (of_accuracy, "fedavg"),
        ([whole[0], *whole[2:]], "fedavg"),
        ([line for line in whole if at_test not in line or ",fedavg," in line], "fedprox"),
        ([line for line in whole if at_test not in line or ",final," in line], "fedavg"),
    ):
        path.write_text("".join(kept))
        with pytest.raises(RunError, match=rf"lines of {method}, sketch, seed 0 are missing; put"):
            compare(plan, tmp_path / "again", results=path)
        assert path.read_text() == "".join(kept)
    path.write_text("".join(whole[: len(whole) // 2 + 1]))
    assert [row.method for row in read_results(path)] == ["fedavg"]


def test_two_files_put_one_behind_the_other_are_one(tmp_path):
    other = GOOD.replace("0123abcd,fedavg", "0123abce,mixstyle")
    rows = read_results(results_file(tmp_path, text=HEADS + GOOD + HEADS + other))
    assert [row.method for row in rows] == ["fedavg", "mixstyle"]
    with pytest.raises(RunError, match=r"line 4: fedavg, sketch, seed 0 of experiment .* line 2"):
        read_results(results_file(tmp_path, text=2 * (HEADS + GOOD)))


def test_a_file_with_the_line_ends_of_another_system_is_read(tmp_path):
    path = results_file(tmp_path, text=HEADS + GOOD)
    rows = read_results(path)
    for ends in ("\r", "\r\n"):
        path.write_bytes((HEADS + GOOD).replace("\n", ends).encode())
        assert read_results(path) == rows
    path.write_text(HEADS + GOOD.replace("sketch", "s" * 200_000))
    with pytest.raises(RunError, match=r"kept\.csv is damaged: field larger"):
        read_results(path)


def test_a_method_that_is_a_formula_is_no_formula_in_the_file(tmp_path):
    result = ResultRow(experiment="0" * 8, method="=1+1", held_out="@x", seed=0)
    text = to_text([result])
    assert [cell[:1] for cell in next(csv.reader(text.splitlines()[1:]))][1:3] == ["'", "'"]
    assert read_results(results_file(tmp_path, text=text)) == [result]


def reported(*arguments):
    shown = CliRunner().invoke(app, ["report", *map(str, arguments)])
    return shown.exit_code, shown.output, shown.exception


def test_a_file_of_kept_results_is_shown_and_written_as_a_page(tmp_path):
    path = results_file(
        tmp_path, text=HEADS + GOOD + GOOD.replace("0123abcd,fedavg", "0123abce,mixstyle")
    )
    code, shown, _ = reported(path)
    assert code == 0
    assert "| MixStyle | sketch | 0 | 50.0 |" in shown
    for caveat in ("2 runs known from a results file alone", "One seed only"):
        assert caveat in shown.partition("## ")[0]
    page = tmp_path / "page.md"
    assert reported(path, "--out", page)[0] == 0
    marked = f"<!-- tables -->\n\n{shown.strip()}\n\n<!-- end of tables -->\n"
    assert page.read_text() == f"# FedAvg and MixStyle, tested on sketch\n\n{marked}"
    page.write_text(page.read_text().replace("# FedAvg and MixStyle", "# Mine") + "By hand.\n")
    assert reported(path, "--out", tmp_path / "page.html")[0] == 0
    assert "<title>FedAvg and MixStyle" in (tmp_path / "page.html").read_text()
    own = page.read_text()
    page.write_text(own.replace("50.0", "99.9"))
    assert reported(path, "--out", page)[0] == 0
    assert page.read_text() == own


def test_a_model_that_learned_nothing_is_marked_wherever_its_number_stands(tmp_path):
    """By hand: ten classes as common as each other, so that a constant model reaches a tenth."""
    still = {"name": "fedavg", "label": "Still", "experiment": {"train": {"lr": 1e-9, "rounds": 1}}}
    plan = PLAN | {"methods": ["fedprox", still], "hold_out": ["ink"]}
    train = {"rounds": 2, "local_epochs": 2, "batch_size": 32, "lr": 0.003}
    data = {"source": "digits", "image_size": 16}
    plan["base"] = PLAN["base"] | {"data": data, "train": train}
    file = tmp_path / "kept.csv"
    compare(plan, tmp_path / "out", cache=tmp_path / "cache", results=file, report=False)
    learned, not_learned = read_results(file)
    assert accuracy_of(learned) > 0.2
    assert accuracy_of(not_learned) < 0.2
    flags = [number_of(row, "constant", "final") for row in (learned, not_learned)]
    assert (*flags, number_of(not_learned, "constant", "swa")) == (0, 1, 1)
    shown = reported(file)[1]
    names = [line.split("|")[1] for line in shown.splitlines() if line.startswith("|")]
    assert [name for name in names if "Still" in name and "majority class" in name]
    assert not [name for name in names if "FedProx" in name and "majority class" in name]
    planned = Results.read(file, load_plan(plan))
    for rule in (FINAL, SWA_MEAN):
        flags = planned.values(rule, "constant", "", "")
        assert {method for method, own in flags.items() if any(own.values())} == {"Still"}


def test_a_page_of_kept_results_overwrites_nothing(tmp_path):
    path = results_file(tmp_path, text=HEADS + GOOD)
    other = tmp_path / "notes.md"
    other.write_text("mine")
    for arguments, fault in (
        ((path, "--out", other), "notes.md already exists and is not overwritten"),
        ((path, "--out", path), "kept.csv already exists and is not overwritten"),
        ((other,), "is no results file"),
        ((path, "--out", tmp_path), "Cannot read"),
    ):
        code, _, error = reported(*arguments)
        assert code != 0
        assert fault in str(error)
    assert (other.read_text(), path.read_text()) == ("mine", HEADS + GOOD)
    assert reported(path, "--tables", tmp_path / "t")[0] == 0
    assert (tmp_path / "t/tables.md").is_file()


def test_two_results_for_a_cell_are_refused_where_tables_would_mix_them(tmp_path):
    text = HEADS + GOOD + GOOD.replace("0123abcd", "deadbeef")
    path = results_file(tmp_path, text=text)
    with pytest.raises(RunError, match=r"kept\.csv: fedavg, sketch, seed 0 appears twice"):
        Results.read(path)


def test_a_run_of_two_plans_is_not_two_domains(tmp_path):
    """The same run is a column of a plan on one data set, and of one over several."""
    again = GOOD.replace("sketch,,", 'sketch,"{""data"": ""digits""}",')
    path = results_file(tmp_path, text=HEADS + GOOD + again)
    with pytest.raises(RunError, match=r"0123abcd is there as sketch and as digits, sketch"):
        Results.read(path)


def test_a_file_that_cannot_be_written_is_said_before_anything_is_run(tmp_path):
    (tmp_path / "a_file").write_text("not a folder")
    path = tmp_path / "a_file" / "kept.csv"
    with pytest.raises(RunError, match=r"Cannot write .*kept\.csv"):
        compare(PLAN, tmp_path / "out", cache=tmp_path / "cache", results=path)
    assert not (tmp_path / "out").exists()


def test_a_results_file_is_not_the_one_that_the_comparison_writes_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ExperimentError, match=r"--results results\.csv: .* name another file"):
        compare(PLAN, tmp_path, results="results.csv")
    assert not list(tmp_path.iterdir())


def test_rows_are_added_to_the_file_that_a_link_names(tmp_path):
    target, link = results_file(tmp_path), tmp_path / "link.csv"
    link.symlink_to(target)
    row = ResultRow(experiment="0" * 8, method="fedavg", held_out="sketch", seed=0)
    (file,) = results_files(link)
    add_rows(file, [row])
    assert link.is_symlink()
    assert read_results(target) == [row]


# Budgets: one row for each, of the round that reaches it.


BUDGETS = [500, "1k", "3k", "5k"]
SEEN = 675
"""Three clients of 225 images each, which three steps of 75 see once; so does ridge."""


def budget_plan(**fields):
    base = {
        "data": {"source": "digits", "image_size": 8, "id_val": 0.5, "id_test": 0},
        "clients": {"number": 3},
        "train": {"local_steps": 3, "batch_size": 75},
    }
    ridge = {"name": "ridge", "experiment": {"train": {"local_steps": None}}}
    own = {"base": base, "methods": ["fedavg", ridge], "hold_out": ["sketch"], "budgets": BUDGETS}
    return own | fields


@pytest.fixture(scope="module")
def at_budgets(tmp_path_factory, cache):
    """A comparison with budgets, and its results file."""
    folder = tmp_path_factory.mktemp("budgets")
    done = compare(budget_plan(), folder / "out", cache=cache, results=folder / "kept.csv")
    return done, folder / "kept.csv"


def test_a_results_file_has_a_row_for_every_budget(at_budgets):
    done, path = at_budgets
    rows = {(row.method, row.budget): accuracy_of(row) for row in read_results(path)}
    fedavg, ridge = (read_run(cell.folder) for cell in done.cells)
    assert [row.images for row in fedavg.rounds] == [SEEN] * 8
    assert [row.images for row in ridge.rounds] == [SEEN]
    reached = {500: 1, 1000: 2, 3000: 5, 5000: 8}
    assert fedavg.table.rounds == [0, *reached.values()]
    expected = {
        ("fedavg", budget): fedavg.table.where(round=round, weights="last").value("test")
        for budget, round in reached.items()
    }
    own = ridge.accuracy
    expected |= {("ridge", budget): own for budget in (1000, 3000, 5000)}
    assert rows == pytest.approx(expected, abs=1e-6)
    numbers = done.frame().query("rule == 'final' and split == 'test' and over == 'pooled'")
    taken = numbers[numbers["metric"] == "accuracy"].set_index(["method", "budget"])["images"]
    assert taken.to_dict() == {
        **{("fedavg", budget): SEEN * round for budget, round in reached.items()},
        **{("ridge", budget): SEEN for budget in (1000, 3000, 5000)},
    }


def test_what_a_results_file_has_at_every_budget_is_not_run_again(at_budgets, tmp_path, cache):
    _, path = at_budgets
    kept = results_file(tmp_path, text=path.read_text())
    again = compare(budget_plan(), tmp_path / "out", cache=cache, results=kept)
    assert not again.outcomes
    assert kept.read_text() == path.read_text()
    assert [row.numbers for row in again.results.rows] == [
        row.numbers for row in sorted(read_results(path), key=lambda row: row.method)
    ]
    for change, runs in ((["1k", "2k"], ["fedavg"]), (BUDGETS[1:], ["fedavg"])):
        other = prepare_comparison(
            budget_plan(budgets=change), tmp_path / "other", cache=cache, results=[kept]
        )
        assert [cell.method for cell in other.missing] == runs
    part = [row for row in read_results(path) if (row.method, row.budget) != ("fedavg", 3000)]
    kept.write_text(to_text(part))
    other = prepare_comparison(budget_plan(), tmp_path / "part", cache=cache, results=[kept])
    assert [cell.method for cell in other.missing] == ["fedavg"]


def test_a_page_has_every_method_at_every_budget_and_ridge_as_a_level_line(at_budgets):
    done, path = at_budgets
    every = done.results
    table = budget_table(every)
    assert [column.heading for column in table.columns[1:]] == [
        f"{budget} images" for budget in ("500", "1k", "3k", "5k")
    ]
    shown = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    ridge = percent(read_run(done.cells[1].folder).accuracy)
    assert shown["Ridge"] == ["–", ridge, ridge, ridge]
    fedavg = read_run(done.cells[0].folder).table.where(weights="last").curve("test")
    assert shown["FedAvg"] == [percent(fedavg[round]) for round in (1, 2, 5, 8)]
    lines = {
        line["name"]: (line["x"], line["y"])
        for line in accuracy_against(every.at_largest, "images").figure["data"]
    }
    assert list(lines["FedAvg"][0]) == [SEEN * round for round in (0, 1, 2, 5, 8)]
    assert list(lines["Ridge"][0]) == [SEEN, 8 * SEEN]
    assert len(set(lines["Ridge"][1])) == 1
    for spent in ("bytes", "seconds"):
        assert len(accuracy_against(every.at_largest, spent).figure["data"]) == 2
    page = done.report.read_text()
    assert "5k images seen in training: " in page
    assert "1k images" in reported(path)[1]


class BudgetMaker(FolderMaker):
    """A run that is evaluated where it reaches 500 and 1500 images."""

    def experiment(self):
        return super().experiment() | {"evaluate": {"budgets": [500, 1500]}}

    def number_rows(self, round_, weights="last"):
        before, now = (self.spent(max(0, one))["images"] for one in (round_ - 1, round_))
        due = round_ == 0 or any(before < budget <= now for budget in (500, 1500))
        return super().number_rows(round_, weights) if due else []


def test_a_curve_is_of_every_budget_though_columns_reach_it_in_other_rounds(tmp_path):
    rows, makers = [], []
    for name, per_round, rounds in (("ink", 4, 6), ("sea", 2, 12)):
        maker = BudgetMaker(
            tmp_path / name, test=[name], per_round=per_round, rounds=rounds, planned=rounds
        )
        run = read_run(maker.write()).at(1500)
        rows.append(ResultRow(method="pardon", held_out=name, seed=0, budget=1500, run=run))
        makers.append(maker)
    results = Results("mine", "mine", rows)
    (line,) = (one for one in learning_curves(results).figure["data"] if one["name"])
    assert list(line["x"]) == [0, (2 + 4) / 2, (6 + 12) / 2]
    reached = zip((0, 2, 6), (0, 4, 12))
    means = [
        sum(maker.accuracy("test", 0, round_) for maker, round_ in zip(makers, rounds)) / 2
        for rounds in reached
    ]
    assert list(line["y"]) == pytest.approx([100 * mean for mean in means])
    (line,) = (one for one in accuracy_against(results, "images").figure["data"] if one["name"])
    assert list(line["x"]) == [0, 520, 1560]


def test_seconds_a_round_are_of_all_rounds_where_a_run_is_cut_at_a_budget(folder_maker):
    """A round's four clients train for a second each."""
    run = read_run(folder_maker().write()).at(500)
    row = ResultRow(method="pardon", held_out="photo", seed=0, budget=500, run=run)
    sections = comparison_page(Results("mine", "mine", [row])).sections
    (table,) = (one.blocks[0] for one in sections if one.title == "Cost")
    shown = {column.heading: cell.text for column, cell in zip(table.columns, table.rows[0])}
    assert (shown["Training"], shown["Aggregation"]) == (duration(4), duration(0.1))


def test_a_run_that_ends_below_a_budget_is_told_of(folder_maker):
    """A round of the made-up run sees 65 images a client."""
    maker = folder_maker()
    run, seen = read_run(maker.write()), maker.spent(6)["images"]
    rows = [
        ResultRow(method="fedavg", held_out="ink", seed=0, budget=budget, run=run.at(budget))
        for budget in (seen, seen + 1)
    ]
    results = Results("mine", "mine", rows)
    assert not list(about_budgets(results.at(seen)))
    (found,) = about_budgets(results)
    assert "1 run ended below the budget of 1.561k images, with 1.56k, " in found.text


def test_a_results_file_tells_of_rounds_that_end_far_from_their_budget():
    rows = [row_of(0.5, "fedavg", budget=1000, images=1090), row_of(0.5, budget=2000, images=1990)]
    assert [one.code for one in about_budgets(Results.of_rows(rows))] == ["budget-not-reached"]
    rows = [row_of(0.5, name, budget=1000, images=n) for name, n in (("a", 1000), ("b", 1190))]
    (found,) = about_budgets(Results.of_rows(rows))
    assert str(found) in map(str, about_results(Results.of_rows([*rows, row_of(0.5, budget=2000)])))
    assert found.text.startswith("1 result took more images than the budget, up to 1.2 times 1k")
    ridge = row_of(0.5, "ridge", budget=1000, images=675, round=1)
    assert not list(about_budgets(Results.of_rows([ridge])))


def test_runs_whose_folders_have_one_name_go_by_their_paths(folder_maker):
    first, second = (folder_maker(f"{name}/run").write() for name in "ab")
    assert results_of([first, second, first]).methods == [f"pardon ({first})", f"pardon ({second})"]


def test_domains_of_one_name_in_two_folders_are_two(folder_maker):
    folders = []
    for folder, method in itertools.product("ab", ("pardon", "fedavg")):
        maker = folder_maker(f"{folder}-{method}")
        maker.method = method
        fields = maker.experiment()
        fields["data"] |= {"source": "folder", "root": f"/images/{folder}"}
        maker.experiment = lambda fields=fields: fields
        folders.append(maker.write())
    results = results_of(folders)
    assert {row.domain for row in results.rows} == {"a, photo", "b, photo"}
    assert {row.collection for row in results.rows} == {"a", "b"}
    assert len(results.methods) == 2


def test_a_comparison_whose_model_learned_nothing_is_told_the_flag_that_compare_has(
    folder_maker, tmp_path, monkeypatch
):
    causes = [Cause("features", "", ("--method", "fedavg", "--rounds", "9"))]
    monkeypatch.setattr("feddg.comparison.results.causes_of_failure", lambda run: causes)
    run = read_run(folder_maker("out/run").write())
    assert "--method fedavg" in _remedy([run])
    (tmp_path / "out" / "plan.yaml").write_text("methods: [ridge]")
    assert _remedy([run]).endswith("/out-again --methods fedavg --rounds 9`.")


def test_results_from_a_file_alone_are_of_the_model_that_is_served(tmp_path):
    base = PLAN["base"] | {"server": {"averaging": "ema"}}
    plan, path = PLAN | {"base": base, "methods": ["fedavg"]}, results_file(tmp_path)
    options = {"cache": tmp_path / "cache", "results": path, "report": False}
    here = compare(plan, tmp_path / "here", **options).results
    elsewhere = compare(plan, tmp_path / "elsewhere", **options).results
    assert [row.run for row in elsewhere.rows] == [None]
    of_file = Results.read(path, load_plan(plan))
    for results in (here, elsewhere, of_file):
        assert results.default_rule.name == "ema"
    (row,) = elsewhere.rows
    fields = {name: getattr(row, name) for name in ResultRow.model_fields}
    fields["numbers"] = [number for number in row.numbers if number.rule != "ema"]
    without = ResultRow(**fields)
    assert replace(elsewhere, rows=[without]).default_rule is FINAL


def row_of(value, method="fedavg", held_out="ink", images=None, round=9, data=None, **more):
    """A row of a results file, of one accuracy."""
    of_value = {"rule": "final", "split": "test", "over": "domain_mean", "metric": "accuracy"}
    fields = {"method": method, "held_out": held_out, "seed": 0, **more}
    fields["numbers"] = (NumberRow(value=value, **of_value, images=images, round=round),)
    fields["conditions"] = {"data": data} if data else more.get("conditions", {})
    return ResultRow(**fields)


def found_in(results, code):
    return [str(one) for one in about_results(results) if one.code == code]


def test_a_mean_that_has_not_begun_at_a_smaller_budget_is_no_rule_of_all_budgets():
    of_value = {"split": "test", "over": "domain_mean", "metric": "accuracy", "value": 0.5}
    rows = [
        row_of(0.5, budget=budget).model_copy(
            update={"numbers": [NumberRow(rule=rule, **of_value) for rule in rules]}
        )
        for budget, rules in ((1000, ["final"]), (2000, ["final", "swa"]))
    ]
    results = Results("x", "x", rows, served="swa")
    assert results.default_rule is FINAL
    assert results.at_largest.default_rule is FINAL  # one rule for a comparison


def test_hold_outs_that_share_a_test_domain_are_one_domain():
    pairs = [*map("+".join, itertools.combinations("abcd", 2))]
    rows = [
        row_of(0.5 + (at if method == "pardon" else 0) / 10, method, pair)
        for at, pair in enumerate(pairs)
        for method in ("fedavg", "pardon")
    ]
    results = Results.of_rows(rows)
    assert len(results.columns) == 6
    margin = results.margins(FINAL)["pardon"]
    assert (margin.domains.count, margin.domains.reach) == (1, None)
    assert margin.mean == pytest.approx(0.25)
    (text,) = found_in(results, "shared-test-images")
    assert "share test images: a+b / a+c / a+d / b+c / b+d / c+d." in text
    apart = Results.of_rows([row for row in rows if row.held_out in ("a+b", "c+d")])
    assert apart.margins(FINAL)["pardon"].domains.count == 2
    assert not found_in(apart, "shared-test-images")


def test_one_data_set_under_two_names_is_counted_once():
    def results(hashes):
        return Results.of_rows(
            [
                row_of(0.5, method, held_out, data=name, hashes={"images": hashes[name]})
                for method, held_out, name in itertools.product(("fedavg", "pardon"), "abc", hashes)
            ]
        )

    once, twice = results({"small": "x", "large": "x"}), results({"small": "x", "large": "y"})
    for found, domains, sets in ((once, 3, 1), (twice, 6, 2)):
        margin = found.margins(FINAL)["pardon"]
        assert (margin.domains.count, margin.collections.count) == (domains, sets)
    assert found_in(once, "shared-test-images") == [
        "Counted as one domain, since they share test images: small, a / large, a; small, b / "
        "large, b; small, c / large, c."
    ]


def test_results_of_one_column_on_different_images_are_warned_about(folder_maker):
    def results(**images):
        return Results.of_rows(
            [
                row_of(0.5, name, hashes={"images": one} if one else {})
                for name, one in images.items()
            ]
        )

    assert not found_in(results(fedavg="x", pardon="x", ridge=None), "different-images")
    (text,) = found_in(results(fedavg="x", pardon="y", ridge="x"), "different-images")
    assert "in 1 column, as fedavg, ridge / pardon in ink: " in text
    folders = []
    for name in ("pardon", "fedavg"):
        maker = folder_maker(name)
        maker.method = name
        folders.append(maker.write())
    table = {"count": 1, "labels": "x", "folders": {}}
    for kinds, found in (("xx", 0), ("xy", 1)):
        for folder, labels in zip(folders, kinds):
            (folder / "images.json").write_text(ImagesFile(**table | {"labels": labels}).to_text())
        assert len(found_in(results_of(folders), "different-images")) == found
    (folders[0] / "images.json").write_text("{")
    assert not found_in(results_of(folders), "different-images")


def test_a_run_that_stands_in_every_column_is_counted_once():
    """Ridge has no learning rate; it is marked as no better than a constant model."""
    rows = [
        row_of(0.5, "fedavg", conditions={"lr": lr}, experiment=f"0123abc{at}")
        for at, lr in enumerate(("0.1", "0.2"))
    ]
    rows += [
        row_of(0.5, "ridge", conditions={"lr": lr}, experiment="89abcdef") for lr in ("0.1", "0.2")
    ]
    constant = NumberRow(rule="final", metric="constant", value=1.0)
    rows[2:] = [row.model_copy(update={"numbers": (*row.numbers, constant)}) for row in rows[2:]]
    results = Results.of_rows(rows)
    assert len(results.columns) == 2
    assert about_method(results, "ridge") == [(MAJORITY, "warning", "")]
    assert "3 runs" in comparison_page(results).tags
    (text,) = found_in(results, "runs-from-a-file")
    assert text.startswith("3 runs known from a results file alone")


def test_runs_under_two_labels_are_named_and_never_compared_with_themselves():
    values = {"a": (0.3, 0.4, 0.5), "b": (0.4, 0.52, 0.6), "c": (0.6, 0.7, 0.82)}
    rows = [
        row_of(value, label, held_out, experiment=f"{label * 7}{at}")
        for label, own in values.items()
        for at, (held_out, value) in enumerate(zip(("ink", "photo", "sketch"), own))
    ]
    before = Results.of_rows(rows)
    assert not before.twins
    again = [row.model_copy(update={"method": "C (ours)"}) for row in rows if row.method == "c"]
    results = Results.of_rows([*rows, *again[:2]])
    assert results.margins(FINAL) == before.margins(FINAL)
    assert results.margins(FINAL, "a") == before.margins(FINAL, "a")
    assert results.margins(FINAL, "C (ours)").keys() == {"a", "b"}
    assert conclusion(results).text == conclusion(before).text
    assert found_in(results, "same-runs") == [
        "The same runs under two labels, compared once: c / C (ours)."
    ]
    assert "9 runs" in comparison_page(results).tags


def test_several_versions_in_one_column_are_named():
    versions = {"fedavg": "0.1.0", "pardon": "0.0.7", "ridge": "0.1.0", "mixstyle": ""}
    rows = [row_of(0.5, method, version=version) for method, version in versions.items()]
    (text,) = found_in(Results.of_rows(rows), "several-versions")
    assert text.startswith("Computed in several versions of feddg, as ")
    assert text.endswith(" as fedavg, ridge in 0.1.0 / pardon in 0.0.7 in ink.")
    assert not found_in(Results.of_rows([rows[0], *rows[2:]]), "several-versions")


def test_runs_on_two_folders_whose_domains_have_one_name_are_two(tmp_path):
    both = [{"name": name, "source": "folder", "root": f"/{name}"} for name in "ab"]
    plan = Plan(data=both, methods=["fedavg"], hold_out=["photo"])
    rows = [
        ResultRow.of(
            cell, hashes={"images": cell.conditions["data"]}, numbers=row_of(share).numbers
        )
        for share, cell in zip((0.5, 0.7), expand_plan(plan))
    ]
    assert len({row.experiment for row in rows}) == 1
    results = Results.of_rows(rows)
    assert results.columns == ["a, photo", "b, photo"]
    assert "2 runs" in comparison_page(results).tags


def test_several_precisions_in_one_column_are_named(folder_maker):
    rows = [
        row_of(0.5, method, machine=f"x86_64, {device}, 8 threads")
        for method, device in (("fedavg", "cpu, float32"), ("pardon", "cuda, bfloat16"))
    ]
    assert found_in(Results.of_rows(rows), "several-precisions") == [
        "Computed in several precisions, as fedavg in float32 / pardon in bfloat16 in ink."
    ]
    assert not found_in(Results.of_rows(rows[:1]), "several-precisions")
    folders = [folder_maker(name, method=name).write() for name in ("fedavg", "pardon")]
    for folder, precision in zip(folders, ("float32", "bfloat16")):
        made = {"precision": precision, "device": "cuda"}
        (folder / "environment.json").write_text(json.dumps(made))
    assert len(found_in(results_of(folders), "several-precisions")) == 1


class EndedEarly(RisingMaker):
    """A run whose accuracy rises until its privacy budget is spent, before its last round."""

    def summary(self):
        why = Diagnostic("budget-spent", "warning", "The run ends after round 4 of 6.")
        return super().summary().model_copy(update={"diagnostics": [why]})


def of_file(results, path):
    """The same results, known from a file alone."""
    without = {"run": None, "folder": "", "machine": "cpu"}
    rows = [
        row.model_copy(update=without | {"numbers": row.table.rows, "experiment": f"{at:08x}"})
        for at, row in enumerate(results.rows)
    ]
    return Results.read(results_file(path, text=to_text(rows)))


def test_runs_that_privacy_ended_early_are_named_and_never_told_to_train_longer(tmp_path):
    folders = [
        maker(tmp_path / f"{method}{seed}", method=method, seed=seed, rounds=rounds).write()
        for maker, method, rounds in ((EndedEarly, "fedavg", 4), (RisingMaker, "pardon", 6))
        for seed in range(2)
    ]
    results = results_of(folders)
    for known in (results, of_file(results, tmp_path)):
        (early,) = found_in(known, "ended-early")
        assert early.startswith(
            "The privacy budget was spent before the last planned round: FedAvg in both runs."
        )
        assert "(but ended early in both runs)" in conclusion(known).text
        (rising,) = found_in(known, "still-rising")
        assert "PARDON in both runs" in rising
        assert "FedAvg" not in rising
    assert not found_in(results_of(folders[2:]), "ended-early")
    early, late = ({one.code for one in about_result(read_run(run))} for run in folders[1:3])
    assert late - early == {"still-rising"}


def test_a_useless_method_that_privacy_ended_early_needs_other_things_than_rounds(tmp_path):
    class Useless(EndedEarly, ConstantMaker):
        accuracy = ConstantMaker.accuracy

    results = results_of([Useless(tmp_path / "run", rounds=4).write()])
    assert "too few rounds" not in results.no_method_fit.advice
    known = of_file(results, tmp_path)
    assert known.no_method_fit.advice.startswith("Train on more images, or")
    for one in (results, known):
        assert len(found_in(one, "ended-early")) == 1


def test_privacy_is_the_reason_why_its_runs_ended_below_a_budget(tmp_path):
    makers = [EndedEarly(tmp_path / "a", rounds=4), FolderMaker(tmp_path / "b", method="fedavg")]
    runs = [read_run(maker.write()) for maker in makers]
    reached, above = makers[0].spent(4)["images"], makers[1].spent(6)["images"] + 1
    rows = [
        ResultRow(method=run.method, held_out="ink", seed=0, budget=budget, run=run.at(budget))
        for run in runs
        for budget in (reached, above)
    ]
    for some, reason in (
        (rows[:2], "because privacy ended training: the last"),
        (rows, "privacy ended training or batches were not full or updates were refused: the last"),
        (rows[2:], "because batches were not full or updates were refused: the last"),
    ):
        results = Results("mine", "mine", some)
        for known in (results, of_file(results, tmp_path)):
            (text,) = found_in(known, "budget-not-reached")
            assert reason in text
    assert [row.ended_early for row in rows] == [False, True, False, False]


def test_runs_whose_methods_had_other_tasks_are_warned_about(folder_maker):
    def results(*tasks):
        folders = []
        for number, (method, part, fields) in enumerate(tasks):
            maker = folder_maker(f"{part}{number}{len(tasks)}", method=method)
            folders.append(maker.write())
            experiment = folders[-1] / "experiment.yaml"
            said = yaml.safe_load(experiment.read_text())
            experiment.write_text(yaml.safe_dump(merge(said, {part: fields})))
        return results_of(folders)

    one, two = (
        ("pardon", "model", {"backbone": "cnn"}),
        ("fedavg", "model", {"backbone": "resnet18"}),
    )
    (text,) = found_in(results(one, two), "unlike-tasks")
    assert text.startswith("Methods were not given the same task: model.backbone differs between")
    # Of one method it is a condition; how a method trains, and its one round, are its own.
    assert not found_in(results(one, two, (*one[:2], two[2])), "unlike-tasks")
    rate, short = ("pardon", "train", {"lr": 0.7}), ("ridge", "train", {"rounds": 1})
    assert not found_in(results(rate, ("fedavg", "train", {"lr": 0.3}), short), "unlike-tasks")


def test_a_value_that_another_plan_does_not_say_is_a_column_of_its_own():
    def row(value, **conditions):
        return row_of(value, conditions=conditions)

    results = Results.of_rows([row(0.9), row(0.2, heterogeneity="0")])
    assert results.columns == ["ink", "heterogeneity 0"]
    assert [*results.values("final")["fedavg"].values()] == [0.9, 0.2]
    turned = [row(0.9, a="1", b="2"), row(0.9, b="2", a="1")]
    with pytest.raises(RunError, match="appears twice"):
        Results.of_rows(turned)
    with pytest.raises(RunError, match="some results are at budgets"):
        Results.of_rows([row(0.9), row(0.9).model_copy(update={"budget": 100, "seed": 1})])
