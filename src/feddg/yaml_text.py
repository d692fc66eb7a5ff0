"""YAML from outside, read into fields; whatever is wrong with it ends in one clear line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from feddg.errors import FeddgError
from feddg.files import is_file, read_text

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MOST_VALUES = 100_000
"""Values that a file may hold, aliases written out; they double with every line otherwise."""
DEEPEST = 50
"""Levels that values may be nested."""


class _Loader(_Base):  # type: ignore[misc]
    """Plain values only; a field said twice is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = {"<<"}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key.value in seen and key.value != "<<":
                said = f"{key.value!r} is said twice"
                raise yaml.constructor.ConstructorError(None, None, said, key.start_mark)
            seen |= {key.value} if isinstance(key, yaml.ScalarNode) else set()
        return super().construct_mapping(node, deep)


def read_fields_of(path: Path, what: str, fault: type[FeddgError]) -> dict[str, Any]:
    """Reads the fields of a YAML file; none of an empty one.

    Args:
        path: the file.
        what: what kind of file it is, for the message.
        fault: what is raised.

    Raises:
        fault: the file is missing, unreadable, not YAML, or holds something else than fields.
    """
    if not is_file(path, fault):
        raise fault(f"{what} {path} does not exist")
    text = read_text(path, fault, errors="strict")
    try:
        return parse_fields(text)
    except ValueError as error:
        raise fault(f"{what} {path} {error}") from None


def parse_fields(text: str) -> dict[str, Any]:
    """Parses fields; none of an empty text.

    Raises:
        ValueError: it is not YAML or holds something else; the message follows a file's name.
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
            raise ValueError(f"has a field that is no word: {key!r}")
    return content


def _check_depth(text: str) -> None:
    """Refuses what is nested too deeply, event by event: the loader would end the process."""
    depth = 0
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} levels deep")


def _keys(content: Any) -> Iterator[Any]:
    """Yields the field that each value stands under; one that holds itself never ends."""
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
