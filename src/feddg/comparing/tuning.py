"""Tuning before a comparison: each method's values are picked on in-domain validation, then fixed.

A plan's ``tune`` section names fields and values. Every combination is tried for every method and
everything that the plan's columns hold out, and the one that does best on in-domain validation, by
what chooses rounds (``evaluate.select_by`` and ``select_over``), is the method's where this is held
out. These domains are not among the images of its trials at all: they never open them
(``data.leave_out``). Each choice is of its own trials alone, for the domain held out in one column
is trained on in the others.
"""

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from feddg.comparing.cells import PlannedCell, Point, expand_plan, setting_point
from feddg.comparing.compare import Work, carry_out_work, work_on
from feddg.comparing.plan import Plan, Tune, Variant
from feddg.comparing.pool import Watcher
from feddg.comparing.tuning_file import TUNING, TriedRow, TuningFile
from feddg.errors import ExperimentError, RunError
from feddg.experiment import Experiment, expand
from feddg.files import replace_text, why
from feddg.methods.composition import method_class
from feddg.rows import ID_VAL
from feddg.runs.evaluations import preferred
from feddg.runs.execute import is_complete
from feddg.runs.reading import read_run
from feddg.runs.selection_rules import SELECTION_RULES
from feddg.settings import leaves, merge

TRIALS = "tuning"
log = logging.getLogger("feddg")


@dataclass(frozen=True)
class _Combination:
    """Values for a method: of each field, in the order of the plan, its name and its text."""

    method: str
    held_out: str
    values: tuple[tuple[str, str], ...]
    changes: tuple[dict[str, Any], ...] = field(compare=False)


def trials_of(plan: Plan) -> dict[_Combination, list[PlannedCell]]:
    """Returns the trials of a plan's ``tune`` section, by what is tried; none without one.

    Raises:
        ExperimentError: a field is unknown, or a trial is no valid experiment.
    """
    if plan.tune is None:
        return {}
    base = plan.model_copy(update={"seeds": plan.tune.seeds, "tune": None})
    found: dict[_Combination, list[PlannedCell]] = {}
    variants = {variant.name: variant for variant in plan.methods}
    _require_some_use(plan.tune, plan.methods)
    for cell in expand_plan(base):
        for points in itertools.product(*_axes_of(plan.tune, variants[cell.method])):
            if points:
                trial = _trial(cell, points, plan.tune)
                found.setdefault(_combination(cell, points), []).append(trial)
    return found


def _combination(cell: PlannedCell, points: Sequence[Point]) -> _Combination:
    values = tuple((name, text) for name, _, text in points)
    changes = tuple(change for _, change, _ in points)
    return _Combination(cell.method, cell.scenario, values, changes)


def _axes_of(tune: Tune, variant: Variant) -> list[list[Point]]:
    known = method_class(variant.method).Settings.model_fields
    fixed = {*leaves(expand(variant.experiment)), *(f"method.{name}" for name in variant.settings)}
    return [
        [setting_point(name, value) for value in values]
        for name, values in tune.settings.items()
        if name not in fixed
        and (not name.startswith("method.") or name.removeprefix("method.") in known)
    ]


def _require_some_use(tune: Tune, variants: Sequence[Variant]) -> None:
    used = {name for variant in variants for axis in _axes_of(tune, variant) for name, *_ in axis}
    for name in tune.settings:
        if name.removeprefix("method.") not in used:
            raise ExperimentError(
                f"tune: {name} is tried for no method: none has it, or each entry fixes it"
            )


def _trial(cell: PlannedCell, points: Sequence[Point], tune: Tune) -> PlannedCell:
    """A cell with values, without its held-out domains."""
    fields = cell.experiment.model_dump(mode="json")
    held = cell.experiment.hold_out
    for _, change, _ in points:
        fields = merge(fields, change)
    fields["hold_out"] = {"test": [], "val": []}
    fields["data"]["leave_out"] = [*held.test, *held.val]
    if not held.test and not held.val:
        raise ExperimentError(
            "tune: name the domains that are held out (hold_out), so that no trial opens them; a "
            "split file or a data set's own split does not say which domains they are"
        )
    if not fields["data"]["id_val"]:
        raise ExperimentError("tune: there is no in-domain validation; set data.id_val above 0")
    if tune.rounds is not None:
        fields["train"]["rounds"] = tune.rounds
    conditions = (*cell.conditions, *((name, text) for name, _, text in points))
    return replace(cell, experiment=Experiment(**fields), conditions=conditions)


def prepare_trials(plan: Plan, out: Path, cache: Path | None = None) -> Work | None:
    """Returns what there is to try before a plan's table is run; None without a ``tune`` section.

    Args:
        plan: the plan.
        out: the folder of the comparison; trials go into a folder inside it.
        cache: where hashes of images are remembered; the user's cache by default.
    """
    cells = [cell for cells in trials_of(plan).values() for cell in cells]
    trying = plan.model_copy(update={"name": f"{plan.name}, tuning", "title": None})
    return work_on(trying, cells, out / TRIALS, cache=cache) if cells else None


def tune(
    plan: Plan,
    out: Path,
    *,
    jobs: int = 0,
    cache: Path | None = None,
    watcher: Watcher | None = None,
    kept: Path | None = None,
) -> Plan:
    """Carries out the trials of a plan and returns the plan with the picked values.

    Complete trials are not run again. What was tried is in ``tuning.json``.

    Args:
        plan: the plan; without a ``tune`` section it is returned as it is.
        out: the folder of the comparison.
        jobs: processes that run at once; 0 runs everything in this process.
        cache: folder for decoded pixels; the user's cache by default.
        watcher: is told what happens.
        kept: see :func:`picked`.

    Raises:
        RunError: no value of a method could be measured.
    """
    work = prepare_trials(plan, out, cache)
    if work is None:
        return plan
    carry_out_work(work, jobs=jobs, cache=cache, watcher=watcher)
    return picked(plan, work, kept)


def picked(plan: Plan, work: Work, kept: Path | None = None) -> Plan:
    """Returns the plan with the values that did best in its trials, and writes ``tuning.json``.

    Args:
        plan: the plan.
        work: its trials, carried out.
        kept: a CSV file of results that outlive their folders; ``NAME.tuning.json`` is written
            beside it, too.

    Raises:
        RunError: no value of a method could be measured, or a file cannot be written.
    """
    assert plan.tune is not None
    found = {
        combination: _Scores([_score(cell, work, plan.tune) for cell in cells], *_chosen_by(cells))
        for combination, cells in trials_of(plan).items()
    }
    best = _best(found)
    rows = [
        TriedRow(
            method=combination.method,
            held_out=combination.held_out,
            values=dict(combination.values),
            metric=scores.metric,
            over=scores.over,
            score=scores.mean,
            trials=len(scores.values),
            picked=combination in best,
        )
        for combination, scores in found.items()
    ]
    settings = plan.tune
    file = TuningFile(
        rule=settings.rule, rounds=settings.rounds, seeds=settings.seeds, tried=tuple(rows)
    )
    beside = [kept.with_suffix(f".{TUNING}")] if kept is not None else []
    for path in [work.out.parent / TUNING, *beside]:
        try:
            replace_text(path, file.to_text())
        except OSError as error:
            raise RunError(f"Cannot write {path}: {why(error)}.") from None
    for remark in file.remarks():
        log.warning("tune: %s", remark)
    variants = [_with(variant, best) for variant in plan.methods]
    return plan.model_copy(update={"methods": tuple(variants), "tune": None})


@dataclass(frozen=True)
class _Scores:
    """What the trials of a combination reached.

    Attributes:
        values: the metric on in-domain validation, by trial; None where there is none.
        metric: its name.
        over: how the domains became one number.
    """

    values: Sequence[float | None]
    metric: str
    over: str

    @property
    def mean(self) -> float | None:
        """The mean over the trials; None unless all have a value."""
        known = [value for value in self.values if value is not None]
        return math.fsum(known) / len(known) if len(known) == len(self.values) else None


def _chosen_by(cells: Sequence[PlannedCell]) -> tuple[str, str]:
    evaluate = cells[0].experiment.evaluate
    return evaluate.select_by, evaluate.select_over


def _score(cell: PlannedCell, work: Work, settings: Tune) -> float | None:
    folder = work.folders[cell.experiment.id]
    if not is_complete(folder):
        return None
    evaluations, rule = read_run(folder).evaluations, SELECTION_RULES.find(settings.rule)
    value = evaluations.of(rule.weights).score(rule.choose(evaluations), ID_VAL)
    return value if value is not None and math.isfinite(value) else None


def _best(found: Mapping[_Combination, _Scores]) -> list[_Combination]:
    """The combination with the best mean of each method and hold-out; of equal ones the first."""
    best: dict[tuple[str, str], tuple[float, _Combination | None]] = {}
    for combination, scores in found.items():
        mean, key = scores.mean, (combination.method, combination.held_out)
        good = -math.inf if mean is None else preferred(mean, scores.metric)
        if good > best.get(key, (-math.inf, None))[0]:
            best[key] = (good, combination)
        best.setdefault(key, (-math.inf, None))
    for (method, held_out), (_, picked_one) in best.items():
        if picked_one is None:
            raise RunError(
                f"tune: in every combination of values for {method} a trial failed, or has no "
                f"value of what picks (evaluate.select_by), where {held_out} is held out; see above"
            )
    return [combination for _, combination in best.values() if combination is not None]


def _with(variant: Variant, best: Sequence[_Combination]) -> Variant:
    """A method's entry with the values that were picked for it."""
    tuned: dict[str, dict[str, Any]] = {}
    for combination in best:
        if combination.method == variant.name:
            fields: dict[str, Any] = {}
            for change in combination.changes:
                fields = merge(fields, change)
            tuned[combination.held_out] = fields
    return variant.model_copy(update={"tuned": tuned})
