"""Distances between reconstructions and true images as papers report them, by any network.

FID, KID, IS and LPIPS are names of published weights; these stand under other names: ``FD``,
``KD``, ``score`` and ``PD``, by the encoder in the package or ``BACKBONE=FILE``. Nothing is ever
downloaded.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, normalize

from feddg.errors import WeightsError
from feddg.models.backbones import build_network, read_weights
from feddg.rng import derive_seed, stream
from feddg.styles.codec import load_codec

LEAST_SIDE = 64
"""Images are enlarged to this side for networks trained on larger ones."""
AT_ONCE = 64
PARTS = ("weight", "bias")

Images = Tensor
"""``(n, 3, H, W)``, RGB in [0, 1]."""
FEWEST_OF_COLLECTION = 8
"""Fewest images on each side for a distance between collections."""
SUBSETS, SUBSET = 50, 100
"""Kernel distance: number of subsets, and largest size of a subset."""


@dataclass(frozen=True)
class Extractor:
    """A network that compares images.

    Attributes:
        maps: returns feature maps ``(n, C, h, w)`` of images, shallow to deep; none if it has none.
        vectors: returns vectors ``(n, d)`` of images.
        head: returns logits ``(n, classes)`` of vectors; None if it has no classes.
    """

    maps: Callable[[Images], list[Tensor]]
    vectors: Callable[[Images], Tensor]
    head: Callable[[Tensor], Tensor] | None = None

    def scores(self, drawn: Images, true: Images, seed: int) -> dict[str, float]:
        """Returns distances between images and as many true ones, and the class score.

        The Frechet distance needs more images than dimensions: both sides are projected by the same
        random matrix to at most half as many dimensions as there are images.
        """
        with torch.inference_mode():
            pairs = zip(drawn.split(AT_ONCE), true.split(AT_ONCE))
            distances = torch.cat([perceptual_distances(self, *pair) for pair in pairs])
        scores = {"PD": float(distances.mean())}
        if len(drawn) < FEWEST_OF_COLLECTION:
            return scores
        one, other = (_over_parts(self.vectors, part) for part in (drawn, true))
        scores["FD"] = frechet_distance(*_projected([one, other], seed))
        scores["KD"] = kernel_distance(one, other, seed)
        if self.head is not None:
            scores["score"] = class_score(_over_parts(self.head, one))
        return scores


def read_extractor(spelling: str) -> Extractor:
    """Returns the network for ``compact`` or ``BACKBONE=FILE``.

    Raises:
        WeightsError: the file is missing or does not fit.
    """
    name, _, file = spelling.partition("=")
    if name == "compact":
        return compact_extractor()
    if not file:
        raise WeightsError(f"extractor {name!r} needs its weights: write {name}=FILE")
    return _backbone(name, Path(file))


def compact_extractor() -> Extractor:
    """Returns the encoder in this package; it has no classes."""
    codec = load_codec("compact")

    def maps(images: Images) -> list[Tensor]:
        return [codec.encode(images)]

    def vectors(images: Images) -> Tensor:
        found = codec.encode(images)
        return torch.cat([found.mean((2, 3)), found.std((2, 3))], 1)

    return Extractor(maps, vectors)


def _backbone(name: str, file: Path) -> Extractor:
    state = read_weights(file)
    head = getattr(build_network(name, 2, weights=None).featurizer, "head", "classifier")
    own = {part: state[f"{head}.{part}"] for part in PARTS if f"{head}.{part}" in state}
    is_ours = own.keys() == set(PARTS)
    classes = len(own["bias"]) if is_ours else 2
    network = build_network(name, classes, weights=str(file)).eval().requires_grad_(False)
    if is_ours:
        network.classifier.load_state_dict(own)

    def maps(images: Images) -> list[Tensor]:
        found: list[Tensor] = []
        hooks = [
            stage.register_forward_hook(lambda *parts: found.append(parts[-1]))
            for stage in network.stages
        ]
        try:
            network.features(_enlarged(images))
        finally:
            for hook in hooks:
                hook.remove()
        return found

    return Extractor(
        maps,
        lambda images: network.features(_enlarged(images)),
        network.classifier if is_ours else None,
    )


def perceptual_distances(extractor: Extractor, one: Images, other: Images) -> Tensor:
    """Returns perceptual distances pair by pair, ``(n,)``: LPIPS without learned weights.

    Zhang et al., "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric" (CVPR
    2018), Eq. 1 with all weights 1: squared distance between feature vectors of unit length, mean
    over places, summed over maps.
    """
    pairs = zip(extractor.maps(one), extractor.maps(other), strict=True)
    distances = [
        (normalize(a, dim=1) - normalize(b, dim=1)).square().sum(1).mean((1, 2)) for a, b in pairs
    ]
    return torch.stack(distances).sum(0)


def _enlarged(images: Images) -> Images:
    side = max(LEAST_SIDE, images.shape[-1])
    if images.shape[-1] == side:
        return images
    large: Tensor = interpolate(images, (side, side), mode="bilinear", antialias=True)
    return large


def frechet_distance(one: Tensor, other: Tensor) -> float:
    """Returns the Frechet distance between Gaussians fitted to two sets of vectors ``(n, d)``."""
    from torchmetrics.image.fid import FrechetInceptionDistance

    with warnings.catch_warnings(action="ignore"):
        return float(
            _of_vectors(FrechetInceptionDistance(feature=_Given(one.shape[1])), one, other)
        )


def kernel_distance(one: Tensor, other: Tensor, seed: int) -> float:
    """Returns the unbiased squared kernel distance of two sets ``(n, d)``; it may be negative."""
    from torchmetrics.image.kid import KernelInceptionDistance

    subset = min(SUBSET, len(one) - 1)
    with warnings.catch_warnings(action="ignore"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "subsets"))
        metric = KernelInceptionDistance(
            feature=_Given(one.shape[1]), subsets=SUBSETS, subset_size=subset
        )
        return float(_of_vectors(metric, one, other)[0])


def class_score(logits: Tensor) -> float:
    """Returns exp of the mean divergence of class probabilities from their mean; at least 1.

    Salimans et al., "Improved Techniques for Training GANs" (NeurIPS 2016), over all images at
    once, because torchmetrics' mean over ten parts is unreliable for few images.

    Args:
        logits: ``(n, classes)``.
    """
    log_shares = logits.double().log_softmax(1)
    mean = log_shares.exp().mean(0, keepdim=True).log()
    return float((log_shares.exp() * (log_shares - mean)).sum(1).mean().exp())


class _Given(nn.Module):
    """Returns precomputed vectors, given in the shape of images."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.num_features = length

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1)


def _of_vectors(metric: Any, drawn: Tensor, true: Tensor) -> Any:
    """Returns a torchmetrics metric of vectors ``(n, d)``, passed as if they were images."""
    for vectors, real in ((true, True), (drawn, False)):
        metric.update(vectors.double()[:, :, None, None], real=real)
    return metric.compute()


def _projected(vectors: list[Tensor], seed: int) -> list[Tensor]:
    most = max(1, len(vectors[0]) // 2)
    length = vectors[0].shape[1]
    if length <= most:
        return vectors
    generator = stream(seed, "projection", length, most)
    directions = torch.linalg.qr(torch.randn(length, most, generator=generator))[0]
    return [part.float() @ directions for part in vectors]


def _over_parts(work: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.cat([work(part).float().cpu() for part in images.split(AT_ONCE)]).clone()
