"""Files: written whole, for their owner alone."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from feddg import storage
from feddg.storage import append_text, private_folder, replace_file, replace_text


@pytest.fixture
def open_umask() -> Iterator[None]:
    """A mask that hides nothing by itself."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_content_is_private_while_it_is_written(tmp_path, open_umask):
    seen = []
    replace_file(tmp_path / "a" / "b", lambda aside: seen.append(mode(aside)))
    assert seen == [0o600]
    append_text(tmp_path / "a" / "c", "row\n")
    append_text(tmp_path / "a" / "c", "row\n")
    assert (mode(tmp_path / "a" / "c"), (tmp_path / "a" / "c").read_text()) == (0o600, "row\n" * 2)


def test_a_writer_that_makes_a_new_file_changes_nothing(tmp_path, open_umask):
    def write(aside: Path) -> None:
        aside.unlink()
        aside.write_text("secret")

    replace_file(tmp_path / "b", write)
    assert mode(tmp_path / "b") == 0o600


def test_folders_that_are_there_keep_their_mode(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    assert private_folder(shared / "runs" / "one") == shared / "runs" / "one"
    assert [mode(p) for p in (shared, shared / "runs", shared / "runs/one")] == [
        *(0o755, 0o700, 0o700)
    ]
    replace_text(shared / "file", "")
    assert mode(shared) == 0o755


def test_on_windows_no_process_is_sent_a_signal_to_see_whether_it_lives(monkeypatch, tmp_path):
    psutil = pytest.importorskip("psutil")
    monkeypatch.setattr(storage, "_WINDOWS", True)
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("signal 0 is Ctrl-C on Windows"))
    monkeypatch.setattr(psutil, "pid_exists", lambda process: process == 1)
    for process in (1, 2):
        (tmp_path / f".rows.json.{process}.7").write_text("half")
    storage.sweep_asides(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == [".rows.json.1.7"]
