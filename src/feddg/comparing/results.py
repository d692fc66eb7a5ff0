"""Many runs as one table of results: method, column (scenario and conditions), seed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from feddg.comparing.intervals import Accuracies, Key
from feddg.comparing.tuning_file import TUNING, TuningFile
from feddg.errors import RunError
from feddg.records import TEST, JsonFile, Row
from feddg.runs.reading import (
    SELECTION_RULES,
    RunRecord,
    SelectionRule,
    flatten,
    is_run,
    read_run,
    served_by_all,
)

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
