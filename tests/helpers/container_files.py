"""Dockerfiles, read as the builder reads them, and the rules that all of ours keep.

The rules are those of hadolint and of Docker's own list of good practice that matter here.
"""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

Instruction = tuple[str, str]
"""Its name in capitals, and the rest of its line."""


def instructions(file: Path) -> list[Instruction]:
    """Returns a Dockerfile's instructions, continued lines joined, comments left out."""
    lines = [line for line in file.read_text("utf-8").splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    split = (line.split(None, 1) for line in joined.splitlines() if line.strip())
    return [(name.upper(), rest) for name, rest in split]


def shell_commands(said: list[Instruction]) -> Iterator[list[str]]:
    """Yields the commands that RUN carries out, one by one."""
    for name, rest in said:
        if name == "RUN":
            for command in rest.split("&&"):
                yield shlex.split(command)


def faults(file: Path, context: Path) -> list[str]:
    """Returns which rules a Dockerfile breaks.

    Args:
        file: the Dockerfile.
        context: the folder that it is built from.
    """
    said = instructions(file)
    return [*_base(said), *_copies(said, context), *_commands(said), *_start(said)]


def _base(said: list[Instruction]) -> Iterator[str]:
    if said[0][0] not in ("FROM", "ARG"):
        yield "the first instruction is not FROM"
    for name, rest in said:
        if name == "FROM" and (":" not in rest or rest.endswith(":latest")):
            yield f"{rest} has no version"
        if name == "ADD":
            yield "ADD, where COPY does"
        if name in ("ENV", "ARG") and re.search(r"(?i)password|secret|token", rest):
            yield f"a secret in the image: {rest}"


def _copies(said: list[Instruction], context: Path) -> Iterator[str]:
    for name, rest in said:
        if name == "COPY":
            *sources, _ = [word for word in rest.split() if not word.startswith("--")]
            for source in sources:
                if source in (".", "./"):
                    yield "everything is copied"
                elif not (context / source).exists():
                    yield f"{source} is copied, but not there"


def _commands(said: list[Instruction]) -> Iterator[str]:
    for words in shell_commands(said):
        if words[0] == "sudo":
            yield "sudo"
        if words[:2] == ["pip", "install"] and "--no-cache-dir" not in words:
            yield "pip keeps a cache"
        if words[:2] == ["apt-get", "install"] and "-y" not in words:
            yield "apt-get asks"


def _start(said: list[Instruction]) -> Iterator[str]:
    users = [place for place, (name, _) in enumerate(said) if name == "USER"]
    if not users or said[users[-1]][1].split(":")[0] in ("root", "0"):
        yield "it runs as root"
    for place, (name, rest) in enumerate(said):
        if name in ("ENTRYPOINT", "CMD"):
            if users and place < users[-1]:
                yield f"{name} stands before USER"
            if not rest.startswith("["):
                yield f"{name} starts a shell, which takes no signal"
            else:
                json.loads(rest)
