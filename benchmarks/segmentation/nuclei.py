"""Segmentation on an unseen kind of microscope image: Dice by method, kind and seed, into a CSV.

    python benchmarks/segmentation/nuclei.py [--seeds 5] [--out docs/results/data/nuclei.csv]

Three kinds train, one client each; nobody sees the fourth. A fifth of each kind takes no part in
training and gives the in-domain score, by which width, rounds and learning rate were chosen. What
the file has is not run again. With ``--pictures FOLDER`` masks of the first seed are drawn.
"""

import argparse
import csv
import io
import zipfile
from pathlib import Path

import numpy
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import feddg
from feddg.models.task import binary_divergence

KINDS = ("fluorescence_small", "fluorescence_large", "stained", "brightfield")
UNSEEN = ("stained", "brightfield", "fluorescence_large", "fluorescence_small")
"""In this order: those that are hard to reach come first."""
METHODS = ("fedavg", "mixstyle", "dart", "randconv", "elcfs")
SIDE, ROUNDS, STEPS, BATCH = 64, 12, 12, 8
DRAWN, TILE, MARGIN = 6, 96, 72
COLUMNS = ("method", "unseen", "seed", "dice", "low", "high", "inside", "images")


def read(file: Path, side: int) -> dict[str, TensorDataset]:
    """Returns each kind's images ``(n, 3, side, side)`` and masks ``(n, 1, side, side)``."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = {kind: [] for kind in KINDS}
    with zipfile.ZipFile(file) as opened:

        def pixels(name: str, mode: str, how: Image.Resampling) -> Tensor:
            image = Image.open(io.BytesIO(opened.read(name))).convert(mode)
            return torch.from_numpy(numpy.array(image.resize((side, side), how)))

        for name in sorted(opened.namelist()):
            kind, _, rest = name.partition("/images/")
            if rest:
                mask = f"{kind}/masks/{Path(rest).stem}.png"
                image = pixels(name, "RGB", Image.Resampling.BOX).permute(2, 0, 1)
                nuclei = pixels(mask, "L", Image.Resampling.NEAREST) > 0
                found[kind].append((image, nuclei[None].float()))
    return {
        kind: TensorDataset(*(torch.stack(part) for part in zip(*pairs)))
        for kind, pairs in found.items()
    }


class UNet(nn.Module):
    """A U-Net of three levels: one logit a pixel."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        wide = [width, 2 * width, 4 * width]
        self.stages = nn.ModuleList(block(a, b) for a, b in zip([3, *wide], wide))
        self.up = nn.ModuleList(
            block(a + b, b) for a, b in ((wide[2], wide[1]), (wide[1], wide[0]))
        )
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Maps ``(B, 3, H, W)`` to ``(B, 1, H, W)``; H and W are multiples of 4."""
        fine = self.stages[0](images)
        middle = self.stages[1](functional.max_pool2d(fine, 2))
        coarse = self.stages[2](functional.max_pool2d(middle, 2))
        for block, finer in zip(self.up, (middle, fine)):
            larger = functional.interpolate(coarse, scale_factor=2)
            coarse = block(torch.cat([larger, finer], 1))
        return self.last(coarse)


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Returns two convolutions, each with ReLU and a normalisation that needs no statistics.

    Kinds are dark or bright: the mean of their batch statistics would suit none of them.
    """
    layers = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False)]
        layers += [nn.GroupNorm(4, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def overlap(shares: Tensor, masks: Tensor) -> Tensor:
    """Returns the loss's overlap of each image, ``(B,)``: Dice, smoothed by one pixel."""
    both = (shares * masks).sum((1, 2, 3))
    return (2 * both + 1) / (shares.sum((1, 2, 3)) + masks.sum((1, 2, 3)) + 1)


def loss(outputs: Tensor, masks: Tensor) -> Tensor:
    """Returns cross-entropy by pixel, plus one minus Dice."""
    by_pixel = functional.binary_cross_entropy_with_logits(outputs, masks)
    return by_pixel + 1 - overlap(outputs.sigmoid(), masks).mean()


def dice(outputs: Tensor, masks: Tensor) -> Tensor:
    """Returns the Dice coefficient of each image's mask, ``(B,)``: 0 where nothing is marked.

    It is torchmetrics' ``dice_score``, which has NaN where there is nothing to find either, and
    leaves such an image out of its mean: so does :func:`with_nuclei`.
    """
    found = (outputs > 0).float()
    return 2 * (found * masks).sum((1, 2, 3)) / (found + masks).sum((1, 2, 3)).clamp(min=1)


TASK = feddg.Task(loss, dice, "Dice", divergence=binary_divergence)


def with_nuclei(data: TensorDataset) -> TensorDataset:
    """Returns the images that have nuclei at this size."""
    rows = data.tensors[1].flatten(1).any(1)
    return TensorDataset(*(part[rows] for part in data.tensors))


def fifths(data: TensorDataset) -> tuple[TensorDataset, TensorDataset]:
    """Returns four fifths that train, and one that does not: every fifth image."""
    out = torch.arange(len(data)) % 5 == 4
    return tuple(TensorDataset(*(part[rows] for part in data.tensors)) for rows in (~out, out))


def federation(method: str, data: dict[str, TensorDataset], unseen: str, seed: int):
    """Returns a federation before round 1: a client for each kind but one."""
    torch.manual_seed(seed)
    return feddg.Federation(
        [fifths(data[kind])[0] for kind in KINDS if kind != unseen],
        UNet(),
        method,
        task=TASK,
        seed=seed,
        rounds=ROUNDS,
        local_steps=STEPS,
        batch_size=BATCH,
        lr=5e-3,
        averaging="ema",
        augmentation="microscope",
    )


def draw(path: Path, rows: dict[str, Tensor]) -> None:
    """Draws named rows of images or masks ``(n, 1 or 3, H, W)`` in [0, 1] below each other."""
    height, width = TILE * len(rows), MARGIN + TILE * DRAWN
    sheet = Image.new("RGB", (width, height), "white")
    for place, (name, tiles) in enumerate(rows.items()):
        ImageDraw.Draw(sheet).text((4, TILE * place + TILE // 2), name, "black")
        for column, tile in enumerate(tiles):
            pixels = (255 * tile.expand(3, -1, -1)).byte().permute(1, 2, 0).numpy()
            small = Image.fromarray(pixels).resize((TILE - 2, TILE - 2))
            sheet.paste(small, (MARGIN + TILE * column, TILE * place))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.quantize(64).save(path, optimize=True)


def main() -> None:
    """Runs what the file lacks, seed by seed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data", type=Path, default=Path("examples/nuclei.zip"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/data/nuclei.csv"))
    parser.add_argument("--pictures", type=Path, help="folder for masks on unseen kinds")
    given = parser.parse_args()
    data = read(given.data, SIDE)
    rows = []
    if given.out.is_file():
        rows = list(csv.DictReader(given.out.open(newline="")))
    done = {(row["method"], row["unseen"], int(row["seed"])) for row in rows}
    for seed in range(given.seeds):
        for unseen in UNSEEN:
            images, masks = (part[:DRAWN] for part in data[unseen].tensors)
            drawn = {"image": images / 255, "by hand": masks}
            for method in METHODS:
                if (method, unseen, seed) in done:
                    continue
                fed = federation(method, data, unseen, seed).fit()
                score = fed.evaluate(with_nuclei(data[unseen]), unseen)
                apart = (with_nuclei(fifths(data[k])[1]) for k in KINDS if k != unseen)
                inside = [fed.evaluate(one, "inside").mean for one in apart]
                seen = (len(KINDS) - 1) * ROUNDS * STEPS * BATCH
                values = (score.mean, *score.interval, sum(inside) / len(inside))
                rounded = [f"{value:.4f}" for value in values]
                rows.append(dict(zip(COLUMNS, (method, unseen, seed, *rounded, seen))))
                with given.out.open("w", newline="") as file:
                    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(rows)
                print(*rows[-1].values(), flush=True)
                if given.pictures and seed == 0:
                    drawn[method] = (fed.predict(images) > 0).float()
                    draw(given.pictures / f"nuclei_{unseen}.png", drawn)


if __name__ == "__main__":
    main()
