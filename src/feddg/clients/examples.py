"""The images a client holds, and the mini-batches that it makes of them."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from feddg.data.pixels import PixelStore


class Pixels(Protocol):
    """Images by row: uint8 ``(B, 3, H, W)``."""

    def gather(self, rows: Tensor) -> Tensor:
        """Returns the images of ``rows``."""
        ...


@dataclass
class Examples:
    """The images one client holds.

    Attributes:
        pixels: the store they are read from.
        rows: ``(n,)`` int64 rows of the store.
        labels: ``(n,)`` int64 class ids.
        domains: ``(n,)`` int64 domain ids; for reports, and for methods whose page says that a
            client knows its domain.
        classes: number of classes in the federation.
        cache_key: identifies these very images, for caches on disk.
        validation: further images of the client's own that it does not train on, or None where
            nobody set any aside.
    """

    pixels: Pixels
    rows: Tensor
    labels: Tensor
    domains: Tensor
    classes: int
    cache_key: str = ""
    validation: "Examples | None" = None

    def __len__(self) -> int:
        return len(self.rows)

    def images(self, positions: Tensor | None = None, device: torch.device | None = None) -> Tensor:
        """Returns uint8 images ``(B, 3, H, W)`` without augmentation.

        Args:
            positions: which of them; all by default.
            device: where; the CPU by default.
        """
        rows = self.rows if positions is None else self.rows[positions]
        return self.pixels.gather(rows) if device is None else gathered(self.pixels, rows, device)


def gathered(pixels: Pixels, rows: Tensor, device: torch.device) -> Tensor:
    """Returns images of a store on a device, where those of some stores stay."""
    if isinstance(pixels, PixelStore):
        return pixels.gather_to(rows, device)
    return pixels.gather(rows).to(device)


@dataclass
class Batch:
    """A mini-batch on the device.

    Attributes:
        images: float RGB in [0, 1], ``(B, 3, H, W)``, augmented.
        labels: ``(B,)`` class ids.
        positions: ``(B,)`` positions among the client's images.
        views: other versions of the same images under the same augmentation draw, by name.
        targets: further labels of the same images, ``(B,)`` each, by name.
        known_labels: ``labels`` on the CPU, for what is decided there; see :attr:`labels_here`.
    """

    images: Tensor
    labels: Tensor
    positions: Tensor
    views: dict[str, Tensor] = field(default_factory=dict)
    targets: dict[str, Tensor] = field(default_factory=dict)
    known_labels: Tensor | None = None

    @property
    def labels_here(self) -> Tensor:
        """The labels on the CPU, without waiting for the device where they came from there."""
        return self.labels.cpu() if self.known_labels is None else self.known_labels

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, chosen: Tensor) -> "Batch":
        """Returns some of the images, by a mask or by their places in the batch."""
        parts = (self.views, self.targets)
        views, targets = ({n: t[chosen] for n, t in part.items()} for part in parts)
        chosen_here = chosen.to(self.positions.device)
        return Batch(
            self.images[chosen],
            self.labels[chosen],
            self.positions[chosen_here],
            views,
            targets,
            None if self.known_labels is None else self.known_labels[chosen_here],
        )


def rows_of(view: Tensor, positions: Tensor) -> Tensor:
    """Returns rows of a view ``(n, H, W, 3)`` as images ``(B, 3, H, W)``, channels last."""
    return view.index_select(0, positions).permute(0, 3, 1, 2)


def split_batches(order: Tensor, batch_size: int) -> list[Tensor]:
    """Cuts ``order`` into batches; a last batch of one joins the one before it."""
    batches = list(order.split(batch_size))
    if len(batches) > 1 and len(batches[-1]) == 1 and batch_size > 1:
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches
