"""How many operations does a step, or a turn, launch on a device, and how long is the host busy?

    python benchmarks/speed/launches.py docs/results/data/speed_launches.csv [METHOD ...]
    python benchmarks/speed/launches.py --time docs/results/data/speed_host.csv [METHOD ...]

ResNet-18 with a 16th of its channels (its time is the host's), PACS' augmentation, batches of 32 at
32 pixels, float32. Launches are counted on the pretended device: what makes a tensor or changes
one, not what only looks at one in another way. A step's are the slope between turns of few and of
many steps; a turn's, what one more client adds to a round besides its steps, with the server's work
on its update. ``recorded``: the same where steps are recorded. Methods of one round have no steps:
there a turn is all that a client does, its images' features and what it answers included.

With ``--time``, the host's milliseconds, on one thread: of a step on the CPU, which waits for no
device, and of a recorded one whose replay does nothing.
"""

import argparse
import csv
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jobs
import torch
from jobs import Federation
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from feddg.clients import graphs
from feddg.experiment import Experiment
from feddg.methods.base import methods
from feddg.models.backbones import register_backbone
from feddg.testing.device import second_device

CLIENTS, FEW = 2, 2
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

    count, replaying = 0, False

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Counts one and carries it out."""
        result = operation(*args, **(kwargs or {}))
        if Launches.replaying:
            return result
        schema = operation._schema
        looks = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
        makes_room = schema.name.startswith("aten::empty") or schema.name.startswith("profiler")
        there = any(t.device.type != "cpu" for t in graphs._tensors([args, kwargs or {}, result]))
        self.count += there and not looks and not makes_room
        return result


def federation(
    method: str, device: str, steps: int, recorded: bool, cache: Path, clients: int = CLIENTS
) -> Federation:
    """Returns a federation that is set up."""
    os.environ["FEDDG_NOISE_IMAGES"] = str(clients * 32 * 2)
    jobs._noise.cache_clear()
    once = methods()[method].one_round
    train = {"local_steps": steps, "batch_size": 32, "rounds": 40, "graphs": recorded}
    train |= {"augmentation": "pacs", "head": "random"}
    made = Federation(
        Experiment(
            data={"source": "noise", "image_size": 32, "id_val": 0, "id_test": 0},
            hold_out="held",
            clients={"number": clients, "heterogeneity": 1.0},
            model={"backbone": "narrow", "weights": None},
            train={} if once else train,
            method=method,
            precision="float32",
            device=device,
        ),
        cache,
    )
    made.server.setup()
    return made


def rounds(count: int, *given: Any) -> Federation:
    """Returns a federation after so many rounds."""
    made = federation(*given)
    for _ in range(count):
        made.server.round()
    return made


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


def by_step(
    method: str, device: str, recorded: bool, cache: Path, measure: Callable[[Federation], float]
) -> tuple[float, float, bool]:
    """Returns a step's figure, a turn's besides its steps, and whether steps were replayed."""
    before, most = 12 if recorded else 1, 10 if measure is busy else 4
    few, many = (rounds(before, method, device, n, recorded, cache) for n in (FEW, most))
    of_few = measure(few)
    step = (measure(many) - of_few) / ((most - FEW) * CLIENTS)
    more = rounds(before, method, device, FEW, recorded, cache, 2 * CLIENTS)
    turn = (measure(more) - of_few) / CLIENTS - FEW * step
    return step, turn, many.worker.graphs.replayed > 0


def figures(method: str, cache: Path, timed: bool) -> dict[str, str | float]:
    """Returns a method's row."""
    with second_device() as device:
        if methods()[method].one_round:
            few, more = (
                launched(federation(method, device, 1, False, cache / str(n), n * CLIENTS))
                for n in (1, 2)
            )
            turn = round((more - few) / CLIENTS)
            return {"method": method, "recorded": "False", "turn": turn} if not timed else {}
        with ExitStack() as stack:
            replay = (lambda *_: _nothing) if timed else (lambda _, step, __: _uncounted(step))
            stack.enter_context(patch.object(graphs.Graphs, "recorded", replay))
            if timed:  # replays that do nothing: what is left is the host's own work
                stack.enter_context(patch.object(graphs, "_apart", lambda *_: ""))
            measure = busy if timed else launched
            fewer, less, replayed = by_step(method, device, True, cache, measure)
        place = "cpu" if timed else device
        step, turn, _ = by_step(method, place, False, cache, measure)
    digits = 1 if timed else None
    return {
        "method": method,
        "recorded": str(replayed),
        "step": round(step, digits),
        "step_recorded": round(fewer, digits),
        "turn": round(turn, digits),
        "turn_recorded": round(less, digits),
    }


def _nothing() -> None:
    pass


def _uncounted(step: Callable[[], None]) -> Callable[[], None]:
    def replay() -> None:
        Launches.replaying = True
        try:
            step()
        finally:
            Launches.replaying = False

    return replay


def main() -> None:
    """Writes a row for each method."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("csv", type=Path, help="where to write")
    parser.add_argument("methods", nargs="*", help="which methods; all by default")
    parser.add_argument("--time", action="store_true", help="measure the host's time")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = ("method", "recorded", "step", "step_recorded", "turn", "turn_recorded")
    with tempfile.TemporaryDirectory() as cache, arguments.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for method in arguments.methods or methods():
            row = figures(method, Path(cache), arguments.time)
            writer.writerow(row)
            file.flush()
            print(*row.values(), flush=True)


if __name__ == "__main__":
    main()
