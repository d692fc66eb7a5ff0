"""Random numbers: named streams determined by a seed, and secret noise that cannot be repeated."""

import decimal
import functools
import hashlib
import json
import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from feddg.messages import on_device

Name = str | int
Generator = torch.Generator | numpy.random.Generator
FINENESS = 24
"""The grid step of noise is the deviation times 2 to the minus this."""
_COARSE = 4
_CHUNK = 1 << 18
_BYTES = 8 + 8 + 4


def derive_seed(seed: int, *names: Name) -> int:
    """Returns the 63-bit seed of the stream ``names`` under ``seed``.

    The same arguments give the same number on every machine, Python version and process.

    Args:
        seed: the experiment's seed.
        *names: purpose and ids, for example ``("client", 7, 3)``.
    """
    key = json.dumps([seed, *names], separators=(",", ":")).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def stream(seed: int, *names: Name) -> torch.Generator:
    """Returns a fresh CPU generator for the stream ``names`` under ``seed``.

    PyTorch's CPU generator (mt19937) uses the lower 32 of the seed's 63 bits. This keeps streams
    apart; nothing secret is drawn from it (see :func:`add_noise`).
    """
    return torch.Generator().manual_seed(derive_seed(seed, *names))


def numpy_stream(seed: int, *names: Name) -> numpy.random.Generator:
    """Returns a fresh numpy generator for the stream ``names`` under ``seed``."""
    return numpy.random.default_rng(derive_seed(seed, *names))


class DrawnFrom(TorchDispatchMode):
    """Inside the block, PyTorch draws from generators of the block instead of the global one.

    Initialisers of layers and torchvision's transforms take no generator, and all threads share the
    global one. The numbers are those that follow ``torch.manual_seed(seed)``, whatever other
    threads draw.

    Args:
        seed: for a generator on each device that is drawn on.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[object] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Gives an operation that draws the block's generator, unless it was given another."""
        given = dict(kwargs or {})
        tensors = (tensor.device for tensor in args if isinstance(tensor, Tensor))
        device = torch.device(next(tensors, None) or given.get("device") or "cpu")
        if torch.Tag.nondeterministic_seeded in func.tags and device.type != "meta":
            if not _takes_generator(func):
                name = func._overloadname.removeprefix("default")
                wanted = f"{name}_generator" if name else "generator"
                func = getattr(func.overloadpacket, wanted, func)
            if _takes_generator(func) and given.get("generator") is None:
                if device not in self._generators:
                    made = torch.Generator(device).manual_seed(self._seed)
                    self._generators[device] = made
                given["generator"] = self._generators[device]
        return func(*args, **given)


def _takes_generator(func: Any) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)


class Ahead:
    """What each pass through a layer draws on the CPU, drawn before the step that it is part of.

    So a device gets it with the step's batch, and waits for nothing inside the step. A step is
    expected to draw what the step before drew, for its own number of images. A pass that nobody
    expected draws when it comes, and what was drawn for one that does not come is put back: the
    stream gives the same numbers in the same order as without looking ahead.

    Args:
        generator: where all draws come from, in the order of the passes.
        draw: returns the tensors of a pass, on the CPU, from the generator and what :meth:`take`
            is given.
        before: whose expectations to take over.
    """

    def __init__(
        self,
        generator: Generator,
        draw: Callable[..., Sequence[Tensor]],
        before: "Ahead | None" = None,
    ) -> None:
        self._generator, self._draw = generator, draw
        self._seen: list[tuple[Any, ...]] = list(before._seen) if before else []
        self._images: int = before._images if before else 0
        self._waiting: deque[tuple[tuple[Any, ...], Any, list[Tensor]]] = deque()

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # a copy of the network goes on with its stream

    def prepare(self, images: int) -> dict[str, Tensor]:
        """Draws what the next step, on so many images, will need; returns the tensors to send."""
        self._put_back()
        for shape, *rest in self._seen:
            key = ((shape[0] * images // self._images, *shape[1:]), *rest)
            state = _state(self._generator)
            self._waiting.append((key, state, list(self._draw(self._generator, *key))))
        self._seen, self._images = [], images
        return {
            f"{number}/{place}": tensor
            for number, (_, _, tensors) in enumerate(self._waiting)
            for place, tensor in enumerate(tensors)
        }

    def arrived(self, sent: dict[str, Tensor]) -> None:
        """Takes the tensors of :meth:`prepare` once they are on the device."""
        for number, (_, _, tensors) in enumerate(self._waiting):
            tensors[:] = [sent[f"{number}/{place}"] for place in range(len(tensors))]

    @property
    def expected(self) -> tuple[object, ...]:
        """The passes that are drawn for and have not come."""
        return tuple(key for key, _, _ in self._waiting)

    def mark(self) -> tuple[list[object], list[object]]:
        """Returns which passes came and which are to come, for :meth:`rewind`."""
        return list(self._seen), list(self._waiting)

    def rewind(self, mark: tuple[list[Any], list[Any]]) -> None:
        """Goes back, or on, to where :meth:`mark` was called."""
        self._seen, self._waiting = list(mark[0]), deque(mark[1])

    def take(self, device: torch.device, shape: Sequence[int], *rest: object) -> list[Tensor]:
        """Returns the tensors of a pass.

        Args:
            device: where they are needed.
            shape: of the pass, the number of images or a multiple of it first.
            *rest: what else the draw depends on.
        """
        key = (tuple(shape), *rest)
        if self._images:
            self._seen.append(key)
        if self._waiting and self._waiting[0][0] == key:
            return self._waiting.popleft()[2]
        self._put_back()
        drawn = {str(n): t for n, t in enumerate(self._draw(self._generator, *key))}
        return list(on_device(drawn, device).values())

    def _put_back(self) -> None:
        if self._waiting:
            state = self._waiting[0][1]
            if isinstance(self._generator, torch.Generator):
                self._generator.set_state(state)
            else:
                self._generator.bit_generator.state = state
            self._waiting.clear()


def _state(generator: Generator) -> object:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.bit_generator.state


# Gaussian noise that nobody can take off again: from the operating system's entropy, on a grid.
#
# Noise that protects somebody must not come from a seeded generator: PyTorch's on the CPU uses 32
# bits of its seed, so that whoever sees the values before and after finds it by trying all. And
# noise drawn in floating point leaves traces: which numbers a float can hold depends on the value
# under the noise (Mironov, "On Significance of the Least Significant Bits for Differential
# Privacy", CCS 2012).
#
# Every draw here is fresh from ``os.urandom``, the kernel's cryptographic generator; there is no
# key to find and no state to copy. The noise is a discrete Gaussian: an integer Z with P(Z = z) ~
# exp(-z^2 / (2 D^2)), D = 2^24, times the grid's step = deviation / D. Values are put on the grid
# before the noise is added, so that every outcome is possible for every value, and the sum's
# rounding to a float is a function of the outcome alone. On a grid this mechanism costs exactly
# what the continuous Gaussian costs, rho = sensitivity^2 / (2 deviation^2) (Canonne, Kamath and
# Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS 2020, Theorem 4). Going to the
# grid moves a value by at most half a step: for n values the sensitivity grows by at most sqrt(n)
# steps, 0.02 % of the deviation for 11 million.
#
# Sampling (Ducas et al., "Lattice Signatures and Bimodal Gaussians", CRYPTO 2013, Algorithms 11
# and 12): |Z| = K x + y with D = 4 K; x from a table of a discrete Gaussian of deviation 4, y
# uniform below K, kept with probability exp(-t (t + 2 x) / 32), t = y / K; then a sign; zero keeps
# but one. Probabilities are compared with 53 bits, so that each is right to about 2^-50.
#
# Why this and not the sum of several floating-point Gaussians (Holohan and Braghin 2021, Opacus'
# secure mode): that makes the attack expensive, this makes it impossible, at the same price.


def add_noise(values: Tensor, deviation: float) -> Tensor:
    """Returns ``values``, rounded to the noise's grid, plus Gaussian noise; float64.

    Release values in this form: the low digits of the sum reveal nothing about the value.

    Args:
        values: values to hide, any shape.
        deviation: standard deviation of the noise, above 0.
    """
    if not (math.isfinite(deviation) and deviation > 0):
        raise ValueError(f"the deviation of noise must be finite and above 0, not {deviation}")
    step = math.ldexp(deviation, -FINENESS)
    grid = torch.round(values.detach().double() / step)
    drawn = torch.from_numpy(discrete_gaussian(grid.numel())).double().reshape(grid.shape)
    return (grid + drawn.to(grid.device)) * step


def discrete_gaussian(count: int, fineness: int = FINENESS) -> numpy.ndarray:
    """Returns ``count`` independent integers from a discrete Gaussian of deviation ``2**fineness``.

    Args:
        count: number of integers.
        fineness: 2 to 26.

    Returns:
        int64 ``(count,)``.
    """
    drawn = numpy.empty(count, dtype=numpy.int64)
    filled = 0
    while filled < count:
        # Nine in ten candidates are kept.
        wanted = min(_CHUNK, int(1.15 * (count - filled)) + 64)
        kept = _candidates(wanted, fineness)[: count - filled]
        drawn[filled : filled + len(kept)] = kept
        filled += len(kept)
    return drawn


def _candidates(count: int, fineness: int) -> numpy.ndarray:
    """Draws candidates and returns the accepted ones."""
    entropy = os.urandom(_BYTES * count)
    coarse, uniform = numpy.frombuffer(entropy, numpy.uint64, 2 * count).reshape(2, count)
    low = numpy.frombuffer(entropy, numpy.uint32, count, 16 * count)
    width = 2**fineness // _COARSE
    x = numpy.searchsorted(_table(), coarse, side="right").astype(numpy.int64)
    y = (low & numpy.uint32(width - 1)).astype(numpy.int64)
    negative = (low >> numpy.uint32(31)).astype(bool)
    t = y / width
    likely = numpy.exp(-t * (t + 2 * x) / (2 * _COARSE**2))
    size = x * width + y
    accepted = (uniform >> numpy.uint64(11)) * 2.0**-53 < likely
    accepted &= ~(negative & (size == 0))
    return numpy.where(negative, -size, size)[accepted]


@functools.cache
def _table() -> numpy.ndarray:
    """Returns cumulative probabilities of 0, 1, ... times 2^64, for a half Gaussian on integers."""
    with decimal.localcontext() as context:
        context.prec = 50
        weights = [(decimal.Decimal(-x * x) / (2 * _COARSE**2)).exp() for x in range(10 * _COARSE)]
        total = sum(weights)
        sums = [sum(weights[: x + 1]) / total * 2**64 for x in range(len(weights) - 1)]
        return numpy.array([min(int(s), 2**64 - 1) for s in sums], dtype=numpy.uint64)
