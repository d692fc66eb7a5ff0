"""Results of many runs as one table, read from run folders or from a results file."""

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from feddg.comparison.plan import DATA, VALIDATED_ON, Cell, Plan, expand_plan
from feddg.comparison.results_file import (
    BUDGET,
    HASHES,
    MADE_WITH,
    NUMBER_COLUMNS,
    Place,
    ResultRow,
    as_json,
    made_with,
    read_results,
)
from feddg.comparison.statistics import Accuracies, Margin, average_over_columns, leads
from feddg.comparison.tuning import TUNING, TuningFile
from feddg.diagnostics import SEVERITIES, Diagnostic, Severity, emit, note, warning
from feddg.errors import RunError, first_names, nearest
from feddg.messages import plain_text
from feddg.records import CONSTANT, RISING, TEST, VAL, JsonFile, NumberRow
from feddg.runs.diagnostics import (
    CONSTANT_ANSWER,
    EARLY,
    MAJORITY,
    OF_SETTINGS,
    STILL_RISING,
    about_accuracy,
    causes_of_failure,
)
from feddg.runs.reading import EXPERIMENT, Run, flatten, is_run, read_run
from feddg.runs.summary import numbers_by_rule
from feddg.runs.table import FINAL, SELECTION_RULES, SelectionRule, rules_asked
from feddg.settings import SHORTHANDS, grouped
from feddg.storage import is_file, read_fields_of
from feddg.text import counted, short

if TYPE_CHECKING:
    from pandas import DataFrame


COMPARISON = "comparison.json"
_NOT_CONDITIONS = ("name", "device", "seed", "preset", "hold_out", "method", "precision")
_OF_A_TASK = ("data.", "clients.", "model.backbone", "train.rounds", "train.local_")
_OF_IMAGES = ("data.source", "data.root", "data.options")
_OF_MARGINS = [
    *(BUDGET, "rule", "method", "other", "difference", "low", "high", "detectable", "p", "p_holm"),
    *("domains", "seeds_low", "seeds_high", "seeds"),
]
_OVER_DATA_SETS = [f"data_sets_{name}" for name in ("mean", "low", "high", "count")]


class ComparisonFile(JsonFile):
    """``comparison.json``; see :class:`Results` for the fields."""

    name: str
    title: str | None = None
    question: str | None = None
    served: str = FINAL.name
    cells: list[ResultRow]

    @classmethod
    def of(cls, plan: Plan, cells: Iterable[Cell], rows: list[ResultRow]) -> Self:
        """Returns the file for a plan's texts and cells, whose rows are given."""
        texts = {name: getattr(plan, name) for name in ("name", "title", "question")}
        rules = {rules_asked(dict(cell.experiment.server))[0].name for cell in cells}
        served = rules.pop() if len(rules) == 1 else FINAL.name
        return cls(**texts, served=served, cells=rows)

    def results(self, rows: Sequence[ResultRow], **more: Any) -> "Results":
        """Returns results with these rows in the file's cells; ``more`` are further fields."""
        fields = {name: value for name, value in self if value is not None and name != "cells"}
        return Results(**{"title": self.name} | fields | more, rows=rows, planned=self.cells)


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
        notices: what was found where the results were put together.
        rule_of_all: default rule of the results that these are a part of, such as one budget's: a
            comparison has one rule.
    """

    name: str
    title: str
    rows: Sequence[ResultRow]
    question: str = ""
    open: Sequence[tuple[str, str]] = ()
    planned: Sequence[ResultRow] = ()
    tuning: TuningFile | None = None
    served: str = FINAL.name
    notices: Sequence[Diagnostic] = ()
    rule_of_all: SelectionRule | None = None

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
            RunError: there are two rows for a place, or without a plan two domains for a run.
            ExperimentError: a cell of the plan is not a valid experiment.
        """
        by_place: dict[Place, ResultRow] = {}
        for row in rows:
            there = by_place.setdefault(row.place, row)
            if there is not row:
                raise RunError(
                    f"{name}: {row.method}, {row.heading}, seed {row.seed} appears twice, as "
                    f"{there.experiment} and as {row.experiment}; keep one"
                )
        if plan is not None:
            cells = expand_plan(plan)
            places = [row for cell in cells for row in ResultRow.all_of(cell)]
            placed = [by_place[row.place] for row in places if row.place in by_place]
            return ComparisonFile.of(plan, cells, places).results(placed)
        if len({row.budget is None for row in rows}) > 1:
            raise RunError(
                f"{name}: some results are at budgets and others of whole runs, which tables would "
                "leave out; give each plan a results file of its own"
            )
        domains: dict[object, str] = {}
        for row in rows:
            if (first := domains.setdefault(row.of_run, row.domain)) != row.domain:
                raise RunError(
                    f"{name}: experiment {row.experiment} is there as {first} and as "
                    f"{row.domain}, of two plans, and would count twice; give each plan a results "
                    "file of its own"
                )
        return cls(name, name, rows)

    @cached_property
    def default_rule(self) -> SelectionRule:
        """The selection rule of the runs' default models; the final round if they differ."""
        if self.rule_of_all is not None:
            return self.rule_of_all
        rules = {run.default_rule for run in self.runs()}
        served = SELECTION_RULES.get(self.served, FINAL)
        of_both = (self.values(rule) for rule in (served, FINAL))
        ours, final = ({m: own.keys() for m, own in values.items()} for values in of_both)
        if not rules and ours == final:
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
    def axes(self) -> dict[str, list[str]]:
        """The axes, besides method and seed, with several values, and these values in order."""
        places = [place.axes for place in self._places]
        values = {
            axis: dict.fromkeys(of.get(axis) for of in places)
            for axis in dict.fromkeys(axis for of in places for axis in of)
        }  # what another plan does not say is a value, too
        return {a: [v for v in own if v is not None] for a, own in values.items() if len(own) > 1}

    @cached_property
    def budgets(self) -> list[int]:
        """The numbers of training images with results, ascending."""
        return sorted({place.budget for place in self._places if place.budget is not None})

    def at(self, budget: int) -> "Results":
        """Returns the results at one of the budgets."""
        rows = [row for row in self.rows if row.budget == budget]
        planned = [place for place in self.planned if place.budget == budget]
        return replace(self, rows=rows, planned=planned, rule_of_all=self.default_rule)

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
        places = [place for place in self._places if axis in place.axes]
        return grouped(dict.fromkeys((place.axes[axis], self.column(place)) for place in places))

    def frame(self) -> "DataFrame":
        """Returns all numbers as a tidy table, one number per row.

        Columns: ``method``, ``column`` (the heading in tables), ``held_out``, one for each further
        axis (``model.weights``, as its short name is another column's), ``seed``, ``budget``
        (images; empty without budgets); those of :class:`NumberRow`; and the provenance:
        ``experiment``, ``machine``, ``version``, ``hashes``, ``folder``.
        """
        from pandas import DataFrame  # a third of a second, and a run needs none of it

        before, after = ["method", "column", "held_out"], ["seed", BUDGET]
        behind = ["experiment", *MADE_WITH, "folder"]
        taken = {*before, *after, *NUMBER_COLUMNS, *behind}  # one is a field's short name, too
        named = {
            axis: SHORTHANDS.get(axis, f"method.{axis}") if axis in taken else axis
            for row in self.rows
            for axis in row.conditions
        }
        axes = dict.fromkeys(named.values(), "")
        numbers = [
            axes
            | vars(row)
            | {named[axis]: value for axis, value in row.conditions.items()}
            | {"column": self.column(row), HASHES: as_json(row.hashes)}
            | vars(number)
            for row in self.rows
            for number in (numbers_by_rule(row.run, domains=True) if row.run else row.numbers)
        ]
        frame = DataFrame(numbers, columns=[*before, *axes, *after, *NUMBER_COLUMNS, *behind])
        counts = dict.fromkeys((BUDGET, "round", "images"), "Int64")
        return frame.astype(counts | dict.fromkeys(("bytes", "seconds", "value"), float))

    def values(
        self,
        rule: SelectionRule | str = "",
        metric: str = "accuracy",
        split: str = TEST,
        over: str = "domain_mean",
    ) -> dict[str, Accuracies]:
        """Returns a number for every method that has it, by column and seed.

        Args:
            rule: the selection rule, or its name; empty for a number that depends on none.
            metric: name of the metric, as in :meth:`frame`; likewise the others.
            split: name of the split; empty for a number of none.
            over: the aggregate over domains, likewise.
        """
        name = rule if isinstance(rule, str) else rule.name
        of = {"rule": name, "metric": metric, "split": split, "over": over}
        values = grouped(
            (row.method, ((self.column(row), row.seed), number.value))
            for row in self.rows
            for number in row.table.where(**of)
        )
        return {method: dict(values[method]) for method in self.methods if method in values}

    @cached_property
    def _data_sets(self) -> dict[str, str]:
        """The data set of each name; the first one of those with the same images."""
        of_images: dict[str, str] = {}
        return {
            row.collection: of_images.setdefault(row.images_hash, row.collection)
            for row in self.rows
            if row.collection and row.images_hash
        }

    def _data_set(self, place: ResultRow) -> str:
        return self._data_sets.get(place.collection, place.collection)

    @cached_property
    def shared(self) -> list[list[str]]:
        """What is held out, in groups that have a test domain in common.

        They are one domain: neither hold-outs that overlap nor two names of the same images are
        independent.
        """
        groups: list[tuple[list[str], set[tuple[str, str]]]] = []
        places = {place.domain: place for place in (*self._places, *self.rows)}
        for domain, place in places.items():
            names = {(self._data_set(place), name) for name in place.tested}
            joint = [group for group in groups if not names.isdisjoint(group[1])]
            groups = [group for group in groups if group not in joint]
            held_out = [name for own, _ in joint for name in own]
            groups.append(([*held_out, domain], names.union(*(own for _, own in joint))))
        return [held_out for held_out, _ in groups]

    @cached_property
    def domains(self) -> dict[str, str]:
        """The domain of each column: columns that differ in a condition, or overlap, share one."""
        first = {name: group[0] for group in self.shared for name in group}
        return {self.column(place): first[place.domain] for place in self._places}

    @cached_property
    def collections(self) -> dict[str, str]:
        """The data set of each domain, in a plan over several."""
        return {
            self.domains[self.column(place)]: self._data_set(place)
            for place in self._places
            if place.collection
        }

    @cached_property
    def twins(self) -> dict[str, str]:
        """Labels that have the runs of an earlier one, wherever both have any, with that one."""
        runs = {m: {(self.column(r), r.seed): r.of_run for r in self.of(m)} for m in self.methods}
        twins: dict[str, str] = {}
        for (first, ours), (label, theirs) in combinations(runs.items(), 2):
            if 0 < len(ours.keys() & theirs.keys()) == len(ours.items() & theirs.items()):
                twins.setdefault(label, twins.get(first, first))
        return twins

    def margins(
        self, rule: SelectionRule | str, base: str = "", metric: str = "accuracy"
    ) -> dict[str, Margin]:
        """Returns every method's margin over ``base``, or over the best other one, if it has one.

        Their p-values are corrected for the number of methods. One with the same runs as an earlier
        one, or as ``base``, has none: no run is compared with itself, or twice.
        """
        values, same = self.values(rule, metric), {name: name for name in self.methods} | self.twins
        once = {name: own for name, own in values.items() if name == same[name] != same.get(base)}
        once |= {base: values[base]} if base in values else {}
        return leads(once, self.domains, base, self.collections)

    @cached_property
    def leader(self) -> tuple[str, float, Margin | None] | None:
        """The method with the best average, and its lead over the best other one if there is one.

        Its label, its accuracy averaged over all columns, and the margin; None if no method has
        every column, or none is fit.
        """
        if self.no_method_fit is not None:
            return None
        accuracies = self.values(self.default_rule)
        spreads = {m: average_over_columns(cells, self.columns) for m, cells in accuracies.items()}
        averages = {m: one.mean for m, one in spreads.items() if one and m not in self.twins}
        if not averages:
            return None
        best = max(averages, key=averages.__getitem__)
        return best, averages[best], self.margins(self.default_rule).get(best)

    def margin_frame(self, base: str = "") -> "DataFrame":
        """Returns :meth:`margins` at every budget by the default rule, a row for each method.

        Columns: ``budget``; ``rule``, by which rounds were chosen; ``method`` and ``other``;
        ``difference`` (shares from 0 to 1, the mean over domains); ``low`` and ``high``, the 95 %
        interval over domains; ``detectable``, see :attr:`Margin.detectable`; ``p`` and ``p_holm``,
        as it is and corrected for the number of methods; ``domains``, their number; ``seeds_low``,
        ``seeds_high`` and ``seeds``, the same over seeds on these domains; ``difference_DOMAIN``,
        the difference on each domain; in a plan over several data sets ``data_sets_mean``,
        ``_low``, ``_high`` and ``_count``, over data sets, each the mean of its domains.

        Args:
            base: the method that all others are set beside; each one's best other method if empty.

        Raises:
            RunError: no method is called so.
        """
        from pandas import DataFrame

        if base and base not in self.methods:
            raise RunError(f"no method is called {base!r}{nearest(base, self.methods)}")
        domains = list(dict.fromkeys(self.domains.values()))
        rows = []
        for budget in self.budgets or (None,):
            results = self if budget is None else self.at(budget)
            rule = results.default_rule
            for method, margin in results.margins(rule, base).items():
                over, seeds = margin.domains, margin.seeds
                ends = (over.low, over.high, margin.detectable, over.p, margin.p, over.count)
                also = (seeds.low, seeds.high, seeds.count, *map(margin.by_domain.get, domains))
                sets = margin.collections
                over_sets = (sets.mean, sets.low, sets.high, sets.count)
                also += over_sets if self.collections else ()
                rows.append((budget, rule.name, method, margin.other, margin.mean, *ends, *also))
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
            if codes and 2 * sum(MAJORITY in of_run for of_run in codes) <= len(codes):
                return None
        if not self.values(rule):
            return None
        text = (
            f"No method here is fit to use: none of them beats {CONSTANT_ANSWER} by more than "
            "chance."
        )
        early = any(row.ended_early for row in self.rows)
        return warning("no-method-fit", text, _remedy(self.runs(), early=early))

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
    made, rows = {name: made_with(runs[name]) for name in complete}, []
    for cell in content.cells:
        run = runs[cell.folder] if cell.folder in complete else None
        if run is not None and cell.budget is not None:
            run = run.at(cell.budget)
        if run is not None or (cell.numbers and cell.folder not in complete):
            rows.append(cell.model_copy(update={"run": run, **made.get(cell.folder, {})}))
    return content.results(
        rows,
        open=[(name, _state(runs[name])) for name in sorted(runs) if name not in filled],
        tuning=tuning,
    )


def _state(run: Run) -> str:
    if not is_run(run.folder):
        return "not started"
    return f"{run.status}: {run.error}" if run.error else run.status


def results_of(folders: Sequence[Path]) -> Results:
    """Arranges runs in a table by the settings in which they differ.

    Hyper-parameters that differ between runs of one method become part of its label. Other
    differing settings become conditions, or part of the label if there is a single method. Runs
    without such a difference are distinguished by their folders.

    Raises:
        RunError: a folder is not a run folder.
    """
    parts = grouped((is_file(folder / COMPARISON), folder) for folder in folders)
    if apart := parts.get(True):
        made = first_names([str(folder) for folder in apart])
        if len(apart) == len(folders):
            raise RunError(f"each of these has a report of its own: {made}; name one of them")
        text = f"Left out, since `feddg compare` made them a page of their own: {made}."
        emit(note("comparison-left-out", text))
    alone = {folder.resolve(): folder for folder in parts.get(False, ())}
    runs = [read_run(folder) for folder in alone.values()]
    complete = [run for run in runs if run.status == "completed"]
    own = [flatten((run.settings.get("method") or {}).get("settings") or {}) for run in complete]
    labels = _told_apart([run.method for run in complete], own)
    others = [
        flatten({k: v for k, v in run.settings.items() if k not in _NOT_CONDITIONS})
        for run in complete
    ]
    conditions, notices = _data_sets(others), list[Diagnostic]()
    if len(set(labels)) == 1:
        labels = _told_apart(labels, others)
    else:
        alike = grouped(zip(labels, others)).values()
        axes = dict.fromkeys(axis for group in alike for axis in differing(group))
        for condition, fields in zip(conditions, others):
            condition |= {axis: fields.get(axis, "") for axis in axes}
        notices += _about_tasks(complete, others, axes)
    held_out = ["+".join(run.held_out(TEST)) or "as split" for run in complete]
    validated = ["+".join(run.held_out(VAL)) for run in complete]
    ways = grouped(zip(held_out, validated))
    held_out = [
        f"{test}{VALIDATED_ON}{val})" if val and len({*ways[test]}) > 1 else test
        for test, val in zip(held_out, validated)
    ]
    rows = [
        ResultRow(
            method=plain_text(label),
            held_out=plain_text(heading),
            conditions={plain_text(axis): plain_text(v) for axis, v in condition.items()},
            seed=int(run.settings.get("seed") or 0),
            folder=run.folder.name,
            run=run,
            **made_with(run),
        )
        for run, label, condition, heading in zip(complete, labels, conditions, held_out)
    ]
    places, names = Counter(row.place for row in rows), Counter(row.folder for row in rows)
    for at, (row, run) in enumerate(zip(rows, complete)):
        if places[row.place] > 1:
            folder = row.folder if names[row.folder] == 1 else plain_text(run.folder)
            rows[at] = row.model_copy(update={"method": f"{row.method} ({folder})"})
    name = f"{len(runs)} runs"
    incomplete = [(run.folder.name, _state(run)) for run in runs if run.status != "completed"]
    return Results(name=name, title=name, rows=rows, open=incomplete, notices=notices)


def _about_tasks(
    runs: Sequence[Run], settings: Sequence[Mapping[str, str]], axes: Iterable[str]
) -> Iterator[Diagnostic]:
    """Reports settings of the task itself that differ between methods, so that none has a column.

    A method of one round trains in its own way.
    """
    values = grouped(
        (name, value)
        for run, fields in zip(runs, settings)
        for name, value in fields.items()
        if name.startswith(_OF_A_TASK)
        and not (run.has_one_round and ("train." in name or name == "clients.per_round"))
    )
    unlike = [name for name, own in values.items() if len({*own}) > 1 and name not in {*axes}]
    if unlike:
        text = (
            f"Methods were not given the same task: {first_names(unlike)} "
            f"{'differs' if len(unlike) == 1 else 'differ'} between them."
        )
        yield warning("unlike-tasks", text, "Compare runs that differ in the method alone.")


def _told_apart(labels: Sequence[str], settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns labels, each with the settings that differ between those of its name."""
    groups = grouped(zip(labels, settings))
    varying = {label: differing(group) for label, group in groups.items()}
    return [
        ", ".join([label, *(f"{name} {of[name]}" for name in varying[label] if name in of)])
        for label, of in zip(labels, settings)
    ]


def _data_sets(settings: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Moves what names a run's images out of its settings, into a condition as plans have it.

    Returns:
        The condition of each run; nothing if all runs have the same images.
    """
    read = [
        {name: fields.pop(name) for name in [*fields] if name.startswith(_OF_IMAGES)}
        for fields in settings
    ]
    unlike = differing(read)
    if not unlike:
        return [{} for _ in settings]
    whole = [", ".join(f"{name} {of[name]}" for name in unlike if name in of) for of in read]
    roots = [(of.get("data.root", "none"), of["data.source"]) for of in read]
    brief = [source if root == "none" else Path(root).name for root, source in roots]
    names = brief if len({*brief}) == len({*whole}) else whole
    return [{DATA: name} for name in names]


def differing(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns the names of the settings that are not the same in all runs."""
    names = dict.fromkeys(name for fields in settings for name in fields)
    return [name for name in names if len({fields.get(name) for fields in settings}) > 1]


def _remedy(runs: Sequence[Run], *, early: bool = False) -> str:
    """Returns the likeliest causes of a failure in most runs, and a command against the first."""
    if not runs:
        longer = "" if early else "longer, "
        return f"Train {longer}on more images, or from pretrained weights (--weights imagenet)."
    causes = [causes_of_failure(run) for run in runs]
    likeliest = Counter(of_run[0].reason for of_run in causes).most_common(1)[0][0]
    run, explained = next((r, c) for r, c in zip(runs, causes) if c[0].reason == likeliest)
    first, *others = (cause.text for cause in explained)
    also = f" Next in line: {', then '.join(others)}." if others else ""
    flags = [*next(cause.flags for cause in explained if cause.flags)]
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
    runs = {row.of_run: row for row in rows}.values()
    counts = Counter(pair for row in runs for pair in _found_in(row, results.default_rule))
    entries = []
    for (code, severity), count in counts.most_common():
        share = f"{count} of {len(runs)}"
        if count == len(runs):
            share = "both" if count == 2 else f"all {count}"
        entries.append((code, severity, f" in {share} runs" if len(runs) > 1 else ""))
    return sorted(entries, key=lambda entry: SEVERITIES.index(entry[1]))


def _found_in(row: ResultRow, rule: SelectionRule) -> list[tuple[str, Severity]]:
    """Returns the warnings about a run, from the run or its row."""
    found: list[tuple[str, Severity]] = []
    if row.run is None:
        if any(number.value for number in row.table.where(rule=rule.name, metric=CONSTANT)):
            found.append((MAJORITY, "warning"))
        if any(number.value for number in row.table.where(rule=FINAL.name, metric=RISING)):
            found.append((STILL_RISING, "note"))
    else:
        table = row.run.table
        diagnostics = about_accuracy(table, rule.of(table).round, weights=rule.weights)
        recorded = row.run.summary.diagnostics if row.run.summary else []
        diagnostics += [one for one in recorded if one.code in OF_SETTINGS]
        found = [(one.code, one.severity) for one in diagnostics]
    if row.ended_early:  # further rounds are what it cannot have
        found = [(EARLY, "warning"), *(pair for pair in found if pair[0] != STILL_RISING)]
    return found


def about_provenance(results: Results) -> Iterator[Diagnostic]:
    """Reports columns whose results differ in images, precision or version, where recorded."""
    if unlike := _unlike(results, lambda row: row.images_hash):
        column, methods = next(iter(unlike.items()))
        text = (
            f"Compared on different images in {counted(len(unlike), 'column')}, as "
            f"{' / '.join(methods.values())} in {column}: part of a difference may come from them."
        )
        yield warning("different-images", text, "Run all of a column on the same images.")
    for name, what in (("precision", "precisions"), ("version", "versions of feddg")):
        if unlike := _unlike(results, attrgetter(name)):
            column, methods = next(iter(unlike.items()))
            apart = " / ".join(f"{own} in {value}" for value, own in methods.items())
            yield note(f"several-{name}s", f"Computed in several {what}, as {apart} in {column}.")


def _unlike(results: Results, of: Callable[[ResultRow], str]) -> dict[str, dict[str, str]]:
    """Returns the methods by a recorded value, for columns that have several of a seed."""
    seeds = grouped(
        ((results.column(row), row.seed), (of(row), row.method)) for row in results.rows
    )
    values = [
        (column, grouped(pair for pair in dict.fromkeys(pairs) if pair[0]))
        for (column, _), pairs in seeds.items()
    ]
    return {
        column: {value: first_names(methods, 3) for value, methods in own.items()}
        for column, own in values
        if len(own) > 1
    }


def about_budgets(results: Results) -> Iterator[Diagnostic]:
    """Reports runs whose last round ended before their budget of images, or far beyond it."""
    seen = [
        (number.images, row.budget, row.run.has_one_round if row.run else number.round == 1)
        for row in results.rows
        for number in row.table.where(rule=FINAL.name).rows[:1]
        if row.budget is not None and number.images is not None
    ]  # of a file, one round is taken for a method's only one
    below = [(images, budget) for images, budget, once in seen if images < budget and not once]
    if below:
        images, budget = min(below)
        early = sum(row.ended_early for row in results.rows)
        causes = ["privacy ended training"] * (early > 0)
        causes += ["batches were not full or updates were refused"] * (early < len(below))
        text = (
            f"{counted(len(below), 'run')} ended below the budget of {short(budget)} images, with "
            f"{short(images)}, because {' or '.join(causes)}: the last round is used."
        )
        yield warning("budget-not-reached", text)
    beyond = [(images / budget, budget) for images, budget, _ in seen if images > 1.1 * budget]
    if beyond:
        times, budget = max(beyond)
        text = (
            f"{counted(len(beyond), 'result')} took more images than the budget, up to "
            f"{times:.1f} times {short(budget)}: a round counts whole, and methods' rounds differ."
        )
        yield note("budget-exceeded", text, "Compare at larger budgets, or in shorter rounds.")


def evaluations(row: ResultRow, weights: str) -> dict[int, tuple[NumberRow, float]]:
    """Returns a row of each round evaluated on all test domains, for its costs, and the accuracy.

    By round; of a run with budgets by budget, which runs on other images reach in other rounds.
    """
    assert row.run is not None
    table = row.run.table.where(weights=weights)
    curve = table.curve(TEST)
    rounds = dict(zip(curve, curve))
    budgets = (row.run.settings.get("evaluate") or {}).get("budgets")
    if row.budget and budgets:
        ends = {budget: row.run.at(budget) for budget in budgets}
        rounds = {0: 0} | {budget: end.rounds_done for budget, end in ends.items() if end}
    return {
        mark: (table.where(round=round_).rows[0], curve[round_])
        for mark, round_ in rounds.items()
        if round_ in curve
    }
