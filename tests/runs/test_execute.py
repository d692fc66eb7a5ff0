"""Whole runs on digits: records, resume after a kill, faults."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from feddg.api import resume, run
from feddg.clients.threads import threads
from feddg.diagnostics import warn
from feddg.errors import RunError
from feddg.experiment import Experiment
from feddg.federation.server import Server
from feddg.methods.pardon import Pardon
from feddg.runs import folder as folder_module
from feddg.runs.diagnostics import DIVERGED
from feddg.runs.evaluate import Evaluate
from feddg.runs.folder import RunFolder
from feddg.runs.observer import Observer
from feddg.runs.reading import read_rows, read_run
from image_folders import make_folder
from run_folders import accuracy_rows

ROUNDS = 3
CHANNELS = 64
SMALL = {
    "data": {"source": "digits", "image_size": 8},
    "hold_out": {"val": "chalk", "test": "sketch"},
    "clients": {"number": 6, "per_round": 2},
    "train": {"rounds": ROUNDS, "local_epochs": 1, "batch_size": 64, "lr": 1e-3},
    "evaluate": {"averages": "never"},
}


def experiment(**change) -> Experiment:
    return Experiment(**{**SMALL, **change})


def final_state(folder: Path) -> bytes:
    """The bytes of the last checkpoint's state."""
    index = json.loads((folder / "checkpoint/checkpoint.json").read_text())
    assert index["round"] == ROUNDS
    return (folder / "checkpoint" / index["state"]).read_bytes()


@pytest.fixture(scope="module")
def described(tmp_path_factory, cache):
    """A completed PARDON run, and the styles that its clients sent."""
    sent, groups = [], Pardon.groups

    def noted(method, statistics):
        sent.extend(message.tensors["style"] for _, message in statistics)
        return groups(method, statistics)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pardon, "groups", noted)
        completed = run(experiment(method="pardon"), tmp_path_factory.mktemp("runs"), cache=cache)
    return completed, torch.stack(sent)


@pytest.fixture(scope="module")
def undisturbed(described):
    """A completed PARDON run."""
    return described[0]


def test_the_number_of_threads_changes_nothing_of_a_small_network(undisturbed, tmp_path, cache):
    with threads(3):
        again = run(experiment(method="pardon"), tmp_path, cache=cache, report=False)
    assert final_state(again.folder) == final_state(undisturbed.folder)


def test_the_folder_holds_everything(undisturbed):
    names = {path.name for path in undisturbed.folder.iterdir()}
    assert names >= {
        "experiment.yaml",
        "environment.json",
        "clients.json",
        "metrics.jsonl",
        "rounds.jsonl",
        "ledger.jsonl",
        "summary.json",
        "report.html",
        "figures",
        "checkpoint",
    }
    assert (undisturbed.folder / "figures/styles.png").stat().st_size > 1000


def test_no_file_holds_a_clients_style(described):
    completed, styles = described
    assert styles.shape == (6, 2, CHANNELS)
    files = [*completed.folder.rglob("*.safetensors")]
    assert completed.folder / "checkpoint" in {file.parent for file in files}
    for file in files:
        for name, tensor in load_file(file).items():
            if tensor.numel() % styles[0].numel() == 0:
                rows = tensor.reshape(-1, 1, styles[0].numel())
                assert not (rows == styles.flatten(1)).all(2).any(), (file.name, name)


def test_the_groups_of_similar_styles_are_kept_and_shown(described):
    undisturbed, styles = described
    groups = undisturbed.setup.groups["style"]
    assert sorted(id for group in groups for id in group) == list(range(6))
    styles = styles.double().flatten(1)
    cosine = torch.nn.functional.normalize(styles) @ torch.nn.functional.normalize(styles).T
    nearest = cosine.fill_diagonal_(-2).argmax(1).tolist()
    # FINCH's finest partition: whoever is another's nearest shares its group, and nobody else.
    by_hand = [{id} for id in range(6)]
    for one, other in enumerate(nearest):
        mine, theirs = (next(g for g in by_hand if id in g) for id in (one, other))
        if mine is not theirs:
            by_hand = [g for g in by_hand if g is not mine and g is not theirs] + [mine | theirs]
    assert sorted(map(sorted, groups)) == sorted(map(sorted, by_hand))
    page = undisturbed.report.read_text(encoding="utf-8")
    assert "Groups of clients before training" in page
    assert ", ".join(f"client-{id}" for id in groups[0]) in page


def test_every_round_is_evaluated_on_every_split(undisturbed):
    table = undisturbed.table.where(weights="last")
    assert table.rounds == list(range(ROUNDS + 1))
    assert table.where(split="test").domains == ["sketch"]
    assert table.where(split="val").domains == ["chalk"]
    assert sorted(table.where(split="id_val").domains) == ["ink", "photo"]
    (last,) = accuracy_rows(undisturbed, ROUNDS, "test")
    assert sum(map(sum, last.confusion)) == last.examples
    right = sum(last.confusion[i][i] for i in range(10))
    assert right / last.examples == pytest.approx(last.value)


def test_the_summary_agrees_with_the_records(undisturbed):
    record = undisturbed
    summary = json.loads((undisturbed.folder / "summary.json").read_text())
    assert summary["status"] == "completed"
    (final,) = (row.value for row in accuracy_rows(record, ROUNDS, "test"))
    of_final = {"rule": "final", "split": "test", "over": "domain_mean", "metric": "accuracy"}
    (number,) = [one for one in summary["numbers"] if of_final.items() <= one.items()]
    assert (number["round"], number["value"]) == (ROUNDS, final)
    rows = read_rows(undisturbed.folder / "ledger.jsonl")
    sent = [row["bytes"] for row in rows if row["kind"] == "message"]
    assert summary["bytes"]["total"] == record.table.rows[-1].bytes == sum(sent)
    style = 2 * CHANNELS * 4
    assert summary["bytes"]["setup_up_per_client"] == style
    assert summary["bytes"]["setup_down_per_client"] == style
    assert summary["peak_memory_bytes"] > 1e8


def test_a_complete_run_is_not_run_again(undisturbed, cache, monkeypatch):
    monkeypatch.setattr("feddg.runs.prepare.load_images", lambda *_: pytest.fail("ran again"))
    again = run(undisturbed.experiment, undisturbed.folder.parent, cache=cache)
    assert again.folder == undisturbed.folder


def test_snapshots_of_rounds_that_were_over_are_said_to_be_missing(undisturbed, cache, caplog):
    out = undisturbed.folder.parent
    run(experiment(method="pardon"), out, cache=cache, report=False, snapshots=[1, 3])
    assert "keeps no model of round 1, 3" in caplog.text


class Interrupt(Observer):
    """Presses Ctrl-C in the middle of a round."""

    def __init__(self, round: int) -> None:
        self.at = round

    def client(self, round, reply):
        if round == self.at:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("method", "train"),
    [("pardon", {}), ("fedbn", {}), ("fedavg", {"keep_optimizer": True, "schedule_by": "step"})],
)
def test_ctrl_c_and_resume_give_the_same_bits(method, train, undisturbed, tmp_path, cache):
    chosen = experiment(method=method)
    chosen = chosen.model_copy(update={"train": chosen.train.model_copy(update=train)})
    whole = undisturbed
    if method != "pardon":
        whole = run(chosen, tmp_path / "whole", cache=cache, report=False)
    with pytest.raises(KeyboardInterrupt):
        run(chosen, tmp_path, observer=Interrupt(2), cache=cache)
    record = read_run(tmp_path / chosen.label)
    assert record.status == "interrupted"
    assert record.rounds_done == 1
    done = resume(tmp_path / chosen.label, cache=cache)
    assert done.status == "completed"
    assert final_state(done.folder) == final_state(whole.folder)
    assert done.setup.groups == whole.setup.groups
    assert done.summary.seconds["setup"] == done.setup.seconds > 0
    for name in ("metrics.jsonl", "rounds.jsonl"):
        clean = [_timeless(row) for row in read_rows(whole.folder / name)]
        assert [_timeless(row) for row in read_rows(done.folder / name)] == clean
    assert read_rows(done.folder / "ledger.jsonl") == read_rows(whole.folder / "ledger.jsonl")


def test_what_was_said_before_a_resume_stays_said_once_but_for_what_its_end_was(tmp_path, cache):
    class Warns(Interrupt):
        def round(self, row):
            warn("of-a-round", "said before")
            warn("still-rising", "of numbers that others follow")

    with pytest.raises(KeyboardInterrupt):
        run(experiment(method="pardon"), tmp_path, observer=Warns(2), cache=cache)
    folder = tmp_path / experiment(method="pardon").label
    first = read_run(folder).summary.diagnostics
    assert {"of-a-round", "still-rising"} <= {one.code for one in first}
    done = resume(folder, cache=cache).summary.diagnostics
    assert [one.text for one in done if one.code == "of-a-round"] == ["said before"]
    assert "of numbers that others follow" not in [one.text for one in done]
    assert len(done) == len(set(done))


def test_a_checkpoint_is_written_beside_the_next_round_and_ctrl_c_waits_for_it(
    undisturbed, tmp_path, cache, monkeypatch
):
    under_way, write = threading.Event(), RunFolder._write_checkpoint

    def late(folder, state, *rest):
        assert state.round != 1 or under_way.wait(60)
        write(folder, state, *rest)

    class Pressed(Interrupt):
        def client(self, round, reply):
            if round == self.at:
                under_way.set()
            super().client(round, reply)

    monkeypatch.setattr(RunFolder, "_write_checkpoint", late)
    with pytest.raises(KeyboardInterrupt):
        run(undisturbed.experiment, tmp_path, observer=Pressed(2), cache=cache)
    folder = tmp_path / undisturbed.experiment.label
    assert json.loads((folder / "checkpoint/checkpoint.json").read_text())["round"] == 1
    assert final_state(resume(folder, cache=cache).folder) == final_state(undisturbed.folder)


def test_a_resumed_run_is_measured_where_budgets_are_reached(tmp_path, cache):
    """Three clients take two steps of eight images: 48 a round."""
    chosen = experiment(
        data={**SMALL["data"], "id_val": 0, "id_test": 0},
        hold_out="sketch",
        clients={"number": 3},
        train={"rounds": 4, "local_steps": 2, "batch_size": 8},
        evaluate={"budgets": [50, 96]},
    )

    with pytest.raises(KeyboardInterrupt):
        run(chosen, tmp_path, observer=Interrupt(2), cache=cache, report=False)
    done = resume(tmp_path / chosen.label, cache=cache)
    assert [row.images for row in done.rounds] == [48] * 4
    assert done.table.rounds == [0, 2, 4]
    assert done.table.where(weights="ema").rounds == [2, 4]
    assert accuracy_rows(done, 2, "test")[0].confusion is not None
    assert done.at(50).table.where(metric="accuracy").rows[-1].images == 96


def _timeless(row):
    return {k: v for k, v in row.items() if k != "seconds"}


@pytest.mark.slow
def test_kill_9_and_resume_give_the_same_bits(undisturbed, tmp_path, cache):
    chosen = undisturbed.experiment
    (tmp_path / "e.yaml").write_text(chosen.to_yaml())
    command = [sys.executable, "-m", "feddg", "run", tmp_path / "e.yaml", "--out", tmp_path, "-q"]
    environment = {**os.environ, "FEDDG_CACHE": str(cache)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    metrics = tmp_path / chosen.label / "rounds.jsonl"
    while not (metrics.is_file() and '"kind":"round"' in metrics.read_text()):
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = resume(tmp_path / chosen.label, cache=cache)
    assert final_state(done.folder) == final_state(undisturbed.folder)


def test_a_full_disk_keeps_the_last_checkpoint_and_says_so(tmp_path, cache, monkeypatch):
    chosen = experiment()
    real = folder_module.save_file

    def full(tensors, path, metadata=None):
        if "state-2" in str(path):
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, path, metadata)

    monkeypatch.setattr(folder_module, "save_file", full)
    with pytest.raises(RunError, match=r"cannot write .*No space left"):
        run(chosen, tmp_path, cache=cache)
    folder = tmp_path / chosen.label
    assert json.loads((folder / "checkpoint/checkpoint.json").read_text())["round"] == 1
    assert not list((folder / "checkpoint").glob(".*"))
    assert read_run(folder).status == "failed"
    monkeypatch.undo()
    done = resume(folder, cache=cache)
    whole = run(chosen, tmp_path / "whole", cache=cache, report=False)
    assert final_state(done.folder) == final_state(whole.folder)


def test_a_folder_with_a_different_experiment_is_left_alone(tmp_path, cache):
    chosen = experiment()
    folder = tmp_path / chosen.label
    folder.mkdir()
    (folder / "experiment.yaml").write_text(experiment(seed=9).to_yaml())
    with pytest.raises(RunError, match="different experiment"):
        run(chosen, tmp_path, cache=cache)
    assert not (folder / "metrics.jsonl").exists()


def test_resume_of_what_is_no_run(tmp_path):
    with pytest.raises(RunError, match=r"holds no run.*experiment\.yaml"):
        resume(tmp_path)


def test_a_loss_that_explodes_fails_with_the_client_and_the_remedy(tmp_path, cache):
    wild = experiment(train={**SMALL["train"], "optimizer": "sgd", "lr": 1e20})
    with pytest.raises(RunError, match=r"round 1: 0 good updates.*client \d.*lower train\.lr"):
        run(wild, tmp_path, cache=cache)
    record = read_run(tmp_path / wild.label)
    assert record.status == "failed"
    assert "lower train.lr" in record.error
    assert DIVERGED in [one.code for one in record.summary.diagnostics]


def test_a_gpu_that_is_full_is_told_with_the_remedy(tmp_path, cache, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.79 GiB"
        )

    monkeypatch.setattr("feddg.federation.inprocess.train", full)
    with pytest.raises(RunError, match=r"Tried to allocate 2.00 GiB. Lower train.batch_size"):
        run(experiment(), tmp_path, cache=cache, report=False)


def test_a_run_stopped_before_its_first_checkpoint_begins_anew(tmp_path, cache, monkeypatch):
    def stopped(*_):
        warn("of-images", "an image that is gone by the next attempt")
        raise KeyboardInterrupt

    chosen = experiment(method="pardon")
    monkeypatch.setattr("feddg.runs.execute.draw_figures", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(chosen, tmp_path, cache=cache)
    monkeypatch.undo()
    folder = tmp_path / chosen.label
    assert "of-images" in [one.code for one in read_run(folder).summary.diagnostics]
    done = run(chosen, tmp_path, cache=cache, report=False)
    assert (folder / "figures/styles.png").is_file()
    assert "of-images" not in [one.code for one in done.summary.diagnostics]


def test_the_evaluation_of_the_start_is_not_time_of_the_exchange(tmp_path, cache, monkeypatch):
    clock, rows = [0.0], Evaluate.rows

    def slow(evaluate, state):
        clock[0] += 100
        return rows(evaluate, state)

    monkeypatch.setattr(Evaluate, "rows", slow)
    ticking = SimpleNamespace(perf_counter=lambda: clock[0])
    monkeypatch.setattr("feddg.methods.base.time", ticking)
    train = {**SMALL["train"], "rounds": 1}
    assert run(experiment(train=train), tmp_path, cache=cache, report=False).setup.seconds == 0


@pytest.mark.skipif(sys.platform == "darwin", reason="names of files are UTF-8 there")
def test_a_file_name_that_is_no_text_does_not_lose_the_run(tmp_path):
    root = make_folder(tmp_path / "images")
    (root / "a" / "x" / os.fsdecode(b"\xff\x1b[31m.png")).write_bytes(b"no image")
    settings = {
        "data": {"source": "folder", "root": str(root), "image_size": 16},
        "hold_out": {"test": "c"},
        "model": {"backbone": "cnn", "weights": None},
        "train": {"rounds": 1, "batch_size": 4},
    }
    done = run(Experiment(**settings), tmp_path / "runs", report=False)
    assert done.summary.status == "completed"
    said = [one.text for one in done.summary.diagnostics if r"\udcff\x1b[31m.png" in one.text]
    assert any(text.startswith("Ignored") for text in said)
    assert resume(done.folder).folder == done.folder


def test_a_file_that_is_gone_is_written_again_and_said(tmp_path, cache, caplog):
    settings = {**SMALL, "train": {**SMALL["train"], "rounds": 1, "local_epochs": 1}}
    folder = run(Experiment(**settings), tmp_path, cache=cache, report=False).folder
    (folder / "summary.json").unlink()
    for name in ("environment.json", "clients.json"):
        (folder / name).unlink()
    caplog.clear()
    resume(folder, cache=cache)
    (line,) = [one.message for one in caplog.records if "was gone" in one.message]
    assert "clients.json and environment.json" in line
    assert read_run(folder).status == "completed"


@pytest.mark.parametrize("share", [0, 0.01], ids=["none", "none of six after rounding"])
def test_a_run_that_evaluates_nothing_ends_and_says_so(tmp_path, cache, share):
    make_folder(tmp_path / "images", ("a", "b"), each=3)
    done = run(
        data={"source": "folder", "root": tmp_path / "images", "id_val": share, "id_test": share},
        clients=2,
        rounds=1,
        image_size=16,
        out=tmp_path / "run",
        cache=cache,
    )
    found = read_run(done.folder)
    assert found.status == "completed"
    assert not found.table
    codes = [one.code for one in found.summary.diagnostics]
    assert codes.count("nothing-evaluated") == 1
    assert done.report.is_file()
    assert resume(done.folder, cache=cache).was_complete


def test_a_run_that_goes_on_elsewhere_says_so(tmp_path, caplog):
    class Stop(Observer):
        def round(self, row):
            raise KeyboardInterrupt

    train = {"rounds": 2, "local_steps": 1, "batch_size": 8, "augmentation": "none"}
    data = {"source": "digits", "image_size": 8}
    few = {"clients": {"number": 2}, "precision": "float32"}
    chosen = Experiment(data=data, train=train, hold_out="sketch", **few)
    with pytest.raises(KeyboardInterrupt):
        run(chosen, tmp_path, observer=Stop(), report=False)
    (folder,) = tmp_path.glob("fedavg*")
    about = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps(about | {"precision": "bfloat16"}))
    resume(folder)
    assert "precision bfloat16 and goes on with float32" in caplog.text


def test_a_run_that_its_budget_ends_is_measured_at_its_end(tmp_path, monkeypatch):
    """Also where the round was measured as one among others, since one more could be afforded."""

    class Stop(Observer):
        def round(self, row):
            if row.round == 3:  # before it counts
                raise KeyboardInterrupt

    train = {"rounds": 3, "local_steps": 1, "batch_size": 8, "augmentation": "none"}
    data = {"source": "digits", "image_size": 8}
    chosen = Experiment(data=data, train=train, hold_out="sketch", evaluate={"every": 3})
    with pytest.raises(KeyboardInterrupt):
        run(chosen, tmp_path, observer=Stop(), report=False)
    (folder,) = tmp_path.glob("fedavg*")
    monkeypatch.setattr(Server, "affordable", lambda self, state: False)
    done = resume(folder)
    assert done.status == "completed"
    assert max(row.round for row in done.table.rows) == done.rounds_done == 2
