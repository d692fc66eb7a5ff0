"""What do several processes for one run cost and save? Rounds by workers.

    python benchmarks/scale/workers.py FOLDER --pacs PACS --weights WEIGHTS

Each row is a run of its own, in processes of their own, rows of a job interleaved. First a round of
the small CNN (20 of 100 clients, about 20 images of 32 pixels each) and of ResNet-18 (4 of 100
clients of PACS at 64 pixels), by one process with one or two threads and by two workers with one
thread each: medians over rounds of its seconds, of CPU seconds of process 0 and of the busiest
worker; and at process 0 of CPU seconds of training and of messages (the rest is the server's work:
sums, checks, ledger), and of the seconds that it waits for replies.

Results go to FOLDER/workers.csv. Trees are those of ``measure.py``.
"""

import argparse
import csv
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from measure import make_tree

SETUPS = {"one process": (1, 1), "one process, two threads": (1, 2), "two workers": (2, 1)}
"""Workers, and threads of each."""
TICKS = os.sysconf("SC_CLK_TCK")


def data_of(tree: Path) -> dict[str, Any]:
    """Returns the settings of a tree's images, one domain held out."""
    data = {"source": "table", "root": str(tree), "image_size": 32, "id_val": 0, "id_test": 0}
    return {"data": data, "hold_out": "domain000", "precision": "float32"}


def jobs(folder: Path, pacs: Path, weights: Path) -> dict[str, dict[str, Any]]:
    """Returns what is trained, by name."""
    train = {"rounds": 8, "local_epochs": 1, "batch_size": 32}
    small = {"backbone": "cnn", "weights": None}
    large = {"backbone": "resnet18", "weights": str(weights)}
    sampled = {"number": 100, "heterogeneity": 1.0, "partition": "heterogeneous"}
    return {
        "small CNN": data_of(folder / "tree2000")
        | {"model": small, "train": train, "clients": sampled | {"per_round": 20}},
        "ResNet-18": {
            "preset": "pacs",
            "data": {"source": "pacs", "root": str(pacs), "image_size": 64},
            "hold_out": "photo",
            "precision": "float32",
            "model": large,
            "train": train | {"rounds": 4},
            "clients": sampled | {"per_round": 4},
        },
    }


def cpu_of(pid: int) -> float:
    """Returns the CPU seconds that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def one(fields: dict[str, Any], out: Path, cache: Path, workers: int, threads: int) -> None:
    """Carries out a run, and prints what a round takes, as JSON."""
    import torch

    import feddg
    from feddg.experiment import Experiment
    from feddg.federation.inprocess import InProcess
    from feddg.records import RoundRow
    from feddg.runs.channel import Channel
    from feddg.runs.observer import Observer

    torch.set_num_threads(threads)
    took = {"waiting": 0.0, "messages": 0.0, "training": 0.0}
    children: list[subprocess.Popen[bytes]] = []

    class Started(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            if "feddg.runs.workers" in self.args:  # type: ignore[operator]
                children.append(self)

    subprocess.Popen = Started  # type: ignore[misc]

    def timed(work: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            wall, cpu = time.perf_counter(), time.process_time()
            found = work(*arguments)
            cpu = time.process_time() - cpu
            took["messages"] += cpu
            took["waiting"] += time.perf_counter() - wall - cpu
            return found

        return called

    for name in ("tell", "send", "flush", "receive"):
        setattr(Channel, name, timed(getattr(Channel, name)))
    train = InProcess.results

    def trained(*arguments: Any) -> Iterator[Any]:
        results = train(*arguments)
        while True:
            started = time.process_time()
            result = next(results, None)
            took["training"] += time.process_time() - started
            if result is None:
                return
            yield result

    InProcess.results = trained  # type: ignore[method-assign]
    marks: list[list[float]] = []

    class Clock(Observer):
        def round(self, row: RoundRow) -> None:
            busiest = max([cpu_of(child.pid) for child in children], default=0.0)
            marks.append([time.perf_counter(), time.process_time(), busiest, *took.values()])

    evaluate = {"every": 1000, "averages": "never", "pictures": False}
    feddg.run(
        Experiment(**fields, evaluate=evaluate),
        out,
        workers=workers,
        observer=Clock(),
        cache=cache,
        report=False,
    )
    steps = [[b - a for a, b in zip(*pair)] for pair in itertools.pairwise(marks)]
    names = ("seconds", "cpu", "worker_cpu", *took)
    print(json.dumps(dict(zip(names, map(statistics.median, zip(*steps))))))


def apart(name: str, options: argparse.Namespace, workers: int, threads: int) -> dict[str, float]:
    """Measures in a process of its own."""
    shutil.rmtree(options.folder / "runs", ignore_errors=True)
    command = [sys.executable, __file__, str(options.folder), "--pacs", str(options.pacs)]
    command += ["--weights", str(options.weights), "--one", name, str(workers), str(threads)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pacs", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    known = jobs(folder, options.pacs, options.weights)
    if options.one:
        name, workers, threads = options.one
        one(known[name], folder / "runs", folder / "cache", int(workers), int(threads))
        return
    rows: list[dict[str, Any]] = []
    make_tree(folder / "tree2000", 2_000)
    for name in known:
        found: dict[str, list[dict[str, float]]] = {setup: [] for setup in SETUPS}
        for _ in range(options.repeats):
            for setup, numbers in SETUPS.items():
                found[setup].append(apart(name, options, *numbers))
        for setup, runs in found.items():
            medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            rows.append({"job": name, "setup": setup, **medians})
            print(json.dumps(rows[-1]), flush=True)
    with (folder / "workers.csv").open("w", newline="") as file:
        names = dict.fromkeys(name for row in rows for name in row)
        table = csv.DictWriter(file, names, lineterminator="\n")
        table.writeheader()
        for row in rows:
            table.writerow({n: f"{v:.4g}" if isinstance(v, float) else v for n, v in row.items()})


if __name__ == "__main__":
    main()
