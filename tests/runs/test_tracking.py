"""Trackers: what they write, on fakes of the packages; they never end a run."""

import logging
import sys
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from feddg.api import run
from feddg.errors import FeddgError
from feddg.experiment import Experiment
from feddg.records import RoundRow
from feddg.runs.reading import read_run
from feddg.runs.tracking import chosen_trackers

EXPERIMENT = Experiment(
    data={"source": "digits", "image_size": 16},
    hold_out="sketch",
    clients=3,
    train={"rounds": 2, "local_epochs": 1, "batch_size": 128},
)


class FakeMLflow:
    """Keeps what it is told, by run."""

    def __init__(self):
        self.runs, self.params, self.metrics, self.ends = [], {}, [], []
        self.uri = None
        self.MlflowClient = self.open

    def open(self, uri):
        self.uri = uri
        return self

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name):
        return f"experiment {name}"

    def create_run(self, experiment, run_name):
        self.runs.append(run_name)
        return SimpleNamespace(info=SimpleNamespace(run_id=f"id-{len(self.runs)}"))

    def update_run(self, run, status):
        self.ends.append((run, status))

    def log_param(self, run, key, value):
        self.params[key] = value

    def log_metric(self, run, name, value, step):
        self.metrics.append((run, name, value, step))

    def set_terminated(self, run, status):
        self.ends.append((run, status))


@pytest.fixture
def mlflow(monkeypatch):
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setenv("FEDDG_TRACK", "mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return fake


def test_mlflow_is_told_what_the_records_hold(mlflow, tmp_path):
    done = run(EXPERIMENT, tmp_path / "study", cache=tmp_path / "cache", report=False)
    assert mlflow.uri == f"sqlite:///{(tmp_path / 'study').resolve() / 'mlflow.db'}"
    assert mlflow.runs == [done.folder.name]
    assert mlflow.params["train.rounds"] == "2"
    told = {(name, step): value for _, name, value, step in mlflow.metrics}
    record = read_run(done.folder)
    for row in (row for row in record.metrics.evaluations if row.weights == "last"):
        assert told[f"{row.split}/{row.domain}", row.round] == row.accuracy
    for row in record.metrics.rounds:
        assert told["loss/cross_entropy", row.round] == row.terms["cross_entropy"]
        assert told["bytes/up", row.round] == row.bytes_up
    assert mlflow.ends == [("id-1", "FINISHED")]


def test_a_continued_run_stays_one_run(mlflow, tmp_path):
    (kind,) = chosen_trackers().values()
    first = kind(tmp_path)
    first.start(EXPERIMENT, 1)
    first.end("interrupted")
    second = kind(tmp_path)
    second.start(EXPERIMENT, 2)
    second.end("completed")
    assert mlflow.runs == [tmp_path.name]
    assert mlflow.ends == [("id-1", "KILLED"), ("id-1", "RUNNING"), ("id-1", "FINISHED")]


def test_weights_and_biases_is_offline_unless_told_otherwise(monkeypatch, tmp_path):
    opened, logged, ended = [], [], []
    fake_run = SimpleNamespace(log=logged.append, finish=lambda exit_code: ended.append(exit_code))

    def init(**options):
        opened.append(options)
        return fake_run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.setenv("FEDDG_TRACK", "wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    (kind,) = chosen_trackers().values()
    tracker = kind(tmp_path)
    tracker.start(EXPERIMENT, 1)
    tracker.round(RoundRow(round=1, clients=[0], terms={"cross_entropy": 0.5}, bytes_up=7))
    tracker.end("completed")
    assert (opened[0]["mode"], opened[0]["id"]) == ("offline", EXPERIMENT.id)
    assert opened[0]["config"]["method"]["name"] == "fedavg"
    assert logged == [{"loss/cross_entropy": 0.5, "bytes/up": 7.0, "bytes/down": 0.0, "round": 1}]
    assert ended == [0]


def test_a_tracker_that_fails_says_so_once_and_the_run_completes(mlflow, tmp_path, caplog):
    def refuse(*_, **__):
        raise ConnectionError("no route to host")

    mlflow.log_metric = refuse
    with caplog.at_level(logging.WARNING, "feddg"):
        done = run(EXPERIMENT, tmp_path, cache=tmp_path / "cache", report=False)
    assert read_run(done.folder).status == "completed"
    assert [r.message for r in caplog.records if "tracks" in r.message] == [
        "mlflow no longer tracks this run: no route to host"
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [("mlfow", "did you mean 'mlflow'"), ("wandb", r"pip install 'feddg\[wandb\]'")],
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
    rows = done.metrics.rounds
    assert told == pytest.approx({row.round: row.terms["cross_entropy"] for row in rows})
