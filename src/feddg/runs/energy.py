"""Energy: how unlike the training images an image is to a model."""

import math

import torch
from torch import Tensor

INSIDE_SHARE = 0.95
"""Share of in-domain validation images at or below the threshold."""
FLAT = 1e-3
"""Smaller differences between energies are rounding: the model gives log-probabilities."""


def energy(logits: Tensor) -> Tensor:
    """Returns each image's free energy at temperature 1: ``-logsumexp`` of its logits.

    It is higher for images unlike the training images (Liu et al., "Energy-based
    Out-of-distribution Detection", NeurIPS 2020, Eq. 4). Log-probabilities have energy 0, whatever
    the image.

    Args:
        logits: ``(B, classes)``.

    Returns:
        ``(B,)``.
    """
    return -torch.logsumexp(logits, dim=1)


def energy_threshold(energies: Tensor, inside: float = INSIDE_SHARE) -> float | None:
    """Returns the energy above which an image counts as unlike the training images.

    Args:
        energies: ``(n,)`` energies of in-domain images not used in training.
        inside: at least this share of them is at or below the threshold.

    Returns:
        The threshold, or None if the model gives log-probabilities, whose energy is always 0.
    """
    if not len(energies) or float(energies.max() - energies.min()) < FLAT:
        return None
    return float(energies.kthvalue(math.ceil(inside * len(energies))).values)
