"""Experiment values that PARDON's benchmarks share (its section V); no data set by itself."""

from typing import Any

PARDON_PROTOCOL: dict[str, Any] = {
    "data": {"image_size": 224},
    "clients": {"number": 100, "per_round": 20, "heterogeneity": 0.1},
    "model": {"backbone": "resnet50", "weights": "imagenet", "embedding": "linear"},
    "train": {"rounds": 50, "lr": 3e-5, "batch_size": 32, "augmentation": "pacs"},
}
