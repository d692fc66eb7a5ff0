"""A results file: CSV with the numbers of finished runs. What it has is not run again.

A campaign may take many days on several machines, and its run folders many gigabytes. What its
tables need of a run are some thirty numbers: accuracies by split and selection rule, how far they
moved from round to round, and what a round cost. ``feddg compare --results FILE`` adds them as
runs end, and does not run again what the file has, whatever folder or machine it ran in:
experiments are told apart by their id and by what is in their files, wherever these lie. Several
processes may add to one file. It has a line for each number; what a run was made with stands in
its first line.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError

import feddg
from feddg.comparison.plan import DATA, VALIDATED_ON, Cell
from feddg.data.fingerprint import ImagesFile
from feddg.diagnostics import warn
from feddg.errors import DataError, RunError, field_fault
from feddg.evaluation.metrics import OF_A_DECISION
from feddg.experiment import Experiment
from feddg.messages import plain_text
from feddg.models.backbones import weights_digest
from feddg.records import ENDED_EARLY, ID_VAL, SPLITS, TEST, NumberRow, as_csv, from_cell
from feddg.runs.prepare import named_files
from feddg.runs.provenance import IMAGES, ImagesNow
from feddg.runs.reading import Run
from feddg.runs.summary import numbers_by_rule
from feddg.runs.table import NumberTable
from feddg.settings import IMAGENET, OneLine, grouped
from feddg.storage import Stamp, alone, is_file, private_folder, read_text, replace_text, stamp, why
from feddg.text import listed, short

_IMAGES, _WEIGHTS = "images", "model.weights"
HASHES, BUDGET = "hashes", "budget"
_OF_PLACE = ("experiment", "method", "held_out", "conditions", "seed", BUDGET)
MADE_WITH = ("machine", "version", HASHES)
NUMBER_COLUMNS = (
    *("rule", "round", "weights", "split", "domain", "over", "metric", "value"),
    *("images", "bytes", "seconds"),
)
COLUMNS = (*_OF_PLACE, *NUMBER_COLUMNS, *MADE_WITH)
"""Columns of a results file."""
_ROUNDED = ("value", "bytes", "seconds")
WAIT = 60.0
"""Seconds after which another process writing the same file is assumed to hang."""
HELD_OUT = "held out"
PRECISIONS = ("float32", "bfloat16")

# What a result was made with: its images and the files that its experiment names, as hashes.
#
# An experiment's id knows the names of files and not what is in them. A row may be met by a folder
# that has changed since, or by another machine's, where the same files lie elsewhere.


def made_with(run: Run) -> dict[str, Any]:
    """Returns what a finished run was made with, as the fields of its rows: :data:`MADE_WITH`."""
    environment, images = run.environment, run.folder / IMAGES
    parts = [environment.get(name) for name in ("processor", "device", "precision")]
    threads = f"{environment.get('threads')} threads" if environment.get("threads") else None
    weights = environment.get("weights")
    digest = weights.get("sha256") if isinstance(weights, dict) else None
    hashes = _recorded(read_text(images)) if is_file(images) else {}
    hashes = hashes | ({_WEIGHTS: str(digest)} if digest else {})
    return {
        "machine": plain_text(", ".join(str(part) for part in [*parts, threads] if part)),
        "version": plain_text(environment.get("feddg", "")),
        HASHES: {plain_text(name): plain_text(value) for name, value in hashes.items()},
    }


def hashes_now(experiment: Experiment, now: ImagesNow) -> dict[str, str]:
    """Returns the hashes that a run would have if started now; missing files are left out."""
    hashes = named_files(experiment)
    with suppress(DataError):  # whoever runs something will say so
        hashes[_IMAGES] = now.fingerprint(experiment)
    weights = experiment.model.weights
    if weights == IMAGENET:
        hashes[_WEIGHTS] = weights
    elif weights is not None and (seen := stamp(Path(weights))) is not None:
        hashes[_WEIGHTS] = _digest(weights, seen)
    return hashes


@lru_cache(maxsize=16)
def _digest(weights: str, seen: Stamp) -> str:
    return str(weights_digest(weights))


@lru_cache(maxsize=8)
def _recorded(images: str) -> dict[str, str]:
    """Returns the hashes that ``images.json`` holds, read once for all runs on the same images.

    Of its images, and of files by field; none if it is damaged.
    """
    try:
        file = ImagesFile.model_validate_json(images)
    except ValidationError:
        return {}
    return {_IMAGES: file.fingerprint()} | file.files


Place = tuple[str, str, tuple[tuple[str, str], ...], int, int | None]


class ResultRow(BaseModel):
    """One run in one place of a table, with its numbers and their provenance.

    Attributes:
        experiment: the experiment's id, independent of file locations; empty if unknown.
        method: label of its method.
        held_out: the held-out test domains.
        conditions: values of further axes, by axis.
        seed: the experiment's seed.
        budget: number of training images at which the numbers hold; None for the whole run.
        machine: processor, number of threads, device and precision.
        version: version of this program.
        hashes: hashes of the images and, by field, of files that the experiment names; empty if not
            recorded.
        numbers: its numbers in a results file; none yet of a run that is not complete.
        folder: name of the run's folder, if known.
        run: the complete run at the budget, if its folder is here; it has all numbers then.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    experiment: str = Field("", pattern="^([0-9a-f]{8})?$")
    method: OneLine = Field(min_length=1)
    held_out: OneLine
    conditions: dict[OneLine, OneLine] = Field(default_factory=dict)
    seed: int
    budget: int | None = Field(None, ge=1)
    machine: OneLine = ""
    version: OneLine = ""
    hashes: dict[OneLine, OneLine] = Field(default_factory=dict)
    numbers: tuple[NumberRow, ...] = ()
    folder: str = Field("", pattern=r"^[^/\\\x00]*$")
    run: InstanceOf[Run] | None = Field(None, exclude=True)

    @classmethod
    def all_of(cls, cell: Cell) -> "list[ResultRow]":
        """Returns the rows of a plan's cell, one per budget, without numbers."""
        return [cls.of(cell, budget=budget) for budget in cell.budgets or (None,)]

    @classmethod
    def of(cls, cell: Cell, **more: Any) -> "ResultRow":
        """Returns a row of a plan's cell; numbers can be added."""
        return cls(
            experiment=cell.portable_id,
            method=cell.method,
            held_out=plain_text(cell.held_out),  # names of folders may hold anything
            conditions={plain_text(axis): plain_text(v) for axis, v in cell.conditions.items()},
            seed=cell.seed,
            **more,
        )

    @property
    def place(self) -> Place:
        """Method, column, seed and budget: the place in a table."""
        conditions = tuple(sorted(self.conditions.items()))  # in whatever order a plan lists them
        return (self.method, self.held_out, conditions, self.seed, self.budget)

    @property
    def key(self) -> tuple[str, Place]:
        """The key of a row in a results file: one row per key."""
        return self.experiment, self.place

    @property
    def of_run(self) -> object:
        """What all rows of one run share: one without an axis's setting stands in every column.

        Another plan may give it another label. Experiments on two folders of images have one id,
        which knows no folder.
        """
        images = self.images_hash
        own = (self.experiment, images, self.held_out, self.seed, self.budget)
        folder = self.run.folder if self.run else self.folder
        return folder or (own if self.experiment else self.key)

    @property
    def domain(self) -> str:
        """The held-out test domains, behind the data set's name in a plan over several."""
        return self.axes[HELD_OUT].partition(VALIDATED_ON)[0]

    @property
    def collection(self) -> str:
        """The data set's name in a plan over several; otherwise empty."""
        return self.conditions.get(DATA, "")

    @property
    def tested(self) -> list[str]:
        """The held-out test domains; without its run, a name with a ``+`` is read as several."""
        if self.run is not None:
            return [plain_text(name) for name in self.run.held_out(TEST)]
        return self.held_out.partition(VALIDATED_ON)[0].split("+")

    @property
    def images_hash(self) -> str:
        """A hash of its images; empty if none is recorded."""
        return self.hashes.get(_IMAGES, "")

    @property
    def precision(self) -> str:
        """The precision it was computed in; empty if it is not recorded."""
        if self.run is not None:
            return str(self.run.environment.get("precision") or "")
        return next((part for part in self.machine.split(", ") if part in PRECISIONS), "")

    @property
    def ended_early(self) -> bool:
        """Whether the run spent its privacy budget before the last planned round."""
        return bool(self.table.where(metric=ENDED_EARLY))

    @property
    def heading(self) -> str:
        """What is held out, and the values of further axes."""
        return self.heading_of(self.axes)

    def heading_of(self, axes: Iterable[str]) -> str:
        """Returns the values of some axes, each with its name but the held-out domains."""
        own = self.axes
        values = {axis: own[axis] for axis in axes if axis in own and axis != DATA}
        return ", ".join(v if axis == HELD_OUT else f"{axis} {v}" for axis, v in values.items())

    @property
    def axes(self) -> dict[str, str]:
        """The values of all axes except method and seed."""
        budget = {} if self.budget is None else {BUDGET: short(self.budget)}
        held_out = f"{self.collection}, {self.held_out}" if self.collection else self.held_out
        return {HELD_OUT: held_out, **self.conditions, **budget}

    @cached_property
    def table(self) -> NumberTable:
        """Its numbers by selection rule: of its run, if that is here, or of the results file."""
        return NumberTable(self.numbers if self.run is None else numbers_by_rule(self.run))


def results_files(results: Path | str | Sequence[Path | str]) -> list[Path]:
    """Returns a comparison's results files; rows are added to the first.

    Raises:
        RunError: a file is damaged, or one other than the first does not exist.
    """
    asked = [results] if isinstance(results, Path | str) else results
    files = [Path(file) for file in asked]
    if files and files[0].is_symlink():  # a file that is replaced would take the link's place
        files[0] = files[0].resolve()
    for number, file in enumerate(files):
        if number and not is_file(file):
            raise RunError(f"There is no results file {file}.")
        read_results(file)
    return files


def read_results(path: Path) -> list[ResultRow]:
    """Reads a results file; returns no rows if it does not exist.

    Raises:
        RunError: it is damaged, has two rows for a run in one place, or lacks lines of a run; names
            the file and the line or the run.
    """
    if not is_file(path):
        return []
    text = io.StringIO(read_text(path, errors="strict"), newline=None)  # any system's line ends
    try:
        heads, *lines = [*csv.reader(text)] or [[]]
    except csv.Error as error:
        raise RunError(f"{path} is damaged: {error}.") from None
    if tuple(heads) != COLUMNS:
        raise RunError(f"{path} is no results file: its columns are not {', '.join(COLUMNS)}.")
    rows: dict[tuple[str, Place], ResultRow] = {}
    numbers: dict[tuple[str, Place], dict[Any, tuple[int, NumberRow | None]]] = {}
    for line, cells in enumerate(lines, start=2):
        if cells == heads:  # of a file that was put behind another
            continue
        if len(cells) != len(heads):
            raise RunError(f"{path}, line {line}: {len(cells)} cells, not {len(heads)}.")
        fields = {name: cell for name, cell in zip(heads, map(from_cell, cells)) if cell}
        of_run: dict[str, Any] = {n: fields.pop(n) for n in (*_OF_PLACE, *MADE_WITH) if n in fields}
        try:
            of_run |= {n: json.loads(of_run[n]) for n in ("conditions", HASHES) if n in of_run}
            row = ResultRow(**{"method": "", "held_out": ""} | of_run)
            number = NumberRow(**fields) if fields else None  # type: ignore[arg-type]
        except (ValueError, RecursionError) as error:
            fault = field_fault(error) if isinstance(error, ValidationError) else str(error)
            raise RunError(f"{path}, line {line} is damaged: {fault}.") from None
        if row.key not in rows or any(name in of_run for name in MADE_WITH):
            rows[row.key] = row
        what = number and (*number.of, number.weights)
        first, _ = numbers.setdefault(row.key, {}).setdefault(what, (line, number))
        if first != line:
            raise RunError(
                f"{path}, line {line}: {row.method}, {row.heading}, seed {row.seed} of "
                f"experiment {row.experiment} is in line {first}, too; keep one"
            )
    found = [
        row.model_copy(update={"numbers": tuple(item for _, item in numbers[key].values() if item)})
        for key, row in rows.items()
    ]
    for row in found:
        rules = {number.rule for number in row.numbers} - {""}
        splits = {number.split for number in row.numbers} - {""}
        accuracies = {(n.rule, n.split) for n in row.numbers if n.metric == "accuracy"}
        # The first line says what a run was made with, the last is its costs' mean by round. Those
        # of long ago have no costs.
        costs = any(number.round and number.bytes is not None for number in row.numbers)
        ends = row.machine and any(n.metric == "bytes_per_round" for n in row.numbers)
        if (costs and not ends) or accuracies != {*product(rules, splits)}:
            raise RunError(
                f"{path}: lines of {row.method}, {row.heading}, seed {row.seed} are missing; put "
                "them back, or remove its other lines, too, to have it run again"
            )
    return found


def add_rows(path: Path, rows: Iterable[ResultRow], without: Iterable[ResultRow] = ()) -> None:
    """Adds rows to a results file, keeping rows that others added meanwhile.

    Args:
        path: the file; created if missing.
        rows: the rows; for a key that the file has, the file's row is kept.
        without: rows to remove.

    Raises:
        RunError: the file is damaged or cannot be written.
    """
    gone = list(without)
    with changing(path):
        there = {row.key: row for row in read_results(path) if row not in gone}
        for row in rows:
            there.setdefault(row.key, row)
        replace_text(path, to_text(list(there.values())))


@contextmanager
def changing(path: Path) -> Iterator[None]:
    """Locks a file for reading and writing while no other process does.

    Raises:
        RunError: it cannot be written, or another process does not release it.
    """
    busy = RunError(
        f"{path} is being written by another process that does not finish; stop it and repeat the "
        "command: complete runs are added then"
    )
    try:
        private_folder(path.parent)
        with alone(path, busy, wait=WAIT):
            yield
    except OSError as error:
        raise RunError(f"Cannot write {path}: {why(error)}.") from None


def rows_of(cell: Cell, run: Run) -> list[ResultRow]:
    """Returns the rows of a finished run for a results file, numbers rounded as written.

    One row per budget of the cell; a method of one round has none for budgets below its images.

    Raises:
        RunError: the run does not say which images it was made with, as its file is damaged.
    """
    made, images = made_with(run), run.folder / IMAGES
    if is_file(images) and _IMAGES not in made[HASHES]:
        raise RunError(f"{images} is damaged, so the run's images are not known; run it again")
    ended = {
        budget: run if budget is None else run.at(budget) for budget in cell.budgets or (None,)
    }
    evaluate = cell.experiment.evaluate
    chosen_by = (evaluate.select_by, evaluate.select_over)
    return [
        ResultRow.of(cell, budget=budget, numbers=_kept(numbers_by_rule(part), *chosen_by), **made)
        for budget, part in ended.items()
        if part is not None
    ]


def _kept(numbers: Iterable[NumberRow], metric: str, over: str) -> list[NumberRow]:
    """Returns the numbers for a results file, rounded as written, which is finer than one image.

    These are accuracies, what chose the rounds, and the numbers that are not of one split.
    """
    wanted = {("accuracy", split, "domain_mean") for split in SPLITS} | {(metric, ID_VAL, over)}
    wanted |= {(name, TEST, "domain_mean") for name in OF_A_DECISION}
    return [
        row.model_copy(
            update={n: float(f"{v:.7g}") for n in _ROUNDED if (v := getattr(row, n)) is not None}
        )
        for row in numbers
        if not row.over or (row.metric, row.split, row.over) in wanted
    ]


def to_text(rows: Sequence[ResultRow]) -> str:
    """Returns rows as CSV, a line for each number."""
    lines: list[Sequence[object]] = [COLUMNS]
    for row in rows:
        place = {name: getattr(row, name) for name in _OF_PLACE}
        place["conditions"] = as_json(row.conditions)
        made = {"machine": row.machine, "version": row.version, "hashes": as_json(row.hashes)}
        for number in row.table.rows or (None,):
            cells = dict(number or ()) | place | made
            lines.append([_as_text(cells.get(name)) for name in COLUMNS])
            made = {}
    return as_csv(lines)


def _as_text(cell: object) -> object:
    return repr(cell).removesuffix(".0") if isinstance(cell, float) else cell


def as_json(values: Mapping[str, str]) -> str:
    """Returns texts by name as a cell's text; empty without any."""
    return json.dumps(values, ensure_ascii=False) if values else ""


def find_rows(
    path: Path, cells: Sequence[Cell], now: ImagesNow, *, own: bool = True, again: bool = False
) -> tuple[dict[str, dict[int | None, ResultRow]], list[ResultRow]]:
    """Returns the rows of a results file that belong to the cells, and the outdated ones.

    A row belongs to an experiment with the same settings and the same content of images and files,
    wherever they are stored. If the content is unknown (not recorded, or images not here), the
    place in the table or the paths must be the same. A row is outdated if the settings match but
    the content has changed.

    Args:
        path: the file.
        cells: the cells that need results.
        now: gives the present hashes of images.
        own: whether the file is the one that rows are added to, where outdated rows must not stay;
            in another file they are ignored with a warning.
        again: whether outdated rows may be replaced.

    Returns:
        The rows by experiment id and budget, for experiments with a row at every budget; and the
        outdated rows of an own file.

    Raises:
        RunError: rows of an own file are outdated, and ``again`` is False.
    """
    rows = grouped((row.experiment, row) for row in read_results(path))
    known = (cell for cell in cells if cell.portable_id in rows) if rows else ()
    asked = grouped((cell.id, cell) for cell in known)
    by_cell: dict[str, dict[int | None, ResultRow]] = {}
    changed: list[tuple[ResultRow, list[str]]] = []
    silent = 0
    for id, own_cells in asked.items():
        today = hashes_now(own_cells[0].experiment, now)
        places = {row.place for cell in own_cells for row in ResultRow.all_of(cell)}
        there: dict[int | None, ResultRow] = {}
        for row in rows[own_cells[0].portable_id]:
            same_place = row.experiment == id or row.place in places
            common = row.hashes.keys() & today.keys()
            other = [name for name in common if row.hashes[name] != today[name]]
            if same_place and other:
                changed.append((row, other))
            elif same_place or (row.hashes and row.hashes == today):
                there.setdefault(row.budget, row)
                silent += not row.hashes
        budgets = own_cells[0].budgets or (None,)
        if own_cells[0].has_one_round and there:  # from its images on it counts at all budgets
            row = next(iter(there.values()))
            seen = max((n.value for n in row.table.where(metric="images_per_round")), default=0.0)
            by_cell[id] = {b: row for b in budgets if b is None or b >= seen}
        elif there.keys() >= {*budgets}:
            by_cell[id] = there
    if silent:
        warn(
            "images-unknown",
            f"{path} does not record for {silent} of its results which images and files they were "
            "made with; they are assumed to be the same.",
        )
    used = [row.version for of_cell in by_cell.values() for row in of_cell.values()]
    if others := sorted({*used} - {"", feddg.__version__}):
        count = sum(version in others for version in used)
        warn(
            "results-of-another-version",
            f"{path}: {count} of its results are of feddg {listed(others)}, this is "
            f"{feddg.__version__}; what changed in between may be part of a difference.",
            "Leave the file out to run them anew.",
        )
    if changed and not again:
        first, names = changed[0]
        fault = (
            f"{path}: {len(changed)} of its results were made with files that have changed since "
            f"({', '.join(sorted(names))} of {first.method}, {first.heading}, seed {first.seed}); "
        )
        if own:
            raise RunError(
                f"{fault}put them back, or use --again to run them again and replace them"
            )
        warn("other-files", f"{fault}they are not used.")
    return by_cell, [row for row, _ in changed] if own else []
