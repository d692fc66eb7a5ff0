"""The cells of a plan: one experiment for each method, hold-out, value of an axis and seed."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from feddg.comparing.plan import Plan, Variant
from feddg.data.data_set import load_source, preset_of
from feddg.data.splits import known_domains, scenarios
from feddg.errors import ExperimentError, nearest
from feddg.experiment import Experiment, expand
from feddg.methods.composition import build_method, method_class
from feddg.settings import merge


@dataclass(frozen=True)
class PlannedCell:
    """One cell of a plan.

    Attributes:
        method: the label of its method.
        scenario: the held-out test domains, as a column's heading.
        conditions: the values of the other axes by axis name, in order.
        seed: the experiment's seed.
        experiment: what is run.
    """

    method: str
    scenario: str
    conditions: tuple[tuple[str, str], ...]
    seed: int
    experiment: Experiment


def expand_plan(plan: Plan, overrides: Mapping[str, Any] | None = None) -> list[PlannedCell]:
    """Returns the plan's cells, seed by seed, so that a table is whole after the first seed.

    Args:
        plan: the plan.
        overrides: experiment fields that win over everything the plan says, for example a smaller
            image size.

    Raises:
        ExperimentError: a cell is no valid experiment, or one that its method cannot run; better
            said before the first run than hours later.
    """
    plan = plan.fixed(overrides or {})
    held = _scenarios(plan)
    _check_fields(plan)
    return [
        _cell(plan, variant, scenario, heading, points, seed)
        for seed in plan.seeds
        for scenario, heading in held
        for points in itertools.product(*_axes(plan))
        for variant in plan.methods
    ]


Point = tuple[str, dict[str, Any], str]
"""A value of an axis: the axis's name, the experiment fields it sets, how tables write it."""


def _axes(plan: Plan) -> list[list[Point | None]]:
    """Every axis between scenarios and methods; None stands for what ``base`` says."""
    lambdas: list[Point | None] = [
        ("heterogeneity", {"clients": {"heterogeneity": value}}, f"{value:g}")
        for value in plan.heterogeneity
    ]
    clients: list[Point | None] = [_clients_point(pair) for pair in plan.clients]
    further: list[list[Point | None]] = [
        [setting_point(field, value) for value in values] for field, values in plan.settings.items()
    ]
    return [lambdas or [None], clients or [None], *further]


def _cell(
    plan: Plan,
    variant: Variant,
    scenario: Any,
    heading: str,
    points: Sequence[Point | None],
    seed: int,
) -> PlannedCell:
    known = method_class(variant.method).Settings.model_fields
    method = {"name": variant.method, "settings": variant.settings}
    fields = merge(expand(plan.base), {"method": method})
    if scenario is not None:
        fields["hold_out"] = expand({"hold_out": scenario})["hold_out"]
    used = [point for point in points if point is not None]
    for _, change, _ in used:
        settings = change.get("method", {}).get("settings", {})
        if all(name in known for name in settings):
            fields = merge(fields, change)
    fields = merge(fields, expand(variant.experiment))
    fields = merge(fields, variant.tuned.get(heading, {}))
    conditions = tuple((name, text) for name, _, text in used)
    experiment = Experiment(**{**fields, "seed": seed, "name": None})
    build_method(experiment.method.name, experiment.method.settings).check(experiment)
    return PlannedCell(variant.name, heading, conditions, seed, experiment)


def _clients_point(pair: tuple[int, int | None]) -> Point:
    number, per_round = pair
    text = f"{number}" if per_round is None else f"{per_round} of {number}"
    return "clients", {"clients": {"number": number, "per_round": per_round}}, text


def setting_point(field: str, value: Any) -> Point:
    """Returns the point of an axis over a dotted experiment field at one of its values."""
    first, *rest = field.split(".")
    path = ["method", "settings", *rest] if first == "method" else [first, *rest]
    nested: Any = value
    for part in reversed(path):
        nested = {part: nested}
    return field.removeprefix("method."), nested, _text(value)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _check_fields(plan: Plan) -> None:
    for field in plan.settings:
        if not field.startswith("method."):
            continue
        name = field.removeprefix("method.")
        fields = [f for v in plan.methods for f in method_class(v.method).Settings.model_fields]
        if name not in fields:
            raise ExperimentError(
                f"none of the plan's methods has a setting {name!r}{nearest(name, fields)}"
            )


def _scenarios(plan: Plan) -> list[tuple[Any, str]]:
    """The hold-outs with the headings of their columns; a heading names the test domains."""
    base = expand(plan.base)
    if plan.hold_out is None:
        held = expand({"hold_out": base.get("hold_out") or {}})["hold_out"]
        return [(None, _heading(held))]
    if isinstance(plan.hold_out, str):
        data = base.get("data", {})
        source = str(data.get("source", "folder"))
        preset = str(base.get("preset") or preset_of(source))
        domains = (
            plan.domains or known_domains(source, preset) or _domains(source, data.get("root"))
        )
        listed: list[Any] = list(scenarios(plan.hold_out, domains, preset))
    else:
        listed = [expand({"hold_out": entry})["hold_out"] for entry in plan.hold_out]
    headings = [_heading(entry) for entry in listed]
    if len(set(headings)) < len(headings):
        headings = [_heading(entry, with_val=True) for entry in listed]
    return list(zip(listed, headings))


def _domains(source: str, root: Any) -> tuple[str, ...]:
    return tuple(load_source(source, root).domain_names)


def _heading(held: Mapping[str, Any], with_val: bool = False) -> str:
    def names(role: str) -> str:
        value = held.get(role) or ()
        return "+".join([value] if isinstance(value, str) else value)

    text = names("test") or "as split"
    return f"{text} (validated on {names('val')})" if with_val and names("val") else text


def distinct(cells: Sequence[PlannedCell]) -> Iterator[Experiment]:
    """Yields each experiment of the cells once, in their order."""
    seen: set[str] = set()
    for cell in cells:
        if cell.experiment.id not in seen:
            seen.add(cell.experiment.id)
            yield cell.experiment
