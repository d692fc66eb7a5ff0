"""Draws docs/images/codec.png: before and after of some codecs, with pictures anyone may show.

Contents: two photographs from scikit-learn (CC BY 2.0) and one from matplotlib (public domain).
Styles: those photographs and variants of them (line drawing, flat colours, ...).

    python benchmarks/codec/picture.py docs/images/codec.png
        [--vgg19 ENCODER DECODER] [--size 64 128]
"""

import argparse
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib import cbook, pyplot
from PIL import Image
from sklearn.datasets import load_sample_image
from torch import Tensor
from train import Variant, flat_colours, inverted, line_drawing, recoloured

from feddg.data.decoding import make_square
from feddg.rng import stream
from feddg.styles.codec import Codec, load_codec, transfer
from feddg.styles.statistics import measure

STRENGTHS = (0.5, 1.0)


def main() -> None:
    """Writes the picture to the path given."""
    options = _options()
    matplotlib.use("Agg")
    codecs = [load_codec("compact"), load_codec("modulated")]
    if options.vgg19:
        codecs.append(load_codec("vgg19", encoder=options.vgg19[0], decoder=options.vgg19[1]))
    photographs = _photographs()
    cases = [(s, i, c) for s in options.size for i in photographs for c in codecs]
    figure, grid = pyplot.subplots(len(cases), 10, figsize=(13, 1.37 * len(cases)))
    for row, (size, image, codec) in enumerate(cases):
        views = _views(codec, _square(image, size), [_square(p, size) for p in photographs])
        for axes, (title, view) in zip(grid[row], views.items()):
            axes.imshow(view[0].permute(1, 2, 0).numpy())
            axes.set(xticks=[], yticks=[])
            if row == 0:
                axes.set_title(title, fontsize=9)
        grid[row][0].set_ylabel(f"{codec.name}, {size} px", fontsize=9)
    figure.tight_layout(pad=0.3)
    figure.savefig(options.out, dpi=64, pil_kwargs={"optimize": True})
    image = Image.open(options.out).convert("RGB").quantize(192)
    image.save(options.out, optimize=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="PNG file to write")
    parser.add_argument("--vgg19", type=Path, nargs=2, help="encoder and decoder to show, too")
    parser.add_argument("--size", type=int, nargs="+", default=[64, 128], help="image side, pixels")
    return parser.parse_args()


def _photographs() -> list[Image.Image]:
    samples = [Image.fromarray(load_sample_image(name)) for name in ("china.jpg", "flower.jpg")]
    with cbook.get_sample_data("grace_hopper.jpg") as file:
        return [*samples, Image.open(file).convert("RGB").crop((60, 0, 460, 400))]


def _views(codec: Codec, image: Tensor, photographs: list[Tensor]) -> dict[str, Tensor]:
    """Original, decoded, and the image in each style at each strength."""
    views = {"original": image, "decoded": transfer(codec, image, torch.ones(2, codec.channels), 0)}
    variants: list[Variant] = [line_drawing, flat_colours, inverted, recoloured]
    for variant in variants:
        style = _pooled(codec, torch.cat(photographs), variant)
        for strength in STRENGTHS:
            name = variant.__name__.replace("_", " ")
            views[f"{name}\n{strength}"] = transfer(codec, image, style, strength)
    return views


def _pooled(codec: Codec, images: Tensor, variant: Variant) -> Tensor:
    varied = variant(images / 255, stream(1, "picture"))
    return measure(codec, (varied * 255).to(torch.uint8)).pooled().styles()[0]


def _square(image: Image.Image, size: int) -> Tensor:
    pixels: np.ndarray = make_square(image, size, "crop")
    return torch.from_numpy(pixels).permute(2, 0, 1)[None]


if __name__ == "__main__":
    main()
