"""What styles cost: the setup beside one epoch of local training, and clustering at the server.

    python benchmarks/speed/styles.py --pacs PACS --weights WEIGHTS

The setup (every client measures its style, the server agrees on one) and the drawing of twins pass
once over all images; so does one epoch of local training by every client, with which both are
compared, alternately, on pixels already decoded. Nothing is taken from a cache. The paper: 3.30 s
of setup against 7.94 s of training, 0.42. Then FINCH and the median for N client styles.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy
import torch
from jobs import JOBS, Federation
from rounds import PeakMemory, private_memory, quartiles, timed

from feddg.styles.interpolate import interpolation_style


def setup_to_epoch(arguments: argparse.Namespace, precision: str) -> None:
    """Prints one row."""
    to_epoch: dict[str, list[float]] = {"setup": [], "twins": []}
    seconds: dict[str, list[float]] = {"setup": [], "twins": [], "epoch": []}
    job = JOBS[arguments.job]
    for _ in range(arguments.pairs):
        with tempfile.TemporaryDirectory() as cache:
            warm = Federation(
                job.experiment("fedavg", precision, arguments.pacs, arguments.weights), Path(cache)
            )
            everyone = warm.experiment.model_copy(
                update={"clients": warm.experiment.clients.model_copy(update={"per_round": None})}
            )
            plain = Federation(everyone, Path(cache))
            pardon = Federation(
                job.experiment("pardon", precision, arguments.pacs, arguments.weights), Path(cache)
            )
            spent = {
                "setup": timed(pardon.server.setup),
                "twins": timed(pardon.begin_everywhere),
                "epoch": timed(plain.server.round),
            }
        for name, value in spent.items():
            seconds[name].append(value)
        for name, ratios in to_epoch.items():
            ratios.append(spent[name] / spent["epoch"])
    middle = {name: f"{numpy.median(values):.1f}" for name, values in seconds.items()}
    print(
        f"| {job.name} | {precision} | {middle['setup']} | {middle['twins']} | {middle['epoch']} "
        f"| {quartiles(to_epoch['setup'])} | {quartiles(to_epoch['twins'])} |",
        flush=True,
    )


def clustering(count: int, channels: int) -> None:
    """Prints seconds and extra memory of the server's part for ``count`` client styles."""
    chance = torch.Generator().manual_seed(0)
    centers = torch.rand((4, 2, channels), generator=chance)
    groups = torch.randint(0, 4, (count,), generator=chance)
    styles = centers[groups] + 0.05 * torch.rand((count, 2, channels), generator=chance)
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
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--channels", type=int, default=64, help="of the codec; VGG-19 has 512")
    arguments = parser.parse_args()
    print("| job | precision | setup s | twins s | epoch s | setup / epoch | twins / epoch |")
    print("|---|---|---|---|---|---|---|")
    for precision in arguments.precisions:
        setup_to_epoch(arguments, precision)
    print("\n| client styles | s | MB |\n|---|---|---|")
    for count in (100, 1_000, 10_000):
        clustering(count, arguments.channels)


if __name__ == "__main__":
    main()
