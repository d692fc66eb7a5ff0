"""Mixed precision on the pretended device: what CUDA's autocast casts is cast there, too."""

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from feddg.clients.graphs import leaves_of
from feddg.testing.device import NAME

KEY = "AutocastPrivateUse1"
HALF = (torch.bfloat16, torch.float16)
_libraries: list[torch.library.Library] = []


@cache
def with_autocast() -> None:
    """Registers CUDA's lists, which are in a header that PyTorch brings (``autocast_mode.h``)."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text(encoding="utf-8")
    rest, own = (torch.library.Library(name, "IMPL") for name in ("_", "aten"))
    rest.fallback(torch.library.fallthrough_kernel, KEY)
    for name, cast in (
        ("AT_FORALL_LOWER_PRECISION_FP", lambda seen: torch.bfloat16),
        ("AT_FORALL_FP32", lambda seen: torch.float32),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", lambda seen: torch.float32),
        ("AT_FORALL_PROMOTE", widest),
    ):
        for operation in operations(text, name):
            own.impl(operation.name().removeprefix("aten::"), casting(operation, cast), KEY)
    _libraries.extend((rest, own))


def operations(text: str, name: str) -> Iterator[Any]:
    """Yields the operations of one of the header's lists that this PyTorch has."""
    listed = text.partition(f"#define {name}(_)")[2].partition("\n\n")[0]
    for words in re.findall(r"_\(([a-z_0-9, A-Z]+)\)", listed):
        packet, _, overload = words.replace(" ", "").partition(",")
        found = getattr(torch.ops.aten, packet, None)
        operation = getattr(found, overload or "default", None)
        if operation is not None:
            yield operation


def widest(seen: list[Tensor]) -> torch.dtype:
    """Returns float32 if anything is, as for sums of two kinds."""
    return torch.float32 if any(t.dtype == torch.float32 for t in seen) else torch.bfloat16


def casting(operation: Any, cast: Callable[[list[Tensor]], torch.dtype]) -> Callable[..., Any]:
    """Returns the operation on floating-point numbers of another type."""

    def ours(value: Any) -> bool:
        floats = (torch.float32, *HALF)
        return isinstance(value, Tensor) and value.device.type == NAME and value.dtype in floats

    def call(*args: Any, **more: Any) -> Any:
        dtype = cast([leaf for leaf in leaves_of([args, more]) if ours(leaf)])

        def changed(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(map(changed, value))
            return value.to(dtype) if ours(value) else value

        with torch._C._ExcludeDispatchKeyGuard(
            torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        ):
            return operation(*map(changed, args), **{n: changed(v) for n, v in more.items()})

    return call
