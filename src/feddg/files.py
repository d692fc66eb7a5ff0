"""Files that survive crashes, damage and curiosity.

They are replaced whole: after a crash they hold the old content or the new. What is written is for
its owner alone (files 0600 in folders 0700): nearly all of it is made from images. What is read is
looked at first: whatever stands where a file should be ends in one clear line, and nothing waits
for a writer that never comes.
"""

import errno
import os
import re
import stat
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from feddg.errors import FeddgError, RunError

FILE_MODE, FOLDER_MODE = 0o600, 0o700

_ASIDE = re.compile(r"\..+\.(\d+)\.\d+")
_CHUNK = 1 << 20
_WINDOWS = os.name == "nt"
# Windows waits for no writer, but changes bytes unless told otherwise.
_READ_PLAINLY = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def private_folder(path: Path) -> Path:
    """Makes a folder, and those above it that are missing, for its owner alone; returns it.

    A folder that is there stays as it is: its owner may have shared it.

    Raises:
        OSError: it cannot be made, or something else is in its place.
    """
    if not path.is_dir():
        if path != path.parent:
            private_folder(path.parent)
        path.mkdir(FOLDER_MODE, exist_ok=True)
    return path


@contextmanager
def alone(path: Path, busy: FeddgError, *, wait: float = 0.0) -> Iterator[None]:
    """Keeps other processes that ask for the same from writing a file meanwhile.

    Args:
        path: the file; its folder is there, it need not be.
        busy: raised where another process does not let go of it.
        wait: seconds to wait for that process.

    Raises:
        busy: see there.
        OSError: nothing can be written beside the file.
    """
    lock = path.with_name(f".{path.name}.lock")
    os.close(os.open(lock, os.O_CREAT | os.O_WRONLY, FILE_MODE))  # or says why it cannot be
    try:
        with FileLock(lock, timeout=wait):
            try:
                yield
            finally:
                with suppress(OSError):  # Windows lets go of it first, and removes it then
                    lock.unlink()
    except Timeout:
        raise busy from None


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Has ``write`` write a file aside, then puts it in place of ``path``; leaves no debris.

    Only its owner may read it, from before the first byte is written.

    Raises:
        OSError: it cannot be written; ``path`` is as it was.
    """
    private_folder(path.parent)
    aside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        os.close(os.open(aside, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, FILE_MODE))
        write(aside)
        aside.chmod(FILE_MODE)  # the writer may have made a new file
        with aside.open("r+b") as file:  # Windows writes out only what is open for writing
            sync(file)
        aside.replace(path)
        sync_folder(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def replace_bytes(path: Path, content: bytes) -> None:
    """Replaces a file by ``content``; see :func:`replace_file`."""
    replace_file(path, lambda aside: aside.write_bytes(content))


def replace_text(path: Path, content: str) -> None:
    """Replaces a file by ``content`` in UTF-8; see :func:`replace_file`."""
    replace_bytes(path, content.encode())


def append_text(path: Path, content: str) -> None:
    """Appends to a file, made for its owner alone if absent, and waits until it is on disk.

    Raises:
        OSError: it cannot be written.
    """
    with open(path, "ab", opener=lambda name, flags: os.open(name, flags, FILE_MODE)) as file:
        file.write(content.encode())
        sync(file)


def sync(file: IO[Any]) -> None:
    """Waits until what was written to an open file is on disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Waits until a folder's entries are on disk: a rename may be lost with the power otherwise."""
    with suppress(OSError):  # some file systems have no such thing
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sweep_asides(folder: Path, *, older_than: float = 0) -> None:
    """Removes half-written files of processes that were killed; what cannot be removed stays.

    Args:
        folder: where to look; not in folders below.
        older_than: age in seconds; for folders that other machines write to, too, whose processes
            cannot be looked up here.
    """
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            written_by = _ASIDE.fullmatch(entry.name)
            if written_by is None or _is_alive(int(written_by[1])):
                continue
            with suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime >= older_than:
                    os.unlink(entry.path)


def _is_alive(process: int) -> bool:
    if _WINDOWS:  # there, signal 0 is Ctrl-C
        import psutil

        return bool(psutil.pid_exists(process))
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def is_file(path: Path, fault: type[FeddgError] = RunError) -> bool:
    """Whether there is a file.

    Raises:
        fault: something else is in its place, or it cannot be told.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise fault(f"Cannot read {path}: {why(error)}.") from None
    if stat.S_ISREG(mode):
        return True
    raise fault(f"Cannot read {path}: it is {kind_of(mode)}, not a file.")


def kind_of(mode: int) -> str:
    """Says what is in place of a file, from its ``st_mode``."""
    if stat.S_ISDIR(mode):
        return "a folder"
    if stat.S_ISFIFO(mode):
        return "a pipe"
    return "a socket" if stat.S_ISSOCK(mode) else "a device"


Stamp = tuple[int, int, int]


def stamp(path: Path | str) -> Stamp | None:
    """Returns size and times of a regular file, which change with it; None for anything else."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def open_file(path: Path) -> IO[bytes]:
    """Opens a plain file to read bytes from it, without ever waiting as for a pipe's writer.

    Raises:
        OSError: it cannot be opened, or is no plain file.
    """
    handle = os.open(path, _READ_PLAINLY)
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, f"it is {kind_of(mode)}, not a file")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_text(path: Path, fault: type[FeddgError] = RunError, *, errors: str = "replace") -> str:
    """Returns a file's text; a byte order mark is left out.

    Args:
        path: the file.
        fault: what is raised.
        errors: ``replace`` for bytes that are no UTF-8, or ``strict``.

    Raises:
        fault: it cannot be read, or is no UTF-8 under ``strict``.
    """
    try:
        with open_file(path) as file:
            return file.read().decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        raise fault(f"{path} is not UTF-8 text (byte {error.start + 1}).") from None
    except (OSError, ValueError) as error:
        raise fault(f"Cannot read {path}: {why(error)}.") from None


def checksum(path: Path) -> int:
    """Returns the CRC-32 of a file's bytes, at some 3 GB/s; it finds every single flipped bit.

    Raises:
        OSError: it cannot be read.
    """
    found = 0
    with open_file(path) as file:
        while chunk := file.read(_CHUNK):
            found = zlib.crc32(chunk, found)
    return found


def why(error: Exception) -> str:
    """Returns the reason of an error that a file caused, in a few words."""
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def entries(folder: Path, fault: type[FeddgError]) -> Collection[os.DirEntry[str]]:
    """Returns what is in a folder, in the order of names.

    Raises:
        fault: it cannot be read.
    """
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        raise fault(f"Cannot read the folder {folder}: {why(error)}.") from None
