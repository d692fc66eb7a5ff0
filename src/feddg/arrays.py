"""Arrays kept on disk between runs, each with a checksum that is looked at before it is believed.

A file is numpy's own format with eight bytes behind it, which numpy does not read: ``CRC1`` and the
CRC-32 of all before them.
"""

import logging
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy

from feddg.files import open_file, replace_file, why

_MARK = b"CRC1"
_TAIL = struct.Struct("<4sI")
_CHUNK = 1 << 20
log = logging.getLogger("feddg")

_unwritable: set[Path] = set()
_whole: set[tuple[str, int, int, int]] = set()
"""Files whose bytes this process has looked at; memory-mapped, they are opened often."""


def keep_array(path: Path, array: numpy.ndarray) -> None:
    """Writes an array with its checksum.

    Raises:
        OSError: it cannot be written; ``path`` is as it was.
    """
    replace_file(path, lambda aside: _write(aside, array))


def open_array(path: Path) -> numpy.ndarray:
    """Opens an array copy-on-write: read by page, and torch may wrap it without a warning.

    Its bytes are compared with the checksum once per process, at some 3 GB/s.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be read.
        ValueError: it is damaged.
    """
    status = path.stat()
    identity = (str(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if identity not in _whole:
        _check(path)
        _whole.add(identity)
    array: numpy.ndarray = numpy.load(path, mmap_mode="c", allow_pickle=False)
    return array


def kept_array(path: Path, compute: Callable[[], numpy.ndarray]) -> numpy.ndarray:
    """Opens an array, computed and kept first where there is none, or a damaged one.

    A file that cannot be written or read costs time, not the run: it is said, once per folder and
    process, and the array is used without being kept.
    """
    try:
        return open_array(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        log.warning("%s is damaged (%s); it is computed again", path, why(error))
    array = compute()
    try:
        keep_array(path, array)
        return open_array(path)
    except (OSError, ValueError) as error:
        if path.parent not in _unwritable:
            _unwritable.add(path.parent)
            log.warning(
                "Cannot keep what is computed once in %s: %s; it is computed again whenever it is "
                "needed. Free some space there, or name another cache folder.",
                path.parent,
                why(error),
            )
        return array


def _write(path: Path, array: numpy.ndarray) -> None:
    with path.open("r+b") as file:  # by name, numpy would add an ending
        numpy.save(file, array, allow_pickle=False)
        end = file.tell()
        file.seek(0)
        file.flush()
        found = _sum(file, end)
        file.write(_TAIL.pack(_MARK, found))


def _check(path: Path) -> None:
    with open_file(path) as file:
        end = path.stat().st_size - _TAIL.size
        found = _sum(file, end)
        tail = file.read()
    if len(tail) != _TAIL.size or not tail.startswith(_MARK):
        raise ValueError("it has no checksum")
    if _TAIL.unpack(tail)[1] != found:
        raise ValueError("its checksum is another one")


def _sum(file: object, end: int) -> int:
    found = 0
    while end > 0 and (chunk := file.read(min(_CHUNK, end))):  # type: ignore[attr-defined]
        found, end = zlib.crc32(chunk, found), end - len(chunk)
    return found
