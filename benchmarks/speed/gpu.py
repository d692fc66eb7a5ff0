"""How fast is a federated round on a GPU, beside a plain loop with the same network and batches?

    python benchmarks/speed/gpu.py gpu.json
    python benchmarks/speed/gpu.py pretended.json --pretend

20 clients of 64 images of noise a round: ResNet-18 and -50 at 224 pixels, EfficientNet-Lite0 at
160; FedAvg, PARDON, FedIG-A and ridge; in bfloat16, TF32 and float32, channels last. By job: images
a second, the share of a plain loop's (forward, loss, backward, fused Adam, on batches that lie
ready; ridge's is the forward pass alone), the share of time in which the device is busy
(profiler), and peak memory. Then the first round's weights beside the CPU's, and ``--device all``
where there are several devices. Everything is written to one file after every job; jobs that do
not begin within ``--minutes`` are left out and named.

``--pretend`` goes the same way on the CPU and on the tests' pretended device, with two clients of
five images at 32 pixels. Its times say nothing; it says whether the script works.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torchvision
from jobs import CLASSES, Federation
from torch import Tensor, nn

import feddg
from feddg.experiment import Experiment
from feddg.models.precision import autocast
from feddg.settings import merge
from feddg.testing.device import second_device

NETWORKS = {"resnet18": 224, "resnet50": 224, "efficientnet_lite0": 160}
METHODS = ("fedavg", "pardon", "fedig-a", "ridge")
PRECISIONS = ("bfloat16", "tf32", "float32")
CLOSE = 1e-4
Row = dict[str, Any]


class Sizes(argparse.Namespace):
    """How much is done: clients, images of each, pixels at most, and timed rounds."""

    def __init__(self, pretend: bool) -> None:
        self.clients, self.images, self.most, self.rounds = (
            (2, 5, 32, 1) if pretend else (20, 64, 224, 2)
        )


def experiment(
    backbone: str, method: str, precision: str, device: str, sizes: Sizes, **fields: Any
) -> Experiment:
    """Returns a job as an experiment."""
    os.environ["FEDDG_NOISE_IMAGES"] = str(sizes.clients * sizes.images)
    size = min(NETWORKS[backbone], sizes.most)
    own: Row = {
        "data": {"source": "noise", "image_size": size, "id_val": 0, "id_test": 0},
        "hold_out": "held",
        "clients": {"number": sizes.clients, "heterogeneity": 1.0},
        "model": {"backbone": backbone, "weights": None},
        "train": {"local_epochs": 1, "batch_size": min(32, sizes.images)},
        "method": method,
        "precision": "float32" if precision == "tf32" else precision,
        "device": device,
    }
    return Experiment(**merge(own, fields))


def ready(device: str) -> Callable[[], None]:
    """Returns what waits until a device has done all that it was given."""
    return torch.cuda.synchronize if device.startswith("cuda") else lambda: None


def seconds(work: Callable[[], object], wait: Callable[[], None]) -> float:
    """Returns how long some work takes, until the device has done it."""
    wait()
    started = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - started


@contextmanager
def multiplying(precision: str) -> Iterator[None]:
    """Multiplies float32 with 10 bits of mantissa inside the block if ``precision`` is TF32."""
    parts = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [part.allow_tf32 for part in parts]
    try:
        for part in parts:
            part.allow_tf32 = precision == "tf32"
        yield
    finally:
        for part, value in zip(parts, before):
            part.allow_tf32 = value


def plain(backbone: str) -> nn.Module:
    """Returns the publisher's network."""
    if backbone == "efficientnet_lite0":
        import timm

        return timm.create_model("tf_efficientnet_lite0", num_classes=CLASSES)  # type: ignore[no-any-return]
    network: nn.Module = torchvision.models.get_model(backbone, num_classes=CLASSES)
    return network


def loop(
    backbone: str, precision: str, device: str, trains: bool
) -> Callable[[list[tuple[Tensor, Tensor]]], None]:
    """Returns the plain loop."""
    network = plain(backbone).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(network.parameters(), 3e-5, fused=device.startswith("cuda"))
    opened = autocast("float32" if precision == "tf32" else precision, torch.device(device))

    def run(batches: list[tuple[Tensor, Tensor]]) -> None:
        for images, labels in batches:
            with opened(), torch.set_grad_enabled(trains):
                loss = nn.functional.cross_entropy(network(images), labels)
            if trains:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    return run


def busy(work: Callable[[], object], device: str, wait: Callable[[], None]) -> float | None:
    """Returns the share of time in which the device computes; None where there is no profiler."""
    if not device.startswith("cuda"):
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        spent = seconds(work, wait)
    worked = sum(event.self_device_time_total for event in profile.key_averages())
    return float(worked / 1e6 / spent)


def measured(backbone: str, method: str, precision: str, device: str, sizes: Sizes) -> Row:
    """Returns a job's row."""
    wait = ready(device)
    with tempfile.TemporaryDirectory() as cache, multiplying(precision):
        chosen = experiment(backbone, method, precision, device, sizes)
        federation = Federation(chosen, Path(cache))
        if device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()
        setup = seconds(federation.server.setup, wait)

        def work() -> None:
            for kept in Path(cache).rglob("*-features-*"):
                kept.unlink()  # a method of one round would find them in the next
            federation.server.round()

        work()  # warms up, and leaves the images on the device
        spent = min(seconds(work, wait) for _ in range(sizes.rounds))
        share = busy(work, device, wait)
        peak = torch.cuda.max_memory_allocated() / 2**30 if device.startswith("cuda") else None
        batches = federation.next_batches()
        images = sum(len(labels) for _, labels in batches)
        bare = loop(backbone, precision, device, trains=not federation.method.one_round)
        bare(batches)
        beside = min(seconds(lambda: bare(batches), wait) for _ in range(sizes.rounds))
    return {
        "network": backbone,
        "pixels": chosen.data.image_size,
        "method": method,
        "precision": precision,
        "device": device,
        "setup[s]": round(setup, 2),
        "images/s": round(images / spent, 1),
        "bare[images/s]": round(images / beside, 1),
        "share of bare": round(beside / spent, 3),
        "busy": share and round(share, 3),
        "peak[GiB]": peak and round(peak, 2),
    }


def apart(device: str, sizes: Sizes) -> Row:
    """Returns how far the first round's weights lie from the CPU's, in float32."""
    small = Sizes(pretend=True)
    found = []
    with tempfile.TemporaryDirectory() as cache, multiplying("float32"):
        for place in ("cpu", device):
            train = {"optimizer": "sgd", "lr": 1e-3}  # Adam makes steps of rounding errors
            chosen = experiment("resnet18", "fedavg", "float32", place, small, train=train)
            federation = Federation(chosen, Path(cache))
            federation.server.setup()
            federation.server.round()
            weights = federation.server.state.weights
            found.append({n: t.detach().cpu().double() for n, t in weights.items()})
    here, there = found
    far = max(float((here[n] - there[n]).abs().max()) for n in here if here[n].numel())
    return {"device": device, "far from the CPU": far, "close": far <= CLOSE}


def all_devices() -> Row:
    """Returns the seconds of a run on one device and on all."""
    spent = {}
    for device in ("cuda", "all"):
        with tempfile.TemporaryDirectory() as out:
            own = {"data": {"source": "digits", "image_size": 128}, "device": device}
            more = {"model": {"backbone": "resnet18", "weights": None}, "train": {"rounds": 2}}
            started = time.perf_counter()
            feddg.run(**own, **more, out=out, report=False)
            spent[device] = round(time.perf_counter() - started, 1)
    return {"devices": torch.cuda.device_count(), "seconds": spent}


def table(rows: list[Row]) -> str:
    """Returns rows as a table."""
    names = list(rows[0])
    lines = [names, *([str(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(names))]
    return "\n".join("  ".join(t.ljust(w) for t, w in zip(line, widths)) for line in lines)


def work(given: argparse.Namespace, devices: list[str]) -> None:
    """Does all jobs, the most telling first, and writes the file after each."""
    sizes, began = Sizes(given.pretend), time.monotonic()
    machine = torch.cuda.get_device_name() if "cuda" in devices else platform.processor()
    whole: Row = {"machine": machine, "torch": torch.__version__, "jobs": [], "left out": []}

    def keep() -> None:
        given.file.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")

    whole["parity"] = [apart(device, sizes) for device in devices if device != "cpu"]
    keep()
    for precision in PRECISIONS if devices == ["cuda"] else ("float32",):
        for device in devices:
            for backbone in NETWORKS:
                for method in METHODS:
                    job = (backbone, method, precision, device)
                    if time.monotonic() - began > 60 * given.minutes:
                        whole["left out"].append(job)
                        continue
                    whole["jobs"].append(measured(*job, sizes))
                    keep()
    if torch.cuda.device_count() > 1 and time.monotonic() - began < 60 * given.minutes:
        whole["all devices"] = all_devices()
    keep()
    print(table(whole["jobs"]))
    print(json.dumps({n: v for n, v in whole.items() if n != "jobs"}, indent=1))


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="JSON, written after every job")
    parser.add_argument("--pretend", action="store_true", help="no GPU: try the script out")
    parser.add_argument("--minutes", type=float, default=7.0, help="when the last job may begin")
    given = parser.parse_args()
    if not given.pretend:
        work(given, ["cuda"])
        return
    with second_device() as name:
        work(given, ["cpu", name])


if __name__ == "__main__":
    main()
