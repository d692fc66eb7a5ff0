"""Images as a client, an evaluation and a method see them: bytes, gathered by row number."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from feddg.messages import Weights, on_device
from feddg.storage import hash_of

SHARE, LEFT = 0.25, 0.5
"""Share of a device's free memory for pixels; share of all of it that stays free for networks and
feature maps, whatever other processes keep there.
"""


def fits(count: int, device: torch.device) -> bool:
    """Returns whether so many bytes may stay on a device; False if its free memory is unknown."""
    memory = getattr(torch.get_device_module(device), "mem_get_info", None)
    if memory is None:
        return False
    free, total = memory(device)
    return bool(count <= min(SHARE * free, free - LEFT * total))


Rows = Tensor | np.ndarray | Sequence[int]
Parcel = tuple[Weights, Callable[[Weights], Tensor]]
"""What images are made of on a device (some of it may be there already), and what makes them."""


class Pixels(Protocol):
    """Images by row, ``(B, 3, size, size)`` uint8.

    Attributes:
        size: side of every image in pixels.
    """

    size: int

    def gather(self, rows: Tensor, device: torch.device | None = None) -> Tensor:
        """Returns the images of ``rows`` on a device, by default the CPU."""
        ...

    def parcel(self, rows: Tensor, device: torch.device) -> Parcel:
        """Returns the tensors to send for some images, and what makes the images of them."""
        return {"images": self.gather(rows)}, lambda sent: sent["images"]


class PixelStore(Pixels, ABC):
    """The pixels of a table, gathered by row number of that table.

    Attributes:
        size: side of every image in pixels.
        fingerprint: a hash of the images in row order, used by caches derived from them; empty for
            a store without a name.
    """

    def __init__(self, size: int, fingerprint: str) -> None:
        self.size = size
        self.fingerprint = fingerprint

    @abstractmethod
    def __len__(self) -> int:
        """The number of rows."""

    @abstractmethod
    def gather(self, rows: Rows, device: torch.device | None = None) -> Tensor:
        """Returns the pixels of some rows.

        Args:
            rows: row numbers in any order, repeats allowed.
            device: the target device; the CPU by default.

        Returns:
            ``(len(rows), 3, size, size)`` uint8, in channels-last memory order.

        Raises:
            IndexError: for a row beyond the table.
        """


class ArrayPixels(PixelStore):
    """Pixels in memory or memory-mapped from the cache."""

    def __init__(
        self, pixels: np.ndarray, positions: np.ndarray | None = None, fingerprint: str = ""
    ) -> None:
        """Wraps an array.

        Args:
            pixels: ``(count, size, size, 3)`` uint8.
            positions: ``(rows,)`` int64, the index of each row's image in ``pixels``; None if row i
                is image i.
            fingerprint: see :class:`PixelStore`.
        """
        super().__init__(pixels.shape[1], fingerprint)
        self._pixels = pixels
        self._positions = np.arange(len(pixels)) if positions is None else positions
        self._on_device: dict[torch.device, tuple[Tensor, np.ndarray] | None] = {}

    def __len__(self) -> int:
        return len(self._positions)

    def gather(self, rows: Rows, device: torch.device | None = None) -> Tensor:
        """Returns the pixels of some rows; on a device they stay if there is room for all."""
        place = device or torch.device("cpu")
        needed, images = self.parcel(rows, place)
        return images(on_device(needed, place))

    def parcel(self, rows: Rows, device: torch.device) -> Parcel:
        """Returns row numbers; sends the images that are needed there for the first time."""
        places = self._positions[np.asarray(rows, dtype=np.int64)]
        if device.type != "cpu" and device not in self._on_device:
            self._on_device[device] = None
            if fits(self._pixels.nbytes, device):
                with torch.inference_mode(False):  # who evaluates first is not the only writer
                    pixels = torch.empty(self._pixels.shape, dtype=torch.uint8, device=device)
                self._on_device[device] = pixels, np.zeros(len(pixels), dtype=bool)
        parcel = self._on_device.get(device)
        if parcel is None:
            taken = channels_last(np.take(self._pixels, places, axis=0))
            return {"images": taken}, lambda sent: sent["images"]
        pixels, known = parcel
        new = np.unique(places[~known[places]])
        if len(new):
            first = {"rows": new, "pixels": np.take(self._pixels, new, axis=0)}
            sent = on_device({n: torch.from_numpy(part) for n, part in first.items()}, device)
            pixels[sent["rows"]] = sent["pixels"]
            known[new] = True
        needed = {"all": pixels, "places": torch.from_numpy(places)}
        return needed, lambda sent: sent["all"].index_select(0, sent["places"]).permute(0, 3, 1, 2)


class Vectors(PixelStore):
    """Features that somebody else's network has extracted, in place of pixels."""

    def __init__(self, features: np.ndarray) -> None:
        """Wraps an array ``(count, d)`` float32; ``size`` is d."""
        super().__init__(features.shape[1], hash_of(features.shape, features))
        self._features = {torch.device("cpu"): torch.from_numpy(features)}

    def __len__(self) -> int:
        return len(self._features[torch.device("cpu")])

    def gather(self, rows: Rows, device: torch.device | None = None) -> Tensor:
        """Returns the features of some rows, ``(len(rows), d)`` float32."""
        host = self._features[torch.device("cpu")]
        place = host.device if device is None else device
        if place not in self._features:  # sent once
            self._features[place] = host.to(place)
        return self._features[place][torch.as_tensor(np.asarray(rows)).to(place)]


def as_unit(images: Tensor, device: torch.device | str | None = None) -> Tensor:
    """Returns uint8 images as RGB in [0, 1] on the device, channels last; features as they are."""
    moved = images if device is None else images.to(device)
    if moved.is_floating_point():
        return moved
    return (moved.float() / 255).contiguous(memory_format=torch.channels_last)


def channels_last(batch: np.ndarray) -> Tensor:
    """Returns images ``(B, H, W, 3)`` as ``(B, 3, H, W)``, the same memory."""
    return torch.from_numpy(batch).permute(0, 3, 1, 2)
