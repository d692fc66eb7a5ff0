"""Files: written whole, for their owner alone."""

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import Timeout

from feddg import storage
from feddg.errors import RunError
from feddg.storage import (
    alone,
    append_text,
    parse_fields,
    private_folder,
    replace_file,
    replace_text,
)

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


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


class OlderLock:
    """A lock as filelock's before 3.24: what it holds may be a file that is no longer there."""

    opened = threading.Event()

    def __init__(self, path: Path, timeout: float) -> None:
        self._handle, self._timeout = os.open(path, os.O_RDWR | os.O_CREAT), timeout

    def __enter__(self) -> None:
        self.opened.set()
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | (0 if self._timeout else fcntl.LOCK_NB))
        except BlockingIOError:
            raise Timeout("") from None

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)


@pytest.mark.skipif(fcntl is None, reason="Windows removes the file itself")
def test_who_waited_for_a_lock_has_the_lock_that_others_ask_for(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "FileLock", OlderLock)
    file, busy = tmp_path / "results.csv", RunError("busy")
    inside, leave = threading.Event(), threading.Event()

    def waits():
        with alone(file, busy, wait=60):
            inside.set()
            leave.wait(60)

    waiting = threading.Thread(target=waits)
    with alone(file, busy):
        OlderLock.opened.clear()
        waiting.start()
        assert OlderLock.opened.wait(60)
    assert inside.wait(60)
    try:
        with pytest.raises(RunError, match="busy"), alone(file, busy):
            pass
    finally:
        leave.set()
        waiting.join()


APPENDS = """
import sys
from pathlib import Path
from feddg.errors import RunError
from feddg.storage import alone, replace_text

file = Path(sys.argv[1])
for row in range(40):
    with alone(file, RunError("busy"), wait=300):
        replace_text(file, (file.read_text() if file.exists() else "") + sys.argv[2])
"""


def test_no_row_of_several_processes_is_lost(tmp_path):
    file = tmp_path / "results.csv"
    words = [sys.executable, "-c", APPENDS, str(file)]
    processes = [subprocess.Popen([*words, f"{number}\n"]) for number in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert sorted(file.read_text().split()) == ["0"] * 40 + ["1"] * 40 + ["2"] * 40


def test_a_name_that_looks_like_something_else_is_read_as_it_is_written():
    names = ["01", "010", "1.10", "1_0", "0x1F", "12:30", "2026-01-01", "no", "On", "+3"]
    values = [1, -3, 0.5, 1.0, 1.0e-3, 1.5e3, float("inf"), True, False, None]
    written = "1, -3, 0.5, 1.0, 1.0e-3, 1.5e+3, .inf, true, False, null"
    assert parse_fields(f"a: [{', '.join(names)}]\nb: [{written}]") == {"a": names, "b": values}
