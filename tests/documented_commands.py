"""The commands that the pages show, found in their code blocks."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOT_READ = ("docs/security_cases.md", "docs/architecture.md")
"""Made by programs, without a command that a reader would type."""
_BLOCK = re.compile(r"^ {0,3}```(\w*)[^\n]*\n(.*?)^ {0,3}```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^ {4}\S[^\n]*\n?)+(?:^ {4,}[^\n]*\n?)*", re.MULTILINE)
_SHELL = ("", "sh", "bash", "shell", "console", "text")


@dataclass(frozen=True)
class Shown:
    """A command of a page: the page, and the command's words."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def pages() -> list[Path]:
    """README and every page of the documentation that people write."""
    found = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    found += sorted((ROOT / "docs").rglob("*.md"))
    return [page for page in found if page.relative_to(ROOT).as_posix() not in NOT_READ]


def shown_commands(page: Path, program: str = "feddg") -> Iterator[Shown]:
    """Yields the commands of a page that call ``program``."""
    name = page.relative_to(ROOT).as_posix()
    for block in _blocks(page.read_text("utf-8")):
        for line in re.sub(r"\\\s*\n\s*", " ", block).splitlines():
            text = line.strip().removeprefix("$ ").removeprefix(".venv/bin/")
            if text.startswith(f"{program} "):
                words = shlex.split(text, comments=True)
                yield Shown(name, tuple(_first_command(words)))


def _blocks(text: str) -> Iterator[str]:
    for language, block in _BLOCK.findall(text):
        if language in _SHELL:
            yield block
    yield from _INDENTED.findall(_BLOCK.sub("", text))


def _first_command(words: list[str]) -> list[str]:
    """What comes before a pipe, a redirection or the next command."""
    ends = [i for i, word in enumerate(words) if word in ("|", ">", ">>", "&&", ";", "2>&1")]
    return words[: ends[0]] if ends else words
