"""From the images of a client to its one style, and from all clients' styles to a common one.

PARDON, also published as FISC: Nguyen et al., "PARDON: Privacy-Aware and Robust Federated Domain
Generalization" (ICDCS 2025), Eq. 1 to 5.
"""

from typing import Literal

import numpy as np
import torch
from torch import Generator, Tensor

from feddg.styles.finch import finch
from feddg.styles.statistics import FeatureMoments, style_from_averages

SMALLEST_DEVIATION = 1e-5
"""Standard deviations of a perturbed style are kept at or above this."""


def client_style(
    moments: FeatureMoments,
    labels: Tensor | np.ndarray,
    combine: Literal["mean", "mixture"] = "mean",
) -> Tensor:
    """Returns the style of a client whose images are clustered (Eq. 1 and 2).

    Every cluster counts the same, whatever its size.

    Args:
        moments: one row per image.
        labels: ``(n,)`` int, the cluster of each image, counted from 0; all 0 gives the client's
            pooled style.
        combine: ``mean`` averages the clusters' means and standard deviations, as the paper
            writes; ``mixture`` takes the standard deviation of the clusters' mixture, which
            includes the spread between them, as the released code does.

    Returns:
        ``(2, C)`` float64.
    """
    clusters = moments.pooled(labels)
    if combine == "mixture":
        return style_from_averages(clusters.averages.mean(0))
    return clusters.styles().mean(0)


def interpolation_style(
    styles: Tensor,
    clustering: bool = True,
    partition: Literal["finest", "coarsest"] = "finest",
    median: Literal["average", "lower"] = "average",
) -> tuple[Tensor, Tensor]:
    """Returns the style between all clients' styles (Eq. 3 to 5), and the clients' groups.

    FINCH groups the clients by their concatenated means and standard deviations; the result is
    the element-wise median of the groups' mean styles.

    Args:
        styles: ``(N, 2, C)``, one per client.
        clustering: False takes the plain mean of all styles instead (ablation v2).
        partition: which of FINCH's partitions makes the groups.
        median: of an even number of groups, the mean of the middle two or the lower one (the
            released code).

    Returns:
        ``(2, C)`` in the type of ``styles``, and the group of each client, ``(N,)`` int64.
    """
    if not clustering:
        return styles.mean(0), torch.zeros(len(styles), dtype=torch.int64)
    partitions = finch(styles.flatten(1).cpu().numpy())
    chosen = partitions.finest if partition == "finest" else partitions.coarsest
    groups = torch.from_numpy(chosen)
    means = torch.stack([styles[groups == group].mean(0) for group in range(chosen.max() + 1)])
    if median == "lower":
        return means.median(dim=0).values, groups
    return means.quantile(0.5, dim=0, interpolation="midpoint"), groups


def perturb(style: Tensor, scale: float, coefficient: float, generator: Generator) -> Tensor:
    """Returns a style that was blurred before it left the client (FISC, Table 10).

    v' = (1 - p) v + N(0, s^2), element by element, as FedPCL defines it. This is a test of
    robustness and no differential privacy: nothing bounds what one image contributes.

    Args:
        style: ``(2, C)``.
        scale: s, the standard deviation of the noise.
        coefficient: p in [0, 1], the share of the style that is taken away.
        generator: a CPU generator for the noise.
    """
    noise = torch.randn(style.shape, generator=generator, dtype=style.dtype)
    mean, deviation = (1 - coefficient) * style + scale * noise.to(style.device)
    return torch.stack([mean, deviation.clamp(min=SMALLEST_DEVIATION)])
