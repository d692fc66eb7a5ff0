"""How fast is a federated round on a GPU, beside plain loops with the same network and batches?

    python benchmarks/speed/gpu.py gpu.json [--minutes 5]
    python benchmarks/speed/gpu.py pretended.json --pretend

20 clients of 64 images of noise a round, batches of 32 (and, where it says 8 steps, of 256 images),
in bfloat16, channels last: ResNet-18 and -50 at 224 pixels, EfficientNet-Lite0 at 160. By job,
images a second: *eager*, every operation launched by Python; *graph*, steps replayed as one CUDA
graph, and nothing where a method's are not; *bare*, a plain loop with as many forward and backward
passes on batches that lie ready; and two floors: a bare step as a CUDA graph, and a minimal
federated round of such steps (weights of all, fresh moments, weighted mean). Then the share of
time in which the device is busy, and peak memory. First, on drawn digits, come a round's weights
beside the CPU's, and five rounds of PARDON with graphs beside five without: weights, and accuracy
after each. Everything is written to one file after every figure; what has not begun within
``--minutes`` is left out and named. With that file the same command goes on, as it does by itself
where a job has broken the GPU's context or the recording of steps.

``--pretend`` goes the same way on the CPU and on the tests' pretended device, with two clients of
five images at 32 pixels. Its times say nothing; it says whether the script works.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from jobs import BareLoop, Federation
from torch import Tensor

from feddg.clients.graphs import Graphs
from feddg.experiment import Experiment
from feddg.settings import merge
from feddg.testing.device import second_device

PIXELS = {"resnet18": 224, "resnet50": 224, "efficientnet_lite0": 160}
JOBS = (
    *(("resnet18", method, 2) for method in ("fedavg", "pardon", "ridge", "fedig-a")),
    *(("resnet50", method, 2) for method in ("fedavg", "pardon")),
    *(("efficientnet_lite0", method, 2) for method in ("fedavg", "pardon")),
    *(("resnet18", method, 8) for method in ("fedavg", "pardon")),
)
"""Network, method, steps of a client's turn; the most telling first."""
PROFILED = JOBS[:2]
CLOSE, SHARE, SAME = 1e-4, 1e-2, 1e-3
"""How far weights may lie apart: from the CPU's after one round, also as a share of what the round
changed, where tensor cores round to ten bits; from eager ones after five."""
ROUNDS_TO_RECORD = 4
Row = dict[str, Any]


class Sizes:
    """How much is done: clients, images of a step, pixels at most, and timed rounds."""

    def __init__(self, pretend: bool) -> None:
        self.clients, self.batch, self.most, self.rounds = (
            (2, 4, 32, 1) if pretend else (20, 32, 224, 3)
        )


def federation(
    job: tuple[str, str, int],
    device: str,
    sizes: Sizes,
    cache: str,
    data: Row | None = None,
    **train: Any,
) -> Federation:
    """Returns a job's federation, set up."""
    backbone, method, steps = job
    os.environ["FEDDG_NOISE_IMAGES"] = str(sizes.clients * steps * sizes.batch)
    pixels = min(PIXELS[backbone], sizes.most)
    fields: Row = {
        "data": {"source": "noise", "image_size": pixels, "id_val": 0, "id_test": 0},
        "hold_out": "held",
        "clients": {"number": sizes.clients, "heterogeneity": 1.0},
        "model": {"backbone": backbone, "weights": None},
        "train": {"local_epochs": 1, "batch_size": sizes.batch, "rounds": 40},
        "method": method,
        "precision": "bfloat16" if device == "cuda" and "optimizer" not in train else "float32",
        "device": device,
    }
    fields |= data or {}
    made = Federation(Experiment(**merge(fields, {"train": train})), Path(cache))
    made.server.setup()
    return made


def synchronize(device: str) -> None:
    """Waits until a device has done all that it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], device: str, times: int = 1) -> float:
    """Returns the least seconds that some work takes, until the device has done it."""
    spent = []
    for _ in range(times):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        spent.append(time.perf_counter() - started)
    return min(spent)


def busy(work: Callable[[], object], device: str) -> float | None:
    """Returns the share of time in which the device computes; None where there is no profiler."""
    if device != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        spent = seconds(work, device)
    worked = sum(event.self_device_time_total for event in profile.key_averages())
    return round(worked / 1e6 / spent, 3)


class Floor:
    """A bare step, as one CUDA graph where there is one, and a minimal federated round of it."""

    def __init__(self, loop: BareLoop, images: Tensor, labels: Tensor, device: str) -> None:
        self.loop, self.images, self.labels = loop, images.clone(), labels.clone()
        state = loop.network.state_dict().values()
        self.live = [tensor for tensor in state if tensor.is_floating_point()]
        self.step: Callable[[], object] = self._step
        if device == "cuda":
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(3):
                    self._step()
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step()
            self.step = graph.replay
        else:
            self._step()

    def _step(self) -> None:
        self.loop.run([(self.images, self.labels)])

    def steps(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        """Takes a step on each batch."""
        for images, labels in batches:
            self.images.copy_(images)
            self.labels.copy_(labels)
            self.step()

    def round(self, batches: list[tuple[Tensor, Tensor]], clients: int) -> None:
        """Has clients train one after the other, from the same weights, and takes their mean."""
        before = [tensor.clone() for tensor in self.live]
        total = [torch.zeros_like(tensor) for tensor in self.live]
        moments = [t for kept in self.loop.optimizer.state.values() for t in kept.values()]
        share = len(batches) // clients
        for first in range(0, len(batches), share):
            with torch.no_grad():
                torch._foreach_copy_(self.live, before)
                torch._foreach_zero_(moments)
            self.steps(batches[first : first + share])
            with torch.no_grad():
                torch._foreach_add_(total, self.live, alpha=1 / clients)
        with torch.no_grad():
            torch._foreach_copy_(self.live, total)


def refused(made: Federation) -> Row:
    """Returns why steps of a federation are not recorded, if any are not."""
    graphs = made.worker.graphs
    records = [record.refused for record in graphs.records.values() if record.refused]
    return {"refused": found} if (found := [*graphs.refused.values(), *records]) else {}


def passes_of_a_round(made: Federation, work: Callable[[], Any]) -> int:
    """Returns how often an image of a round passes through the network, at least once."""
    passed: list[int] = []
    hook = made.worker.network.featurizer.register_forward_pre_hook(
        lambda _, inputs: passed.append(len(inputs[0]))
    )
    images = work().images
    hook.remove()
    return max(1, round(sum(passed) / images))


def measure(
    row: Row, job: tuple[str, str, int], device: str, sizes: Sizes, write: Callable[[], None]
) -> None:
    """Fills in a job's row, and writes it after every figure."""
    row |= dict(zip(("network", "method", "steps"), job)) | {"device": device}
    images = sizes.clients * job[2] * sizes.batch

    def note(name: str, rate: float | None) -> None:
        row[f"{name}[images/s]"] = None if rate is None else round(rate, 1)
        write()

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as cache:
        for name, recorded in (("eager", False), ("graph", True)):
            if recorded and device == "cpu":
                continue
            made = federation(job, device, sizes, cache, graphs=recorded)

            def work(made: Federation = made) -> Any:
                for kept in Path(cache).rglob("*-features-*"):
                    kept.unlink()  # a method of one round would find them in the next
                return made.server.round()

            if recorded:
                for _ in range(ROUNDS_TO_RECORD):
                    work()
            else:
                passes = passes_of_a_round(made, work)
            before = made.worker.graphs.replayed
            rate = images / seconds(work, device, sizes.rounds)
            replayed = made.worker.graphs.replayed > before
            row |= refused(made)
            note(name, rate if replayed == recorded else None)
        batches = made.next_batches()
        trains = not made.method.one_round
        on_gpu = device == "cuda"
        precision = "bfloat16" if on_gpu else "float32"
        loop = BareLoop(made, precision, forwards=passes, trains=trains)
        loop.run(batches[:1])
        note("bare", images / seconds(lambda: loop.run(batches), device, sizes.rounds))
        if trains:
            loop = BareLoop(made, precision, forwards=passes, recorded=on_gpu)
            floor = Floor(loop, *batches[0], device)
            whole = [(x, y) for x, y in batches if len(y) == len(floor.labels)]
            for name, floored in (
                ("bare graph", lambda: floor.steps(whole)),
                ("minimal round", lambda: floor.round(whole, sizes.clients)),
            ):
                note(name, images / seconds(floored, device, sizes.rounds))
        row["passes"] = passes
        if device == "cuda":
            row["peak[GiB]"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        if job in PROFILED:  # it takes long
            row["busy"] = busy(work, device)


def apart(device: str) -> Row:
    """Returns how far weights lie from the CPU's after a round, and from eager ones after five.

    And the accuracies on the unseen domain after each of the five, which may differ by two images:
    a GPU need not add in the same order twice.
    Statistics are frozen: those of four images at one place make 1e-7 a tenth within four steps.
    """
    small, weights, accuracies = Sizes(pretend=True), {}, dict[Any, list[float]]()
    digits = {"data": {"source": "digits", "image_size": 32, "id_val": 0}, "hold_out": "sketch"}
    digits["model"] = {"backbone": "resnet18", "weights": None, "normalization": "frozen"}
    steps = 4 if device == "cuda" else 2
    ways = (("cpu", False, 1), (device, False, 1), (device, False, 5), (device, True, 5))
    replayed = images = 0
    for way in ways:
        place, recorded, rounds = way
        with tempfile.TemporaryDirectory() as cache:
            # Adam makes steps of rounding errors.
            more: Row = {"optimizer": "sgd", "lr": 1e-2, "graphs": recorded, "local_steps": steps}
            made = federation(("resnet18", "pardon", 2), place, small, cache, digits, **more)
            weights["start"] = {n: t.cpu().double() for n, t in made.server.state.weights.items()}
            accuracies[way] = []
            for round in range(rounds):
                made.server.round()
                found = made.server.state.weights
                # A device that is pretended takes long.
                if rounds > 1 and (device == "cuda" or round == rounds - 1):
                    scores = made.scores(made.evaluation, found)
                    unseen = [s for s in scores if s.split == "test"]
                    accuracies[way] += [s.accuracy for s in unseen]
                    images = min(s.examples for s in unseen)
            weights[way] = {n: t.cpu().double() for n, t in found.items()}
            replayed = made.worker.graphs.replayed

    def far(one: Any, other: Any) -> float:
        a, b = weights[one], weights[other]
        return max(float((a[name] - b[name]).abs().max()) for name in a if a[name].numel())

    def length(one: Any, other: Any) -> float:
        a, b = weights[one], weights[other]
        return float(sum((a[name] - b[name]).square().sum() for name in a)) ** 0.5

    here, there = far(*ways[:2]), far(*ways[2:])
    share = length(*ways[:2]) / length("start", ways[0])
    eager, graph = accuracies[ways[2]], accuracies[ways[3]]
    return {
        "device": device,
        "from the CPU": here,
        "as a share of the change": share,
        "graph from eager": there,
        "steps replayed": replayed,
        **refused(made),
        "accuracies eager": eager,
        "accuracies graph": graph,
        "alike": replayed > 0
        and all(abs(a - b) * images < 2.5 for a, b in zip(eager, graph))
        and max(here / CLOSE, share / SHARE, there / SAME) <= 1,
    }


def table(rows: list[Row]) -> str:
    """Returns rows as a table."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, *([str(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(names))]
    return "\n".join("  ".join(t.ljust(w) for t, w in zip(line, widths)) for line in lines)


def work(file: Path, minutes: float, devices: list[str], pretend: bool = False) -> None:
    """Does all jobs, the most telling first, and writes the file after each."""
    sizes, began = Sizes(pretend), time.monotonic()
    machine = torch.cuda.get_device_name() if "cuda" in devices else platform.processor()
    whole: Row = {"machine": machine, "torch": torch.__version__, "begun": [], "jobs": []}
    if file.exists():
        whole = json.loads(file.read_text(encoding="utf-8"))

    def write() -> None:
        whole["left out"] = [name for name in names if name not in whole["begun"]]
        part = file.with_suffix(".part")
        part.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        part.replace(file)

    tasks: list[Any] = [(None, device) for device in devices if device != "cpu"]
    tasks += [(job, device) for job in JOBS for device in devices]
    names = [f"{' '.join(map(str, job or ['parity']))} on {device}" for job, device in tasks]
    for (job, device), name in zip(tasks, names):
        left = minutes - (time.monotonic() - began) / 60
        if name in whole["begun"] or left <= 0:
            continue
        whole["begun"].append(name)
        write()
        try:
            if job is None:
                whole["parity"] = apart(device)
            else:
                whole["jobs"].append({})
                measure(whole["jobs"][-1], job, device, sizes, write)
        except Exception as error:  # the next job may do, and time on a GPU is short
            whole.setdefault("failed", {})[name] = traceback.format_exc()[-2000:]
            Graphs.broken = Graphs.broken or ("CUDA error" in str(error))
        write()
        if Graphs.broken:  # in this process nothing is recorded any more, or nothing works
            words = [sys.argv[0], str(file), "--minutes", str(left)]
            os.execv(sys.executable, [sys.executable, *words])
    print(table(whole["jobs"]))
    print(json.dumps({n: v for n, v in whole.items() if n != "jobs"}, indent=1))
    write()


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="JSON, written after every job")
    parser.add_argument("--pretend", action="store_true", help="no GPU: try the script out")
    parser.add_argument("--minutes", type=float, default=5.0, help="when the last job may begin")
    given = parser.parse_args()
    with second_device() if given.pretend else nullcontext("cuda") as name:
        devices = ["cpu", name] if given.pretend else [name]
        work(given.file, given.minutes, devices, given.pretend)


if __name__ == "__main__":
    main()
