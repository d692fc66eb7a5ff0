"""Lines where there is no terminal: never silent for long, never one per client."""

import io
import sys
import types

import pytest
from rich.console import Console

from feddg.comparison.plan import Cell, Plan
from feddg.comparison.pool import Outcome
from feddg.evaluation.accuracy import Score
from feddg.experiment import Experiment
from feddg.messages import Refusal
from feddg.progress import (
    SILENCE_SECONDS,
    Bars,
    Lines,
    ManyBars,
    notebook_observer,
    notebook_watcher,
    observer,
    print_plan,
    working,
)
from feddg.records import RoundRow
from feddg.runs.observer import Observer

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


def test_a_line_at_evaluated_rounds_and_after_a_long_silence(shown):
    clock = Clock()
    watching = Lines(shown, clock)
    watching.work("decoding images", 5, 100)
    assert lines(shown) == []
    clock.now = SILENCE_SECONDS
    watching.work("decoding images", 50, 100)
    watching.work("decoding images", 51, 100)
    assert lines(shown) == ["decoding images: 50 of 100, after 30 s"]
    watching.start(EXPERIMENT, 1)
    for client in range(4):
        clock.now += SILENCE_SECONDS / 2
        watching.client(1, Refusal(client, "absent"))
    assert lines(shown)[1:] == [
        "fedavg: 3 rounds",
        "round 1 of 3: 2 of 4 clients, after 1 min 0 s",
        "round 1 of 3: 4 of 4 clients, after 1 min 30 s",
    ]


def test_the_first_round_says_how_long_the_others_will_take(shown):
    watching = Lines(shown, Clock())
    watching.start(EXPERIMENT, 1)
    for number, took in ((1, 45.0), (2, 50.0)):
        watching.round(RoundRow(round=number, clients=[], seconds={"train": took}))
    assert lines(shown) == ["fedavg: 3 rounds", "round 1 of 3: about 1 min 30 s left"]


def test_what_to_watch_with(monkeypatch):
    assert type(observer(quiet=True)) is Observer
    assert type(observer()) is Lines
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    assert type(observer()) is Bars
    assert type(observer(verbose=True)) is Lines
    with working() as progress:
        progress("reading", 1, 2)


def test_many_runs_say_how_far_they_are_now_and_then(shown, tmp_path):
    clock = Clock()
    bars = ManyBars(shown, clock)
    cell = Cell("fedavg", "sketch", {}, 0, EXPERIMENT, folder=tmp_path / "mine")
    bars.start(2, 0)
    bars.news(cell, {"of": 10, "rounds": 0})
    assert lines(shown) == []
    clock.now = SILENCE_SECONDS
    bars.news(cell, {"rounds": 3})
    bars.news(cell, {"rounds": 4})
    (line,) = lines(shown)
    assert line.startswith("0/2  mine: 3 of 10 rounds; about")
    bars.ended(Outcome(cell, "completed"))
    assert lines(shown)[1] == "1/2  mine completed"
    bars.end()


def test_scores_are_named_by_split_and_domain(shown):
    watching = Lines(shown, Clock())
    fields = {"split": "test", "domain": "ink", "accuracy": 0.5}
    watching.scores(2, [type("Part", (), fields)])
    assert lines(shown) == ["round   2       0 s  test/ink 0.500"]
    assert all(hasattr(Score, name) or name in Score.__annotations__ for name in fields)


def test_a_bar_that_does_not_know_its_length_yet_is_drawn(tmp_path):
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    bars = ManyBars(console)
    cell = Cell("fedavg", "sketch", {}, 0, EXPERIMENT, folder=tmp_path / "mine")
    bars.start(1, 0)
    bars.news(cell, {"work": "decoding"})
    bars.news(cell, {"of": 10, "rounds": 3})
    bars.end()
    assert "mine" in console.file.getvalue()


def test_progress_is_shown_in_notebooks_only(monkeypatch):
    assert notebook_observer() is None
    assert notebook_watcher() is None
    shell = type("ZMQInteractiveShell", (), {})()
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setattr("feddg.progress.find_spec", lambda name: None)
    assert isinstance(notebook_observer(), Lines)
    assert isinstance(notebook_watcher(), ManyBars)
