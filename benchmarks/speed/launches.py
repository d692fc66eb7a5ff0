"""How many operations does a training step launch on a device, and how long is the host busy?

    python benchmarks/speed/launches.py docs/results/data/speed_launches.csv [METHOD ...]

ResNet-18 with a 16th of its channels (its time is the host's), PACS' augmentation, batches of 32 at
32 pixels, float32. Launches are counted on the pretended device: what makes a tensor or changes
one, not what only looks at one in another way. The host's time is the process's, on one thread;
without recording it is that of a step on the CPU, which waits for no device, with recording that
of a replay which does nothing. Each figure is the slope between turns of few and of many steps.
"""

import argparse
import csv
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch
from jobs import Federation
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from feddg.clients import graphs
from feddg.experiment import Experiment
from feddg.methods.base import methods
from feddg.models.backbones import register_backbone
from feddg.testing.device import second_device

CLIENTS, FEW, MANY = 2, 2, 10
WIDTHS = (4, 8, 16, 32)


class Block(nn.Module):
    """A basic block of a ResNet."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        stride = 1 if before == width else 2
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False),
            *(nn.BatchNorm2d(width), nn.ReLU()),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.short: nn.Module = nn.Identity()
        if stride == 2:
            self.short = nn.Sequential(
                nn.Conv2d(before, width, 1, 2, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, maps: Tensor) -> Tensor:
        """Returns the maps after the block."""
        return nn.functional.relu(self.body(maps) + self.short(maps))


@register_backbone("narrow")
class Narrow(nn.Module):
    """ResNet-18 with a 16th of its channels."""

    def __init__(self) -> None:
        super().__init__()
        self.out_features = WIDTHS[-1]
        first = nn.Conv2d(3, WIDTHS[0], 7, 2, 3, bias=False)
        self.stem = nn.Sequential(
            first, nn.BatchNorm2d(WIDTHS[0]), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        before = (WIDTHS[0], *WIDTHS[:-1])
        self.stages = nn.ModuleList(
            nn.Sequential(Block(a, b), Block(b, b)) for a, b in zip(before, WIDTHS)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Maps ``(B, 3, H, W)`` to ``(B, 32)``."""
        maps = self.stem(images)
        for stage in self.stages:
            maps = stage(maps)
        return maps.mean((2, 3))


class Launches(TorchDispatchMode):
    """Counts operations that launch something on a device that is not the CPU."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Counts one and carries it out."""
        result = operation(*args, **(kwargs or {}))
        schema = operation._schema
        looks = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
        makes_room = schema.name.startswith("aten::empty") or schema.name.startswith("profiler")
        there = any(t.device.type != "cpu" for t in graphs._tensors([args, kwargs or {}, result]))
        self.count += there and not looks and not makes_room
        return result


def federation(method: str, device: str, steps: int, recorded: bool, cache: Path) -> Federation:
    """Returns a federation that is set up."""
    os.environ["FEDDG_NOISE_IMAGES"] = str(CLIENTS * 32 * 2)
    made = Federation(
        Experiment(
            data={"source": "noise", "image_size": 32, "id_val": 0, "id_test": 0},
            hold_out="held",
            clients={"number": CLIENTS, "heterogeneity": 1.0},
            model={"backbone": "narrow", "weights": None},
            train={
                **{"local_steps": steps, "batch_size": 32, "rounds": 40, "graphs": recorded},
                **{"augmentation": "pacs", "head": "random"},
            },
            method=method,
            precision="float32",
            device=device,
        ),
        cache,
    )
    made.server.setup()
    return made


def slopes(
    method: str,
    device: str,
    cache: Path,
    *measures: Callable[[Federation], float],
    recorded: bool = False,
) -> tuple[list[float], bool]:
    """Returns figures by step, and whether steps were replayed."""
    few, many = (federation(method, device, n, recorded, cache) for n in (FEW, MANY))
    for each in (few, many):
        for _ in range(4 if recorded else 1):
            each.server.round()
    steps = (MANY - FEW) * CLIENTS
    found = [(measure(many) - measure(few)) / steps for measure in measures]
    return found, many.worker.graphs.replayed > 0


def launched(each: Federation) -> float:
    """Returns what a round launches."""
    before = each.worker.graphs.replayed
    with Launches() as counted:
        each.server.round()
    return counted.count + each.worker.graphs.replayed - before


def busy(each: Federation) -> float:
    """Returns the least milliseconds of the processor that a round takes."""
    best = float("inf")
    for _ in range(3):
        started = time.process_time()
        each.server.round()
        best = min(best, time.process_time() - started)
    return best * 1000


def figures(method: str, cache: Path) -> dict[str, str | float]:
    """Returns a method's row."""
    with second_device() as device:
        (launches,), _ = slopes(method, device, cache, launched)
        with ExitStack() as stack:
            # Replays that do nothing: what is left is the host's own work.
            stack.enter_context(patch.object(graphs.Graphs, "recorded", lambda *_: lambda: None))
            stack.enter_context(patch.object(graphs, "_apart", lambda *_: ""))
            measures = launched, busy
            (fewer, shorter), replayed = slopes(method, device, cache, *measures, recorded=True)
    (milliseconds,), _ = slopes(method, "cpu", cache, busy)
    return {
        "method": method,
        "recorded": str(replayed),
        "launches": round(launches),
        "launches_recorded": round(fewer),
        "milliseconds": round(milliseconds, 1),
        "milliseconds_recorded": round(shorter, 1),
    }


def main() -> None:
    """Writes a row for each method."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("csv", type=Path, help="where to write")
    parser.add_argument("methods", nargs="*", help="which methods; all by default")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache, arguments.csv.open("w", newline="") as file:
        writer = None
        for method in arguments.methods or methods():
            row = figures(method, Path(cache))
            writer = writer or csv.DictWriter(file, row, lineterminator="\n")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(row)
            file.flush()
            print(*row.values(), flush=True)


if __name__ == "__main__":
    main()
