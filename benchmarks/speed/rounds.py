"""How much slower is a federated round than the plain loop on the same batches?

    python benchmarks/speed/rounds.py --job resnet18_64 --pacs PACS --weights WEIGHTS

Interleaved in one process: the plain loop, feddg's FedAvg, the plain loop with two passes, feddg's
PARDON, then all again; the ratio of neighbours cancels what else the machine does. The medians and
the quartiles of these ratios are printed, images per second, and the peak of private memory, each
in a process of its own. Rounds only: no evaluation, no files; PARDON's setup is timed apart.

``--whole 10`` times whole runs of so many rounds of FedAvg instead, with records, checkpoints and
an evaluation every fifth round, against a plain loop of as many steps that evaluates as many
images; start and decoding apart.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy
import torch
from jobs import JOBS, BareLoop, Federation

import feddg
from feddg.experiment import Experiment
from feddg.settings import merge


def timed(work: Callable[[], object]) -> float:
    """Returns the seconds that ``work`` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def quartiles(values: list[float]) -> str:
    """Returns the median and the quartiles as text."""
    low, middle, high = numpy.percentile(values, [25, 50, 75])
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def compare(arguments: argparse.Namespace, precision: str) -> list[dict[str, object]]:
    """Times pairs of rounds and returns the rows of the table."""
    job = JOBS[arguments.job]
    rows = []
    for method, forwards in (("fedavg", 1), ("pardon", 2)):
        if method not in arguments.methods:
            continue
        federation = Federation(
            job.experiment(method, precision, arguments.pacs, arguments.weights)
        )
        setup = timed(federation.server.setup)
        stylized = timed(federation.begin_everywhere)
        same = BareLoop(federation, precision, forwards=forwards)
        naive = BareLoop(federation, "float32", naive=True, forwards=forwards)
        seconds: dict[str, list[float]] = {"feddg": [], "bare": [], "naive": []}
        images = []
        for pair in range(arguments.pairs + 1):
            batches = federation.next_batches()
            for name in ("bare", "feddg", "naive") if pair % 2 else ("feddg", "bare", "naive"):
                loop = {"bare": same, "naive": naive}.get(name)
                ready = loop.laid_out(batches) if loop else []
                spent = timed(partial(loop.run, ready) if loop else federation.server.round)
                if pair:  # the first pair warms up
                    seconds[name].append(spent)
            images.append(sum(len(labels) for _, labels in batches))
        ratios = {
            name: [a / b for a, b in zip(seconds["feddg"], seconds[name])]
            for name in ("bare", "naive")
        }
        per_second = float(numpy.median(numpy.array(images[1:]) / seconds["feddg"]))
        rows.append(
            {
                "job": job.name,
                "precision": precision,
                "method": method,
                "to bare": quartiles(ratios["bare"]),
                "to naive float32": quartiles(ratios["naive"]),
                "images/s": round(per_second),
                "setup s": round(setup, 2),
                "stylized copies s": round(stylized, 2),
            }
        )
    return rows


def compare_whole(arguments: argparse.Namespace, precision: str) -> dict[str, object]:
    """Times pairs of a whole run and a plain loop, and returns the row of the table."""
    fields = JOBS[arguments.job].experiment("fedavg", precision, arguments.pacs, arguments.weights)
    changed = {"train": {"rounds": arguments.whole}, "evaluate": {"every": 5, "pictures": False}}
    experiment = Experiment(**merge(fields.given, changed))
    federation = Federation(experiment)
    batches = []
    for _ in range(arguments.whole):
        batches += federation.next_batches()
        federation.server.state = federation.server.state.next()
    bare = BareLoop(federation, precision)
    batches = bare.laid_out(batches)
    ratios, own, plain = [], [], []
    for pair in range(arguments.pairs + 1):
        with tempfile.TemporaryDirectory() as folder:
            done = feddg.run(experiment, folder, report=False)
            spent = done.summary.seconds
            evaluated = sum(row.examples for row in done.table.where(metric="accuracy"))
        own.append(spent["total"] - spent["prepare"] - spent.get("setup", 0.0))
        plain.append(timed(partial(bare.run, batches)) + timed(partial(bare.evaluate, evaluated)))
        if pair:  # the first pair warms up
            ratios.append(own[-1] / plain[-1])
    return {
        "job": arguments.job,
        "precision": precision,
        "whole run to bare loop": quartiles(ratios),
        "s": f"{numpy.median(own[1:]):.1f} / {numpy.median(plain[1:]):.1f}",
        "images trained, evaluated": f"{sum(len(y) for _, y in batches)}, {evaluated}",
    }


class PeakMemory:
    """Watches this process's private (anonymous) memory, in bytes."""

    def __init__(self) -> None:
        self.peak, self._done = 0, threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._done.wait(0.01):
            self.peak = max(self.peak, private_memory())


def private_memory() -> int:
    """Returns this process's anonymous resident memory in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")


def measure_memory(arguments: argparse.Namespace) -> int:
    """Returns the peak of private memory over two rounds, or of the plain loop on their batches."""
    kind, precision = arguments.memory.split(":")
    method = "pardon" if kind == "pardon" else "fedavg"
    job = JOBS[arguments.job]
    with PeakMemory() as memory:
        federation = Federation(
            job.experiment(method, precision, arguments.pacs, arguments.weights)
        )
        if kind == "bare":
            loop = BareLoop(federation, precision)
            federation.worker.network.to("meta")
            federation.server.state.weights.clear()
            for _ in range(2):
                loop.run(federation.next_batches())
        else:
            federation.start()
            for _ in range(2):
                federation.server.round()
    return memory.peak


def memory_of(arguments: argparse.Namespace, kind: str, precision: str) -> str:
    """Measures in a fresh process."""
    given = ["--job", arguments.job, "--pacs", str(arguments.pacs)]
    given += ["--weights", str(arguments.weights), "--memory", f"{kind}:{precision}"]
    done = subprocess.run(
        [sys.executable, __file__, *given], check=True, capture_output=True, text=True
    )
    return f"{int(done.stdout) / 1e9:.2f}"


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", choices=JOBS, default="cnn32")
    parser.add_argument("--pacs", type=Path, default=Path("pacs"))
    parser.add_argument("--weights", type=Path, default=Path("resnet18_tinyimagenet.safetensors"))
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--methods", nargs="+", default=["fedavg", "pardon"])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--whole", type=int, metavar="ROUNDS", help="time whole runs of FedAvg")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--json", type=Path, help="also append the rows to this file")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        print(measure_memory(arguments))
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.pairs} pairs")
    rows = []
    for precision in arguments.precisions:
        whole = [compare_whole(arguments, precision)] if arguments.whole else []
        for row in whole or compare(arguments, precision):
            if not arguments.whole and not arguments.no_memory:
                kind = str(row["method"])
                row["peak GB"] = memory_of(arguments, kind, precision)
                row["bare GB"] = memory_of(arguments, "bare", precision)
            rows.append(row)
            if len(rows) == 1:
                print("| " + " | ".join(row) + " |\n|" + "---|" * len(row))
            print("| " + " | ".join(str(value) for value in row.values()) + " |", flush=True)
    if arguments.json:
        with arguments.json.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
