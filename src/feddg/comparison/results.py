"""Results of many runs as one table, read from run folders or from a results file."""

import csv
import io
import json
import shlex
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError

import feddg
from feddg.comparison.plan import DATA, VALIDATED_ON, Cell, Plan, expand_plan
from feddg.comparison.statistics import Accuracies, Key, Margin, average_over_columns, leads
from feddg.data.fingerprint import ImagesFile
from feddg.diagnostics import SEVERITIES, Diagnostic, Severity, warn
from feddg.errors import DataError, RunError, field_fault
from feddg.evaluation.metrics import OF_A_DECISION
from feddg.experiment import Experiment
from feddg.messages import plain_text
from feddg.models.backbones import weights_digest
from feddg.records import (
    CONSTANT,
    ID_VAL,
    RISING,
    SPLITS,
    TEST,
    JsonFile,
    Number,
    NumberRow,
    Row,
    as_csv,
    from_cell,
)
from feddg.runs.diagnostics import (
    CONSTANT_ANSWER,
    IN_WORDS,
    MAJORITY,
    STILL_RISING,
    UNSTEADY,
    about_accuracy,
    about_fluctuation,
    causes_of_failure,
    fluctuation,
)
from feddg.runs.numbers import numbers_of
from feddg.runs.prepare import named_files
from feddg.runs.provenance import IMAGES, ImagesNow
from feddg.runs.reading import (
    EXPERIMENT,
    FINAL,
    SELECTION_RULES,
    Run,
    SelectionRule,
    flatten,
    is_run,
    read_run,
)
from feddg.settings import IMAGENET, OneLine, grouped
from feddg.storage import (
    Stamp,
    alone,
    is_file,
    private_folder,
    read_fields_of,
    read_text,
    replace_text,
    stamp,
    why,
)
from feddg.text import counted, listed, short

if TYPE_CHECKING:
    from pandas import DataFrame


TUNING: Final = "tuning.json"
_IMAGES, _WEIGHTS = "images", "model.weights"
_HASHES, BUDGET = "hashes", "budget"
_OF_PLACE = ("experiment", "method", "held_out", "conditions", "seed", BUDGET)
_MADE_WITH = ("machine", "version", _HASHES)
COLUMNS = (*_OF_PLACE, *NumberRow.model_fields, *_MADE_WITH)
"""Columns of a results file."""
_ROUNDED = ("value", "bytes", "seconds")
WAIT = 60.0
"""Seconds after which another process writing the same file is assumed to hang."""
HELD_OUT = "held out"
COMPARISON = "comparison.json"
_NOT_CONDITIONS = ("name", "device", "seed", "preset", "hold_out", "method", "precision")
_OF_MARGINS = [
    *(BUDGET, "method", "other", "difference", "low", "high", "detectable", "p", "p_holm"),
    *("domains", "seeds_low", "seeds_high", "seeds"),
]
_OVER_DATA_SETS = [f"data_sets_{name}" for name in ("mean", "low", "high", "count")]


class TriedRow(Row):
    """One combination of values that was tried for a method.

    Attributes:
        method: the method's label.
        held_out: the held-out test domains of the columns it was tried for.
        values: the values by field.
        metric: the metric that chooses rounds in its trials (``evaluate.select_by``).
        over: how the metric is taken over domains (``evaluate.select_over``).
        score: mean of that metric on in-domain validation over its trials, 0 to 1; None if a trial
            failed or the metric is undefined for its images.
        trials: number of trials.
        constant: number of trials whose model is no better on in-domain validation than always
            predicting one class; None if not recorded.
        picked: whether these values are used for the table.
    """

    method: str
    held_out: str = ""
    values: dict[str, str]
    metric: str = "accuracy"
    over: str = "domain_mean"
    score: Number | None = None
    trials: int
    constant: int | None = Field(None, ge=0)
    picked: bool


class TuningFile(JsonFile):
    """The trials before a comparison, and the chosen values: ``tuning.json``.

    Attributes:
        rule: the selection rule for the round of a trial.
        rounds: rounds of a trial.
        seeds: seeds of the trials.
        tried: all combinations.
    """

    rule: str
    rounds: int | None = None
    seeds: tuple[int, ...]
    tried: tuple[TriedRow, ...]

    def after(self, earlier: "TuningFile | None") -> "TuningFile":
        """Returns this file merged with an earlier one's other methods and hold-outs.

        A table may be run column by column. Choices with another rule, number of rounds or other
        seeds are dropped.
        """
        settings = (self.rule, self.rounds, self.seeds)
        if earlier is None or settings != (earlier.rule, earlier.rounds, earlier.seeds):
            return self
        own = {(row.method, row.held_out) for row in self.tried}
        others = [row for row in earlier.tried if (row.method, row.held_out) not in own]
        return self.model_copy(update={"tried": (*others, *self.tried)})

    def diagnostics(self) -> list[Diagnostic]:
        """Returns warnings about the choices: models that learned nothing, end values, ties."""
        found = []
        for row in (row for row in self.tried if row.picked):
            group = (row.method, row.held_out)
            rows = [other for other in self.tried if (other.method, other.held_out) == group]
            where = f"{row.method}{f', {row.held_out} held out' if row.held_out else ''}"
            if row.constant:
                text = (
                    f"{where}: with the picked values the model is {IN_WORDS[MAJORITY]} in "
                    f"{row.constant} of {row.trials} trials, so that the choice means little."
                )
                advice = (
                    "Give trials more rounds (tune.rounds), pretrained weights, or other values."
                )
                found.append(Diagnostic("tuned-on-nothing-learned", "warning", text, advice))
            for text, advice in _edges(row, rows):
                found.append(Diagnostic("edge-of-the-grid", "warning", f"{where}: {text}", advice))
            equal = sum(other.score == row.score for other in rows)
            if equal > 1:
                text = f"{where}: {equal} combinations do equally well; the first is used."
                found.append(Diagnostic("tuning-tie", "warning", text))
        return found


def _edges(picked: TriedRow, rows: Sequence[TriedRow]) -> Iterator[tuple[str, str]]:
    """Yields chosen numbers at an end of their grid, with what to try next."""
    for name, text in picked.values.items():
        try:
            values = sorted({float(row.values[name]) for row in rows})
            value = float(text)
        except (KeyError, ValueError):
            continue  # words have no order
        off = value == 0 == values[0]  # nothing is below none of it
        if len(values) > 1 and value in (values[0], values[-1]) and not off:
            end, beyond = ("lowest", "lower") if value == values[0] else ("highest", "higher")
            yield f"{name} {text} is the {end} that was tried.", f"Try a {beyond} one, too."


# What a result was made with: its images and the files that its experiment names, as hashes.
#
# An experiment's id knows the names of files and not what is in them. A row may be met by a folder
# that has changed since, or by another machine's, where the same files lie elsewhere.


def hashes_of(run: Run) -> dict[str, str]:
    """Returns a finished run's recorded hashes: of its images, and of files by field.

    Raises:
        RunError: a file of the run is damaged.
    """
    images = ImagesFile.read(run.folder / IMAGES)
    found = {} if images is None else {_IMAGES: images.fingerprint()} | images.files
    weights = run.environment.get("weights")
    digest = weights.get("sha256") if isinstance(weights, dict) else None
    return found | ({_WEIGHTS: str(digest)} if digest else {})


def hashes_now(experiment: Experiment, now: ImagesNow) -> dict[str, str]:
    """Returns the hashes that a run would have if started now; missing files are left out."""
    found = named_files(experiment)
    with suppress(DataError):  # whoever runs something will say so
        found[_IMAGES] = now.fingerprint(experiment)
    weights = experiment.model.weights
    if weights == IMAGENET:
        found[_WEIGHTS] = weights
    elif weights is not None and (seen := stamp(Path(weights))) is not None:
        found[_WEIGHTS] = _digest(weights, seen)
    return found


@lru_cache(maxsize=16)
def _digest(weights: str, seen: Stamp) -> str:
    return str(weights_digest(weights))


# A results file: CSV with the numbers of finished runs. What it has is not run again.
#
# A campaign may take many days on several machines, and its run folders many gigabytes. What its
# tables need of a run are some thirty numbers: accuracies by split and selection rule, how far they
# moved from round to round, and what a round cost. ``feddg compare --results FILE`` adds them as
# runs end, and does not run again what the file has, whatever folder or machine it ran in:
# experiments are told apart by their id and by what is in their files, wherever these lie. Several
# processes may add to one file. It has a line for each number; what a run was made with stands in
# its first line.


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
        return (self.method, self.held_out, tuple(self.conditions.items()), self.seed, self.budget)

    @property
    def key(self) -> tuple[str, Place]:
        """The key of a row in a results file: one row per key."""
        return self.experiment, self.place

    @property
    def domain(self) -> str:
        """The held-out test domains, behind the data set's name in a plan over several."""
        return self.axes[HELD_OUT].partition(VALIDATED_ON)[0]

    @property
    def collection(self) -> str:
        """The data set's name in a plan over several; otherwise empty."""
        return self.conditions.get(DATA, "")

    @property
    def heading(self) -> str:
        """What is held out, and the values of further axes."""
        return self.heading_of(self.axes)

    def heading_of(self, axes: Container[str]) -> str:
        """Returns the values of some axes, each with its name but the held-out domains."""
        own = {axis: v for axis, v in self.axes.items() if axis in axes and axis != DATA}
        return ", ".join(v if axis == HELD_OUT else f"{axis} {v}" for axis, v in own.items())

    @property
    def axes(self) -> dict[str, str]:
        """The values of all axes except method and seed."""
        budget = {} if self.budget is None else {BUDGET: short(self.budget)}
        held_out = f"{self.collection}, {self.held_out}" if self.collection else self.held_out
        return {HELD_OUT: held_out, **self.conditions, **budget}

    @cached_property
    def measured(self) -> Sequence[NumberRow]:
        """All its numbers: of its run, if that is here, or of the results file."""
        return self.numbers if self.run is None else numbers_of(self.run)

    def value(self, metric: str, rule: str = "", split: str = "", over: str = "") -> float | None:
        """Returns one of its numbers, or None if it was not measured; see :class:`NumberRow`."""
        wanted = (metric, rule, split, over, "")
        return next((one.value for one in self.measured if one.of == wanted), None)

    def accuracy(self, rule: SelectionRule = FINAL, split: str = TEST) -> float | None:
        """Returns the accuracy from 0 to 1 under a selection rule, or None if not measured."""
        return self.value("accuracy", rule.name, split, "domain_mean")


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
        RunError: it is damaged, or has two rows for a run in one place; names the file and the
            line.
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
    found: dict[tuple[str, Place], ResultRow] = {}
    numbers: dict[tuple[str, Place], dict[Any, tuple[int, NumberRow | None]]] = {}
    for line, cells in enumerate(lines, start=2):
        if len(cells) != len(heads):
            raise RunError(f"{path}, line {line}: {len(cells)} cells, not {len(heads)}.")
        own = {name: cell for name, cell in zip(heads, map(from_cell, cells)) if cell}
        of_run: dict[str, Any] = {n: own.pop(n) for n in (*_OF_PLACE, *_MADE_WITH) if n in own}
        try:
            of_run |= {n: json.loads(of_run[n]) for n in ("conditions", _HASHES) if n in of_run}
            row = ResultRow(**{"method": "", "held_out": ""} | of_run)
            number = NumberRow(**own) if own else None  # type: ignore[arg-type]
        except (ValueError, RecursionError) as error:
            fault = field_fault(error) if isinstance(error, ValidationError) else str(error)
            raise RunError(f"{path}, line {line} is damaged: {fault}.") from None
        if row.key not in found or any(name in of_run for name in _MADE_WITH):
            found[row.key] = row
        what = number and (*number.of, number.weights)
        first, _ = numbers.setdefault(row.key, {}).setdefault(what, (line, number))
        if first != line:
            raise RunError(
                f"{path}, line {line}: {row.method}, {row.heading}, seed {row.seed} of "
                f"experiment {row.experiment} is in line {first}, too; keep one"
            )
    return [
        row.model_copy(update={"numbers": tuple(one for _, one in numbers[key].values() if one)})
        for key, row in found.items()
    ]


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
    """
    found = run.environment
    parts = [found.get(name) for name in ("processor", "device", "precision")]
    threads = f"{found.get('threads')} threads" if found.get("threads") else None
    made_with = {
        "machine": plain_text(", ".join(str(part) for part in [*parts, threads] if part)),
        "version": plain_text(found.get("feddg", "")),
        "hashes": {plain_text(name): plain_text(v) for name, v in hashes_of(run).items()},
    }
    ended = {
        budget: run if budget is None else run.at(budget) for budget in cell.budgets or (None,)
    }
    evaluate = cell.experiment.evaluate
    chosen_by = (evaluate.select_by, evaluate.select_over)
    return [
        ResultRow.of(cell, budget=budget, numbers=_kept(numbers_of(one), *chosen_by), **made_with)
        for budget, one in ended.items()
        if one is not None
    ]


def _kept(numbers: Iterable[NumberRow], metric: str, over: str) -> list[NumberRow]:
    """Returns the numbers for a results file, rounded as written, which is finer than one image.

    These are accuracies, what chose the rounds, and the numbers that are not of one split.
    """
    wanted = {("accuracy", split, "domain_mean") for split in SPLITS} | {(metric, ID_VAL, over)}
    wanted |= {(name, TEST, "domain_mean") for name in OF_A_DECISION}
    return [
        one.model_copy(
            update={n: float(f"{v:.7g}") for n in _ROUNDED if (v := getattr(one, n)) is not None}
        )
        for one in numbers
        if not one.over or (one.metric, one.split, one.over) in wanted
    ]


def to_text(rows: Sequence[ResultRow]) -> str:
    """Returns rows as CSV, a line for each number."""
    lines: list[Sequence[object]] = [COLUMNS]
    for row in rows:
        place = {name: getattr(row, name) for name in _OF_PLACE}
        place["conditions"] = _as_json(row.conditions)
        made = {"machine": row.machine, "version": row.version, "hashes": _as_json(row.hashes)}
        for number in row.measured or (None,):
            cells = dict(number or ()) | place | made
            lines.append([_as_text(cells.get(name)) for name in COLUMNS])
            made = {}
    return as_csv(lines)


def _as_text(cell: object) -> object:
    return repr(cell).removesuffix(".0") if isinstance(cell, float) else cell


def _as_json(values: Mapping[str, str]) -> str:
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
    found: dict[str, dict[int | None, ResultRow]] = {}
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
            if row.hashes and row.hashes == today:
                there.setdefault(row.budget, row)
            elif same_place and other:
                changed.append((row, other))
            elif same_place:
                there.setdefault(row.budget, row)
                silent += not row.hashes
        if own_cells[0].has_one_round and there:
            there = _from_its_images_on(next(iter(there.values())), own_cells[0].budgets)
            found[id] = there
        elif there.keys() >= set(own_cells[0].budgets or (None,)):
            found[id] = there
    if silent:
        warn(
            "images-unknown",
            f"{path} does not record for {silent} of its results which images and files they were "
            "made with; they are assumed to be the same.",
        )
    used = [row.version for own in found.values() for row in own.values()]
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
                f"{fault}put them back, or use --again to run them anew and replace them"
            )
        warn("other-files", f"{fault}they are not used.")
    return found, [row for row, _ in changed] if own else []


def _from_its_images_on(row: ResultRow, budgets: Sequence[int]) -> dict[int | None, ResultRow]:
    """Returns the row of a one-round method for all budgets not below its number of images."""
    seen = row.value("images_per_round") or 0.0
    return {budget: row for budget in budgets or (None,) if budget is None or budget >= seen}


class ComparisonFile(JsonFile):
    """``comparison.json``; see :class:`Results` for the fields."""

    name: str
    title: str | None = None
    question: str | None = None
    served: str = FINAL.name
    cells: list[ResultRow]

    @classmethod
    def of(cls, plan: Plan, cells: Sequence[ResultRow]) -> "ComparisonFile":
        """Returns the file for a plan's texts and cells."""
        of_plan = {"name", "title", "question"}
        return cls(**plan.model_dump(mode="json", include=of_plan), cells=list(cells))

    def results(self, rows: Sequence[ResultRow], **more: Any) -> "Results":
        """Returns results with these rows in the file's cells; ``more`` are further fields."""
        own = {name: value for name, value in self if value is not None and name != "cells"}
        return Results(**{"title": self.name} | own | more, rows=rows, planned=self.cells)


@dataclass(frozen=True)
class Leader:
    """The method with the best average, beside the best other one.

    Attributes:
        method: its label.
        average: its accuracy, in [0, 1], averaged over all columns.
        margin: its lead over the best other method; None if none shares columns and seeds.
    """

    method: str
    average: float
    margin: Margin | None


@dataclass(frozen=True)
class Results:
    """Results of many runs: what tables and pages are made from.

    Attributes:
        name: short name.
        title: heading.
        rows: rows of complete runs; a run may have several places.
        question: the question they answer.
        open: folders of incomplete runs, each with status and reason.
        planned: all places, with or without results.
        tuning: the trials of each method, if there were any.
        served: name of the rule of the runs' default models, as their experiments ask for.
    """

    name: str
    title: str
    rows: Sequence[ResultRow]
    question: str = ""
    open: Sequence[tuple[str, str]] = ()
    planned: Sequence[ResultRow] = ()
    tuning: TuningFile | None = None
    served: str = FINAL.name

    @classmethod
    def read(cls, path: Path, plan: Plan | None = None) -> "Results":
        """Reads a results file; see :meth:`of_rows`.

        Raises:
            RunError: the file is damaged, or has two rows for a place.
        """
        return cls.of_rows(read_results(path), plan, name=path.name)

    @classmethod
    def of_rows(
        cls, rows: Sequence[ResultRow], plan: Plan | None = None, name: str = "results"
    ) -> "Results":
        """Puts rows into the cells of a plan; without a plan, each row is its own cell.

        Raises:
            RunError: there are two rows for a place.
            ExperimentError: a cell of the plan is not a valid experiment.
        """
        found: dict[Place, ResultRow] = {}
        for row in rows:
            there = found.setdefault(row.place, row)
            if there is not row:
                raise RunError(
                    f"{name}: {row.method}, {row.heading}, seed {row.seed} is "
                    f"there twice, as {there.experiment} and as {row.experiment}; keep one"
                )
        if plan is None:
            return cls(name, name, rows)
        cells = [row for cell in expand_plan(plan) for row in ResultRow.all_of(cell)]
        content = ComparisonFile.of(plan, cells)
        placed = [found[cell.place] for cell in content.cells if cell.place in found]
        return content.results(placed)

    @cached_property
    def default_rule(self) -> SelectionRule:
        """The selection rule of the runs' default models; the final round if they differ."""
        rules = {run.default_rule for run in self.runs()}
        served = SELECTION_RULES.get(self.served, FINAL)
        if not rules and self.accuracies(served).keys() == self.accuracies().keys():
            return served
        return rules.pop() if len(rules) == 1 else FINAL

    @cached_property
    def _places(self) -> Sequence[ResultRow]:
        return self.planned or self.rows

    @cached_property
    def methods(self) -> list[str]:
        """Labels of the methods, in the plan's order."""
        return list(dict.fromkeys(place.method for place in self._places))

    @cached_property
    def seeds(self) -> list[int]:
        """All seeds."""
        return sorted({place.seed for place in self._places})

    @cached_property
    def seeds_run(self) -> set[int]:
        """The seeds with a result."""
        return {row.seed for row in self.rows}

    @cached_property
    def axes(self) -> dict[str, list[str]]:
        """The axes, besides method and seed, with several values, and these values in order."""
        values = grouped(pair for place in self._places for pair in place.axes.items())
        return {axis: list(dict.fromkeys(own)) for axis, own in values.items() if len({*own}) > 1}

    @cached_property
    def budgets(self) -> list[int]:
        """The numbers of training images with results, ascending."""
        return sorted({place.budget for place in self._places if place.budget is not None})

    def at(self, budget: int) -> "Results":
        """Returns the results at one of the budgets."""
        rows, planned = (
            [place for place in places if place.budget == budget]
            for places in (self.rows, self.planned)
        )
        return replace(self, rows=rows, planned=planned)

    @cached_property
    def at_largest(self) -> "Results":
        """The results at the largest budget; all results if there are no budgets."""
        return self.at(self.budgets[-1]) if self.budgets else self

    def column(self, place: ResultRow) -> str:
        """Returns the column heading of a place."""
        return place.heading_of(self.axes) or place.held_out

    @cached_property
    def columns(self) -> list[str]:
        """The column headings, in the plan's order."""
        return list(dict.fromkeys(self.column(place) for place in self._places))

    def columns_by(self, axis: str) -> dict[str, list[str]]:
        """Returns the columns grouped by their value of an axis."""
        own = [(place.axes.get(axis), self.column(place)) for place in self._places]
        groups = grouped((value, column) for value, column in own if value is not None)
        return {value: list(dict.fromkeys(columns)) for value, columns in groups.items()}

    def frame(self) -> "DataFrame":
        """Returns all numbers as a tidy table, one number per row.

        Columns: ``method``, ``column`` (the heading in tables), ``held_out``, one for each further
        axis, ``seed``, ``budget`` (images; empty without budgets); those of :class:`NumberRow`; and
        the provenance: ``experiment``, ``machine``, ``version``, ``hashes``, ``folder``.
        """
        from pandas import DataFrame  # a third of a second, and a run needs none of it

        axes = dict.fromkeys(axis for row in self.rows for axis in row.conditions)
        before = ["method", "column", "held_out", *axes, "seed", BUDGET]
        behind = ["experiment", *_MADE_WITH, "folder"]
        numbers = [
            dict.fromkeys(axes, "")
            | vars(row)
            | row.conditions
            | {"column": self.column(row), _HASHES: _as_json(row.hashes)}
            | vars(number)
            for row in self.rows
            for number in (numbers_of(row.run, domains=True) if row.run else row.measured)
        ]
        frame = DataFrame(numbers, columns=[*before, *NumberRow.model_fields, *behind])
        counts = dict.fromkeys((BUDGET, "round", "images"), "Int64")
        return frame.astype(counts | dict.fromkeys(("bytes", "seconds", "value"), float))

    @cached_property
    def _by_metric(self) -> dict[tuple[str, ...], dict[str, dict[Key, float]]]:
        found: dict[tuple[str, ...], dict[str, dict[Key, float]]] = {}
        for row in self.rows:
            column = self.column(row)
            for one in row.measured:
                if not one.domain:
                    methods = found.setdefault((one.metric, one.rule, one.split, one.over), {})
                    methods.setdefault(row.method, {})[column, row.seed] = one.value
        return found

    def values(
        self, metric: str, rule: str = "", split: str = "", over: str = ""
    ) -> dict[str, Accuracies]:
        """Returns a number for every method that has it, by column and seed.

        Args:
            metric: name of the metric, as in :meth:`frame`; likewise the others.
            rule: the name of a selection rule.
            split: name of the split.
            over: the aggregate over domains.
        """
        found = self._by_metric.get((metric, rule, split, over), {})
        return {method: dict(found[method]) for method in self.methods if method in found}

    def mean(
        self, method: str, metric: str, rule: str = "", split: str = "", over: str = ""
    ) -> float | None:
        """Returns the mean of a number over a method's runs that have it; see :meth:`values`."""
        found = self.values(metric, rule, split, over).get(method, {})
        return fmean(found.values()) if found else None

    def accuracies(self, rule: SelectionRule = FINAL, split: str = TEST) -> dict[str, Accuracies]:
        """Returns every method's accuracies under a rule, by column and seed."""
        return self.values("accuracy", rule.name, split, "domain_mean")

    @cached_property
    def domains(self) -> dict[str, str]:
        """What is held out, by column: columns that differ in a condition share a domain."""
        return {self.column(place): place.domain for place in self._places}

    @cached_property
    def collections(self) -> dict[str, str]:
        """The data set of each domain, in a plan over several."""
        return {place.domain: place.collection for place in self._places if place.collection}

    def margins(self, rule: SelectionRule, base: str = "") -> dict[str, Margin]:
        """Returns every method's margin over ``base``, or over the best other one, if it has one.

        Their p-values are corrected for the number of methods.
        """
        return leads(self.accuracies(rule), self.domains, base, self.collections)

    @cached_property
    def leader(self) -> Leader | None:
        """The method with the best average; None if none has every column, or none is fit."""
        if self.no_method_fit is not None:
            return None
        found = self.accuracies(self.default_rule)
        spreads = {m: average_over_columns(own, self.columns) for m, own in found.items()}
        averages = {method: one.mean for method, one in spreads.items() if one is not None}
        if not averages:
            return None
        best = max(averages, key=averages.__getitem__)
        return Leader(best, averages[best], self.margins(self.default_rule).get(best))

    def margin_frame(self, base: str = "") -> "DataFrame":
        """Returns :meth:`margins` at every budget by the default rule, a row for each method.

        Columns: ``budget``; ``method`` and ``other``; ``difference`` (shares from 0 to 1, the mean
        over domains); ``low`` and ``high``, the 95 % interval over domains; ``detectable``, see
        :attr:`Margin.detectable`; ``p`` and ``p_holm``, as it is and corrected for the number of
        methods; ``domains``, their number; ``seeds_low``, ``seeds_high`` and ``seeds``, the same
        over seeds on these domains; ``difference_DOMAIN``, the difference on each domain; in a plan
        over several data sets ``data_sets_mean``, ``_low``, ``_high`` and ``_count``, over data
        sets, each the mean of its domains.

        Args:
            base: the method that all others are set beside; each one's best other method if empty.
        """
        from pandas import DataFrame

        rule = self.default_rule
        domains = list(dict.fromkeys(self.domains.values()))
        rows = []
        for budget in self.budgets or (None,):
            own = self if budget is None else self.at(budget)
            for method, one in own.margins(rule, base).items():
                over, seeds = one.domains, one.seeds
                ends = (over.low, over.high, one.detectable, over.p, one.p, over.count)
                also = (seeds.low, seeds.high, seeds.count, *map(one.by_domain.get, domains))
                sets = one.collections
                over_sets = (sets.mean, sets.low, sets.high, sets.count)
                also += over_sets if self.collections else ()
                rows.append((budget, method, one.other, one.mean, *ends, *also))
        columns = [*_OF_MARGINS, *(f"difference_{name}" for name in domains)]
        columns += _OVER_DATA_SETS if self.collections else []
        return DataFrame(rows, columns=columns).astype({BUDGET: "Int64"})

    @cached_property
    def no_method_fit(self) -> Diagnostic | None:
        """A warning that no method is usable, with the cause and a command to try.

        None if a method beats a constant prediction in at least half of its runs.
        """
        rule = self.default_rule
        for method in self.methods:
            codes = [dict(_found_in(row, rule)) for row in self.of(method)]
            if codes and 2 * sum(MAJORITY in found for found in codes) <= len(codes):
                return None
        if not self.accuracies(rule):
            return None
        names = (rule.name, TEST, "domain_mean")
        constants = [self.mean(m, "largest_class_share", *names) for m in self.methods]
        share = max((value for value in constants if value is not None), default=None)
        right = f" ({100 * share:.1f} % right)" if share is not None else ""
        text = (
            f"No method here is fit to use: none of them beats {CONSTANT_ANSWER}{right} by more "
            "than chance."
        )
        return Diagnostic("no-method-fit", "warning", text, _remedy(self.runs()))

    def of(self, method: str) -> list[ResultRow]:
        """Returns the rows of a method."""
        return [row for row in self.rows if row.method == method]

    def runs(self, method: str | None = None) -> list[Run]:
        """Returns the runs whose folders are here, of one method or all."""
        rows = self.rows if method is None else self.of(method)
        return [row.run for row in rows if row.run is not None]


def read_comparison(folder: Path) -> Results:
    """Reads the results of ``feddg compare`` from its folder.

    Raises:
        RunError: the folder contains no comparison.
    """
    content = ComparisonFile.read(folder / COMPARISON)
    if content is None:
        raise RunError(f"{folder} holds no comparison: there is no {COMPARISON} in it")
    runs = {name: Run(folder / name) for name in {cell.folder for cell in content.cells}}
    complete = {name for name, run in runs.items() if run.status == "completed"}
    filled = complete | {cell.folder for cell in content.cells if cell.numbers}
    tuning, plan = TuningFile.read(folder / TUNING), folder / "plan.yaml"
    if tuning and is_file(plan) and not read_fields_of(plan, "plan file", RunError).get("tune"):
        tuning = None  # it is left of an earlier comparison in this folder
    rows = []
    for cell in content.cells:
        run = runs[cell.folder] if cell.folder in complete else None
        if run is not None and cell.budget is not None:
            run = run.at(cell.budget)
        if run is not None or (cell.numbers and cell.folder not in complete):
            rows.append(cell.model_copy(update={"run": run}))
    return content.results(
        rows,
        open=[(name, _state(runs[name])) for name in sorted(runs) if name not in filled],
        tuning=tuning,
    )


def _state(run: Run) -> str:
    if not is_run(run.folder):
        return "not started"
    return f"{run.status}: {run.error}" if run.error else run.status


def results_of(folders: Sequence[Path], title: str | None = None) -> Results:
    """Arranges runs in a table by the settings in which they differ.

    Hyper-parameters that differ between runs of one method become part of its label. Other
    differing settings become conditions, or part of the label if there is a single method. Runs
    without such a difference are distinguished by their folders.

    Raises:
        RunError: a folder is not a run folder.
    """
    runs = [read_run(folder) for folder in {one.resolve(): one for one in folders}.values()]
    complete = [run for run in runs if run.status == "completed"]
    settings = [
        flatten((run.settings.get("method") or {}).get("settings") or {}) for run in complete
    ]
    of_method = grouped((run.method, own) for run, own in zip(complete, settings))
    varying = {method: differing(own) for method, own in of_method.items()}
    labels = [
        ", ".join([run.method, *(f"{k} {own[k]}" for k in varying[run.method] if k in own)])
        for run, own in zip(complete, settings)
    ]
    others = [
        flatten({k: v for k, v in run.settings.items() if k not in _NOT_CONDITIONS})
        for run in complete
    ]
    alike = grouped(zip(labels, others)).values()
    axes = dict.fromkeys(axis for own in alike for axis in differing(own))
    conditions = [{axis: own.get(axis, "") for axis in axes} for own in others]
    if len(set(labels)) == 1:
        labels = [
            ", ".join([label, *(f"{axis} {value}" for axis, value in own.items() if value)])
            for label, own in zip(labels, conditions)
        ]
        conditions = [{} for _ in complete]
    rows = [
        ResultRow(
            method=plain_text(label),
            held_out=plain_text("+".join(run.held_out(TEST)) or "as split"),
            conditions={plain_text(axis): plain_text(v) for axis, v in condition.items()},
            seed=int(run.settings.get("seed") or 0),
            folder=run.folder.name,
            run=run,
        )
        for run, label, condition in zip(complete, labels, conditions)
    ]
    places, names = Counter(row.place for row in rows), Counter(row.folder for row in rows)
    folder_of = [
        row.folder if names[row.folder] == 1 else plain_text(run.folder)
        for row, run in zip(rows, complete)
    ]
    rows = [
        row.model_copy(update={"method": f"{row.method} ({folder})"})
        if places[row.place] > 1
        else row
        for row, folder in zip(rows, folder_of)
    ]
    name = title or f"{len(runs)} runs"
    incomplete = [(run.folder.name, _state(run)) for run in runs if run.status != "completed"]
    return Results(name=name, title=name, rows=rows, open=incomplete)


def differing(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns the names of the settings that are not the same in all runs."""
    names = dict.fromkeys(name for own in settings for name in own)
    return [name for name in names if len({own.get(name) for own in settings}) > 1]


def _remedy(runs: Sequence[Run]) -> str:
    """Returns the likeliest causes of a failure in most runs, and a command against the first."""
    if not runs:
        return "Train longer, on more images, or from pretrained weights (--weights imagenet)."
    causes = [causes_of_failure(run) for run in runs]
    likeliest = Counter(own[0].reason for own in causes).most_common(1)[0][0]
    run, found = next((r, c) for r, c in zip(runs, causes) if c[0].reason == likeliest)
    first, *others = (cause.text for cause in found)
    also = f" Next in line: {', then '.join(others)}." if others else ""
    flags = [*next(cause.flags for cause in found if cause.flags)]
    plan, out = run.folder.parent / "plan.yaml", f"{run.folder.parent}-again"
    again = ["run", str(run.folder / EXPERIMENT)]
    if is_file(plan):
        again = ["compare", str(plan), "--out", out]
        flags = ["--methods" if flag == "--method" else flag for flag in flags]
    return f"Most likely: {first}.{also} Try `{shlex.join(['feddg', *again, *flags])}`."


def about_method(results: Results, method: str) -> list[tuple[str, Severity, str]]:
    """Returns the codes found in a method's runs, their severity, and in how many; gravest first.

    The last is `` in 2 of 6 runs``, `` in both runs`` or `` in all 6 runs``; empty for one run.
    """
    rows = results.of(method)
    runs = {row.run.folder if row.run else row.folder or row.key: row for row in rows}.values()
    counts = Counter(found for row in runs for found in _found_in(row, results.default_rule))
    found = []
    for (code, severity), count in counts.most_common():
        share = f"{count} of {len(runs)}"
        if count == len(runs):
            share = "both" if count == 2 else f"all {count}"
        found.append((code, severity, f" in {share} runs" if len(runs) > 1 else ""))
    return sorted(found, key=lambda one: SEVERITIES.index(one[1]))


def _found_in(row: ResultRow, rule: SelectionRule) -> list[tuple[str, Severity]]:
    """Returns the warnings about a run, from the run or its row."""
    if row.run is None:
        diagnosed: dict[str, tuple[str, Severity]] = {
            CONSTANT: (MAJORITY, "warning"),
            RISING: (STILL_RISING, "note"),
        }
        rules = {CONSTANT: rule.name, RISING: FINAL.name}
        return [found for name, found in diagnosed.items() if row.value(name, rules[name])]
    evaluations = row.run.evaluations
    found = about_accuracy(evaluations, rule.of(evaluations).round, weights=rule.weights)
    # Of methods beside each other about_lead says how much they fluctuate.
    return [(one.code, one.severity) for one in found if one.code != UNSTEADY]


def about_budgets(results: Results) -> Iterator[Diagnostic]:
    """Reports runs that ended before they reached their budget of images."""
    seen = [
        (row.run.spent[row.run.rounds_done].images, row.budget)
        for row in results.rows
        if row.run is not None and row.budget is not None and not row.run.has_one_round
    ]
    below = [(images, budget) for images, budget in seen if images < budget]
    if below:
        images, budget = min(below)
        text = (
            f"{counted(len(below), 'run')} ended below the budget of {short(budget)} images, with "
            f"{short(images)}, because batches were not full or updates were refused: the last "
            "round is used."
        )
        yield Diagnostic("budget-not-reached", "warning", text)


def about_lead(results: Results) -> Iterator[Diagnostic]:
    """Warns if the best method's lead is smaller than its round-to-round fluctuation."""
    best = results.leader
    if best is None or best.margin is None:
        return
    steps = [
        step
        for method in (best.method, best.margin.other)
        for run in results.runs(method)
        if (step := fluctuation(run.evaluations)) is not None
    ]
    yield from about_fluctuation(fmean(steps) if steps else None, best.margin.mean)
