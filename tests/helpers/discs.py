"""Segmentation in small: images of discs with their masks, a network, a score, a task."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import feddg


class Discs(Dataset):
    """Bright discs on noise, with their masks ``(1, 16, 16)``."""

    def __init__(self, seed: int, count: int = 12, tint: float = 1.0) -> None:
        rng = torch.Generator().manual_seed(seed)
        x, y = torch.rand(2, count, 1, 1, generator=rng) * 8 + 4
        across = torch.arange(16.0)
        inside = (across - x).square() + (across[:, None] - y).square() < 14
        noise = torch.rand(count, 3, 16, 16, generator=rng) * 0.4
        self.masks = inside[:, None].float()
        self.images = (noise + 0.6 * tint * self.masks).clamp(0, 1)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.masks[index]


class SmallUNet(nn.Module):
    """A network that gives one number a pixel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.deep = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.up = nn.Conv2d(16, 1, 3, padding=1)
        self.stages = [self.down, self.deep]

    def forward(self, images: Tensor) -> Tensor:
        fine = self.down(images)
        coarse = functional.interpolate(self.deep(fine), scale_factor=2)
        return self.up(torch.cat([fine, coarse], 1))


def dice(outputs: Tensor, masks: Tensor) -> Tensor:
    found = (outputs > 0).float()
    return 2 * (found * masks).sum((1, 2, 3)) / (found + masks).sum((1, 2, 3)).clamp(min=1)


SEGMENT = feddg.Task(functional.binary_cross_entropy_with_logits, dice, name="Dice")
