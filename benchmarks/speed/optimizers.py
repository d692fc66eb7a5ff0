"""How long does the optimizer's step alone take on ResNet-18's channels-last weights?

    python benchmarks/speed/optimizers.py --threads 1

Interleaved in one process, each on its own network with the same gradients: feddg's optimizer in
memory order, PyTorch's fused one, and PyTorch's without fusing (foreach, and one by one). Medians
with quartiles of milliseconds, of the clock and of CPU time: where others share the machine, only
the second, at one thread, can be trusted.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torchvision

from feddg.clients.optim import MemoryOrderAdam, MemoryOrderSGD

Make = Callable[..., torch.optim.Optimizer]
KINDS: dict[str, tuple[Make, Make, dict[str, Any]]] = {
    "Adam": (MemoryOrderAdam, torch.optim.Adam, {}),
    "SGD": (MemoryOrderSGD, torch.optim.SGD, {}),
    "SGD, momentum": (MemoryOrderSGD, torch.optim.SGD, {"momentum": 0.5}),
}
PLAIN = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "one by one": {"foreach": False, "fused": False},
}


class Timed:
    """One optimizer on a network of its own."""

    def __init__(self, make: Make, **settings: Any) -> None:
        torch.manual_seed(0)
        network = torchvision.models.resnet18(num_classes=10)
        self.parameters = list(network.to(memory_format=torch.channels_last).parameters())  # type: ignore[call-overload]
        self.optimizer = make(self.parameters, lr=0.01, **settings)
        self.milliseconds: list[tuple[float, float]] = []

    def step(self, number: int) -> None:
        """Takes a step on gradients that are the same for every optimizer."""
        rng = torch.Generator().manual_seed(number)
        for parameter in self.parameters:
            parameter.grad = torch.empty_like(parameter).normal_(generator=rng)
        clock, processor = time.perf_counter(), time.process_time()
        self.optimizer.step()
        spent = (time.perf_counter() - clock, time.process_time() - processor)
        self.milliseconds.append((1e3 * spent[0], 1e3 * spent[1]))


def compare(kind: str, steps: int) -> None:
    """Prints one row for each way to take a step."""
    ours, theirs, settings = KINDS[kind]
    ways = {"memory order": Timed(ours, **settings)}
    ways |= {name: Timed(theirs, **settings, **plain) for name, plain in PLAIN.items()}
    for number in range(steps + 2):
        for way in ways.values():
            way.step(number)
    reference = ways["fused"].parameters
    for name, way in ways.items():
        clock, processor = numpy.array(way.milliseconds[2:]).T  # the first two make their memory
        cells = [" to ".join(f"{v:.2f}" for v in quartiles(part)) for part in (clock, processor)]
        same = all(torch.equal(one, other) for one, other in zip(reference, way.parameters))
        print(f"| {kind} | {name} | {' | '.join(cells)} | {'same bits' if same else ''} |")


def quartiles(values: numpy.ndarray) -> numpy.ndarray:
    """Returns the first quartile, the median and the third."""
    return numpy.percentile(values, [25, 50, 75])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} threads, {arguments.steps} steps")
    print("| optimizer | way | ms, clock | ms, CPU time | to fused |\n|---|---|---|---|---|")
    for kind in KINDS:
        compare(kind, arguments.steps)


if __name__ == "__main__":
    main()
