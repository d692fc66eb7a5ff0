"""What adapting costs: prediction under each adaptation, and a training step of FedIG and FedIG-A.

Each measurement is a pair: the plain model (or FedAvg's step) and the other, one right after the
other on the same batch, in turns of order; the median of the pairs' ratios is printed, so that a
machine that slows down for a while spoils few pairs. Run it on a quiet machine.

    python benchmarks/adaptation/costs.py --image-size 64 --pairs 30
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "speed"))

from rounds import quartiles, timed

from feddg.clients.client import Client, Examples, Worker
from feddg.data.augment import NONE
from feddg.data.pixels import ArrayPixels
from feddg.methods.composition import build_method
from feddg.models.backbones import build_network
from feddg.models.network import Network
from feddg.models.normalization import statistics_names
from feddg.models.precision import autocast, choose_precision
from feddg.prediction.adaptation import ADAPTATIONS, Parts, adapt
from feddg.settings import TrainSettings

CLASSES, CLIENTS = 7, 3
PAPER_INFERENCE = {
    "global": 1.0, "bin": 1.35 / 1.34, "mixnorm": 6.70 / 1.34, "iabn": 1.57 / 1.34,
    "adapter": 1.37 / 1.34,
}  # fmt: skip
PAPER_TRAINING = {"FedIG": 2.25 / 1.43, "FedIG-A": 3.50 / 1.43, "FedIG, bin": 3.24 / 1.43}
"""Ratios of the paper's Table 4: batches of 64 at 224 pixels, ResNet-18, an RTX A5000."""


def network(method: str, gate: float | None = None) -> Network:
    """Returns a new ResNet-18 as a method trains it."""
    plain = build_network("resnet18", CLASSES, weights=None, embedding="bottleneck")
    settings = {} if method == "fedavg" else {"instance_gate": gate}
    made = build_method(method, settings).network(plain)
    return made.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def paired(plain: Callable[[], object], other: Callable[[], object], pairs: int) -> list[float]:
    """Returns how much longer ``other`` took than ``plain``, pair by pair."""
    ratios = []
    for turn in range(pairs + 2):
        first, second = (plain, other) if turn % 2 else (other, plain)
        times = {work: timed(work) for work in (first, second)}
        ratios.append(times[other] / times[plain])
    return ratios[2:]


def inference(args: argparse.Namespace) -> list[tuple[str, list[float]]]:
    """Ratios of every adaptation to the plain model's prediction."""
    precise = autocast(args.precision, torch.device("cpu"))
    images = torch.rand(args.batch_size, 3, args.image_size, args.image_size)
    images = images.contiguous(memory_format=torch.channels_last)

    def predict(what: torch.nn.Module) -> None:
        with torch.inference_mode(), precise():
            what(images)

    found = []
    for name in ADAPTATIONS:
        plain = network("fedavg").eval()
        model = network("fedig-a" if name == "adapter" else "fedig", 0.5 if name == "bin" else None)
        if name == "adapter":
            open_adapters(model)
        own = {n: t for n, t in model.state_dict().items() if n in statistics_names(model)}
        predictor = adapt(model.eval(), name, Parts(dict.fromkeys(range(CLIENTS), own)))

        ratios = paired(partial(predict, plain), partial(predict, predictor), args.pairs)
        found.append((name, ratios))
        print(name, quartiles(ratios), flush=True)
    return found


def open_adapters(model: Network) -> None:
    """Makes alpha differ from 0, where a layer would be the plain one."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "zero_shot_adapter" in name:
                parameter.add_(0.01 * torch.rand_like(parameter))


def training(args: argparse.Namespace) -> list[tuple[str, list[float]]]:
    """Ratios of a step of FedIG, of FedIG-A and of FedIG with BIN to one of FedAvg."""
    plain = step_of("fedavg", None, args)
    found = []
    for label, method, gate in (
        ("FedIG", "fedig", None), ("FedIG, bin", "fedig", 1.0), ("FedIG-A", "fedig-a", None)
    ):  # fmt: skip
        ratios = paired(plain, step_of(method, gate, args), args.pairs)
        found.append((label, ratios))
        print(label, quartiles(ratios), flush=True)
    return found


def step_of(method: str, gate: float | None, args: argparse.Namespace) -> Callable[[], object]:
    """Returns what takes one training step on always the same batch."""
    made = network(method, gate)
    chosen = build_method(method, {} if method == "fedavg" else {"instance_gate": gate})
    train = TrainSettings(batch_size=args.batch_size, optimizer="sgd", lr=1e-4, momentum=0.5)
    device = torch.device("cpu")
    precise = autocast(args.precision, device)
    worker = Worker(made, train, NONE, device, 0, precise)
    rng = numpy.random.default_rng(0)
    shape = (args.batch_size, args.image_size, args.image_size, 3)
    pixels = ArrayPixels(rng.integers(0, 256, shape, dtype=numpy.uint8))
    rows = torch.arange(args.batch_size)
    examples = Examples(pixels, rows, rows % CLASSES, rows * 0, CLASSES)
    received = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    client = Client(0, examples, worker, round=1, received=received)
    client.set_training()
    chosen.begin(client)
    client.optimizer = chosen.optimizer(client)
    batch = next(client.batches())

    def step() -> None:
        with precise():
            chosen.step(client, batch)

    return step


def table(title: str, found: list[tuple[str, list[float]]], paper: dict[str, float]) -> str:
    """Returns a Markdown table."""
    rows = [
        f"| {name} | {quartiles(ratios)} | {f'{paper[name]:.2f}' if name in paper else '-'} |"
        for name, ratios in found
    ]
    head = f"| {title} | ours: median (quartiles) | paper |\n| --- | ---: | ---: |"
    return "\n".join([head, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--precision", default="float32", help="auto, float32 or bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--result", type=Path, help="Markdown file to write")
    args = parser.parse_args()
    args.precision = choose_precision(args.precision, torch.device("cpu"))
    torch.set_num_threads(args.threads)
    told = (
        "# What adapting costs\n\n"
        f"    python benchmarks/adaptation/costs.py --image-size {args.image_size} --batch-size "
        f"{args.batch_size} --pairs {args.pairs} --precision {args.precision}\n\n"
        f"ResNet-18 with a bottleneck, {CLASSES} classes, CPU, {args.threads} thread(s), "
        f"{args.precision}; interleaved pairs on the same batch. The ensemble has {CLIENTS} "
        "clients. The paper's ratios are those of its Table 4 (a GPU, 224 pixels)."
    )
    parts = [
        told,
        table("predicting, relative to the plain model", inference(args), PAPER_INFERENCE),
        table("a training step, relative to FedAvg", training(args), PAPER_TRAINING),
    ]
    if args.result is not None:
        args.result.write_text("\n\n".join(parts) + "\n")
    print("\n\n".join(parts))


if __name__ == "__main__":
    main()
