"""A run folder: checkpoints stay whole, one process writes, strangers' files stay."""

import os
import time
from contextlib import suppress

import pytest
import torch

from feddg import storage
from feddg.errors import RunError
from feddg.methods.base import State
from feddg.runs import folder as folder_module
from feddg.runs.folder import RunFolder


def test_a_crash_at_any_write_of_a_checkpoint_leaves_a_whole_one(tmp_path, monkeypatch):
    def state(round: int) -> State:
        return State({"w": torch.full((3,), float(round))}, {}, None, round, 3)

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


def test_two_processes_do_not_write_one_folder(tmp_path):
    with RunFolder(tmp_path / "r"), pytest.raises(RunError, match="another process"):
        RunFolder(tmp_path / "r")


def test_a_failed_runs_folder_stays_where_it_was_there_before(tmp_path):
    with RunFolder(tmp_path / "new") as ours:
        ours.write_json("figures/captions.json", {})
        ours.remove_unstarted()
    assert not ours.path.exists()
    for name in ("checkpoint/checkpoint.json", "privacy.jsonl", "opened_sums.jsonl"):
        with RunFolder(tmp_path / name.replace("/", "-")) as begun:
            begun.replace(name, "")
            begun.remove_unstarted()
        assert (begun.path / name).is_file()
    (tmp_path / "theirs").mkdir()
    with RunFolder(tmp_path / "theirs") as theirs:
        theirs.write_json("clients.json", {})
        theirs.remove_unstarted()
    assert (theirs.path / "clients.json").is_file()


def test_what_no_checkpoint_names_is_swept_out_of_the_models(tmp_path):
    weights = {"w": torch.ones(3)}
    with RunFolder(tmp_path) as folder:
        folder.write_tensors("models/kept.safetensors", weights)
        kept = {"best_held_out": "kept.safetensors"}
        folder.save_checkpoint(State(weights, {}, None, 2, 3), {}, set(), kept)
        folder.write_tensors("models/unlisted.safetensors", weights)
        (tmp_path / "models/.kept.safetensors.4194305.1").write_text("half")
    with RunFolder(tmp_path) as folder:
        assert not list((tmp_path / "models").glob(".*"))
        folder.load_checkpoint()
        assert [path.name for path in (tmp_path / "models").iterdir()] == ["kept.safetensors"]


def test_a_page_that_is_written_meanwhile_is_not_swept(tmp_path):
    page, old = tmp_path / ".report.html.4194305.1", tmp_path / ".report.html.4194306.1"
    for file in (page, old):
        file.write_text("half")
    os.utime(old, (0, time.time() - 100_000))
    RunFolder(tmp_path).close()
    assert page.exists()
    assert not old.exists()
