"""The trials of a plan's ``tune`` section: every combination of values, nothing held out."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from feddg.comparing.cells import PlannedCell, Point, expand_plan, setting_point
from feddg.comparing.plan import Plan, Tune, Variant
from feddg.errors import ExperimentError
from feddg.experiment import Experiment, expand
from feddg.methods.composition import method_class
from feddg.settings import leaves, merge


@dataclass(frozen=True)
class Combination:
    """Values for a method: of each field, in the order of the plan, its name and its text."""

    method: str
    held_out: str
    values: tuple[tuple[str, str], ...]
    changes: tuple[dict[str, Any], ...] = field(compare=False)


def trials_of(plan: Plan) -> dict[Combination, list[PlannedCell]]:
    """Returns the trials of a plan's ``tune`` section, by what is tried; none without one.

    Raises:
        ExperimentError: a field is unknown, or a trial is no valid experiment.
    """
    if plan.tune is None:
        return {}
    base = plan.model_copy(update={"seeds": plan.tune.seeds, "tune": None})
    found: dict[Combination, list[PlannedCell]] = {}
    variants = {variant.name: variant for variant in plan.methods}
    _require_some_use(plan.tune, plan.methods)
    for cell in expand_plan(base):
        for points in itertools.product(*_axes_of(plan.tune, variants[cell.method])):
            if points:
                trial = _trial(cell, points, plan.tune)
                found.setdefault(_combination(cell, points), []).append(trial)
    return found


def with_values(plan: Plan, chosen: Iterable[Combination]) -> Plan:
    """Returns a plan without its ``tune`` section, whose methods have values chosen for them.

    Args:
        plan: the plan.
        chosen: one combination for each method and everything that is held out, at most.
    """
    of: dict[str, dict[str, dict[str, Any]]] = {}
    for combination in chosen:
        fields: dict[str, Any] = {}
        for change in combination.changes:
            fields = merge(fields, change)
        of.setdefault(combination.method, {})[combination.held_out] = fields
    methods = [v.model_copy(update={"tuned": of.get(v.name, {})}) for v in plan.methods]
    return plan.model_copy(update={"methods": tuple(methods), "tune": None})


def table_cells(plan: Plan) -> list[PlannedCell]:
    """Returns the cells that a plan's table may have, whatever values its ``tune`` section picks.

    Raises:
        ExperimentError: see :func:`trials_of`.
    """
    of: dict[tuple[str, str], list[Combination]] = {}
    for combination in trials_of(plan):
        of.setdefault((combination.method, combination.held_out), []).append(combination)
    most = max(map(len, of.values()), default=0)
    choices = [[tried[i % len(tried)] for tried in of.values()] for i in range(most)]
    plans = [with_values(plan, chosen) for chosen in choices]
    return [cell for one in plans for cell in expand_plan(one)]


def _combination(cell: PlannedCell, points: Sequence[Point]) -> Combination:
    values = tuple((name, text) for name, _, text in points)
    changes = tuple(change for _, change, _ in points)
    return Combination(cell.method, cell.scenario, values, changes)


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
