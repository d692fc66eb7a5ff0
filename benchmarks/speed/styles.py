"""What styles cost: the setup beside one epoch of local training, and clustering at the server.

    python benchmarks/speed/styles.py --pacs PACS --weights WEIGHTS

The setup (every client measures its style, the server agrees on one) and the drawing of stylized
copies pass once over all images; so does one epoch of local training by every client, FedAvg's or
PARDON's own, with which they are compared, alternately, on pixels already decoded. Of an epoch a
tenth of the clients is timed, and counted by its images. Nothing else is taken from a cache. The
paper: 3.30 s of setup against 7.94 s of PARDON's local training, 0.42. Then FINCH and the median
for N client styles.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import numpy
import torch
from jobs import JOBS, Federation
from rounds import PeakMemory, private_memory, quartiles, timed

from feddg.styles.statistics import interpolation_style

PART = 10
"""Clients of a hundred whose epoch is timed."""
COLUMNS = ("setup", "stylized", "FedAvg epoch", "PARDON epoch")


def setup_to_epoch(arguments: argparse.Namespace, precision: str) -> None:
    """Prints one row."""
    with tempfile.TemporaryDirectory() as decoded:
        federation(arguments, precision, "fedavg", Path(decoded))
        rows = [seconds_of_each(arguments, precision, decoded) for _ in range(arguments.pairs)]
    middle = [f"{numpy.median([row[name] for row in rows]):.1f}" for name in COLUMNS]
    ratios = [
        quartiles([row["setup"] / row[name] for row in rows])
        for name in ("FedAvg epoch", "PARDON epoch")
    ]
    print(f"| {arguments.job} | {precision} | {' | '.join([*middle, *ratios])} |", flush=True)


def seconds_of_each(
    arguments: argparse.Namespace, precision: str, decoded: str
) -> dict[str, float]:
    """Times setup, stylized copies and both epochs once; the cache holds decoded pixels alone."""
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(shutil.copytree(decoded, folder, dirs_exist_ok=True))
        plain = federation(arguments, precision, "fedavg", cache)
        pardon = federation(arguments, precision, "pardon", cache)
        return {
            "setup": timed(pardon.server.setup),
            "FedAvg epoch": epoch(plain),
            "stylized": timed(pardon.begin_everywhere),
            "PARDON epoch": epoch(pardon),
        }


def federation(
    arguments: argparse.Namespace, precision: str, method: str, cache: Path
) -> Federation:
    """Returns the job's federation with ``PART`` clients per round."""
    job = JOBS[arguments.job]
    experiment = job.experiment(method, precision, arguments.pacs, arguments.weights)
    clients = experiment.clients.model_copy(update={"per_round": PART})
    return Federation(experiment.model_copy(update={"clients": clients}), cache)


def epoch(job: Federation) -> float:
    """Returns the seconds of an epoch by every client, from a round of some of them."""
    images = sum(len(job.transport.examples(id)) for id in job.transport.clients)
    started = time.perf_counter()
    record = job.server.round()
    return (time.perf_counter() - started) * images / record.images


def clustering(count: int, channels: int) -> None:
    """Prints seconds and extra memory of the server's part for ``count`` client styles."""
    rng = torch.Generator().manual_seed(0)
    centers = torch.rand((4, 2, channels), generator=rng)
    groups = torch.randint(0, 4, (count,), generator=rng)
    styles = centers[groups] + 0.05 * torch.rand((count, 2, channels), generator=rng)
    before = private_memory()
    with PeakMemory() as memory:
        started = time.perf_counter()
        interpolation_style(styles, clustering=True, partition="finest", median="average")
        spent = time.perf_counter() - started
    more = max(0, memory.peak - before) / 1e6
    print(f"| {count:,} | {spent:.2f} | {more:.0f} |", flush=True)


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", choices=JOBS, default="resnet18_64")
    parser.add_argument("--pacs", type=Path, default=Path("pacs"))
    parser.add_argument("--weights", type=Path, default=Path("resnet18_tinyimagenet.safetensors"))
    parser.add_argument("--precisions", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--channels", type=int, default=64, help="of the codec; VGG-19 has 512")
    arguments = parser.parse_args()
    seconds = " | ".join(f"{name} s" for name in COLUMNS)
    print(f"| job | precision | {seconds} | setup / FedAvg epoch | setup / PARDON epoch |")
    print("|---" * 8 + "|")
    for precision in arguments.precisions:
        setup_to_epoch(arguments, precision)
    print("\n| client styles | s | MB |\n|---|---|---|")
    for count in (100, 1_000, 10_000):
        clustering(count, arguments.channels)


if __name__ == "__main__":
    main()
