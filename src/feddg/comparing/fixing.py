"""A plan with experiment fields fixed: what a command line says over a plan becomes the plan."""

from collections.abc import Mapping
from typing import Any

from feddg.experiment import expand
from feddg.settings import leaves, merge, nested


def fix_fields(plan: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a plan's fields with experiment fields that win over everything it says.

    They go into ``base``. What would win over them there gives way: the same fields of single
    methods take their values, and an axis over one of them is left out.

    Args:
        plan: the complete fields of a :class:`feddg.comparing.plan.Plan`.
        overrides: experiment fields, nested; shorthands are allowed.
    """
    over = expand(dict(overrides))
    if not over:
        return plan
    known = leaves(over)
    own = over.get("method", {}).get("settings", {})
    variants = [
        {
            **variant,
            "settings": _replaced(variant["settings"], own),
            "experiment": _replaced(expand(variant["experiment"]), over),
        }
        for variant in plan["methods"]
    ]
    fixed = {**plan, "base": merge(expand(plan["base"]), over), "methods": variants}
    if "clients.heterogeneity" in known:
        fixed["heterogeneity"] = ()
    if "hold_out" in over:
        fixed["hold_out"] = None
    fixed["settings"] = {
        field: values for field, values in plan["settings"].items() if _path(field) not in known
    }
    return _with_fixed_clients(fixed, over.get("clients", {}))


def _with_fixed_clients(plan: dict[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """An axis of clients says both their number and how many take part in a round."""
    pairs = [
        (said.get("number", number), said.get("per_round", per_round))
        for number, per_round in plan["clients"]
    ]
    return {**plan, "clients": list(dict.fromkeys(pairs))}


def _replaced(below: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``below`` with the values that ``over`` gives to fields it has; nothing is added."""
    values = leaves(over)
    out = dict(below)
    for path in leaves(below):
        if path in values:
            out = merge(out, nested(path, values[path]))
    return out


def _path(field: str) -> str:
    first, _, rest = field.partition(".")
    return f"method.settings.{rest}" if first == "method" else field
