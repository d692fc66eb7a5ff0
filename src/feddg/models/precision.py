"""Device and precision, and the choice that ``auto`` makes on this machine."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial

import torch

from feddg.errors import ExperimentError


def choose_device(name: str) -> torch.device:
    """Returns the device called ``name``; ``auto`` is CUDA if available, else the CPU.

    Raises:
        ExperimentError: there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ExperimentError(
            f"device {name!r} cannot be used ({str(error).splitlines()[0]}); try --device cpu"
        ) from None
    return device


def has_fast_bfloat16(device: torch.device) -> bool:
    """Returns whether the hardware multiplies bfloat16 faster than float32.

    Recent GPUs do, and CPUs with AMX or AVX512-BF16. Exception: on Intel CPUs that have AMX,
    AVX512-BF16 is no faster than float32, and if a virtual machine hides AMX, a training step takes
    a third longer. These CPUs are recognised by AVX512-FP16, which AMD's lack.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return False
    by_vectors = bool(getattr(torch.cpu, "_is_avx512_bf16_supported", bool)())
    facts: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return multiplies_tiles() or (by_vectors and not facts.get("avx512_fp16"))


def multiplies_tiles() -> bool:
    """Returns whether the CPU has AMX, which multiplies tiles of bfloat16 matrices."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())


def choose_precision(name: str, device: torch.device, *, exact: bool = False) -> str:
    """Returns ``float32`` or ``bfloat16``; ``auto`` is bfloat16 if that is faster.

    Args:
        name: ``auto`` or one of them.
        device: where it is computed.
        exact: whether numbers lose their meaning in the eight bits of a bfloat16, such as features
            that are a year or a pressure; ``auto`` is float32 then.

    Raises:
        ExperimentError: it is neither.
    """
    if name not in ("auto", "float32", "bfloat16"):
        raise ExperimentError(f"precision {name!r}: choose auto, float32 or bfloat16")
    if name == "auto":
        return "bfloat16" if has_fast_bfloat16(device) and not exact else "float32"
    return name


@contextmanager
def as_usual() -> Iterator[None]:
    """Inside, PyTorch has gradients and no autocast, whatever the program has set around it."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():  # leaving it turns on threads of backward passes
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def autocast(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Returns a function that opens the precision's context; weights and optimizer stay float32.

    Autocast's cache is off: it would keep a weight's first bfloat16 copy until the context closes,
    so a context around several optimizer steps would use stale weights.
    """
    if precision == "float32":
        return nullcontext
    return partial(torch.autocast, device.type, torch.bfloat16, cache_enabled=False)
