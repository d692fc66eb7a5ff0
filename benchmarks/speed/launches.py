"""How many operations does a step, or a turn, launch on a device, and how long is the host busy?

    python benchmarks/speed/launches.py docs/results/data/speed_launches.csv [METHOD ...]
    python benchmarks/speed/launches.py --time docs/results/data/speed_host.csv [METHOD ...]

ResNet-18 with a 16th of its channels (its time is the host's), PACS' augmentation, batches of 32 at
32 pixels, float32, clients of two domains. Launches are counted on the pretended device: what makes
a tensor or changes one, not what only looks at one in another way. A step's are the slope between
turns of few and of many steps; a turn's, what one more client adds to a round besides its steps,
with the server's work on its update; ``waits``: how often the host waits for the device there.
``recorded``: the same where steps are recorded, and ``why`` not. Methods of one round have no
steps: there a turn is all that a client does, its images' features and what it answers included.

With ``--time``, milliseconds of the processor (not of the clock), on one thread: of a step and a
turn on the CPU, which waits for no device, and of a recorded step on the pretended device, whose
replay does nothing. ``on_lists`` is the part of a turn that is arithmetic on all tensors at once:
on a device a launch or a few.
"""

import argparse
import csv
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jobs
import numpy
import torch
from jobs import Federation
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from feddg.clients import graphs
from feddg.clients.client import Client, Prepared
from feddg.data.data_set import register_source
from feddg.data.images import ImageTable
from feddg.experiment import Experiment
from feddg.federation import local_training
from feddg.methods.base import methods
from feddg.models.backbones import register_backbone
from feddg.testing.device import second_device, traffic

Figures = numpy.ndarray[Any, Any]
PREPARE = Client.prepare
CLIENTS, MOST_ROUNDS = 2, 12
SETTINGS = {"dart": {"forms": ["outlines"]}, "mixstyle": {"mix_probability": 1.0}}
"""Methods that draw what a round's or a pass's steps do have one choice, or rounds differ."""
NO_LAUNCH = ("aten::empty", "aten::new_empty", "aten::_unsafe_view", "profiler")
NAMES = ("method", "recorded", "why", "step", "step_recorded", "turn", "turn_recorded", "waits")
TIMED = (*NAMES[:-2], "on_lists")
ROUNDS_TIMED = 15
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
        there = any(t.device.type != "cpu" for t in graphs._tensors([args, kwargs or {}, result]))
        if there and not looks and not schema.name.startswith(NO_LAUNCH):
            self.count += _kernels(args) if schema.name.startswith("aten::_foreach") else 1
        return result


def _kernels(args: tuple[Any, ...]) -> int:
    """Returns what an operation on lists of tensors launches: one, or one for each if unlike."""
    lists = [part for part in args if isinstance(part, (list, tuple))]
    kinds = {tuple(t.dtype for t in part) for part in zip(*lists) if isinstance(part[0], Tensor)}
    return 1 if len(kinds) < 2 else len(lists[0])


@register_source("two_domains")
def two_domains(root: Path | None) -> ImageTable:
    """The images of noise, of which a client has two domains."""
    table = jobs.noise(root)
    domains = numpy.where(table.domains > 0, 2, numpy.arange(len(table.domains)) // 10 % 2)
    return replace(table, domains=domains, domain_names=("one", "other", "held"))


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
            data={"source": "two_domains", "image_size": 32, "id_val": 0, "id_test": 0},
            hold_out="held",
            clients={"number": clients, "heterogeneity": 1.0},
            model={"backbone": "narrow", "weights": None},
            train={} if once else train,
            method={"name": method} | SETTINGS.get(method, {}),
            precision="float32",
            device=device,
        ),
        cache,
    )
    made.server.setup()
    return made


def begun(*given: Any) -> Federation:
    """Returns a federation after the first rounds, with all recorded that is going to be."""
    made = federation(*given)
    steps, kept = made.experiment.train.local_steps, made.worker.graphs
    made.server.per_round = CLIENTS
    for number in range(MOST_ROUNDS if made.experiment.train.graphs else 1):
        before = kept.replayed
        made.server.round()
        whole = kept.replayed - before == steps * len(made.server.sample(number + 1))
        if whole or (kept.refused and not kept.replayed):
            break
    return made


class Meter:
    """Reads how much of everything there was so far: launches and waits, or milliseconds."""

    def __init__(self, made: Federation, timed: bool) -> None:
        self.made, self.timed = made, timed
        self.marks: list[Figures] = []

    def __call__(self) -> Figures:
        """Returns the figures so far."""
        if self.timed:
            return numpy.array([1000 * time.process_time()])
        launches = self.launches.count + self.made.worker.graphs.replayed
        return numpy.array([launches, self.traffic.waits.total()])

    def round(self, clients: int) -> Figures:
        """Returns the figures of a round of so many clients, the best of three if it is timed."""
        self.made.server.per_round = clients
        taken = []
        for _ in range(3 if self.timed else 1):
            with (
                traffic() as self.traffic,
                Launches() if not self.timed else nullcontext() as counted,
            ):
                self.launches = counted
                before = self()
                self.made.server.round()
                taken.append(self() - before)
        return numpy.min(taken, 0)

    def prepare(self, client: Client, draws: Any = None) -> Iterator[Prepared]:
        """Yields a client's batches, and reads the figures before each and after the last."""
        for prepared in PREPARE(client, draws):
            self.marks.append(self())
            yield prepared
        self.marks.append(self())


class Apart:
    """Seconds of the processor by what they were spent on, where functions are timed."""

    def __init__(self) -> None:
        self.spent = Counter[str]()
        self._inside = False

    def timed(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function whose time counts for a label, and that of others inside it, too."""

        def call(*given: Any, **more: Any) -> Any:
            if self._inside:
                return function(*given, **more)
            self._inside, began = True, time.process_time()
            try:
                return function(*given, **more)
            finally:
                self._inside = False
                self.spent[label] += time.process_time() - began

        return call

    def round(self, made: Federation) -> Figures:
        """Returns the milliseconds of a round besides its steps, and those on lists of tensors."""
        self.spent.clear()
        began = time.process_time()
        made.server.round()
        whole = time.process_time() - began
        return 1000 * numpy.array([whole - self.spent["steps"], self.spent["lists"]])


def turn_timed(made: Federation, half: int) -> Figures:
    """Returns the milliseconds of a turn besides its steps, and those of them on lists of tensors.

    What a round of all clients takes more than one of half of them; the best of several each.
    """
    apart, best = Apart(), []
    parts = [(local_training, "_take_steps", "steps")]
    parts += [(torch, name, "lists") for name in dir(torch) if name.startswith("_foreach_")]
    with ExitStack() as stack:
        for owner, name, label in parts:
            timed = apart.timed(label, getattr(owner, name))
            stack.enter_context(patch.object(owner, name, timed))
        for clients in (half, 2 * half):
            made.server.per_round = clients
            best.append(numpy.min([apart.round(made) for _ in range(ROUNDS_TIMED)], 0))
    few, all_of_them = best
    return (all_of_them - few) / half


def by_step(
    method: str, device: str, recorded: bool, cache: Path, timed: bool
) -> tuple[Figures, Figures | None, Federation]:
    """Returns a step's figures, a turn's besides its steps, and a federation."""
    steps = 6 if timed else 2
    made = begun(method, device, steps, recorded, cache, 2 * CLIENTS)
    made.server.per_round = clients = len(made.transport.clients)
    made.server.round()  # in which everybody does what is done once
    half, meter = max(1, clients // 2), Meter(made, timed)
    with patch.object(Client, "prepare", lambda *given, **more: meter.prepare(*given, **more)):
        few, more = (meter.round(count) for count in (half, clients))
    turns = numpy.diff(numpy.reshape(meter.marks, (-1, steps + 1, len(few))), axis=1)
    apart = turns[:, 1:-1] if timed else turns[:, 1:]
    step, alike = numpy.median(apart, (0, 1)), timed or not numpy.ptp(apart[..., 0])
    turn = (more - few) / max(1, clients - half) - steps * step
    if timed and clients == 2 * half:
        turn = turn_timed(made, half)
    return step, turn if alike else None, made


def figures(method: str, cache: Path, timed: bool) -> dict[str, Any]:
    """Returns a method's row."""
    digits = 1 if timed else None
    row: dict[str, Any] = {"method": method}
    less: Figures | None = None
    with second_device() as device:
        place = "cpu" if timed else device
        if methods()[method].one_round:
            few, more = (
                Meter(federation(method, place, 1, False, cache / str(n), n), timed).round(n)
                for n in (CLIENTS, 2 * CLIENTS)
            )
            row["why"] = "has no steps: a turn is all that a client does"
            turn = (more - few) / CLIENTS
        else:
            with ExitStack() as stack:
                replay = (
                    (lambda *_: lambda: None) if timed else (lambda _, step, __: _uncounted(step))
                )
                stack.enter_context(patch.object(graphs.Graphs, "recorded", replay))
                if timed:  # replays that do nothing: what is left is the host's own work
                    stack.enter_context(patch.object(graphs, "_apart", lambda *_: ""))
                fewer, less, seen = by_step(method, device, True, cache, timed)
            step, turn, _ = by_step(method, place, False, cache, timed)
            row["step"] = round(step[0], digits)
            if seen.worker.graphs.replayed:
                row["step_recorded"] = round(fewer[0], digits)
            else:
                row["why"] = seen.worker.graphs.refused.get(method, "steps of two clients differ")
        # There is one turn of gathered images; and none is told apart from steps that differ.
        if turn is not None and not methods()[method].gathers_images:
            row["turn"] = round(turn[0], digits)
            # Pretending takes most of a recorded turn's time.
            if less is not None and "step_recorded" in row and not timed:
                row["turn_recorded"] = round(less[0], digits)
            if len(turn) > 1:
                row["on_lists" if timed else "waits"] = round(turn[1], 1)
    return row | {"recorded": "step_recorded" in row}


def _uncounted(step: Callable[[], None]) -> Callable[[], None]:
    def replay() -> None:
        Launches.replaying = True
        try:
            step()
        finally:
            Launches.replaying = False

    return replay


def main() -> None:
    """Writes a row for each method, and keeps those of others."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("csv", type=Path, help="where to write")
    parser.add_argument("methods", nargs="*", help="which methods; all by default")
    parser.add_argument("--time", action="store_true", help="measure the host's time")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = TIMED if arguments.time else NAMES
    rows = {}
    if arguments.csv.exists():
        with arguments.csv.open(newline="") as file:
            rows = {row["method"]: row for row in csv.DictReader(file)}
    with tempfile.TemporaryDirectory() as cache:
        for method in arguments.methods or methods():
            rows[method] = figures(method, Path(cache), arguments.time)
            print(*rows[method].values(), flush=True)
            with arguments.csv.open("w", newline="") as file:
                writer = csv.DictWriter(file, names, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows[name] for name in sorted(rows))


if __name__ == "__main__":
    main()
