"""What does an idle client cost? Rounds of 10 clients among 10 to 10,000, images of noise.

    python benchmarks/speed/scaling.py
    python benchmarks/speed/scaling.py --setup pardon

The second line measures a method's exchange before the first round, for clients of 2 images: CPU
seconds, and the process's largest resident memory before and after.

Each size runs in a process of its own, sizes interleaved. Printed: the median of a round's seconds
and its ratio to N = 10; start-up (hashing the images, splits, partition,
network; imports not counted);
and private memory per client beyond N = 10, without the pixels themselves. Afterwards the same for
images per client and for clients per round.
"""

import argparse
import gc
import json
import subprocess
import sys
import time

import numpy
from jobs import Federation, Job
from rounds import private_memory

from feddg.data.data_set import load_source
from feddg.experiment import Experiment
from feddg.runs.prepare import peak_memory

SIDE = 32


def experiment_of(method: str, clients: int, per_round: int, images: int) -> Experiment:
    """Returns a federation on noise."""
    job = Job(
        "scaling",
        clients * images,
        {
            "clients": {"number": clients, "per_round": per_round, "heterogeneity": 1.0},
            "model": {"backbone": "cnn", "weights": None},
            "train": {"local_epochs": 1, "batch_size": 32, "augmentation": "digits"},
        },
    )
    return job.experiment(method, "float32", None, None)  # type: ignore[arg-type]


def measure_setup(method: str, clients: int, images: int) -> None:
    """Prints a row: what the exchange before the first round takes."""
    federation = Federation(experiment_of(method, clients, 10, images))
    before, started = peak_memory(), time.process_time()
    federation.server.setup()
    seconds, peak = time.process_time() - started, peak_memory()
    print(f"| {clients:,} | {seconds:.1f} | {before / 1e9:.2f} | {peak / 1e9:.2f} |", flush=True)


def measure(clients: int, per_round: int, images: int, rounds: int) -> dict[str, float]:
    """Runs some rounds and returns seconds per round, start-up seconds and private bytes."""
    experiment = experiment_of("fedavg", clients, per_round, images)
    load_source("noise")  # kept: making the noise is no part of the start
    started = time.perf_counter()
    federation = Federation(experiment)
    federation.server.setup()
    startup = time.perf_counter() - started
    federation.server.round()
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        federation.server.round()
        seconds.append(time.perf_counter() - started)
    gc.collect()
    pixels = clients * images * SIDE * SIDE * 3
    memory = private_memory() - pixels
    return {"round": float(numpy.median(seconds)), "startup": startup, "memory": memory}


def apart(clients: int, per_round: int, images: int, rounds: int) -> dict[str, float]:
    """Measures in a fresh process."""
    numbers = [str(number) for number in (clients, per_round, images, rounds)]
    done = subprocess.run(
        [sys.executable, __file__, "--one", *numbers], check=True, capture_output=True, text=True
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def table(cases: list[tuple[int, int, int]], repeats: int, rounds: int) -> None:
    """Prints one table; the first case is what the others are compared with."""
    found: dict[tuple[int, int, int], list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(repeats):
        for case in cases:
            found[case].append(apart(*case, rounds))
    print(
        "\n| N | K | images per client | s per round | to first row | start-up s | kB per client |"
    )
    print("|---|---|---|---|---|---|---|")
    base: dict[str, float] = {}
    for case, runs in found.items():
        now = {name: float(numpy.median([run[name] for run in runs])) for name in runs[0]}
        base = base or now
        more = case[0] - cases[0][0]
        each = f"{(now['memory'] - base['memory']) / more / 1000:.2f}" if more else "-"
        ratio = now["round"] / base["round"]
        n, k, images = case
        print(
            f"| {n:,} | {k} | {images} | {now['round']:.3f} | {ratio:.3f} "
            f"| {now['startup']:.2f} | {each} |",
            flush=True,
        )


def main() -> None:
    """Prints the tables, or one measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--setup", metavar="METHOD")
    parser.add_argument("--one", type=int, nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(*arguments.one)))
        return
    if arguments.setup:
        print("| clients | CPU s | peak before, GB | peak, GB |\n|---|---|---|---|", flush=True)
        for clients in (100, 1_000, 10_000):
            measure_setup(arguments.setup, clients, 2)
        return
    table([(n, 10, 20) for n in (10, 100, 1_000, 10_000)], arguments.repeats, arguments.rounds)
    table([(100, 10, images) for images in (10, 30, 100)], 1, arguments.rounds)
    table([(100, k, 20) for k in (5, 20, 80)], 1, arguments.rounds)


if __name__ == "__main__":
    main()
