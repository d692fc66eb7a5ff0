"""The catalogue of odd, damaged and hostile inputs: paths, files, bytes, numbers, markup, names."""

import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

OUTSIDE = (
    *("../evil.png", "/evil.png", "a/../../evil.png", "a/..", ".."),
    *("C:\\evil.png", "C:evil.png", "a\\..\\..\\evil.png"),
)
"""Paths that lead out of their folder, on some system."""
NOT_UTF8 = b"\xff\xfe\x00"
NOT_FINITE = (math.nan, math.inf, -math.inf)
CONTROL = "\x1b[2J\n\x9b\u202e"
"""What would clear a terminal, forge a line or turn a text around."""
MARKUP = '<script>alert("x")</script><img src=http://example.org/x onerror=alert(1)>&amp;'
DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
"""JSON and YAML of a hundred thousand levels."""
LAUGHS = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}' if i else 'x'] * 9)}]\n" for i in range(9))
"""YAML whose aliases stand for 400 million values."""
PROGRAM = pickle.dumps(os.system)
"""A pickle that would run a program."""


def write(content: str) -> Callable[[Path], Any]:
    """Puts something else into a file."""
    return lambda path: path.write_text(content)


def write_bytes(content: bytes) -> Callable[[Path], Any]:
    """Puts other bytes into a file."""
    return lambda path: path.write_bytes(content)


def flip(path: Path, at: float = 0.9) -> None:
    """Flips one bit, some way into a file."""
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    """Cuts a file in half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def pipe(path: Path) -> Path:
    """Puts a pipe, which nobody writes to, in place of a file."""
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    return path


def folder(path: Path) -> Path:
    """Puts a folder in place of a file."""
    path.unlink(missing_ok=True)
    path.mkdir(parents=True)
    return path


def loop(path: Path) -> Path:
    """Puts a link that leads to itself in place of a file."""
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)
    return path


NO_FILES = {"missing": lambda path: None, "folder": folder, "pipe": pipe, "link to itself": loop}
"""What may be there in place of a file."""
CONTENTS = {
    "empty": b"",
    "not UTF-8": NOT_UTF8,
    "an image": b"\x89PNG\r\n\x1a\n\xff",
    "a zero byte": b"seed: 1\0",
    "a pickle": PROGRAM,
    "a header of 2^60 bytes": b"\0" * 7 + b"\x10" + b"{}",
    "a number": b"1",
    "a list": b"- a\n",
    "a JSON list": b"[]",
    "deep": DEEP.encode(),
    "aliases": LAUGHS.encode(),
    "control characters": CONTROL.encode(),
}
"""What no reader of YAML, JSON, CSV or weights can use."""
ODD_FILES: dict[str, Callable[[Path], Any]] = NO_FILES | {
    what: write_bytes(content) for what, content in CONTENTS.items()
}
