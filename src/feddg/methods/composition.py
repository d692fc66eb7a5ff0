"""Methods by name: a single one, or several combined in one class (``ccst+jigen``)."""

import functools
import inspect
import itertools
from collections.abc import Iterable

from pydantic import create_model

from feddg.errors import ExperimentError
from feddg.methods.base import METHODS, Method, MethodSettings
from feddg.methods.baselines import FedAvg
from feddg.models.task import Task
from feddg.settings import Fields, merge

HOOKS = [
    name
    for name, member in vars(Method).items()
    if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
]
"""The hooks that a method may override, and a composition must chain."""


def method_class(name: str) -> type[Method]:
    """Returns the class of a method, or of a composition ``first+second``.

    Raises:
        ExperimentError: unknown name (with the nearest known one), or parts that do not combine.
    """
    names = [part.strip() for part in name.split("+")]
    parts = [METHODS.find(part if part in METHODS else part.lower()) for part in names]
    return parts[0] if len(parts) == 1 else compose(tuple(parts))


@functools.cache
def compose(parts: tuple[type[Method], ...]) -> type[Method]:
    """Returns one class with all ``parts`` as cooperative bases.

    The first part is the outermost, unless another has to be: its hooks run first and reach the
    next part's through ``super()``. A part whose hook does not call ``super()`` would silence the
    same hook of all later parts, so it is moved behind them. The composition's name shows the
    order. Two parts that replace the same hook cannot be combined.

    Raises:
        ExperimentError: the parts cannot be combined; the message says why.
    """
    parts = _arranged(tuple(sorted(parts, key=lambda part: not part.outermost)))
    name = _joined_name(parts)
    own = (part.Settings for part in parts if part.Settings is not MethodSettings)
    settings: tuple[type[MethodSettings], ...] = (*own, MethodSettings)
    members = {
        "name": name,
        "title": " + ".join(part.title for part in parts),
        "aliases": (),
        "summary": " + ".join(part.summary for part in parts),
        "Settings": create_model(f"{name} settings", __base__=settings),
        "presets": _presets(parts),
        "excludes": _merged(part.excludes for part in parts),
        "sends": _merged(part.sends for part in parts),
        "noises": frozenset[str]().union(*(part.noises for part in parts)),
        "any_task": not any(map(works_on_embeddings, parts)),
        "__doc__": f"The composition {name}.",
    }
    return type(name, parts, members)


def _presets(parts: tuple[type[Method], ...]) -> Fields:
    """Returns the parts' presets: the first part's hold, and before them a one-round method's.

    It trains nothing, so what others say of training, for one data set even, is not for it.
    """
    last = sorted(reversed(parts), key=lambda part: part.one_round)
    names = dict.fromkeys(name for part in last for name in part.presets)
    return {
        name: _merged(merge(p.presets.get("*", {}), p.presets.get(name, {})) for p in last)
        for name in names
    }


def _merged(mappings: Iterable[Fields]) -> Fields:
    return functools.reduce(merge, mappings, {})


def _joined_name(parts: Iterable[type[Method]]) -> str:
    return "+".join(part.name for part in parts)


def _arranged(parts: tuple[type[Method], ...]) -> tuple[type[Method], ...]:
    """Returns the parts in the given order, or in the first order that silences no hook."""
    _refuse_impossible(parts)
    for order in itertools.permutations(parts):
        if _silenced(order) is None:
            return order
    pairs = itertools.combinations(parts, 2)
    faults = [(_silenced(pair), _silenced(pair[::-1])) for pair in pairs]
    fault = next((one for one, other in faults if one and other), _silenced(parts))
    raise ExperimentError(f"{_joined_name(parts)}: {fault}, nor the other way round")


def _refuse_impossible(parts: tuple[type[Method], ...]) -> None:
    name = _joined_name(parts)
    if FedAvg in parts:
        raise ExperimentError(f"{name}: every method contains fedavg; leave it out")
    if len(set(parts)) < len(parts):
        raise ExperimentError(f"{name}: a method cannot be combined with itself")
    for part, other in itertools.permutations(parts, 2):
        reason = part.excludes.get(other.name) or other.excludes.get(part.name)
        if reason is not None:
            raise ExperimentError(f"{name}: {reason}")
        if issubclass(part, other):
            raise ExperimentError(f"{name}: {part.name} already contains {other.name}")
        shared = sorted(part.Settings.model_fields.keys() & other.Settings.model_fields.keys())
        if shared:
            raise ExperimentError(
                f"{name}: {part.name} and {other.name} both have a setting called {shared[0]!r}"
            )


def _silenced(parts: tuple[type[Method], ...]) -> str | None:
    """Returns which part's hook would never run because an earlier part replaces it, or None."""
    for hook in HOOKS:
        owners = [part for part in parts if getattr(part, hook) is not getattr(Method, hook)]
        for first, second in itertools.pairwise(owners):
            chained = getattr(first, hook) is getattr(second, hook) or _calls_super(first, hook)
            if not chained:
                return f"{first.name} replaces {hook!r}, so {second.name}'s would never run"
    return None


def _calls_super(part: type[Method], hook: str) -> bool:
    member = getattr(part, hook)
    code = inspect.unwrap(getattr(member, "fget", member)).__code__
    if "super" in code.co_names:
        return hook in code.co_names
    return "__class__" in code.co_freevars  # in a nested function


def works_on_embeddings(method: type[Method]) -> bool:
    """Whether a method needs classes, or a linear layer that it changes the input of."""
    if method.any_task is not None:
        return not method.any_task
    loss = method.loss is not Method.loss and not _calls_super(method, "loss")
    hooks = "head_loss", "output_loss", "network"
    return loss or any(getattr(method, hook) is not getattr(Method, hook) for hook in hooks)


def check_task(method: type[Method], task: Task, dense: bool) -> None:
    """Raises ExperimentError if a method cannot run a task.

    Args:
        method: the method.
        task: the task.
        dense: whether targets may tell of places in images.
    """
    if not task.has_classes and works_on_embeddings(method):
        raise ExperimentError(
            f"{method.name} needs class labels, embeddings or a linear classifier, and this task "
            "has none: choose a method that averages or changes images, such as fedavg, fedprox, "
            "mixstyle or randconv"
        )
    if dense and method.moves_pixels:
        raise ExperimentError(
            f"{method.name} moves the pixels of images, and targets of two or more sides, or of a "
            "number for each pixel, would not move along: choose another method, or "
            "train.augmentation, which also moves masks"
        )


def build_method(name: str, settings: Fields) -> Method:
    """Returns the method with validated settings.

    Raises:
        ExperimentError: unknown method, or a setting that is unknown or out of range.
    """
    return method_class(name)(**settings)
