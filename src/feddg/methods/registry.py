"""Methods by name: ours, third parties' through entry points, and compositions (``ccst+jigen``)."""

import functools
import importlib
import logging
import pkgutil
from importlib.metadata import entry_points
from typing import Any, TypeVar

from pydantic import ValidationError, create_model

import feddg.methods
from feddg.errors import ExperimentError, nearest
from feddg.methods.base import Method, MethodSettings
from feddg.settings import merge

ENTRY_POINTS = "feddg.methods"
log = logging.getLogger("feddg")
M = TypeVar("M", bound=type[Method])
_registered: dict[str, type[Method]] = {}


def register(method: M) -> M:
    """Class decorator that adds a method under its name and aliases.

    Raises:
        ExperimentError: another method already has one of the names.
    """
    for name in (method.name, *method.aliases):
        taken = _registered.get(name)
        if taken is not None and taken.__qualname__ != method.__qualname__:
            raise ExperimentError(f"two methods are called {name!r}: {taken} and {method}")
        _registered[name] = method
    return method


@functools.cache
def _load_all() -> None:
    register(Method)
    for module in pkgutil.iter_modules(feddg.methods.__path__):
        importlib.import_module(f"feddg.methods.{module.name}")
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            register(entry.load())
        except Exception as error:  # a broken plug-in must not take the others down
            log.warning("method %r of %s cannot be loaded: %s", entry.name, entry.value, error)


def methods() -> dict[str, type[Method]]:
    """Returns all methods by name, aliases left out, in alphabetical order."""
    _load_all()
    return {name: m for name, m in sorted(_registered.items()) if m.name == name}


def method_class(name: str) -> type[Method]:
    """Returns the class of a method, or of a composition ``first+second``.

    Raises:
        ExperimentError: unknown name (with the nearest known one), or parts that exclude each other.
    """
    _load_all()
    parts = [_single(part.strip().lower()) for part in name.split("+")]
    return parts[0] if len(parts) == 1 else compose(tuple(parts))


def _single(name: str) -> type[Method]:
    if name not in _registered:
        raise ExperimentError(
            f"unknown method {name!r}{nearest(name, _registered)}; `feddg methods` lists them all"
        )
    return _registered[name]


@functools.cache
def compose(parts: tuple[type[Method], ...]) -> type[Method]:
    """Returns one class with all ``parts`` as cooperative bases.

    Raises:
        ExperimentError: the parts cannot be combined; says why.
    """
    name = "+".join(part.name for part in parts)
    _refuse_impossible(name, parts)
    fields: dict[str, Any] = {}
    for part in parts:
        fields |= {key: (f.annotation, f) for key, f in part.Settings.model_fields.items()}
    settings = create_model(f"{name} settings", __base__=MethodSettings, **fields)
    presets = [part.presets for part in reversed(parts)]
    members = {
        "name": name,
        "aliases": (),
        "summary": " + ".join(part.summary for part in parts),
        "Settings": settings,
        "presets": _merged_presets(presets),
        "__doc__": f"The composition {name}.",
    }
    return type(name, parts, members)


def _merged_presets(presets: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    return functools.reduce(merge, presets, {})


def _refuse_impossible(name: str, parts: tuple[type[Method], ...]) -> None:
    if len(set(parts)) < len(parts):
        raise ExperimentError(f"{name}: a method cannot be combined with itself")
    for one in parts:
        for other in parts:
            if other.name in one.excludes:
                raise ExperimentError(f"{name}: {one.excludes[other.name]}")
            if one is not other and issubclass(one, other) and other is not Method:
                raise ExperimentError(f"{name}: {one.name} already contains {other.name}")
    names = [field for part in parts for field in part.Settings.model_fields]
    shared = sorted(field for field in set(names) if names.count(field) > 1)
    if shared:
        raise ExperimentError(f"{name}: both parts have a setting called {shared[0]!r}")


def build_method(name: str, settings: dict[str, Any]) -> Method:
    """Returns the method with validated settings.

    Raises:
        ExperimentError: unknown method, or a setting that is unknown or out of range.
    """
    cls = method_class(name)
    try:
        return cls(cls.Settings(**settings))
    except ValidationError as error:
        raise ExperimentError(_explain(cls, error)) from None


def _explain(cls: type[Method], error: ValidationError) -> str:
    fault = error.errors()[0]
    field = ".".join(str(part) for part in fault["loc"])
    known = list(cls.Settings.model_fields)
    if fault["type"] == "extra_forbidden":
        listing = ", ".join(known) or "none at all"
        return (
            f"method {cls.name} has no setting {field!r}{nearest(field, known)}; it has: {listing}"
        )
    return f"method {cls.name}, setting {field!r}: {fault['msg']} (got {fault['input']!r})"
