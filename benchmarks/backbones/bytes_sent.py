"""What a client sends each round, by what is trained.

    python benchmarks/backbones/bytes_sent.py OUT.csv

Counted as the ledger counts, of networks for seven classes; nothing is trained.
"""

import csv
import sys
from pathlib import Path

from feddg.models.backbones import build_network
from feddg.models.trained import trained_by
from feddg.settings import TrainSettings

BACKBONES = {"resnet18": 224, "efficientnet_lite0": 224, "vit_small_patch16_224": 224}


def main() -> None:
    """Writes a row for each network and what is trained of it."""
    rows = []
    for backbone, size in BACKBONES.items():
        for trainable in ("all", "norm+head", "lora", "head"):
            network = build_network(backbone, 7, weights=None, image_size=size)
            train = TrainSettings(trainable=trainable)
            network = trained_by(network, lambda built: built, train, statistics=False)
            sent = {n: t for n, t in network.state_dict().items() if n not in network.frozen}
            size_sent = sum(tensor.nbytes for tensor in sent.values())
            rows.append(
                {
                    "backbone": backbone,
                    "trainable": trainable,
                    "megabytes": f"{size_sent / 1e6:.3f}",
                }
            )
    with Path(sys.argv[1]).open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
