"""Results of many runs: read from run folders or CSV files, as one table."""

import csv
import io
import itertools
import json
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from feddg.comparison.plan import Plan, PlannedCell, expand_plan, table_cells
from feddg.comparison.statistics import Accuracies, Key, best_other, paired_margin
from feddg.data.fingerprint import ImagesFile
from feddg.diagnostics import Diagnostic, emit, gravest_first
from feddg.errors import DataError, ExperimentError, RunError
from feddg.experiment import Experiment
from feddg.messages import plain_text
from feddg.models.backbones import weights_digest
from feddg.records import (
    ID_VAL,
    LAST,
    SPLITS,
    TAIL,
    TEST,
    JsonFile,
    Number,
    Row,
    as_cell,
    from_cell,
)
from feddg.runs.diagnostics import (
    MAJORITY,
    STILL_RISING,
    about_accuracy,
    about_fluctuation,
    fluctuation,
    split_accuracy,
)
from feddg.runs.provenance import IMAGES, ImagesNow, named_files
from feddg.runs.reading import (
    FINAL,
    SELECTION_RULES,
    Evaluations,
    RunRecord,
    SelectionRule,
    flatten,
    is_run,
    read_run,
    served_by_all,
)
from feddg.settings import TORCHVISIONS, OneLine
from feddg.storage import Stamp, alone, is_file, private_folder, read_text, replace_text, stamp, why

# What was tried for each method before a comparison, as a file beside its tables.


TUNING: Final = "tuning.json"
_TRIALS: Final = "trials.csv"


def tuning_beside(kept: Path) -> Path:
    """Returns the file of what was tried and picked, beside one of kept results."""
    return kept.with_suffix(f".{TUNING}")


def trials_beside(kept: Path) -> Path:
    """Returns the file of the trials' own kept results, beside that of their table."""
    return kept.with_suffix(f".{_TRIALS}")


class TriedRow(Row):
    """A combination of values that was tried for a method.

    Attributes:
        method: the method's label.
        held_out: what the columns hold out that it was tried for.
        values: the values by field.
        metric: what chooses rounds in its trials (``evaluate.select_by``).
        over: how it is taken over domains (``evaluate.select_over``).
        score: the mean of that on in-domain validation over its trials, 0 to 1; None where a trial
            failed or the metric is not defined for its images.
        trials: how many there are.
        constant: in how many of them the model is no better than one that always names the same
            class, on in-domain validation; None where this is not on record.
        picked: whether the table is run with it.
    """

    method: str
    held_out: str = ""
    values: dict[str, str]
    metric: str = "accuracy"
    over: str = "domain_mean"
    score: Number | None = Field(None, validation_alias=AliasChoices("score", "accuracy"))
    trials: int
    constant: int | None = Field(None, ge=0)
    picked: bool


class TuningFile(JsonFile):
    """What was tried before a comparison, and what was picked: ``tuning.json``.

    Attributes:
        rule: which round of a trial counts.
        rounds: rounds of a trial.
        seeds: of the trials.
        tried: all combinations.
    """

    rule: str
    rounds: int | None = None
    seeds: tuple[int, ...]
    tried: tuple[TriedRow, ...]

    def after(self, earlier: "TuningFile | None") -> "TuningFile":
        """Returns this file behind what an earlier one says of other methods and hold-outs.

        A table may be carried out column by column. Choices by another rule, number of rounds or
        other seeds are not this table's, and are left out.
        """
        settings = (self.rule, self.rounds, self.seeds)
        if earlier is None or settings != (earlier.rule, earlier.rounds, earlier.seeds):
            return self
        own = {(row.method, row.held_out) for row in self.tried}
        others = [row for row in earlier.tried if (row.method, row.held_out) not in own]
        return self.model_copy(update={"tried": (*others, *self.tried)})

    def diagnostics(self) -> list[Diagnostic]:
        """Returns what to know about the choices: models that learned nothing, ends, and ties."""
        groups: dict[tuple[str, str], list[TriedRow]] = {}
        for row in self.tried:
            groups.setdefault((row.method, row.held_out), []).append(row)
        found = []
        for (method, held_out), rows in groups.items():
            for row in (row for row in rows if row.picked):
                where = f"{method}{f', {held_out} held out' if held_out else ''}"
                if row.constant:
                    found.append(
                        Diagnostic(
                            "tuned-on-nothing-learned",
                            "warning",
                            f"{where}: with the picked values the model is no better than always "
                            f"answering the most frequent class in {row.constant} of {row.trials} "
                            "trials, so that the choice says little.",
                            "Give trials more rounds (tune.rounds), pretrained weights, or other "
                            "values.",
                        )
                    )
                for text, advice in _edges(row, rows):
                    edge = f"{where}: {text}"
                    found.append(Diagnostic("edge-of-the-grid", "warning", edge, advice))
                equal = [other for other in rows if other.score == row.score]
                if len(equal) > 1:
                    text = f"{where}: {len(equal)} combinations do equally well; the first counts."
                    found.append(Diagnostic("tuning-tie", "warning", text))
        return found


def _edges(picked: TriedRow, rows: Sequence[TriedRow]) -> Iterator[tuple[str, str]]:
    """Which numbers of a choice are the first or last of their grid, and what to try."""
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


COMPARISON = "comparison.json"
HELD_OUT = "held out"
_NOT_CONDITIONS = ("name", "device", "seed", "preset", "hold_out", "method", "precision")


@dataclass(frozen=True)
class Place:
    """Where a run stands among the others.

    Attributes:
        method: the label of its method.
        scenario: the held-out test domains.
        conditions: values of further axes, by axis.
        seed: the experiment's seed.
    """

    method: str
    scenario: str
    conditions: Mapping[str, str]
    seed: int

    @property
    def values(self) -> dict[str, str]:
        """The values of all axes beside method and seed."""
        return {HELD_OUT: self.scenario, **self.conditions}


class PlacedRun(Row):
    """A cell of a comparison, and which run belongs to it."""

    method: str
    scenario: str
    conditions: dict[str, str]
    seed: int
    folder: Annotated[str, Field(pattern=r"^[^/\\\x00]+$")]
    kept: bool = False
    """Whether a row of kept results is all there is of it."""


class ComparisonFile(JsonFile):
    """``comparison.json``; see :class:`Results` for the fields."""

    name: str
    title: str | None = None
    question: str | None = None
    differences: list[str] | None = None
    paper: dict[str, Any] | None = None
    cells: list[PlacedRun]


@dataclass(frozen=True)
class Result:
    """One complete run in its place."""

    place: Place
    run: RunRecord

    @cached_property
    def rounds(self) -> dict[str, int | None]:
        """The round that each selection rule chooses."""
        return {rule.name: rule.choose(self.run.evaluations) for rule in SELECTION_RULES.values()}

    def accuracy(self, rule: SelectionRule, split: str = TEST) -> float | None:
        """Accuracy of a split, mean over its domains, after the round that a rule chooses."""
        return rule.measure(self.run.evaluations, self.rounds[rule.name], split)


@dataclass(frozen=True)
class Results:
    """The runs of a comparison.

    Attributes:
        name: short.
        title: for a heading.
        question: what it is to answer.
        results: completed runs; a run may stand in several cells.
        open: folders of runs that are not complete, each with its status and reason.
        elsewhere: folders of runs that are complete, but are not here: rows of kept results.
        differences: how the setting differs from the paper's.
        paper: the paper's numbers, as in a plan's ``paper``.
        planned: all places, filled or not.
        tuning: what was tried for each method first, if anything.
    """

    name: str
    title: str
    results: Sequence[Result]
    question: str = ""
    open: Sequence[tuple[str, str]] = ()
    elsewhere: Sequence[str] = ()
    differences: Sequence[str] = ()
    paper: Mapping[str, Any] | None = None
    planned: Sequence[Place] = ()
    tuning: TuningFile | None = None

    @cached_property
    def served(self) -> SelectionRule:
        """The rule of the models that the runs serve; the final round's where they differ."""
        return served_by_all(result.run for result in self.results)

    @cached_property
    def _places(self) -> Sequence[Place]:
        return self.planned or [result.place for result in self.results]

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
        """The seeds of which there is a result."""
        return {result.place.seed for result in self.results}

    @cached_property
    def axes(self) -> dict[str, list[str]]:
        """The axes beside method and seed that have several values, with these, in order."""
        values: dict[str, dict[str, None]] = {}
        for place in self._places:
            for axis, value in place.values.items():
                values.setdefault(axis, {})[value] = None
        return {axis: list(known) for axis, known in values.items() if len(known) > 1}

    def column(self, place: Place) -> str:
        """Returns the heading of the column that a place is in."""
        texts = [
            value if axis == HELD_OUT else f"{axis} {value}"
            for axis, value in place.values.items()
            if axis in self.axes
        ]
        return ", ".join(texts) or place.scenario

    @cached_property
    def columns(self) -> list[str]:
        """The columns' headings, in the plan's order."""
        return list(dict.fromkeys(self.column(place) for place in self._places))

    def columns_by(self, axis: str) -> dict[str, list[str]]:
        """Returns the columns that share a value of an axis, by that value."""
        groups: dict[str, dict[str, None]] = {}
        for place in self._places:
            if axis in place.values:
                groups.setdefault(place.values[axis], {})[self.column(place)] = None
        return {value: list(columns) for value, columns in groups.items()}

    def accuracies(self, rule: SelectionRule, split: str = TEST) -> dict[str, Accuracies]:
        """Returns every method's accuracies under a rule, by column and seed."""
        found: dict[str, dict[Key, float]] = {method: {} for method in self.methods}
        for result in self.results:
            value = result.accuracy(rule, split)
            if value is not None and value == value:
                place = result.place
                found[place.method][self.column(place), place.seed] = value
        return {method: values for method, values in found.items() if values}

    def of(self, method: str) -> Iterator[Result]:
        """Yields the results of a method."""
        return (result for result in self.results if result.place.method == method)


def read_comparison(folder: Path) -> Results:
    """Reads what ``feddg compare`` wrote to a folder.

    Raises:
        RunError: the folder holds no comparison.
    """
    content = ComparisonFile.read(folder / COMPARISON)
    if content is None:
        raise RunError(f"{folder} holds no comparison: there is no {COMPARISON} in it")
    cells = content.cells
    runs = {name: RunRecord(folder / name) for name in {cell.folder for cell in cells}}
    complete = {name for name, run in runs.items() if run.status == "completed"}
    kept = {cell.folder for cell in cells if cell.kept} - complete
    places = [Place(cell.method, cell.scenario, cell.conditions, cell.seed) for cell in cells]
    return Results(
        name=content.name,
        title=content.title or content.name,
        question=content.question or "",
        results=[
            Result(place, runs[cell.folder])
            for place, cell in zip(places, cells)
            if cell.folder in complete
        ],
        open=[(name, _state(runs[name])) for name in sorted(runs) if name not in complete | kept],
        elsewhere=sorted(kept),
        differences=content.differences or (),
        paper=content.paper,
        planned=places,
        tuning=TuningFile.read(folder / TUNING),
    )


def _state(run: RunRecord) -> str:
    if not is_run(run.folder):
        return "not started"
    return f"{run.status}: {run.error}" if run.error else run.status


def results_of(folders: Sequence[Path], title: str | None = None) -> Results:
    """Gives runs their places by what their experiments differ in.

    Hyper-parameters that differ between runs of one method become part of its label; other
    settings that differ between runs of one label become conditions, or, of a single method, part
    of its label, too. Runs that nothing of this tells apart are told apart by their folders.

    Raises:
        RunError: a folder is no run folder.
    """
    runs = [read_run(folder) for folder in folders]
    complete = [run for run in runs if run.status == "completed"]
    labels = _labels(complete)
    conditions = _conditions(complete, labels)
    if len(set(labels)) == 1:
        told = ([f"{axis} {value}" for axis, value in own.items() if value] for own in conditions)
        labels = [", ".join([label, *own]) for label, own in zip(labels, told)]
        conditions = [{} for _ in complete]
    places = [
        Place(label, "+".join(run.held_out(TEST)) or "as split", condition, seed_of(run))
        for run, label, condition in zip(complete, labels, conditions)
    ]
    results = [
        Result(
            replace(place, method=f"{place.method} ({run.folder.name})")
            if places.count(place) > 1
            else place,
            run,
        )
        for run, place in zip(complete, places)
    ]
    named = title or f"{len(runs)} runs"
    open_runs = [(run.folder.name, _state(run)) for run in runs if run.status != "completed"]
    return Results(name=named, title=named, results=results, open=open_runs)


def seed_of(run: RunRecord) -> int:
    """Returns a run's seed."""
    return int(run.experiment.get("seed") or 0)


def _labels(runs: Sequence[RunRecord]) -> list[str]:
    settings = [
        dict(flatten((run.experiment.get("method") or {}).get("settings") or {})) for run in runs
    ]
    varying = {
        method: _varying([own for run, own in zip(runs, settings) if run.method == method])
        for method in {run.method for run in runs}
    }
    return [
        ", ".join([run.method, *(f"{k} {own[k]}" for k in varying[run.method] if k in own)])
        for run, own in zip(runs, settings)
    ]


def _conditions(runs: Sequence[RunRecord], labels: Sequence[str]) -> list[dict[str, str]]:
    flat = [
        dict(flatten({k: v for k, v in run.experiment.items() if k not in _NOT_CONDITIONS}))
        for run in runs
    ]
    axes: dict[str, None] = {}
    for label in dict.fromkeys(labels):
        axes |= dict.fromkeys(_varying([own for own, of in zip(flat, labels) if of == label]))
    return [{axis: own.get(axis, "") for axis in axes} for own in flat]


def _varying(rows: Sequence[Mapping[str, str]]) -> list[str]:
    keys = dict.fromkeys(key for row in rows for key in row)
    return [key for key in keys if len({row.get(key) for row in rows}) > 1]


# The numbers of a finished run that outlive its folder.


SCORE: Final = "score"
"""Begins the name of a metric that is not the tables' accuracy; it may be below 0."""
CONSTANT: Final = "constant"
"""Begins the name of what says whether a model is no better than a constant one: 1, or 0."""
RISING: Final = "rising"
"""Whether accuracy was still rising at the last round: 1, or 0."""


def measured_numbers(run: RunRecord) -> dict[str, float]:
    """Returns the numbers of a finished run that tables need.

    Returns:
        All to seven digits, so that a number is the same once it was written and read.

        Accuracies from 0 to 1 as ``SPLIT_RULE``. ``score_RULE``: what chooses rounds, on in-domain
        validation, where that is something else (see :func:`score_name`). ``constant_RULE`` and
        ``rising``: 1 where the model is no better on the test domains than one that always names
        the same class, and where its accuracy there was still rising at the last round, else 0
        (see :mod:`feddg.runs.diagnostics`); where no test domain is held out, as in the trials of a
        ``tune`` section, this is of in-domain validation. ``movement_last`` and
        ``movement_tail``: by how much the accuracy on the test domains changes from one evaluated
        round to the next, mean over the second half of the rounds, of the last weights and of the
        tail's mean. By round, means: ``seconds`` of training and aggregation, ``images`` of
        training steps, each once a step, ``passes`` of images through the networks where they were
        counted, ``bytes`` that a client sends and is sent.
    """
    numbers: dict[str, float] = {}
    found = run.evaluations
    judged = TEST if any(found.at(round, TEST) for round in found.rounds) else ID_VAL
    for rule in SELECTION_RULES.values():
        chosen = rule.choose(found)
        for split in SPLITS:
            value = rule.measure(found, chosen, split)
            if value is not None and math.isfinite(value):
                numbers[f"{split}_{rule.key}"] = value
        name = score_name(rule, found.select_by, found.select_over)
        score = found.of(rule.weights).score(chosen, ID_VAL)
        if score is not None and math.isfinite(score):
            numbers[name] = score
        at = split_accuracy(found.of(rule.weights), chosen, judged)
        if at is not None and at.constant is not None:
            codes = {one.code for one in about_accuracy(found, chosen, judged, rule.weights)}
            numbers[constant_name(rule)] = float(MAJORITY in codes)
            if rule is FINAL:
                numbers[RISING] = float(STILL_RISING in codes)
    for weights in (LAST, TAIL):
        moved = mean_step(found.of(weights), run.rounds_done)
        if moved is not None:
            numbers[f"movement_{weights}"] = moved
    rounds = run.metrics.rounds
    if rounds:
        trained = [r.seconds.get("train", 0.0) + r.seconds.get("aggregate", 0.0) for r in rounds]
        sent = [(r.bytes_up + r.bytes_down) / max(1, len(r.clients)) for r in rounds]
        numbers["seconds"] = math.fsum(trained) / len(rounds)
        numbers["images"] = math.fsum(r.images for r in rounds) / len(rounds)
        if all(r.passes for r in rounds):
            numbers["passes"] = math.fsum(r.passes for r in rounds) / len(rounds)
        numbers["bytes"] = math.fsum(sent) / len(rounds)
    return {name: float(f"{number:.7g}") for name, number in numbers.items()}


def constant_name(rule: SelectionRule) -> str:
    """Returns which number of a run says whether a rule's model is no better than a constant."""
    return f"{CONSTANT}_{rule.key}"


def score_name(rule: SelectionRule, select_by: str, select_over: str) -> str:
    """Returns which number of a run says how well it does on in-domain validation under a rule.

    Args:
        rule: which round and which weights count.
        select_by: the run's ``evaluate.select_by``.
        select_over: its ``evaluate.select_over``.
    """
    tables_show_it = (select_by, select_over) == ("accuracy", "domain_mean")
    return f"{ID_VAL if tables_show_it else SCORE}_{rule.key}"


def mean_step(evaluations: Evaluations, rounds: int, split: str = TEST) -> float | None:
    """Returns the mean absolute change between neighbouring evaluated rounds of the second half.

    Neighbours are the rounds that lie closest together: with ``evaluate.every_of_last`` those of
    the end, which are one apart.

    Args:
        evaluations: of one kind of weights.
        rounds: rounds trained.
        split: whose accuracy, mean over its domains.

    Returns:
        The change, 0 to 1; None with fewer than two evaluations in the second half.
    """
    values = {round: evaluations.accuracy(round, split) for round in evaluations.rounds}
    known = [(round, value) for round, value in values.items() if value is not None]
    pairs = list(itertools.pairwise((round, value) for round, value in known if round > rounds / 2))
    if not pairs:
        return None
    closest = min(b - a for (a, _), (b, _) in pairs)
    steps = [abs(y - x) for (a, x), (b, y) in pairs if b - a == closest]
    return math.fsum(steps) / len(steps)


# What a result was made with: its images and the files that its experiment names, as hashes.
#
# An experiment's hash knows the names of files and not what is in them. A kept result may be met
# by a folder that has changed since, or by another machine's, where the same files lie elsewhere.


_IMAGES, _WEIGHTS = "images", "model.weights"


def made_with(run: RunRecord) -> dict[str, str]:
    """Returns the hashes that a finished run wrote down: of its images, and by field of files.

    Raises:
        RunError: a file of the run is damaged.
    """
    images = ImagesFile.read(run.folder / IMAGES)
    found = {} if images is None else {_IMAGES: images.fingerprint()} | images.files
    weights = run.environment.get("weights")
    digest = weights.get("sha256") if isinstance(weights, dict) else None
    return found | ({_WEIGHTS: str(digest)} if digest else {})


def would_be_made_with(experiment: Experiment, now: ImagesNow) -> dict[str, str]:
    """Returns the same of a run that would begin now, without what is not there any more."""
    found = named_files(experiment)
    with suppress(DataError):  # whoever runs something will say so
        found[_IMAGES] = now.fingerprint(experiment)
    weights = experiment.model.weights
    if weights == TORCHVISIONS:
        found[_WEIGHTS] = weights
    elif weights is not None and (seen := stamp(Path(weights))) is not None:
        found[_WEIGHTS] = _digest(weights, seen)
    return found


def others(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns what has another content now; what is known of one side only is not compared."""
    return [name for name in before.keys() & now.keys() if before[name] != now[name]]


def are_the_same(before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Whether something is known of both sides, and all that is known of one is the other's."""
    return bool(before) and before == now


@lru_cache(maxsize=16)
def _digest(weights: str, seen: Stamp) -> str:
    return str(weights_digest(weights))


# Results that outlive their run folders: a CSV file with one row per finished run.
#
# A campaign may take many days on several machines, and its run folders many gigabytes. What its
# tables need of a run is one row: accuracies by split and selection rule, how far they moved from
# round to round, and what a round cost. ``feddg compare --kept FILE`` adds such rows as runs end,
# and does not run again what the file has, whatever folder or machine it ran in: experiments are
# told apart by their hash and by what is in their files, wherever these lie
# (:mod:`feddg.comparison.results`). Several processes may add to one file.


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
            :func:`feddg.comparison.results.measured_numbers` for the others.
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


# The files of kept results that a comparison goes by: its own, other plans', nothing outdated.


def kept_files(
    kept: Path | None, known: Sequence[Path] = ()
) -> tuple[KeptResults | None, list[KeptResults]]:
    """Reads a table's own file of kept results, and those of other plans.

    Raises:
        ExperimentError: results are known, and there is no file to copy them into.
        RunError: a file is damaged, or one of known results is not there.
    """
    if known and kept is None:
        raise ExperimentError(
            "known results are copied into the table's own file: name that, too (--kept FILE)"
        )
    for path in known:
        if not is_file(path):
            raise RunError(f"There is no file of known results {path}.")
    own = KeptResults.read(kept) if kept is not None else None
    return own, [KeptResults.read(path) for path in known]


@dataclass(frozen=True)
class Asked:
    """An experiment whose result is asked for: of many files, so its hash is computed once.

    Attributes:
        experiment: what is or would be run.
        hash: that of its results.
        places: where the results of its cells stand.
    """

    experiment: Experiment
    hash: str
    places: Set[Hashable]


def asked_for(cells: Sequence[PlannedCell]) -> dict[str, Asked]:
    """Returns what cells ask for, by the experiments' ids."""
    of: dict[str, list[PlannedCell]] = {}
    for cell in cells:
        of.setdefault(cell.experiment.id, []).append(cell)
    return {
        id: Asked(own[0].experiment, own[0].experiment.portable_id, set(map(place_of, own)))
        for id, own in of.items()
    }


def known_results_of(
    file: KeptResults,
    asked: Mapping[str, Asked],
    now: ImagesNow,
    *,
    own: bool = True,
    again: bool = False,
) -> dict[str, KeptResult]:
    """Returns the results of experiments that a file has, by the experiments' ids.

    A result is an experiment's where the settings are the same and so is what is in its images and
    files, wherever they lie. Where that is not known of both sides - nobody wrote it down, or
    images are not here - it is one in the same place of the table, or of the same paths. It
    is outdated where it would be one, and what is in them is something else now.

    Args:
        file: the file.
        asked: what is asked for, by the experiments' ids.
        now: tells the images.
        own: whether it is the table's own file, which outdated results are not to stay in; another
            table's is read only, and they are passed over with a warning.
        again: whether to leave outdated results out of the file.

    Raises:
        RunError: some of the table's own are outdated, and ``again`` is not said.
    """
    rows: dict[str, list[KeptResult]] = {}
    for result in file.results:
        rows.setdefault(result.experiment, []).append(result)
    found: dict[str, KeptResult] = {}
    changed: list[tuple[KeptResult, list[str]]] = []
    silent = 0
    for id, one in asked.items():
        candidates = rows.get(one.hash)
        if not candidates:
            continue
        today = would_be_made_with(one.experiment, now)
        for result in candidates:
            meant = result.experiment == id or result.place in one.places
            if are_the_same(result.made_with, today):
                found.setdefault(id, result)
            elif meant and (names := others(result.made_with, today)):
                changed.append((result, names))
            elif meant:
                found.setdefault(id, result)
                silent += not result.made_with
    if silent:
        text = (
            f"{file.path} does not say of {silent} of its results which images and files they were "
            "made with; they are taken to be the same."
        )
        emit(Diagnostic("images-unknown", "warning", text))
    if changed and not again:
        first, names = changed[0]
        said = (
            f"{file.path}: {len(changed)} of its results came from other files than are there now "
            f"({', '.join(sorted(names))} of {first.method}, {first.column}, seed {first.seed}); "
        )
        if own:
            raise RunError(f"{said}put them back, or --again runs anew and replaces them")
        emit(Diagnostic("other-files", "warning", f"{said}they are not taken."))
    if own:
        file.leave_out([result for result, _ in changed])
    return found


# Kept results as a table, by method and column: those of a plan where one is given.


@dataclass(frozen=True)
class KeptTable:
    """Kept results by method and column.

    Attributes:
        results: one for each cell that has one; in the plan's order, or in the file's without one.
        plan: the plan; None for a file that speaks for itself.
        cells: the plan's cells; none without one.
        strangers: how many rows of the file are no cell of the plan.
    """

    results: Sequence[KeptResult]
    plan: Plan | None = None
    cells: Sequence[PlannedCell] = ()
    strangers: int = 0

    @classmethod
    def of(cls, kept: KeptResults, plan: Plan | None = None) -> "KeptTable":
        """Puts kept results into the cells of a plan; without one, each is a cell of its own.

        Raises:
            RunError: the file has two results for a cell.
            ExperimentError: a cell of the plan is no valid experiment.
        """
        found: dict[Hashable, KeptResult] = {}
        for result in kept.results:
            there = found.setdefault(result.place, result)
            if there is not result:
                raise RunError(
                    f"{kept.path}: {result.method}, {result.column}, seed {result.seed} stands "
                    f"there twice, as {there.experiment} and as {result.experiment}; leave one"
                )
        if plan is None:
            return cls(kept.results)
        cells = expand_plan(plan)
        placed = [found[key] for key in map(place_of, cells) if key in found]
        return cls(placed, plan, cells, strangers=len(found) - len(placed))

    @cached_property
    def _places(self) -> Results:
        """The plan's places, which name methods, columns and seeds."""
        places = [Place(c.method, c.scenario, dict(c.conditions), c.seed) for c in self.cells]
        return Results("", "", [], planned=places)

    @cached_property
    def methods(self) -> list[str]:
        """Labels of the methods, in order."""
        if self.plan is not None:
            return self._places.methods
        return list(dict.fromkeys(result.method for result in self.results))

    @cached_property
    def columns(self) -> list[str]:
        """The columns' headings, in order."""
        if self.plan is not None:
            return self._places.columns
        return list(dict.fromkeys(result.column for result in self.results))

    @property
    def paper(self) -> Mapping[str, Any] | None:
        """The paper's numbers, as in a plan's ``paper``."""
        published = self.plan.paper if self.plan is not None else None
        return None if published is None else published.model_dump(mode="json")

    @property
    def exact(self) -> int:
        """How many results ran as the plan says, wherever its files lay, by any value it tries."""
        tuned = self.plan is not None and self.plan.tune is not None
        cells = table_cells(self.plan) if self.plan and tuned else self.cells
        wanted = {cell.experiment.portable_id for cell in cells}
        return sum(result.experiment in wanted for result in self.results)

    def column(self, result: KeptResult) -> str:
        """Returns the heading of the column that a result is in."""
        if self.plan is None:
            return result.column
        place = Place(result.method, result.held_out, result.conditions, result.seed)
        return self._places.column(place)

    def no_better_than_constant(self, rule: SelectionRule = FINAL) -> dict[str, set[Key]]:
        """Returns by method where, under a rule, a model is no better than a constant one."""
        name = constant_name(rule)
        found = {
            method: {(self.column(r), r.seed) for r in rows if r.numbers.get(name)}
            for method, rows in self.by_method().items()
        }
        return {method: places for method, places in found.items() if places}

    def by_method(self) -> dict[str, list[KeptResult]]:
        """Returns the results of every method that has some."""
        found: dict[str, list[KeptResult]] = {method: [] for method in self.methods}
        for result in self.results:
            found[result.method].append(result)
        return {method: rows for method, rows in found.items() if rows}

    def accuracies(self, rule: SelectionRule = FINAL, split: str = TEST) -> dict[str, Accuracies]:
        """Returns every method's accuracies under a rule, by column and seed."""
        found: dict[str, Accuracies] = {}
        for method, rows in self.by_method().items():
            values = {(self.column(r), r.seed): r.accuracy(rule, split) for r in rows}
            known = {key: value for key, value in values.items() if value is not None}
            if known:
                found[method] = known
        return found


# What must be known beside a method's accuracy in a comparison, gathered from its runs.


def about_method(results: Results, method: str) -> list[Diagnostic]:
    """Returns what was found in a method's runs, and in how many of them, the gravest first.

    The text is ``no better than majority class in 2 of 6 runs``.
    """
    runs = list({result.run.folder: result for result in results.of(method)}.values())
    found = [
        one
        for result in runs
        for one in about_accuracy(
            result.run.evaluations,
            result.rounds[results.served.name],
            weights=results.served.weights,
        )
    ]
    counts = Counter(one.code for one in found)
    first = {one.code: one for one in reversed(found)}
    gathered = []
    for code, count in counts.most_common():
        often = "all" if count == len(runs) else str(count)
        where = f" in {often} of {len(runs)} runs" if len(runs) > 1 else ""
        gathered.append(replace(first[code], text=f"{first[code].short}{where}", advice=""))
    return gravest_first(gathered)


def about_margin(results: Results, best: str) -> Iterator[Diagnostic]:
    """Says so where accuracy fluctuates by more than the best method is above the next one."""
    accuracies = results.accuracies(results.served)
    other = best_other(best, accuracies)
    margin = paired_margin(accuracies[best], accuracies[other]) if other else None
    if other is None or margin is None:
        return
    known = [
        moved
        for method in (best, other)
        for result in results.of(method)
        if (moved := fluctuation(result.run.evaluations)) is not None
    ]
    mean = math.fsum(known) / len(known) if known else None
    yield from about_fluctuation(mean, margin.mean)
