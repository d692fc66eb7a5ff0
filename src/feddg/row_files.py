"""Files of JSON: read into the class that declares them, with one clear error where that fails."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from feddg.errors import RunError
from feddg.files import is_file, read_text

T = TypeVar("T")


class Row(BaseModel):
    """One row of a file, or a part of one.

    Attributes:
        identity: names of the fields that say what a row is about; a later row replaces an earlier
            one about the same.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)
    identity: ClassVar[tuple[str, ...]] = ()

    @property
    def key(self) -> tuple[int | str, ...]:
        """What the row is about."""
        return tuple(getattr(self, name) for name in self.identity)

    def to_json(self) -> str:
        """Returns the row as one line of JSON; what is None is left out."""
        return self.model_dump_json(exclude_none=True)


class JsonFile(Row):
    """A file that is one JSON object."""

    def to_text(self) -> str:
        """Returns the content of the file."""
        return self.model_dump_json(indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Reads a file; None if there is no such file.

        Raises:
            RunError: it is damaged; names the file and the field.
        """
        if not is_file(path):
            return None
        try:
            return cls.model_validate_json(read_text(path))
        except ValidationError as error:
            fault = error.errors()[0]
            raise RunError(f"{path} is damaged: {_said(fault['loc'], fault)}.") from None


class RowFile(Generic[T]):
    """A kind of file of JSON lines, by what its rows are.

    Args:
        row: the row's class, or a union told apart by ``kind``.
    """

    def __init__(self, row: Any, *, tagged: bool = False) -> None:
        self._rows: TypeAdapter[list[T]] = TypeAdapter(list[row])
        self._tagged = tagged

    def read(self, path: Path) -> list[T]:
        """Reads a file; none if there is no such file.

        A last line that was cut off by a crash, and rows of kinds that only another version knows,
        are left out.

        Raises:
            RunError: a row is damaged; names the file, the row and the field.
        """
        if not is_file(path):
            return []
        text = read_text(path)
        try:  # all at once: faster than line by line
            return self._rows.validate_json("[" + text.removesuffix("\n").replace("\n", ",") + "]")
        except ValidationError:
            return list(self._one_by_one(path, numbered_lines(text)))

    def parse(self, text: str) -> list[T]:
        """Reads rows from a JSON array.

        Raises:
            ValueError: it holds none; says what is wrong in one line.
        """
        try:
            return self._rows.validate_json(text)
        except ValidationError as error:
            raise ValueError(self._fault(error)) from None

    def to_text(self, rows: list[T]) -> str:
        """Returns rows as a JSON array."""
        return self._rows.dump_json(rows, exclude_none=True).decode()

    def _one_by_one(self, path: Path, lines: list[tuple[int, str]]) -> Iterator[T]:
        for number, line in lines:
            try:
                yield from self._rows.validate_json(f"[{line}]")
            except ValidationError as error:
                kind = error.errors()[0]["type"]
                cut_off = kind == "json_invalid" and number == lines[-1][0]
                if cut_off or kind == "union_tag_invalid":
                    continue
                fault = self._fault(error)
                raise RunError(f"{path} is damaged in row {number}: {fault}.") from None

    def _fault(self, error: ValidationError) -> str:
        fault = error.errors()[0]
        # Before the field's name come the row's place and, in a union, its kind.
        return _said(fault["loc"][2 if self._tagged else 1 :], fault)


def _said(place: tuple[int | str, ...], fault: Any) -> str:
    field = ".".join(str(part) for part in place)
    if fault["type"] == "missing":
        return f"it lacks {field!r}"
    if fault["type"] == "union_tag_not_found":
        return "it lacks 'kind'"
    message = str(fault["msg"])
    return f"{field!r}: {message}" if field else message


def numbered_lines(text: str) -> list[tuple[int, str]]:
    """Returns the lines that hold something, with their numbers, from 1."""
    lines = enumerate(text.split("\n"), start=1)
    return [(number, line) for number, line in lines if line.strip(" \r\0")]
