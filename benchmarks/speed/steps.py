"""How long does a training step take, beside a plain loop with the same network?

    python benchmarks/speed/steps.py docs/results/data/speed_steps.csv

Batches of 32 images of noise, random weights, frozen statistics, Adam. The plain loop is the
publisher's network (torchvision, timm), channels last, with fused Adam, in the same precision.
Each of the two has a process of its own, since feddg changes how memory is kept; they take a step
in turns, and the ratio of neighbours cancels what else the machine does. The time is the
processor's, of all threads together: others on the machine do not lengthen it much.
"""

import argparse
import csv
import multiprocessing
import os
import time
from collections.abc import Callable
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path

import numpy
import torch
from torch import Tensor, nn

from feddg.experiment import Experiment
from feddg.federation.federation import build, build_worker
from feddg.models.precision import autocast

CLASSES = 10
BACKBONES = {"efficientnet_lite0": "tf_efficientnet_lite0", "resnet18": None}
"""By feddg's name, that of timm; None for torchvision's of the same name."""


def plain_step(backbone: str, precision: str, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """Returns a step of the plain loop."""
    import timm
    import torchvision

    name = BACKBONES[backbone]
    network = (
        timm.create_model(name, num_classes=CLASSES)
        if name
        else torchvision.models.get_model(backbone, num_classes=CLASSES)
    ).to(memory_format=torch.channels_last)
    network.train()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    optimizer = torch.optim.Adam(network.parameters(), 3e-5, fused=True)
    opened = autocast(precision, torch.device("cpu"))

    def step() -> None:
        with opened():
            loss = nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def own_step(backbone: str, precision: str, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """Returns a step of FedAvg's local training."""
    experiment = Experiment(
        data={"source": "digits", "image_size": images.shape[-1]},
        model={"backbone": backbone, "weights": None, "normalization": "frozen"},
        train={"optimizer": "adam", "lr": 3e-5},
        precision=precision,
        device="cpu",
    )
    worker = build_worker(build(experiment, CLASSES)[1], experiment)
    worker.network.train()
    for module in worker.network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    optimizer = worker.optimization.optimizer(worker.network, worker.train)

    def step() -> None:
        with worker.autocast():
            loss = nn.functional.cross_entropy(worker.network(images), labels)
        worker.optimization.descend(optimizer, loss)

    return step


def serve(
    pipe: Connection, own: bool, backbone: str, size: int, precision: str, threads: int
) -> None:
    """Takes a step and answers with its seconds, whenever it is asked to."""
    torch.set_num_threads(threads)
    rng = torch.Generator().manual_seed(0)
    images = torch.rand(32, 3, size, size, generator=rng).to(memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (32,), generator=rng)
    step = (own_step if own else plain_step)(backbone, precision, images, labels)
    while pipe.recv():
        started = time.process_time()
        step()
        pipe.send(time.process_time() - started)


def measured(backbone: str, size: int, precision: str, threads: int, pairs: int) -> dict[str, str]:
    """Returns a row: milliseconds of both, and their ratio."""
    context = multiprocessing.get_context("spawn")
    pipes = []
    for own in (False, True):
        here, there = context.Pipe()
        given = (there, own, backbone, size, precision, threads)
        context.Process(target=serve, args=given, daemon=True).start()
        pipes.append(here)

    def turn(pipe: Connection) -> float:
        pipe.send(True)
        return float(pipe.recv())

    for pipe in pipes:  # the first step warms up
        turn(pipe)
    found = numpy.array([[turn(pipe) for pipe in pipes] for _ in range(pairs)])
    for pipe in pipes:
        pipe.send(False)
    low, middle, high = numpy.percentile(found[:, 1] / found[:, 0], [25, 50, 75])
    bare, own = (f"{1000 * seconds:.0f}" for seconds in numpy.median(found, axis=0))
    return {
        "backbone": backbone,
        "precision": precision,
        "threads": str(threads),
        "size[pixels]": str(size),
        "bare[ms]": bare,
        "feddg[ms]": own,
        "ratio": f"{middle:.3f}",
        "low": f"{low:.3f}",
        "high": f"{high:.3f}",
    }


def main() -> None:
    """Measures, and writes a row at a time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[96, 128, 160, 224])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", type=int, default=7)
    given = parser.parse_args()
    os.environ["OMP_WAIT_POLICY"] = "passive"  # a thread that waits takes no time
    with given.file.open("w", newline="", encoding="utf-8") as file:
        writer = None
        for job in product(given.threads, BACKBONES, ("float32", "bfloat16"), given.sizes):
            threads, backbone, precision, size = job
            row = measured(backbone, size, precision, threads, given.pairs)
            writer = writer or csv.DictWriter(file, list(row))
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(row)
            file.flush()
            print(row)


if __name__ == "__main__":
    main()
