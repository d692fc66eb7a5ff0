"""Lines where there is no terminal: never silent for long, never one per client."""

import io
import sys
import types

import pytest
from rich.console import Console

from feddg.comparison.plan import Cell, Plan
from feddg.comparison.pool import ROUNDS, Outcome, Reporter
from feddg.evaluation.accuracy import Score
from feddg.experiment import Experiment
from feddg.messages import Refusal
from feddg.progress import (
    SILENCE_SECONDS,
    Display,
    OneRun,
    notebook_observer,
    notebook_watcher,
    print_plan,
    working,
)
from feddg.records import RoundRow
from feddg.text import print_line

EXPERIMENT = Experiment(data="digits", clients=4, train={"rounds": 3})


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def shown():
    return Console(file=io.StringIO(), width=200)


def lines(console):
    return console.file.getvalue().replace("\N{NO-BREAK SPACE}", " ").splitlines()


def test_domains_of_one_name_in_two_data_sets_are_two_in_the_plan(shown):
    plan = Plan(base={}, data=["digits", "emoji"], methods=["fedavg"], hold_out=["sketch"])
    cells = [Cell("fedavg", "ink", {"data": name}, 0, EXPERIMENT) for name in ("small", "large")]
    made = {"cells": cells, "missing": [], "folders": [], "started": 0, "folder": "here"}
    print_plan(shown, types.SimpleNamespace(plan=plan, **made))
    assert ["held", "out", "2", "small/ink,", "large/ink"] in map(str.split, lines(shown))


def test_a_run_says_how_it_was_evaluated_and_after_a_long_silence_where_it_is(shown):
    clock = Clock()
    watching = OneRun(Display(console=shown, clock=clock))
    watching.work("decoding images", 5, 100)
    assert lines(shown) == []
    clock.now = SILENCE_SECONDS
    watching.work("decoding images", 50, 100)
    watching.work("decoding images", 51, 100)
    assert lines(shown) == ["decoding images: 50 of 100; about 33 s left"]
    watching.start(EXPERIMENT, 1)
    for client in range(4):
        clock.now += SILENCE_SECONDS / 2
        watching.client(1, Refusal(client, "absent"))
    watching.round(RoundRow(round=1, clients=[], seconds={}))
    parts = [("test", "ink", 0.5), ("id_val", "photo", 0.75), ("id_val", "sketch", 0.25)]
    names = "split", "domain", "accuracy"
    watching.scores(1, [types.SimpleNamespace(**dict(zip(names, part))) for part in parts])
    watching.end("completed")
    assert lines(shown)[1:] == [
        "rounds: 0 of 3",
        "rounds: 0.5 of 3; about 2 min 30 s left",
        "rounds: 1 of 3; about 2 min 0 s left",
        "rounds: 1 of 3; round 1: ink 50.0%, in-domain 50.0%; about 2 min 0 s left",
    ]
    assert all(hasattr(Score, name) or name in Score.__annotations__ for name in names)


def test_a_run_that_goes_on_is_judged_by_what_this_call_has_done(shown):
    clock = Clock()
    watching = OneRun(Display(console=shown, clock=clock))
    watching.start(EXPERIMENT, 2)
    clock.now = SILENCE_SECONDS
    watching.round(RoundRow(round=2, clients=[], seconds={}))
    assert lines(shown) == ["rounds: 1 of 3", "rounds: 2 of 3; about 30 s left"]


def test_how_long_the_last_evaluation_takes_is_not_said(shown):
    clock = Clock()
    watching = OneRun(Display(console=shown, clock=clock))
    watching.start(EXPERIMENT, 3)
    for client in range(4):
        clock.now += SILENCE_SECONDS
        watching.client(3, Refusal(client, "absent"))
    assert lines(shown)[-2:] == ["rounds: 2.8 of 3; about 30 s left", "rounds: 3 of 3"]


def test_work_of_any_size_moves_on_in_steps():
    for total, batch in ((100_003, 64), (7, 1)):
        told = []
        shown = Reporter(told.append)
        for done in range(0, total, batch):
            shown.work("predicting images", done, total)
        places = [news["done"] for news in told]
        assert max(map(int.__sub__, places[1:], places)) <= max(batch, total / 500)
        assert len(told) <= 1001


def test_what_to_watch_with(monkeypatch, capsys):
    def said(*flags):
        watching = OneRun(Display(*flags))
        watching.start(EXPERIMENT, 1)
        watching.end("completed")
        return capsys.readouterr().err

    assert said() == "rounds: 0 of 3\n"
    assert said(True) == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    assert "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in said()
    assert said(False, True) == "rounds: 0 of 3\n"
    assert said(True) == ""
    with working() as progress:
        progress("reading", 1, 2)
    assert "reading: 1 of 2" in capsys.readouterr().err


def test_many_runs_say_how_far_they_are_now_and_then(shown, tmp_path):
    clock = Clock()
    bars = Display(console=shown, clock=clock)
    cell = Cell("fedavg", "sketch", {}, 0, EXPERIMENT, folder=tmp_path / "mine")
    bars.start(2, 0)
    bars.news(cell.folder, {"what": ROUNDS, "done": 0.0, "of": 10, "scores": ""})
    assert lines(shown) == []
    clock.now = SILENCE_SECONDS
    bars.news(cell.folder, {"what": ROUNDS, "done": 3.0, "of": 10, "scores": "ink 50.0%"})
    bars.news(cell.folder, {"what": ROUNDS, "done": 4.0, "of": 10})
    assert lines(shown) == [
        "runs: 0 of 2; about 2 min 50 s left; "
        "mine, rounds: 3 of 10; ink 50.0%; about 1 min 10 s left"
    ]
    bars.ended(Outcome(cell, "completed"))
    bars.ended(Outcome(cell, "failed", "no images"))
    assert lines(shown)[1:] == [
        "runs: 1 of 2; about 30 s left; mine completed",
        "runs: 1 of 2; about 30 s left; mine failed: no images",
    ]
    bars.end()


def test_bars_are_drawn_again_for_the_table_after_its_trials(tmp_path):
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    bars = Display(console=console)
    for name in ("trial", "table"):
        bars.start(1, 0)
        bars.news(tmp_path / name, {"what": "decoding", "done": 5, "of": 0})
        bars.news(tmp_path / name, {"what": ROUNDS, "done": 3.0, "of": 10, "scores": "ink 50.0%"})
        bars.end()
        drawn = lines(console)
        assert any(f"{name}, rounds: 3 of 10" in line and "ink 50.0%" in line for line in drawn)
        print_line(console, "between")
    assert "trial" not in console.file.getvalue().split("between")[1]


def test_progress_is_shown_in_notebooks_only(monkeypatch, capsys, tmp_path):
    assert notebook_observer() is None
    assert notebook_watcher() is None
    shell = type("ZMQInteractiveShell", (), {})()
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setattr("feddg.progress.find_spec", lambda name: None)
    assert isinstance(notebook_observer(), OneRun)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as ipykernel does
    bars = notebook_watcher()
    assert isinstance(bars, Display)
    bars.news(tmp_path, {"what": ROUNDS, "done": 3.0, "of": 10, "scores": "ink 50.0%"})
    bars.end()
    assert capsys.readouterr().out.strip().endswith("rounds: 3 of 10; ink 50.0%"), "without bars"
