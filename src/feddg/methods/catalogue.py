"""All methods by name: ours, and third parties' through entry points."""

from typing import TypeVar

from feddg.errors import ExperimentError
from feddg.methods.base import Method
from feddg.registry import Registry

M = TypeVar("M", bound=type[Method])


def _names(method: type[Method]) -> tuple[str, ...]:
    if not hasattr(method, "name"):
        raise ExperimentError(f'{method.__qualname__} has no name; give the class a name = "..."')
    return (method.name, *method.aliases)


METHODS: Registry[type[Method]] = Registry(
    "method",
    "feddg.methods",
    group="feddg.methods",
    error=ExperimentError,
    where="feddg methods",
    named=_names,
)
"""Every method by its name."""


def register(method: M) -> M:
    """Class decorator that adds a method under its name and aliases.

    Raises:
        ExperimentError: the class has no name, or another method already has one of its names.
    """
    name, *aliases = _names(method)
    METHODS.add(name, method, tuple(aliases))
    return method


def methods() -> dict[str, type[Method]]:
    """Returns all methods by name, aliases left out, in alphabetical order."""
    return dict(sorted(METHODS.items()))


def title_of(name: str) -> str:
    """Returns a method's title, a composition's joined by ``+``; what is unknown stays as it is.

    Args:
        name: of a method or composition (aliases are left as they are written), or any text.
    """
    titles = {_plain(known): method.title for known, method in METHODS.items()}
    parts = [part.strip() for part in name.split("+")]
    if not any(_plain(part) in titles for part in parts):
        return name
    return " + ".join(titles.get(_plain(part), part) for part in parts)


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")
