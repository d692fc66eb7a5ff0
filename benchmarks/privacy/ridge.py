"""What an image's privacy costs ridge: accuracy against epsilon on PACS, every domain held out.

    FEDDG_RESNET18=FILE python benchmarks/privacy/ridge.py PACS docs/results/data/privacy_ridge.csv

ResNet-18 at 96 pixels, its 512 features as they are, or 64 fixed random sums of them
(fixed_features.py). Every client noises its own sums. What is in the file is not run again.
"""

import argparse
import csv
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

import fixed_features
import torch
from torch import Tensor, nn

from feddg.api import run
from feddg.experiment import Experiment
from feddg.models.backbones import build_network, register_backbone

LONGEST = {"all_features": 40.0, "few_features": 8.0}
"""Where features are clipped: the median length of the 512, and that of all of the 64."""
LEVELS = ("none", "clipped", "16", "8", "4", "1")
"""Neither clipped nor noised, clipped alone, or an image's epsilon."""


class Kept(nn.Module):
    """Features of images as a featurizer; each is computed once."""

    def __init__(self, features: fixed_features.Remembered, width: int) -> None:
        super().__init__()
        self.features, self.out_features = features, width

    @property
    def stages(self) -> list[nn.Module]:
        """None."""
        return []

    def forward(self, images: Tensor) -> Tensor:
        """Maps ``(B, 3, H, W)`` to ``(B, out_features)``."""
        return self.features(images)


FILE = os.environ["FEDDG_RESNET18"]
TRUNK = build_network("resnet18", 7, weights=FILE).eval().featurizer
ALL = fixed_features.Remembered(TRUNK)
FEW = fixed_features.Remembered(fixed_features.projected(ALL))


@register_backbone("all_features")
def all_features() -> nn.Module:
    """The 512 features of ResNet-18."""
    return Kept(ALL, 512)


@register_backbone("few_features")
def few_features() -> nn.Module:
    """64 random sums of them, centred, of length 8."""
    return Kept(FEW, fixed_features.FIXED)


def experiment(
    root: Path, unseen: str, backbone: str, clients: int, level: str, seed: int
) -> Experiment:
    """Returns the run: one round, every client asked."""
    settings: dict[str, Any] = {
        "none": {},
        "clipped": {"clip": LONGEST[backbone], "penalties": [1.0]},
    }.get(level, {"clip": LONGEST[backbone]})
    return Experiment(
        preset="pacs",
        data={"source": "pacs", "root": str(root), "image_size": 96},
        hold_out={"test": unseen},
        clients={"number": clients, "heterogeneity": 0.0 if clients == 3 else 0.1},
        model={"backbone": backbone, "weights": None, "normalization": "frozen"},
        method={"name": "ridge", "settings": settings},
        privacy={"record_epsilon": float(level)} if level.isdigit() else {},
        evaluate={"pictures": False},
        seed=seed,
        device="cpu",
    )


def main() -> None:
    """Runs what is missing."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = list(csv.DictReader(asked.out.open())) if asked.out.exists() else []
    done = {tuple(list(row.values())[:5]) for row in rows}
    unseen = ("art_painting", "cartoon", "photo", "sketch")
    for cell in itertools.product(unseen, LONGEST, (3, 100), LEVELS, range(asked.seeds)):
        if tuple(map(str, cell)) in done:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = run(experiment(asked.root, *cell), Path(folder) / "run", report=False)
        row = dict(zip(("unseen", "features", "clients", "level", "seed"), map(str, cell)))
        rows.append({**row, "accuracy": f"{100 * found.accuracy:.2f}"})
        print(*rows[-1].values(), flush=True)
        with asked.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
