"""Safe reading and writing of files: text, YAML, arrays, and the cache."""

import errno
import hashlib
import itertools
import json
import logging
import os
import re
import stat
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

import numpy
import yaml
from filelock import FileLock, Timeout

from feddg.errors import FeddgError, RunError

log = logging.getLogger("feddg")
FILE_MODE, FOLDER_MODE = 0o600, 0o700

_ASIDE = re.compile(r"\..+\.\d+\.\d+")
A_DAY = 86_400
_CHUNK = 1 << 20
# Windows waits for no writer, but changes bytes unless told otherwise.
_READ_PLAINLY = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
MOST_VALUES = 100_000
"""Most values in a file with aliases expanded, because aliases can double them with every line."""
NO_FILE = "it is a folder, a pipe or a device, not a file"
DEEPEST = 50
"""Largest nesting depth of values."""


def private_folder(path: Path) -> Path:
    """Creates a private folder and its missing parents, for the owner only; returns it.

    An existing folder is not changed, because its owner may have shared it.

    Raises:
        OSError: it cannot be created, or something else is in its place.
    """
    if not path.is_dir():
        if path != path.parent:
            private_folder(path.parent)
        path.mkdir(FOLDER_MODE, exist_ok=True)
    return path


@contextmanager
def alone(path: Path, busy: FeddgError, *, wait: float = 0.0) -> Iterator[None]:
    """Locks a file against other processes that also use this lock.

    Args:
        path: the file, which need not exist; its folder must.
        busy: the error if another process holds the lock.
        wait: seconds to wait for the lock.

    Raises:
        busy: another process holds the lock.
        OSError: the lock file cannot be written beside the file.
    """
    lock = path.with_name(f".{path.name}.lock")
    os.close(os.open(lock, os.O_CREAT | os.O_WRONLY, FILE_MODE))  # or says why it cannot be
    try:
        # The lock file stays: a process that had opened a removed one would lock nothing.
        with FileLock(lock, timeout=wait):
            yield
    except Timeout:
        raise busy from None


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a temporary file with ``write`` and moves it to ``path``; leaves no partial file.

    Only its owner can read it, from the beginning.

    Raises:
        OSError: it cannot be written; ``path`` is unchanged.
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


def set_aside(path: Path) -> Path:
    """Renames a file that people edit, so that another can take its place; returns the new path."""
    names = (f".former{number or ''}{path.suffix}" for number in itertools.count())
    former = next(new for name in names if not (new := path.with_suffix(name)).exists())
    with file_faults(RunError, f"cannot rename {path}"):
        path.replace(former)
    return former


def append_text(path: Path, content: str) -> None:
    """Appends to a file, created for its owner only, and waits until it is on disk.

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
    """Waits until a folder's entries are on disk, so that a rename survives a power failure."""
    with suppress(OSError):  # some file systems have no such thing
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sweep_asides(folder: Path, *, older_than: float = A_DAY) -> None:
    """Removes temporary files of killed processes, if possible.

    Args:
        folder: the folder; its subfolders are not searched.
        older_than: age in seconds above which nobody writes them any more; 0 where no other process
            writes.
    """
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _ASIDE.fullmatch(entry.name):
                with suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime >= older_than:
                        os.unlink(entry.path)


def is_file(path: Path, fault: type[FeddgError] = RunError) -> bool:
    """Returns whether a file exists.

    Raises:
        fault: something else is in its place, or it cannot be checked.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise fault(f"Cannot read {path}: {why(error)}.") from None
    if stat.S_ISREG(mode):
        return True
    raise fault(f"Cannot read {path}: {NO_FILE}.")


Stamp = tuple[int, int, int]


def stamp(path: Path | str) -> Stamp | None:
    """Returns size and times of a regular file, which change with its content; else None."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def open_file(path: Path) -> BufferedReader:
    """Opens a regular file for reading bytes, without blocking on pipes.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    handle = os.open(path, _READ_PLAINLY)
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, NO_FILE)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_text(path: Path, fault: type[FeddgError] = RunError, *, errors: str = "replace") -> str:
    """Returns a file's text without a byte order mark.

    Args:
        path: the file.
        fault: the exception to raise.
        errors: ``replace`` for bytes that are not UTF-8, or ``strict``.

    Raises:
        fault: it cannot be read, or is not UTF-8 with ``strict``.
    """
    try:
        with open_file(path) as file:
            return file.read().decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        raise fault(f"{path} is not UTF-8 text (byte {error.start + 1}); save it so.") from None
    except (OSError, ValueError) as error:
        raise fault(f"Cannot read {path}: {why(error)}.") from None


def checksum(path: Path) -> int:
    """Returns the CRC-32 of a file, at about 3 GB/s; it detects every single flipped bit.

    Raises:
        OSError: it cannot be read.
    """
    crc = 0
    with open_file(path) as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


def digest(path: Path, kind: str = "sha256") -> str:
    """Returns the hash of a file, ``sha256`` or ``md5``, in hexadecimal digits.

    Raises:
        OSError: it cannot be read.
    """
    with open_file(path) as file:
        new = partial(hashlib.new, kind, usedforsecurity=False)
        return hashlib.file_digest(file, new).hexdigest()


def why(error: Exception) -> str:
    """Returns the reason of a file error in a few words."""
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


@contextmanager
def file_faults(kind: type[FeddgError], doing: str, *also: type[Exception]) -> Iterator[None]:
    """Turns an error of files in its block into one of ours, which says what failed, and why.

    Args:
        kind: the error to raise.
        doing: what failed, as ``Cannot write x``.
        also: further kinds of errors that mean the same.
    """
    faults: tuple[type[Exception], ...] = (OSError, *also)
    try:
        yield
    except faults as error:
        raise kind(f"{doing}: {why(error)}.") from None


def entries(folder: Path, fault: type[FeddgError]) -> Collection[os.DirEntry[str]]:
    """Returns the entries of a folder, sorted by name.

    Raises:
        fault: it cannot be read.
    """
    with file_faults(fault, f"Cannot read the folder {folder}"), os.scandir(folder) as listing:
        return sorted(listing, key=lambda entry: entry.name)


_warn_once = cache(log.warning)


def open_array(path: Path, *, writable: bool = True) -> numpy.ndarray:
    """Opens a memory-mapped array, after checking the file's size against its header.

    Args:
        path: the file.
        writable: opens it copy-on-write, which torch wraps without a warning.

    Raises:
        FileNotFoundError: it does not exist.
        OSError: it cannot be read.
        ValueError: it is damaged.
    """
    open_file(path).close()  # numpy would wait for a pipe's writer
    try:
        array: numpy.ndarray = numpy.load(
            path, mmap_mode="c" if writable else "r", allow_pickle=False
        )
    except EOFError as error:
        raise ValueError(why(error)) from None
    return array


def kept_array(path: Path, compute: Callable[[], numpy.ndarray]) -> numpy.ndarray:
    """Opens a cached array; computes and stores it first if it is missing or damaged.

    If the file cannot be written or read, the array is used without being stored; this is reported
    once per folder and reason.
    """
    try:
        return open_array(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        log.warning("%s is damaged (%s); it is computed again", path, why(error))
    array = compute()

    def write(aside: Path) -> None:
        with aside.open("wb") as file:  # by name, numpy would add an ending
            numpy.save(file, array, allow_pickle=False)

    try:
        replace_file(path, write)
        return open_array(path)
    except (OSError, ValueError) as error:
        _warn_once(
            "Cannot keep what is computed once in %s: %s; it is computed again whenever it is "
            "needed. Free some space there, or name another cache folder.",
            path.parent,
            why(error),
        )
        return array


# What is kept on disk between runs, and where it is.
#
# Decoded pixels are written by :mod:`feddg.data.decoded`, stylized images and whatever else
# methods compute once by :meth:`feddg.clients.client.Client.cached`.


def cache_folder(chosen: Path | str | None = None) -> Path:
    """Returns the cache folder: ``chosen``, by default ``$FEDDG_CACHE`` or the user's cache."""
    if chosen is not None:
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("FEDDG_CACHE") or f"{home}/feddg")


_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]
    """Loads plain values only; a duplicate field is an error."""

    def construct_mapping(self, node: object, deep: bool = False) -> object:
        seen = {"<<"}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key.value in seen and key.value != "<<":
                fault = f"{key.value!r} is said twice"
                raise yaml.constructor.ConstructorError(None, None, fault, key.start_mark)
            seen |= {key.value} if isinstance(key, yaml.ScalarNode) else set()
        return super().construct_mapping(node, deep)

    def as_written(self, node: yaml.ScalarNode) -> object:
        """Returns a value that would be written the same again, else its text.

        A domain called 01, 1.10 or no is not 1, 1.1 or False; numbers are read from text, too.
        """
        kind = node.tag.rpartition(":")[2]
        if kind == "timestamp":
            return node.value
        value = getattr(self, f"construct_yaml_{kind}")(node)
        special = kind == "float" and set(node.value.lower()) & set("einf")
        return value if special or str(value).lower() == node.value.lower() else node.value


for _kind in ("int", "float", "bool", "timestamp"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.as_written)


def read_fields_of(path: Path, what: str, fault: type[FeddgError]) -> dict[str, Any]:
    """Reads the fields of a YAML file; returns none for an empty file.

    Args:
        path: the file.
        what: the kind of file, for messages.
        fault: the exception to raise.

    Raises:
        fault: the file is missing, unreadable, not YAML, or does not contain fields.
    """
    if not is_file(path, fault):
        raise fault(f"{what} {path} does not exist")
    text = read_text(path, fault, errors="strict")
    try:
        return parse_fields(text)
    except ValueError as error:
        raise fault(f"{what} {path} {error}") from None


def parse_fields(text: str) -> dict[str, object]:
    """Parses fields; returns none for an empty text.

    Raises:
        ValueError: it is not YAML, or does not contain fields; the message is to follow a file's
            name.
    """
    try:
        _check_depth(text)
        content = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"is not valid YAML: {_place(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError("must hold fields such as 'data: digits'")
    for count, key in enumerate(_keys(content)):
        if count > MOST_VALUES:
            raise ValueError(f"holds more than {MOST_VALUES:,} values, aliases written out")
        if not isinstance(key, str):
            raise ValueError(f"has a field whose name is not text: {key!r}")
    return content


def _check_depth(text: str) -> None:
    """Refuses deep nesting by reading events, because the loader would crash the process."""
    depth = 0
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} levels deep")


def _keys(content: object) -> Iterator[object]:
    """Yields the field of each value; never ends for a value that contains itself."""
    pending = [("", content)]
    while pending:
        name, value = pending.pop()
        yield name
        if isinstance(value, dict):
            pending += value.items()
        elif isinstance(value, list | tuple | set):
            pending += [("", inner) for inner in value]


def _place(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} (line {mark.line + 1}, column {mark.column + 1})"
    return " ".join(str(error).split())


def hash_of(value: object, content: numpy.ndarray | None = None) -> str:
    """Returns a hash of 32 characters of a JSON value and an array's bytes."""
    digest = hashlib.blake2b(json.dumps(value).encode(), digest_size=16)
    if content is not None:
        digest.update(numpy.ascontiguousarray(content).data)
    return digest.hexdigest()
