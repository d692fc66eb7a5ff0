"""A program's own images and network: two sites train together, a third one is measured."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import feddg


def site(seed: int, brightness: float) -> TensorDataset:
    """Returns a site's images: squares, above or below the middle; any torch data set will do."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (64,), generator=generator)
    images = brightness * torch.rand(64, 3, 16, 16, generator=generator)
    images[torch.arange(64), :, 4 + 6 * labels, 4:12] = 1.0
    return TensorDataset(images, labels)


network = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(4),
    nn.Flatten(),
    nn.Linear(128, 2),
)
federation = feddg.Federation([site(1, 0.3), site(2, 0.6)], network, "fedavg", lr=0.01)
federation.fit(rounds=5)
print(f"{federation.evaluate(site(3, 0.9)).accuracy:.1%}")
