"""Results that outlive their run folders: a CSV file with one row per finished run.

A campaign may take many days on several machines, and its run folders many gigabytes. What its
tables need of a run is one row: accuracies by split and selection rule, how far they moved from
round to round, and what a round cost. ``feddg compare --kept FILE`` adds such rows as runs end, and
does not run again what the file has, whatever folder or machine it ran in: experiments are told
apart by their hash and by what is in their files, wherever these lie
(:mod:`feddg.comparing.known_results`). Several processes may add to one file.
"""

import csv
import io
import json
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from feddg.comparing.cells import PlannedCell
from feddg.comparing.made_with import made_with
from feddg.comparing.measured_numbers import CONSTANT, RISING, SCORE, measured_numbers
from feddg.errors import RunError
from feddg.messages import plain_text
from feddg.records import SPLITS, TEST, as_cell, from_cell
from feddg.runs.reading import FINAL, SELECTION_RULES, RunRecord, SelectionRule
from feddg.settings import OneLine
from feddg.storage import alone, is_file, private_folder, read_text, replace_text, why

_ACCURACIES = {f"{split}_{rule.key}" for rule in SELECTION_RULES.values() for split in SPLITS}
_MADE_WITH = "made_with"
_OF_PLACE = (
    "experiment",
    "method",
    "held_out",
    "conditions",
    "seed",
    "machine",
    "version",
    _MADE_WITH,
)
WAIT = 60.0
"""Seconds after which another process that writes the same file is taken to hang."""


class KeptResult(BaseModel):
    """What tables need of one finished run.

    Attributes:
        experiment: the experiment's hash, the same wherever its files lie.
        method: the label of its method in the plan it was run for.
        held_out: the held-out test domains.
        conditions: values of further axes, by axis.
        seed: the experiment's seed.
        machine: processor, number of threads, device and precision.
        version: of this program.
        made_with: hashes of the images, and by field of the files that the experiment names; empty
            where nobody wrote them down.
        numbers: ``test_final`` and its like (split and key of the selection rule): accuracy from 0
            to 1, mean over the split's domains; see
            :func:`feddg.comparing.measured_numbers.measured_numbers` for the others.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    experiment: str = Field(pattern="^[0-9a-f]{8}$")
    method: OneLine = Field(min_length=1)
    held_out: OneLine
    conditions: dict[OneLine, OneLine] = Field(default_factory=dict)
    seed: int
    machine: OneLine = ""
    version: OneLine = ""
    made_with: dict[OneLine, OneLine] = Field(default_factory=dict)
    numbers: dict[str, float] = Field(default_factory=dict)

    @field_validator("numbers")
    @classmethod
    def _possible(cls, numbers: dict[str, float]) -> dict[str, float]:
        for name, value in numbers.items():
            a_share = name in _ACCURACIES or name == RISING or name.startswith(f"{CONSTANT}_")
            most = 1.0 if a_share else math.inf
            least = -math.inf if name.startswith(f"{SCORE}_") else 0.0
            if not least <= value <= most or math.isinf(value):
                raise PydanticCustomError(
                    "impossible", "{name} cannot be {value}", {"name": name, "value": value}
                )
        return numbers

    @property
    def place(self) -> Hashable:
        """Method, column and seed: where it stands in a table."""
        return _key(self.method, self.held_out, self.conditions, self.seed)

    @property
    def column(self) -> str:
        """The heading of its column: what is held out, and the further axes' values."""
        further = [f"{axis} {value}" for axis, value in self.conditions.items()]
        return ", ".join([self.held_out, *further])

    def accuracy(self, rule: SelectionRule = FINAL, split: str = TEST) -> float | None:
        """Its accuracy from 0 to 1 under a selection rule, or None where it was not measured."""
        return self.numbers.get(f"{split}_{rule.key}")


@dataclass
class KeptResults:
    """A file of kept results, and what is in it.

    Attributes:
        path: the file; made when the first result is added.
        results: in the order of the file.
    """

    path: Path
    results: list[KeptResult] = field(default_factory=list)
    _gone: list[KeptResult] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "KeptResults":
        """Reads a file; none yet is an empty one.

        Raises:
            RunError: it is damaged, or has two rows for a run in one place; names the file and the
                line.
        """
        found = cls(path, list(_read(path)) if is_file(path) else [])
        lines: dict[Hashable, int] = {}
        for line, row in enumerate(found.results, start=2):
            first = lines.setdefault((row.experiment, row.place), line)
            if first != line:
                raise RunError(
                    f"{path}, line {line}: {row.method}, {row.column}, seed {row.seed} of "
                    f"experiment {row.experiment} stands in line {first}, too; leave one"
                )
        return found

    def lacking(self, cells: Iterable[PlannedCell]) -> list[PlannedCell]:
        """Returns the cells that have no result here: of their experiment and in their place."""
        there = {(result.experiment, result.place) for result in self.results}
        return [
            cell for cell in cells if (cell.experiment.portable_id, place_of(cell)) not in there
        ]

    def add(self, cells: Iterable[PlannedCell], run: RunRecord) -> None:
        """Adds a finished run, once for each cell of a plan that it stands in.

        Raises:
            RunError: the file cannot be written.
        """
        self._add([_kept(cell, run) for cell in cells])

    def copy(self, cells: Iterable[PlannedCell], result: KeptResult) -> None:
        """Adds the result of another cell, or of another table's, to cells of the same experiment.

        Raises:
            RunError: the file cannot be written.
        """
        self._add([result.model_copy(update=_fields_of(cell)) for cell in cells])

    def leave_out(self, results: Iterable[KeptResult]) -> None:
        """Forgets results; the file loses them when something is added."""
        self._gone += results
        self.results = [result for result in self.results if result not in self._gone]

    def require_place(self) -> None:
        """Makes sure, before hours of runs, that results can be added.

        Raises:
            RunError: the file cannot be written.
        """
        with changing(self.path):
            pass

    def _add(self, results: Iterable[KeptResult]) -> None:
        """Adds results to what the file has now: others may have added theirs meanwhile."""
        with changing(self.path):
            there = list(_read(self.path)) if is_file(self.path) else []
            now = {(r.experiment, r.place): r for r in there if r not in self._gone}
            for result in results:
                now.setdefault((result.experiment, result.place), result)
            self.results = list(now.values())
            replace_text(self.path, to_text(self.results))


@contextmanager
def changing(path: Path) -> Iterator[None]:
    """Reads and writes a file that outlives folders while no other process does.

    Raises:
        RunError: it cannot be written, or another process does not let go of it.
    """
    busy = RunError(
        f"{path} is being written by another process that does not end; stop that, then give the "
        "command again: what is complete is added then"
    )
    try:
        private_folder(path.parent)
        with alone(path, busy, wait=WAIT):
            yield
    except OSError as error:
        raise RunError(f"Cannot write {path}: {why(error)}.") from None


def place_of(cell: PlannedCell) -> Hashable:
    """Returns where a cell's result stands in a file; equal to its :attr:`KeptResult.place`."""
    return _key(**_fields_of(cell))


def _key(method: str, held_out: str, conditions: Mapping[str, str], seed: int) -> Hashable:
    return method, held_out, tuple(conditions.items()), seed


def _fields_of(cell: PlannedCell) -> dict[str, Any]:
    return {
        "method": cell.method,
        "held_out": plain_text(cell.scenario),  # names of folders may hold anything
        "conditions": {plain_text(axis): plain_text(value) for axis, value in cell.conditions},
        "seed": cell.seed,
    }


def _kept(cell: PlannedCell, run: RunRecord) -> KeptResult:
    found = run.environment
    parts = [found.get(name) for name in ("processor", "device", "precision")]
    threads = f"{found.get('threads')} threads" if found.get("threads") else None
    return KeptResult(
        experiment=cell.experiment.portable_id,
        **_fields_of(cell),
        machine=plain_text(", ".join(str(part) for part in [*parts, threads] if part)),
        version=plain_text(found.get("feddg", "")),
        made_with={plain_text(name): plain_text(v) for name, v in made_with(run).items()},
        numbers=measured_numbers(run),
    )


def to_text(results: Sequence[KeptResult]) -> str:
    """Returns results as CSV; numbers to seven digits, which is finer than any image counts."""
    names = list(dict.fromkeys(name for result in results for name in result.numbers))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*_OF_PLACE, *names])
    for result in results:
        place: list[Any] = [getattr(result, name) for name in _OF_PLACE]
        place[3], place[7] = _as_json(result.conditions), _as_json(result.made_with)
        numbers = [result.numbers.get(name) for name in names]
        written = ["" if number is None else f"{number:.7g}" for number in numbers]
        writer.writerow(map(as_cell, [*place, *written]))
    return out.getvalue()


def _as_json(values: Mapping[str, str]) -> str:
    return json.dumps(values, ensure_ascii=False) if values else ""


def _read(path: Path) -> Iterator[KeptResult]:
    rows = csv.reader(io.StringIO(read_text(path, errors="strict")))
    heads = next(rows, [])
    if tuple(heads[: len(_OF_PLACE)]) != _OF_PLACE:
        raise RunError(f"{path} holds no kept results: it begins with {', '.join(heads[:3])!r}.")
    for line, cells in enumerate(rows, start=2):
        if len(cells) != len(heads):
            raise RunError(f"{path}, line {line}: {len(cells)} cells, not {len(heads)}.")
        found = dict(zip(heads, map(from_cell, cells)))
        place: dict[str, Any] = {name: found.pop(name) for name in _OF_PLACE}
        try:
            place |= {name: json.loads(place[name] or "{}") for name in ("conditions", _MADE_WITH)}
            numbers = {name: value for name, value in found.items() if value}
            yield KeptResult(**place, numbers=numbers)  # type: ignore[arg-type]
        except (ValueError, ValidationError, RecursionError) as error:
            said = str(error).splitlines()[0]
            if isinstance(error, ValidationError):
                fault = error.errors()[0]
                said = f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
            raise RunError(f"{path}, line {line} is damaged: {said}.") from None
