"""How many images a second codecs stylize, on one thread; measure while nothing else runs.

    python benchmarks/codec/speed.py [--vgg19 ENCODER DECODER] [--size 64 --size 128]

Every codec in turn, repeatedly, so that a slow moment of the machine is nobody's alone; of each the
fastest turn counts. The images are random pixels: convolutions take equally long on any.
"""

import argparse
import time
from pathlib import Path

import torch

from feddg.styles.codec import Codec, load_codec, transfer
from feddg.styles.statistics import measure

IMAGES, TURNS = 64, 7


def main() -> None:
    """Prints a Markdown table: images per second by codec and size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vgg19", nargs=2, type=Path, metavar=("ENCODER", "DECODER"))
    parser.add_argument("--size", type=int, action="append", help="pixels; 64 and 128 by default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    codecs = {name: load_codec(name) for name in ("compact", "modulated", "colors")}
    if options.vgg19:
        encoder, decoder = options.vgg19
        codecs["vgg19"] = load_codec("vgg19", encoder=encoder, decoder=decoder)
    sizes = options.size or [64, 128]
    rates = {size: _images_per_second(codecs, size) for size in sizes}
    print("| images per second |", " | ".join(f"`{name}`" for name in codecs), "|")
    print("|---|" + "---|" * len(codecs))
    for size, found in rates.items():
        print(f"| {size} pixels |", " | ".join(f"{found[name]:.0f}" for name in codecs), "|")


def _images_per_second(codecs: dict[str, Codec], size: int) -> dict[str, float]:
    drawn = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (IMAGES, 3, size, size), dtype=torch.uint8, generator=drawn)
    styles = {
        name: measure(codec, images[:8]).pooled().styles()[0] for name, codec in codecs.items()
    }
    least = dict.fromkeys(codecs, float("inf"))
    for _ in range(TURNS):
        for name, codec in codecs.items():
            start = time.perf_counter()
            transfer(codec, images, styles[name])
            least[name] = min(least[name], time.perf_counter() - start)
    return {name: IMAGES / seconds for name, seconds in least.items()}


if __name__ == "__main__":
    main()
