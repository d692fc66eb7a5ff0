"""The commands that the pages show, found in their code blocks."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import typer

from feddg.cli import app

ROOT = Path(__file__).parents[2]
NOT_READ = ("docs/architecture.md",)
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


def inline_commands(page: Path, program: str = "feddg") -> Iterator[tuple[str, ...]]:
    """Yields the words of what a page's sentences call a command: ``feddg run --dry-run``."""
    text = _INDENTED.sub("", _BLOCK.sub("", page.read_text("utf-8")))
    for code in re.findall(rf"(?<!`)`({program} [^`]+)`(?!`)", text):
        yield tuple(shlex.split(code.replace("\n", " "), comments=True))


def parsed(shown: Shown) -> click.Context:
    """Reads a command as the command line would, without carrying it out.

    Raises:
        click.UsageError: it would be refused.
    """
    command, rest = command_of(shown.words)
    return command.make_context(shown.words[0], list(rest), parent=click.Context(command))


def command_of(words: Sequence[str]) -> tuple[click.Command, Sequence[str]]:
    """Returns the command that words call, and the words after its name.

    Raises:
        click.UsageError: there is none of this name.
    """
    command, rest = typer.main.get_command(app), words[1:]
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        found = command.get_command(click.Context(command), rest[0])
        if found is None:
            raise click.UsageError(f"{shlex.join(words)}: no command {rest[0]}")
        command, rest = found, rest[1:]
    return command, rest


def _blocks(text: str) -> Iterator[str]:
    for language, block in _BLOCK.findall(text):
        if language in _SHELL:
            yield block
    yield from _INDENTED.findall(_BLOCK.sub("", text))


def _first_command(words: list[str]) -> list[str]:
    """What comes before a pipe, a redirection or the next command."""
    ends = [i for i, word in enumerate(words) if word in ("|", ">", ">>", "&&", ";", "2>&1")]
    return words[: ends[0]] if ends else words
