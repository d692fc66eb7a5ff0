"""Energy: how unlike the training images an image is, by the model's own logits."""

import numpy
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

INSIDE_SHARE = 0.95
"""Share of in-domain validation images that the threshold lets pass."""
FLAT = 1e-3
"""Energies that differ by less are rounding: the model gives log-probabilities."""


def energy(logits: Tensor) -> Tensor:
    """Returns each image's free energy at temperature 1: ``-logsumexp`` of its logits.

    It is higher for images unlike those of training (Liu et al., "Energy-based Out-of-distribution
    Detection", NeurIPS 2020, Eq. 4). Log-probabilities have energy 0, whatever the image.

    Args:
        logits: ``(B, classes)``.

    Returns:
        ``(B,)``.
    """
    return -torch.logsumexp(logits, dim=1)


def energy_threshold(energies: Tensor, inside: float = INSIDE_SHARE) -> float | None:
    """Returns the energy above which an image counts as unlike training.

    Args:
        energies: ``(n,)`` of in-domain images that were not trained on.
        inside: share of them that lies at or below the threshold.

    Returns:
        None where energies say nothing: the model gives log-probabilities.
    """
    if not len(energies) or float(energies.max() - energies.min()) < FLAT:
        return None
    return float(torch.quantile(energies.double(), inside))


def separation(inside: Tensor, outside: Tensor) -> float:
    """Returns how well energies tell foreign images from in-domain ones, as an AUROC.

    Args:
        inside: energies ``(n,)`` of in-domain images.
        outside: energies ``(m,)`` of foreign images.

    Returns:
        In [0, 1]: 0.5 is guessing, 1 a clean separation.
    """
    scores = torch.cat([inside, outside]).numpy()
    foreign = numpy.concatenate([numpy.zeros(len(inside)), numpy.ones(len(outside))])
    return float(roc_auc_score(foreign, scores))
