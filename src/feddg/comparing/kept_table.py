"""Kept results as a table, by method and column: those of a plan where one is given."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from feddg.comparing.cells import PlannedCell, expand_plan
from feddg.comparing.intervals import Accuracies, Key
from feddg.comparing.kept_results import KeptResult, KeptResults, place_of
from feddg.comparing.measured_numbers import constant_name
from feddg.comparing.plan import Plan
from feddg.comparing.results import Place, Results
from feddg.comparing.trials import table_cells
from feddg.errors import RunError
from feddg.records import TEST
from feddg.runs.reading import FINAL, SelectionRule


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
