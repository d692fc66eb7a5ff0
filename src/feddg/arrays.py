"""Arrays kept on disk between runs, in numpy's own format; each file is replaced whole."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy

from feddg.files import open_file, replace_file, why

log = logging.getLogger("feddg")

_unwritable: set[Path] = set()


def keep_array(path: Path, array: numpy.ndarray) -> None:
    """Writes an array.

    Raises:
        OSError: it cannot be written; ``path`` is as it was.
    """
    replace_file(path, lambda aside: _write(aside, array))


def open_array(path: Path, *, writable: bool = True) -> numpy.ndarray:
    """Opens an array whose file is as large as its header says; it is read by page.

    Args:
        path: the file.
        writable: copy-on-write, which torch wraps without a warning.

    Raises:
        FileNotFoundError: there is none.
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
    with path.open("wb") as file:  # by name, numpy would add an ending
        numpy.save(file, array, allow_pickle=False)
