"""Files that are replaced whole: after a crash they hold the old content or the new."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Has ``write`` write a file aside, then puts it in place of ``path``; leaves no debris.

    Raises:
        OSError: it cannot be written; ``path`` is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        write(aside)
        with aside.open("rb") as file:
            sync(file)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def replace_bytes(path: Path, content: bytes) -> None:
    """Replaces a file by ``content``; see :func:`replace_file`."""
    replace_file(path, lambda aside: aside.write_bytes(content))


def replace_text(path: Path, content: str) -> None:
    """Replaces a file by ``content`` in UTF-8; see :func:`replace_file`."""
    replace_bytes(path, content.encode())


def sync(file: IO[Any]) -> None:
    """Waits until what was written to an open file is on disk."""
    file.flush()
    os.fsync(file.fileno())
