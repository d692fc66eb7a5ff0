"""Watches a method while it trains: what it changes that is not its own."""

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType

import numpy
import torch
from torch import Tensor, nn

from feddg.messages import Broadcast, Refusal, Weights, copied
from feddg.methods.base import Round, RoundHook, State


@contextmanager
def quietly() -> Iterator[list[BaseException]]:
    """Holds back the package's warnings inside the block; yields the errors that came with them."""
    errors: list[BaseException] = []

    def hold(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1] is not None:
            errors.append(record.exc_info[1])
        return record.levelno < logging.WARNING

    log = logging.getLogger("feddg")
    log.filters.insert(0, hold)  # of two, the inner one is asked first
    try:
        yield errors
    finally:
        log.removeFilter(hold)


@contextmanager
def other_global_numbers(seed: int) -> Iterator[None]:
    """Sets all global generators inside the block, and puts them back."""
    before = random.getstate(), numpy.random.get_state()  # noqa: NPY002 - what others may use
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        numpy.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            numpy.random.set_state(before[1])  # noqa: NPY002


@contextmanager
def as_they_were() -> Iterator[None]:
    """Puts PyTorch's settings back that a method may have changed inside the block."""
    count, dtype = torch.get_num_threads(), torch.get_default_dtype()
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        try:
            yield
        finally:
            torch.set_num_threads(count)
            torch.set_default_dtype(dtype)


def global_numbers() -> dict[str, object]:
    """Returns what all parts of a program share: the global generators, and PyTorch's settings."""
    return {
        "Python's global random numbers": random.getstate(),
        "numpy's global random numbers": repr(numpy.random.get_state()),  # noqa: NPY002
        "PyTorch's global random numbers": content(torch.get_rng_state()),
        "PyTorch's default dtype": torch.get_default_dtype(),
        "PyTorch's number of threads": torch.get_num_threads(),
        "PyTorch's deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "PyTorch's gradient mode": torch.is_grad_enabled(),
    }


def content(value: object, depth: int = 4) -> object:
    """Returns what tells the content of an object, for comparisons."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return tuple(value.shape), value.dtype, flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, numpy.ndarray):
        return value.shape, value.dtype, value.tobytes()
    if isinstance(value, torch.Generator):
        return content(value.get_state())
    if isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, nn.Module):
        return content(value.state_dict())
    if depth and isinstance(value, dict):
        return [(repr(name), content(item, depth - 1)) for name, item in value.items()]
    if depth and isinstance(value, list | tuple | set | frozenset):
        return [content(item, depth - 1) for item in value]
    plain = isinstance(value, type | ModuleType | FunctionType) or not hasattr(value, "__dict__")
    return repr(value) if plain or not depth else (repr(value), content(vars(value), depth - 1))


def changed(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """Returns the names of what differs, sorted."""
    return sorted(n for n in before | after if before.get(n, ...) != after.get(n, ...))


class Watch(RoundHook):
    """Knows what a round was given, which nobody may change.

    Attributes:
        found: what was changed first, or None.
        refusals: why clients' updates were refused.
    """

    def __init__(self) -> None:
        self.refusals: list[str] = []
        self.found: str | None = None
        self._given: dict[str, tuple[Weights, Weights]] = {}

    def give(self, **given: Weights) -> None:
        """Adds tensors that stay as they are until the next round."""
        for name, tensors in given.items():
            self._given[name] = tensors, copied(tensors)

    def start(self, state: State, labels: Weights) -> None:
        """Begins a round of a state and of clients' labels."""
        self._given.clear()
        context = {} if state.context is None else state.context.tensors
        self.give(weights=state.weights, extras=state.extras, context=context, labels=labels)

    def changed(self) -> str | None:
        """Returns what is not as it was given, or None."""
        for what, (now, before) in self._given.items():
            name = differs(now, before)
            if name is not None:
                return WORDS[what].format(name)
        return None

    def broadcast(self, broadcast: Broadcast, round: Round) -> Broadcast:
        """See :class:`RoundHook`."""
        for name, tensor in broadcast.weights.items():
            kept = round.state.weights.get(name)
            if kept is not None and kept.dtype != tensor.dtype and self.found is None:
                self.found = f"the broadcast holds {name!r} as {tensor.dtype}, not {kept.dtype}"
        self.give(sent=broadcast.weights, added=broadcast.extras.tensors)
        return broadcast

    def refused(self, refusal: Refusal, round: Round) -> None:
        """See :class:`RoundHook`."""
        self.refusals.append(f"client {refusal.client}: {refusal.reason}")

    def completed(self, state: State, round: Round) -> State:
        """See :class:`RoundHook`."""
        self.found = self.found or self.changed()
        return state


WORDS = {
    "weights": "state.weights[{}] is changed in place, or put into the round's old state",
    "extras": "state.extras[{}] is changed in place",
    "context": "client.context[{}] is changed",
    "labels": "the labels of client {} are changed",
    "sent": "client.received[{}] is changed, which other clients get, too",
    "added": "client.extras[{}] is changed, which other clients get, too",
}


def differs(one: Weights, other: Weights) -> str | None:
    """Returns the first entry that differs, or None."""
    if one.keys() != other.keys():
        return f"the entries {sorted(one.keys() ^ other.keys())[:3]}"
    return next((repr(n) for n, t in one.items() if not torch.equal(t.cpu(), other[n].cpu())), None)
