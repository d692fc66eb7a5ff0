"""Methods by name: ours, third parties' through entry points, and compositions (``ccst+jigen``)."""

import functools
import importlib
import inspect
import itertools
import logging
import pkgutil
from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any, TypeVar

from pydantic import ValidationError, create_model

import feddg.methods
from feddg.errors import ExperimentError, nearest
from feddg.methods.base import Method, MethodSettings
from feddg.settings import merge

ENTRY_POINTS = "feddg.methods"
HOOKS = [
    name
    for name, member in vars(Method).items()
    if not name.startswith("_")
    and name != "preview"  # only a picture in the report; the first part's is shown
    and (inspect.isfunction(member) or isinstance(member, property))
]
"""What a method may override, and a composition must chain."""

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
        ExperimentError: unknown name (with the nearest known one), or parts that do not combine.
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

    The first part is the outermost: its hooks run first and reach the next part's through
    ``super()``. So a part whose hook does not call ``super()`` replaces that hook, and silences the
    same hook of every part behind it; such a composition is refused.

    Raises:
        ExperimentError: the parts cannot be combined; says why, and in which order they can.
    """
    name = "+".join(part.name for part in parts)
    _refuse_impossible(name, parts)
    members = {
        "name": name,
        "aliases": (),
        "summary": " + ".join(part.summary for part in parts),
        "Settings": create_model(f"{name} settings", __base__=_settings(parts)),
        "presets": _merged(part.presets for part in reversed(parts)),
        "excludes": _merged(part.excludes for part in parts),
        "sends": _merged(part.sends for part in parts),
        "__doc__": f"The composition {name}.",
    }
    return type(name, parts, members)


def _settings(parts: tuple[type[Method], ...]) -> tuple[type[MethodSettings], ...]:
    own = [part.Settings for part in parts if part.Settings is not MethodSettings]
    return (*own, MethodSettings)


def _merged(mappings: Iterable[dict[str, Any]]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for mapping in mappings:
        whole = merge(whole, mapping)
    return whole


def _refuse_impossible(name: str, parts: tuple[type[Method], ...]) -> None:
    if Method in parts:
        raise ExperimentError(f"{name}: every method contains fedavg; leave it out")
    if len(set(parts)) < len(parts):
        raise ExperimentError(f"{name}: a method cannot be combined with itself")
    for one, other in itertools.permutations(parts, 2):
        if other.name in one.excludes:
            raise ExperimentError(f"{name}: {one.excludes[other.name]}")
        if issubclass(one, other):
            raise ExperimentError(f"{name}: {one.name} already contains {other.name}")
        shared = sorted(one.Settings.model_fields.keys() & other.Settings.model_fields.keys())
        if shared:
            raise ExperimentError(
                f"{name}: {one.name} and {other.name} both have a setting called {shared[0]!r}"
            )
    fault = _silenced(parts)
    if fault is not None:
        orders = itertools.permutations(parts)
        works = next((order for order in orders if _silenced(order) is None), None)
        remedy = "+".join(part.name for part in works) + " works" if works else "no order works"
        raise ExperimentError(f"{name}: {fault}; {remedy}")


def _silenced(parts: tuple[type[Method], ...]) -> str | None:
    """Says which part's hook would never run because one before it replaces it, or None."""
    for hook in HOOKS:
        owners = [part for part in parts if getattr(part, hook) is not getattr(Method, hook)]
        for first, second in itertools.pairwise(owners):
            chained = getattr(first, hook) is getattr(second, hook) or _calls_super(first, hook)
            if not chained:
                return f"{first.name} replaces {hook!r} and so silences {second.name}'s"
    return None


def _calls_super(part: type[Method], hook: str) -> bool:
    found: Any = getattr(part, hook)
    code = inspect.unwrap(getattr(found, "fget", found)).__code__
    # A call inside a nested function shows as the cell that super() needs.
    return "super" in code.co_names or "__class__" in code.co_freevars


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
    if not field:  # a rule about several settings, which names them itself
        return f"method {cls.name}: {fault['msg'].removeprefix('Value error, ')}"
    return f"method {cls.name}, setting {field!r}: {fault['msg']} (got {fault['input']!r})"
