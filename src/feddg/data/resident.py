"""Pixels that stay on the device: an image is sent to it once, not with every batch.

A copy from ordinary memory makes the host wait until the device has done all that was asked of it,
so a batch sent with every step leaves the device idle between steps.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

SHARE = 0.25
"""Of a device's free memory, what pixels may take; the rest is for networks and feature maps."""


class ResidentPixels:
    """Rows of an array on a device, sent when they are first asked for."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        """Reserves memory for all rows; sends none.

        Args:
            shape: ``(count, size, size, 3)``.
            device: not the CPU.
        """
        with torch.inference_mode(False):  # who evaluates first must not be the only one to write
            self._pixels = torch.empty(shape, dtype=torch.uint8, device=device)
        self._sent = np.zeros(shape[0], dtype=bool)

    def gather(self, rows: np.ndarray, read: Callable[[np.ndarray], np.ndarray]) -> Tensor:
        """Returns rows, ``(len(rows), 3, size, size)`` uint8 in channels-last memory order.

        Args:
            rows: ``(B,)`` int64, repeats allowed.
            read: returns the pixels of rows that were never sent, ``(n, size, size, 3)`` uint8.
        """
        device = self._pixels.device
        new = np.unique(rows[~self._sent[rows]])
        if len(new):
            self._pixels[torch.from_numpy(new).to(device)] = torch.from_numpy(read(new)).to(device)
            self._sent[new] = True
        chosen = self._pixels.index_select(0, torch.from_numpy(rows).to(device))
        return chosen.permute(0, 3, 1, 2)


def fits(count: int, device: torch.device) -> bool:
    """Whether so many bytes may stay on a device; never on one that does not tell its memory."""
    memory = getattr(torch.get_device_module(device), "mem_get_info", None)
    return memory is not None and count <= SHARE * memory(device)[0]
