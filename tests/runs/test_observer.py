"""Trackers: what they write, on fakes of the packages; they never end a run."""

import logging
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from feddg.api import run
from feddg.errors import FeddgError
from feddg.experiment import Experiment
from feddg.records import RoundRow
from feddg.runs.observer import chosen_trackers
from feddg.runs.reading import read_run

EXPERIMENT = Experiment(
    data={"source": "digits", "image_size": 8},
    hold_out="sketch",
    clients=3,
    train={"rounds": 2, "local_steps": 2, "batch_size": 32},
)


class FakeRun:
    """Keeps what it is told."""

    def __init__(self):
        self.opened, self.logged, self.ended = [], [], []

    def init(self, **options):
        self.opened.append(options)
        return self

    def log(self, values):
        self.logged.append(values)

    def finish(self, exit_code):
        self.ended.append(exit_code)


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeRun()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("FEDDG_TRACK", "wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return fake


def test_a_tracker_is_told_what_the_records_hold(wandb, tmp_path):
    done = run(EXPERIMENT, tmp_path / "study", cache=tmp_path / "cache", report=False)
    assert [options["name"] for options in wandb.opened] == [done.folder.name]
    told = {(name, values["round"]): v for values in wandb.logged for name, v in values.items()}
    record = read_run(done.folder)
    for row in record.table.where(weights="last", metric="accuracy"):
        assert told[f"{row.split}/{row.domain}", row.round] == row.value
    for row in record.rounds:
        assert told["loss/cross_entropy", row.round] == row.terms["cross_entropy"]
        assert told["bytes/up", row.round] == row.bytes_up
    assert wandb.ended == [0]


def test_a_continued_run_stays_one_run(wandb, tmp_path):
    (kind,) = chosen_trackers().values()
    for first_round, status in ((1, "interrupted"), (2, "completed")):
        tracker = kind(tmp_path / EXPERIMENT.label)
        tracker.start(EXPERIMENT, first_round)
        tracker.end(status)
    assert {options["id"] for options in wandb.opened} == {EXPERIMENT.id}
    assert {options["resume"] for options in wandb.opened} == {"allow"}
    assert wandb.ended == [1, 0]


def test_weights_and_biases_is_offline_unless_told_otherwise(wandb, tmp_path):
    (kind,) = chosen_trackers().values()
    tracker = kind(tmp_path)
    tracker.start(EXPERIMENT, 1)
    tracker.round(RoundRow(round=1, clients=[0], terms={"cross_entropy": 0.5}, bytes_up=7))
    assert wandb.opened[0]["mode"] == "offline"
    assert wandb.opened[0]["config"]["method"]["name"] == "fedavg"
    known = {"loss/cross_entropy": 0.5, "bytes/up": 7.0, "bytes/down": 0.0, "round": 1}
    assert wandb.logged == [known]


def test_a_tracker_that_fails_says_so_once_and_the_run_completes(wandb, tmp_path, caplog):
    def refuse(*_, **__):
        raise ConnectionError("no route to host")

    wandb.log = refuse
    with caplog.at_level(logging.WARNING, "feddg"):
        done = run(EXPERIMENT, tmp_path, cache=tmp_path / "cache", report=False)
    assert read_run(done.folder).status == "completed"
    assert [r.message for r in caplog.records if "tracks" in r.message] == [
        "wandb no longer tracks this run: no route to host"
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [("wandbb", "did you mean 'wandb'"), ("wandb", r"pip install 'feddg\[wandb\]'")],
)
def test_mistakes_are_named(monkeypatch, name, text):
    monkeypatch.setitem(sys.modules, "wandb", None)  # what an absent package looks like
    monkeypatch.setenv("FEDDG_TRACK", name)
    with pytest.raises(FeddgError, match=text):
        chosen_trackers()


def test_tensorboard_is_told_what_the_records_hold_and_only_if_asked(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDDG_TRACK", raising=False)
    plain = run(EXPERIMENT, tmp_path / "plain", cache=tmp_path / "cache", report=False)
    assert not (plain.folder / "events").exists()
    monkeypatch.setenv("FEDDG_TRACK", "tensorboard")
    done = run(EXPERIMENT, tmp_path / "told", cache=tmp_path / "cache", report=False)
    found = EventAccumulator(str(done.folder / "events")).Reload().Scalars("loss/cross_entropy")
    told = {point.step: point.value for point in found}
    rows = done.rounds
    assert told == pytest.approx({row.round: row.terms["cross_entropy"] for row in rows})
