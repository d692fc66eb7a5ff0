"""What the command line accepts for a field of the settings."""

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click


def type_of(field: Any) -> click.ParamType:
    """Returns what click makes of a field's annotation and bounds."""
    kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)]
    kind = field.annotation
    if get_origin(kind) is not Literal and kinds:
        kind = kinds[0]  # optional
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    bounds = [*field.metadata]
    if hasattr(kind, "__metadata__"):
        bounds += [*kind.__metadata__]
        kind = get_args(kind)[0]
    if kind in (int, float):
        return _range(kind, bounds)
    return click.Path(path_type=Path) if kind is Path else click.STRING


def _range(kind: type, bounds: list[Any]) -> click.ParamType:
    limits: dict[str, Any] = {}
    for bound in _constraints(bounds):
        for name, side, is_open in (
            ("ge", "min", False),
            ("gt", "min", True),
            ("le", "max", False),
            ("lt", "max", True),
        ):
            value = getattr(bound, name, None)
            if value is not None:
                limits |= {side: value, f"{side}_open": is_open}
    if not limits:
        return click.INT if kind is int else click.FLOAT
    return click.IntRange(**limits) if kind is int else click.FloatRange(**limits)


def _constraints(bounds: list[Any]) -> list[Any]:
    """Bounds, those inside a pydantic ``Field`` of an annotation too."""
    return [inner for bound in bounds for inner in (getattr(bound, "metadata", None) or [bound])]
