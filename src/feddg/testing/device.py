"""A device that is not the CPU, on any machine, for tests of where tensors live.

Its tensors hold CPU tensors and compute with them, so numbers are the CPU's; but as on a GPU,
tensors of two devices do not mix, numpy and CPU generators have no part in it, and what needs its
answer on the host is counted, as is what is sent to it, and whether the host waits for that: for
every copy from memory that is not pinned.
"""

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from feddg.clients.graphs import ANSWERS, INDEXED, Graphs, leaves_of

NAME = "pretended"
aten = torch.ops.aten

MOVES = {aten._to_copy.default, aten.copy_.default}
WORDS = {str(aten._local_scalar_dense.default): "a number (.item(), float, if)"}


@dataclass
class Traffic:
    """What has passed between the host and the device.

    Attributes:
        waits: how often the host waited for the device, by operation, with the line of ``files``
            that asked for it, if there is one.
        sent: numbers of bytes that were sent to it, one each time.
        launches: operations on it that make or change a tensor.
        files: the files whose lines are named.
    """

    waits: Counter[str] = field(default_factory=Counter)
    sent: list[int] = field(default_factory=list)
    launches: int = 0
    files: Collection[str] = ()


_watching: list[Traffic] = []
_pinned: Any = WeakIdKeyDictionary()


@contextmanager
def traffic(files: Collection[str] = ()) -> Iterator[Traffic]:
    """Counts what passes between host and device in its block; names lines of some files."""
    seen = Traffic(files=files)
    _watching.append(seen)
    try:
        yield seen
    finally:
        _watching.remove(seen)


class OnDevice(Tensor):
    """A tensor of the device.

    Attributes:
        held: its numbers, on the CPU.
    """

    held: Tensor

    @staticmethod
    def __new__(cls: Any, held: Tensor) -> "OnDevice":
        """Returns a tensor of the device with these numbers."""
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"OnDevice({self.held!r})"

    def untyped_storage(self) -> Any:
        """Returns the storage of its numbers, which tells tensors apart."""
        return self.held.untyped_storage()

    def tolist(self) -> Any:
        """Returns the numbers, for which the host waits."""
        _waited("tolist")
        return self.held.tolist()

    def numpy(self, **kwargs: Any) -> Any:
        """Raises TypeError, as on a GPU."""
        raise TypeError(f"can't convert {NAME} tensor to numpy, use Tensor.cpu() first")

    __array__ = numpy  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls: Any, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _carry_out(operation, args, kwargs or {})


def _waited(name: str) -> None:
    for seen in _watching:
        places = [
            f"{Path(frame.f_code.co_filename).name}:{line}"
            for frame, line in walk_stack(sys._getframe())
            if frame.f_code.co_filename in seen.files
        ]
        seen.waits[f"{WORDS.get(name, name)} at {places[0]}" if places else name] += 1


def _sent(tensor: Tensor, non_blocking: bool = False) -> None:
    for seen in _watching:
        seen.sent.append(tensor.nbytes)
    if not (non_blocking and tensor in _pinned):
        _waited("copy from memory that is not pinned")


def _put(tensor: Tensor) -> OnDevice:
    # A lazy conjugate would be lost: operations below this one do not see its mark.
    return OnDevice(tensor.resolve_conj().resolve_neg())


def _taken(value: Any) -> Any:
    if isinstance(value, OnDevice):
        return value.held
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _changed(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_changed(change, item) for item in value])
    return change(value)


@cache
def _is_composed(operation: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        operation.name(), "CompositeImplicitAutograd"
    )


@cache
def _gives_a_view(operation: Any) -> bool:
    return any(r.alias_info and not r.alias_info.is_write for r in operation._schema.returns)


def _carry_out(operation: Any, args: Any, kwargs: Any) -> Any:
    leaves = [*leaves_of([args, kwargs])]
    if _is_composed(operation):
        # Inference mode does not take compositions apart; one that changes nothing is an alias.
        result = operation.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return _changed(
                lambda x: _put(x.held) if any(x is g for g in leaves) and _here(x) else x, result
            )
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    _check(operation, args, leaves, tensors)
    _count(operation, args, kwargs, tensors)
    if operation is aten._to_copy.default:
        device = kwargs.get("device")
        rest = {n: value for n, value in kwargs.items() if n not in ("device", "pin_memory")}
        moved = operation(*_changed(_taken, args), **rest)
        return moved if device is not None and device.type == "cpu" else _put(moved)
    if operation is aten.copy_.default:
        operation(*_changed(_taken, args), **kwargs)
        return args[0]
    named = {name: _changed(_taken, value) for name, value in kwargs.items()}
    result = operation(*_changed(_taken, args), **named)
    known = {id(x.held): x for x in tensors if isinstance(x, OnDevice)}

    def back(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return known[id(value)] if id(value) in known else _put(value)

    # A view of an ordinary tensor is one, also in inference mode.
    ordinary = _gives_a_view(operation) and not any(x.is_inference() for x in tensors)
    with torch.inference_mode(torch.is_inference_mode_enabled() and not ordinary):
        return _changed(back, result)


def _here(value: Any) -> bool:
    return isinstance(value, OnDevice)


def _check(operation: Any, args: Any, leaves: list[Any], tensors: list[Tensor]) -> None:
    if any(isinstance(x, torch.Generator) and x.device.type == "cpu" for x in leaves):
        raise RuntimeError(f"{operation}: expected a {NAME} generator but found a cpu one")
    strangers = [x for x in tensors if not _here(x) and x.dim()]
    if operation in INDEXED:  # row numbers may come from the CPU
        strangers = [x for x in strangers if any(x is given for given in (args[0], *args[2:]))]
    if operation not in MOVES and strangers and any(_here(x) for x in tensors):
        raise RuntimeError(
            f"{operation}: expected all tensors to be on the same device, found {NAME} and cpu"
        )


def _count(operation: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
    for seen in _watching:
        seen.launches += not _gives_a_view(operation)
    if operation in ANSWERS:
        _waited(str(operation))
    elif operation in INDEXED:
        if any(_here(x) and x.dtype == torch.bool for x in tensors):
            _waited(f"{operation} by a mask")
        for rows in (x for x in tensors if not _here(x) and x.dim()):
            _sent(rows)
    elif operation is aten.copy_.default:
        if _here(args[0]) and not _here(args[1]):
            _sent(args[1], kwargs.get("non_blocking", len(args) > 2 and args[2]))
        elif not _here(args[0]):
            _waited("copy to the host")
    elif operation is aten._to_copy.default and kwargs.get("device") == torch.device("cpu"):
        _waited("copy to the host")


class _Tape(TorchDispatchMode):
    """Notes operations with their tensors, and does them again, without a line of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Notes one operation and carries it out."""
        given = (
            _changed(_as_now, [*args]),
            {n: _changed(_as_now, v) for n, v in (kwargs or {}).items()},
        )
        result = operation(*args, **(kwargs or {}))
        if not _gives_a_view(operation):  # a view has what its tensor has
            self.notes.append((operation, *given, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        """Puts what the operations give now where it was; casts are among them."""
        with torch.autocast(NAME, enabled=False):
            for operation, args, kwargs, before in self.notes:
                now = operation(*args, **kwargs)
                for old, new in zip(leaves_of([before]), leaves_of([now])):
                    if isinstance(old, Tensor) and old is not new and old.numel():
                        _taken(old).detach().copy_(_taken(new))


def _as_now(value: Any) -> Any:
    """Returns a number of the host as it is now, which a recorded step keeps."""
    return (
        value.clone() if isinstance(value, Tensor) and not (_here(value) or value.dim()) else value
    )


def _recorded(step: Callable[[], None]) -> Callable[[], None]:
    with _Tape() as tape:
        step()
    return tape.replay


Graphs.recorders[NAME] = _recorded

_libraries: list[torch.library.Library] = []


@contextmanager
def second_device() -> Iterator[str]:
    """Gives its block the device's name; backward passes run in the thread that asks for them."""
    if not _libraries:
        backend_registration._setup_privateuseone_for_python_backend(NAME, _module())
        library = torch.library.Library("aten", "IMPL")
        library.impl("empty.memory_format", _empty, "PrivateUse1")
        library.impl("empty_strided", _empty_strided, "PrivateUse1")
        library.impl("_copy_from", _copy_from, "PrivateUse1")
        library.impl("is_pinned", lambda tensor, device=None: tensor in _pinned, "CPU")
        library.impl("_pin_memory", _pin, "CPU")
        _libraries.append(library)
    with torch.autograd.set_multithreading_enabled(False):
        yield NAME


def _module() -> Any:
    # Not at import: older versions of PyTorch have no such base, and tests are skipped there.
    class Module(backend_registration._DummyBackendModule):
        def mem_get_info(self, device: Any = None) -> tuple[int, int]:
            return 2**30, 2**30

        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16]

    return Module()


def _empty(
    size: Any, dtype: Any = None, *rest: Any, memory_format: Any = None, **more: Any
) -> OnDevice:
    chosen = memory_format or torch.contiguous_format
    return OnDevice(torch.empty(size, dtype=dtype, memory_format=chosen))


def _empty_strided(size: Any, stride: Any, dtype: Any = None, *rest: Any, **more: Any) -> OnDevice:
    return OnDevice(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _sent(source, non_blocking)
    _taken(target).copy_(_taken(source))
    return target


def _pin(tensor: Tensor, device: Any = None) -> Tensor:
    pinned = tensor.clone()
    _pinned[pinned] = True
    return pinned
