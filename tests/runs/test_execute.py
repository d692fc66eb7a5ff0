"""Whole runs on digits: records, resume after a kill, faults."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from feddg import storage
from feddg.api import resume, run
from feddg.clients.threads import threads
from feddg.errors import FeddgError, RunError
from feddg.evaluation.accuracy import Score
from feddg.experiment import Experiment
from feddg.methods.base import State
from feddg.runs import folder as folder_module
from feddg.runs.folder import RunFolder
from feddg.runs.model import load_model
from feddg.runs.observer import Observer
from feddg.runs.reading import read_rows, read_run
from feddg.settings import EvaluateSettings

ROUNDS = 3
CHANNELS = 64
SMALL = {
    "data": "digits",
    "hold_out": {"val": "chalk", "test": "sketch"},
    "clients": {"number": 6, "per_round": 2},
    "train": {"rounds": ROUNDS, "local_epochs": 1, "batch_size": 64, "lr": 1e-3},
}


def experiment(**change) -> Experiment:
    return Experiment(**{**SMALL, **change})


def final_state(folder: Path) -> bytes:
    """The bytes of the last checkpoint's state."""
    index = json.loads((folder / "checkpoint/checkpoint.json").read_text())
    assert index["round"] == ROUNDS
    return (folder / "checkpoint" / index["state"]).read_bytes()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, cache):
    """A completed PARDON run."""
    return run(experiment(method="pardon"), tmp_path_factory.mktemp("runs"), cache=cache)


@pytest.mark.parametrize("count", [1, 3])
def test_the_number_of_threads_changes_nothing_of_a_small_network(
    undisturbed, tmp_path, cache, count
):
    with threads(count):
        again = run(experiment(method="pardon"), tmp_path, cache=cache)
    assert final_state(again.folder) == final_state(undisturbed.folder)


def test_the_folder_holds_everything(undisturbed):
    names = {path.name for path in undisturbed.folder.iterdir()}
    assert names >= {
        "experiment.yaml",
        "environment.json",
        "clients.json",
        "metrics.jsonl",
        "ledger.jsonl",
        "setup.safetensors",
        "summary.json",
        "report.html",
        "figures",
        "events",
        "checkpoint",
    }
    assert (undisturbed.folder / "figures/styles.png").stat().st_size > 1000
    assert any((undisturbed.folder / "events").iterdir())
    assert load_file(undisturbed.folder / "setup.safetensors")["style"].shape == (6, 2, CHANNELS)


def test_the_groups_of_similar_styles_are_kept_and_shown(undisturbed):
    groups = undisturbed.record.metrics.setup.groups["style"]
    assert sorted(id for group in groups for id in group) == list(range(6))
    styles = load_file(undisturbed.folder / "setup.safetensors")["style"].double().flatten(1)
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


@pytest.mark.parametrize(
    ("fields", "measured"),
    [
        ({"every": 4}, [4, 8, 10]),
        ({"every": 10, "every_of_last": 3}, [8, 9, 10]),
        ({"every": 3, "every_of_last": 1}, [3, 6, 9, 10]),
        ({"every": 1, "every_of_last": 20}, list(range(1, 11))),
    ],
)
def test_which_rounds_are_evaluated(fields, measured):
    settings = EvaluateSettings(**fields)
    assert [r for r in range(1, 11) if settings.after(r, 10)] == measured


def test_every_round_is_evaluated_on_every_split(undisturbed):
    evaluations = undisturbed.record.evaluations
    assert evaluations.rounds == list(range(ROUNDS + 1))
    assert evaluations.domains("test") == ["sketch"]
    assert evaluations.domains("val") == ["chalk"]
    assert sorted(evaluations.domains("id_val")) == ["ink", "photo"]
    last = evaluations.get(ROUNDS, "test", "sketch")
    assert sum(map(sum, last.confusion)) == last.examples
    right = sum(last.confusion[i][i] for i in range(10))
    assert right / last.examples == pytest.approx(last.accuracy)


def test_the_summary_agrees_with_the_records(undisturbed):
    record = undisturbed.record
    summary = json.loads((undisturbed.folder / "summary.json").read_text())
    assert summary["status"] == "completed"
    final = record.evaluations.get(ROUNDS, "test", "sketch").accuracy
    assert summary["final"]["test"]["accuracy"] == final
    rows = read_rows(undisturbed.folder / "ledger.jsonl")
    sent = [row["bytes"] for row in rows if row["kind"] == "message"]
    assert summary["bytes"]["total"] == sum(sent)
    style = 2 * CHANNELS * 4
    assert summary["bytes"]["setup_up_per_client"] == style
    assert summary["bytes"]["setup_down_per_client"] == style
    assert summary["peak_memory_bytes"] > 1e8


def test_a_complete_run_is_not_run_again(undisturbed, cache, monkeypatch):
    monkeypatch.setattr("feddg.runs.context.load_images", lambda *_: pytest.fail("ran again"))
    again = run(undisturbed.experiment, undisturbed.folder.parent, cache=cache)
    assert again.folder == undisturbed.folder


def test_the_model_predicts_what_the_run_measured(undisturbed):
    import torch

    from feddg.data.data_set import load_source

    model = load_model(undisturbed.folder)
    table = load_source("digits")
    rows = table.domains == table.domain_id("sketch")
    images = torch.from_numpy(table.images[rows]).permute(0, 3, 1, 2).float() / 255
    with torch.inference_mode():
        predicted = model(images).argmax(1).numpy()
    accuracy = (predicted == table.labels[rows]).mean()
    assert accuracy == pytest.approx(undisturbed.record.evaluations.accuracy(ROUNDS, "test"))
    assert model.class_names == tuple("0123456789")


class Interrupt(Observer):
    """Presses Ctrl-C in the middle of a round."""

    def __init__(self, round: int) -> None:
        self.at = round

    def client(self, round, reply):
        if round == self.at:
            raise KeyboardInterrupt


@pytest.mark.parametrize("method", ["pardon", "fedbn"])
def test_ctrl_c_and_resume_give_the_same_bits(method, tmp_path, cache):
    whole = run(experiment(method=method), tmp_path / "whole", cache=cache, report=False)
    chosen = experiment(method=method)
    with pytest.raises(KeyboardInterrupt):
        run(chosen, tmp_path, observer=Interrupt(2), cache=cache)
    record = read_run(tmp_path / chosen.label)
    assert record.status == "interrupted"
    assert record.rounds_done == 1
    done = resume(tmp_path / chosen.label, cache=cache)
    assert done.record.status == "completed"
    assert final_state(done.folder) == final_state(whole.folder)
    assert done.record.metrics.setup.groups == whole.record.metrics.setup.groups
    clean = [_timeless(row) for row in read_rows(whole.folder / "metrics.jsonl")]
    assert [_timeless(row) for row in read_rows(done.folder / "metrics.jsonl")] == clean
    assert read_rows(done.folder / "ledger.jsonl") == read_rows(whole.folder / "ledger.jsonl")


def _timeless(row):
    return {k: v for k, v in row.items() if k not in ("seconds", "images_per_second")}


@pytest.mark.parametrize("wait", [0.0, 0.4])
def test_kill_9_at_any_moment_and_resume_give_the_same_bits(wait, undisturbed, tmp_path, cache):
    chosen = undisturbed.experiment
    (tmp_path / "e.yaml").write_text(chosen.to_yaml())
    command = [sys.executable, "-m", "feddg", "run", tmp_path / "e.yaml", "--out", tmp_path, "-q"]
    environment = {**os.environ, "FEDDG_CACHE": str(cache)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    metrics = tmp_path / chosen.label / "metrics.jsonl"
    while not (metrics.is_file() and '"kind":"round"' in metrics.read_text()):
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.01)
    time.sleep(wait)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = resume(tmp_path / chosen.label, cache=cache)
    assert final_state(done.folder) == final_state(undisturbed.folder)


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EROFS])
def test_before_the_first_checkpoint_no_resume_is_recommended(tmp_path, cache, monkeypatch, fault):
    def full(path, content):
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr(folder_module, "replace_bytes", full)
    with pytest.raises(RunError, match=r"then the same command begins the run$"):
        run(experiment(), tmp_path, cache=cache)
    monkeypatch.undo()
    run(experiment(), tmp_path, cache=cache, report=False)


def test_a_full_disk_keeps_the_last_checkpoint_and_says_so(tmp_path, cache, monkeypatch):
    chosen = experiment()
    real = folder_module.save_file

    def full(tensors, path, metadata=None):
        if "state-2" in str(path):
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, path, metadata)

    monkeypatch.setattr(folder_module, "save_file", full)
    with pytest.raises(RunError, match=r"disk is full.*free some space.*feddg resume"):
        run(chosen, tmp_path, cache=cache)
    folder = tmp_path / chosen.label
    assert json.loads((folder / "checkpoint/checkpoint.json").read_text())["round"] == 1
    assert not list((folder / "checkpoint").glob(".*"))
    assert read_run(folder).status == "failed"
    monkeypatch.undo()
    done = resume(folder, cache=cache)
    whole = run(chosen, tmp_path / "whole", cache=cache, report=False)
    assert final_state(done.folder) == final_state(whole.folder)


def test_a_crash_at_any_write_of_a_checkpoint_leaves_a_whole_one(tmp_path, monkeypatch):
    def state(round: int) -> State:
        return State({"w": torch.full((3,), float(round))}, {}, None, round, ROUNDS)

    def memory(round: int) -> dict:
        return {0: {"m": torch.full((2,), float(round))}}

    real = storage.replace_file
    # A checkpoint is a memory, a state and the index: each may be the last that is written.
    for written, expected in enumerate((1, 1, 1, 2)):
        with RunFolder(tmp_path / str(written)) as folder:
            folder.save_checkpoint(state(1), memory(1), {0})
            left = [written]

            def crash(path, write, left=left):
                if left[0] == 0:
                    path.with_name(f".{path.name}.4194305.1").write_text("half")
                    raise KeyboardInterrupt
                left[0] -= 1
                real(path, write)

            monkeypatch.setattr(storage, "replace_file", crash)
            monkeypatch.setattr(folder_module, "replace_file", crash)
            with suppress(KeyboardInterrupt):
                folder.save_checkpoint(state(2), memory(2), {0})
            monkeypatch.undo()
        with RunFolder(tmp_path / str(written)) as folder:
            found = folder.load_checkpoint()
            assert found.state.round == expected
            assert torch.equal(found.state.weights["w"], state(expected).weights["w"])
            assert torch.equal(found.memories[0]["m"], memory(expected)[0]["m"])
            folder.save_checkpoint(state(2), memory(2), {0})
            names = {path.name for path in (folder.path / "checkpoint").iterdir()}
        assert names == {"checkpoint.json", "state-2.safetensors", "memory-0-2.safetensors"}


def test_what_no_checkpoint_names_is_swept_out_of_the_models(tmp_path):
    weights = {"w": torch.ones(3)}
    with RunFolder(tmp_path) as folder:
        folder.write_tensors("models/kept.safetensors", weights)
        kept = {"best_held_out": "kept.safetensors"}
        folder.save_checkpoint(State(weights, {}, None, 2, ROUNDS), {}, set(), kept)
        folder.write_tensors("models/unlisted.safetensors", weights)
        (tmp_path / "models/.kept.safetensors.4194305.1").write_text("half")
    with RunFolder(tmp_path) as folder:
        assert not list((tmp_path / "models").glob(".*"))
        folder.load_checkpoint()
        assert [path.name for path in (tmp_path / "models").iterdir()] == ["kept.safetensors"]


def test_a_folder_with_a_different_experiment_is_left_alone(tmp_path, cache):
    chosen = experiment()
    folder = tmp_path / chosen.label
    folder.mkdir()
    (folder / "experiment.yaml").write_text(experiment(seed=9).to_yaml())
    with pytest.raises(RunError, match="different experiment"):
        run(chosen, tmp_path, cache=cache)
    assert not (folder / "metrics.jsonl").exists()


def test_two_processes_do_not_write_one_folder(tmp_path):
    with RunFolder(tmp_path / "r"), pytest.raises(RunError, match="another process"):
        RunFolder(tmp_path / "r")


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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hold_out": {"test": "skech"}}, "sketch"),
        ({"hold_out": {}}, "--hold-out"),
        ({"hold_out": {"test": ["ink", "chalk", "photo", "sketch"]}}, "train"),
        ({"clients": {"number": 100_000}}, "100000|100,000"),
        ({"data": {"source": "folder"}}, "root"),
        ({"data": {"source": "digit"}}, "digits"),
    ],
)
def test_mistakes_end_before_round_1_with_one_clear_error(change, words, tmp_path, cache):
    with pytest.raises(FeddgError, match=words):
        run(experiment(**change), tmp_path, cache=cache)


def test_scores_are_counted_by_hand():
    import numpy
    import torch

    from feddg.data.pixels import ArrayPixels
    from feddg.evaluation.accuracy import Evaluation

    pixels = ArrayPixels(numpy.arange(5, dtype=numpy.uint8)[:, None, None, None].repeat(3, 3))
    labels, domains = numpy.array([0, 1, 1, 0, 1]), numpy.array([0, 0, 2, 2, 2])

    class Brightness(torch.nn.Module):
        def forward(self, images):
            # Images 0..4 have brightness i / 255: class 1 from image 2 on.
            bright = images.mean((1, 2, 3)) * 255
            return torch.stack([2 - bright - 0.5, bright - 2 + 0.5], 1)

    rows = {"test": numpy.arange(5)}
    evaluation = Evaluation(
        pixels, rows, labels, domains, ("a", "b", "c"), 2, 2, torch.device("cpu")
    )
    scores: list[Score] = evaluation.scores(Brightness())
    assert [(s.domain, s.correct, s.examples) for s in scores] == [("a", 1, 2), ("c", 2, 3)]
    assert scores[1].confusion.tolist() == [[0, 1], [0, 2]]
    # Image 0: logits (1.5, -1.5), label 0. Image 1: (0.5, -0.5), label 1.
    by_hand = (numpy.log(1 + numpy.exp(-3)) + numpy.log(1 + numpy.exp(1))) / 2
    assert scores[0].loss == pytest.approx(by_hand, rel=1e-6)
