"""Measures how similar reconstructions are to the true images, and loads the networks for it."""

import hashlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn.functional import interpolate, normalize

from feddg.errors import WeightsError, need
from feddg.models.backbones import build_network, read_weights
from feddg.rng import derive_seed, stream
from feddg.storage import is_file
from feddg.styles.codec import load_codec

# Networks that judge images, and the names that their verdicts may carry.
#
# A metric is called FID, KID, IS or LPIPS only where the published weights behind that name were
# read from a file that the user gave. Everything else carries the name of its network:
# ``FD[resnet18]``. Nothing is ever downloaded.


COMPACT = "compact"
INCEPTION = "inception"
PUBLISHED = {
    INCEPTION: "6726825d",
    "alex": "7be5be79",
    "vgg": "397923af",
    "squeeze": "b8a52dc0",
}
"""Beginnings of the SHA-256 of published files: FID's Inception, and LPIPS's networks."""
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
        name: its name in its metrics.
        maps: returns feature maps ``(n, C, h, w)`` of images, shallow to deep; None if it has none.
        vectors: returns vectors ``(n, d)`` of images.
        head: returns logits ``(n, classes)`` of vectors; None if it has no classes.
        published: whether its metrics may use the published names.
    """

    name: str
    maps: Callable[[Images], list[Tensor]] | None
    vectors: Callable[[Images], Tensor]
    head: Callable[[Tensor], Tensor] | None = None
    published: bool = False

    def named(self, short: str, published: str) -> str:
        """Returns the name of a metric of this network."""
        return published if self.published else f"{short}[{self.name}]"


def read_extractor(spelling: str) -> Extractor:
    """Returns the network for ``compact``, ``inception=FILE`` or ``BACKBONE=FILE``.

    Raises:
        WeightsError: the file is missing, does not fit, or is not the published one.
    """
    name, _, file = spelling.partition("=")
    if name == COMPACT and not file:
        return compact_extractor()
    if not file:
        raise WeightsError(
            f"extractor {name!r} needs its weights: write {name}=FILE (nothing is downloaded); "
            f"{COMPACT!r} needs none"
        )
    if name == INCEPTION:
        return _inception(Path(file))
    return _backbone(name, Path(file))


def compact_extractor() -> Extractor:
    """Returns the encoder in this package; it has no classes."""
    codec = load_codec(COMPACT)

    def maps(images: Images) -> list[Tensor]:
        return [codec.encode(images)]

    def vectors(images: Images) -> Tensor:
        found = codec.encode(images)
        return torch.cat([found.mean((2, 3)), found.std((2, 3))], 1)

    return Extractor(COMPACT, maps, vectors)


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
        name,
        maps if network.stages else None,
        lambda images: network.features(_enlarged(images)),
        network.classifier if is_ours else None,
    )


def _inception(file: Path) -> Extractor:
    require_published(file, INCEPTION)
    need("attacks", "FID", ["torch_fidelity"])
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    network = FeatureExtractorInceptionV3(INCEPTION, ["2048"], feature_extractor_weights_path=file)

    def vectors(images: Images) -> Tensor:
        found: Tensor = network((images * 255).round().to(torch.uint8))[0]
        return found

    # The published score leaves the last layer's bias out.
    head = lambda found: found @ network.fc.weight.T  # noqa: E731
    return Extractor(INCEPTION, None, vectors, head, published=True)


def read_lpips(spelling: str) -> Callable[[Images, Images], Tensor]:
    """Returns LPIPS: its published heads, on the network ``alex=FILE``, ``vgg=`` or ``squeeze=``.

    Raises:
        WeightsError: the file is not torchvision's published one for that network.
    """
    name, _, file = spelling.partition("=")
    if name not in PUBLISHED or name == INCEPTION or not file:
        raise WeightsError("LPIPS needs its trunk's weights: alex=FILE, vgg=FILE or squeeze=FILE")
    require_published(Path(file), name)
    need("attacks", "LPIPS", ["lpips"])
    from lpips import LPIPS

    # It asks torchvision in words that are going out of use.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
        network = LPIPS(net=name, pnet_rand=True, verbose=False).eval().requires_grad_(False)
    given = read_weights(Path(file))
    # The trunk's slices keep the numbers of torchvision's ``features``.
    own = network.net.state_dict()
    own = {key: given["features." + key.split(".", 1)[1]] for key in own}
    network.net.load_state_dict(own)

    def distances(one: Images, other: Images) -> Tensor:
        found: Tensor = network(one, other, normalize=True)
        return found.flatten()

    return distances


def require_published(file: Path, name: str) -> None:
    """Raises WeightsError if a file's hash is not that of the published one."""
    if not is_file(file, WeightsError):
        raise WeightsError(f"weights file {file} does not exist")
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if not found.startswith(PUBLISHED[name]):
        raise WeightsError(
            f"{file} is not the published file for {name!r} (its SHA-256 begins with {found[:8]}, "
            f"not {PUBLISHED[name]}); FID, KID, IS and LPIPS are names of the published weights "
            "only. Another network stands under its own name: --extractor resnet18=FILE"
        )


def perceptual_distances(extractor: Extractor, one: Images, other: Images) -> Tensor:
    """Returns perceptual distances pair by pair, ``(n,)``: LPIPS without learned weights.

    Zhang et al., "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric" (CVPR
    2018), Eq. 1 with all weights 1: squared distance between feature vectors of unit length, mean
    over places, summed over maps.
    """
    assert extractor.maps is not None, f"{extractor.name} has no feature maps"
    pairs = zip(extractor.maps(one), extractor.maps(other), strict=True)
    distances = [
        (normalize(a, dim=1) - normalize(b, dim=1)).square().sum(1).mean((1, 2)) for a, b in pairs
    ]
    return torch.stack(distances).sum(0)


def perceptual_points(extractor: Extractor, images: Images) -> Tensor:
    """Returns points ``(n, k)`` whose squared distances are the perceptual ones."""
    assert extractor.maps is not None, f"{extractor.name} has no feature maps"
    with torch.inference_mode():
        parts = [
            torch.cat([_weighed(found) for found in extractor.maps(part)], 1)
            for part in images.split(AT_ONCE)
        ]
    return torch.cat(parts).clone()


def _weighed(found: Tensor) -> Tensor:
    places = found.shape[-2] * found.shape[-1]
    unit: Tensor = normalize(found, dim=1)
    return unit.flatten(1) / math.sqrt(places)


def _enlarged(images: Images) -> Images:
    side = max(LEAST_SIDE, images.shape[-1])
    if images.shape[-1] == side:
        return images
    large: Tensor = interpolate(images, (side, side), mode="bilinear", antialias=True)
    return large


@dataclass(frozen=True)
class Judges:
    """The networks that compare reconstructions.

    Attributes:
        extractor: for distances between collections, and the class score.
        eye: for the perceptual distance, and for retrieval.
        lpips: the published perceptual distance, if its weights are given.
    """

    extractor: Extractor = field(default_factory=compact_extractor)
    eye: Extractor = field(default_factory=compact_extractor)
    lpips: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def perceptual_name(self) -> str:
        """The name of the perceptual distance."""
        return "LPIPS" if self.lpips else self._looker.named("PD", "PD")

    @property
    def _looker(self) -> Extractor:
        return self.extractor if self.extractor.maps is not None else self.eye

    def perceptual(self, one: Tensor, other: Tensor) -> Tensor:
        """Returns perceptual distances pair by pair, ``(n,)``."""
        with torch.inference_mode():
            pairs = zip(one.split(AT_ONCE), other.split(AT_ONCE))
            work = self.lpips or (lambda a, b: perceptual_distances(self._looker, a, b))
            return torch.cat([work(a, b) for a, b in pairs]).clone()


def psnr(one: Tensor, other: Tensor) -> Tensor:
    """Returns PSNR in dB, pair by pair, ``(n,)``; images ``(n, 3, H, W)`` in [0, 1]."""
    from torchmetrics.functional.image import peak_signal_noise_ratio

    found: Tensor = peak_signal_noise_ratio(
        one, other, data_range=1.0, reduction="none", dim=(1, 2, 3)
    )
    return found.clamp(max=100.0)


def ssim(one: Tensor, other: Tensor) -> Tensor:
    """Returns SSIM pair by pair, ``(n,)``; images ``(n, 3, H, W)`` in [0, 1], 12 pixels or more."""
    from torchmetrics.functional.image import structural_similarity_index_measure

    found = structural_similarity_index_measure(one, other, data_range=1.0, reduction="none")
    assert isinstance(found, Tensor)
    return found.reshape(-1)


@dataclass(frozen=True)
class Collection:
    """The outputs of an extractor for images.

    Attributes:
        vectors: ``(n, d)``.
        logits: ``(n, classes)``, or None.
    """

    vectors: Tensor
    logits: Tensor | None = None

    @classmethod
    def of(cls, images: Tensor, extractor: Extractor) -> "Collection":
        """Returns the outputs for images ``(n, 3, H, W)`` in [0, 1]."""
        vectors = _over_parts(extractor.vectors, images)
        head = extractor.head
        return cls(vectors, None if head is None else _over_parts(head, vectors))

    def take(self, positions: Tensor) -> "Collection":
        """Returns the outputs of some of the images."""
        logits = None if self.logits is None else self.logits[positions]
        return Collection(self.vectors[positions], logits)


def collection_scores(
    drawn: Collection, true: Collection, extractor: Extractor, seed: int
) -> dict[str, float]:
    """Returns distances between two collections of equal size, and the class score of the first.

    The Frechet distance needs more images than dimensions: both sides are projected by the same
    random matrix to at most half as many dimensions as there are images.

    Args:
        drawn: outputs for the reconstructions.
        true: outputs for as many true images.
        extractor: the network that computed them.
        seed: seed of projection and subsets.

    Raises:
        ValueError: the collections differ in size.
    """
    vectors = [drawn.vectors, true.vectors]
    if len(vectors[0]) != len(vectors[1]):
        sizes = " against ".join(str(len(part)) for part in vectors)
        raise ValueError(f"{sizes} images: give both sides as many")
    if len(vectors[0]) < FEWEST_OF_COLLECTION:
        return {}
    scores = {
        extractor.named("FD", "FID"): frechet_distance(*_projected(vectors, seed)),
        extractor.named("KD", "KID"): kernel_distance(vectors[0], vectors[1], seed),
    }
    if drawn.logits is not None:
        scores[extractor.named("score", "IS")] = class_score(drawn.logits)
    return scores


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


@dataclass(frozen=True)
class Retrieval:
    """Whether the true image of a reconstruction can be found among others.

    Attributes:
        ranks: ``(n,)`` share of the other candidates that are nearer than the true image, in [0,
            1]; 0.5 is chance. NaN if there is no other.
        first: share of reconstructions whose true image is nearest.
        first_chance: that share by chance.
    """

    ranks: Tensor
    first: float
    first_chance: float


def retrieval(drawn: Tensor, true: Tensor, groups: Tensor) -> Retrieval:
    """Ranks the true image of each reconstruction among the true images of its group.

    Args:
        drawn: ``(n, k)`` points of the reconstructions, see ``perceptual_points``.
        true: points of their true images.
        groups: ``(n,)`` the group of each, for example its domain.
    """
    distances = torch.cdist(drawn, true)
    own = distances.diagonal()[:, None]
    others = (groups[:, None] == groups[None, :]).fill_diagonal_(False)
    nearer = ((distances < own).double() + 0.5 * (distances == own).double()) * others
    counts = others.sum(1)
    ranks = torch.where(counts > 0, nearer.sum(1) / counts.clamp(min=1), torch.nan)
    comparable = counts > 0
    if not comparable.any():
        return Retrieval(ranks, math.nan, math.nan)
    # With k others no nearer, the true one is first with a chance of 1 / (1 + ties).
    ties = (others & (distances == own)).sum(1)
    firsts = ((nearer.sum(1) - 0.5 * ties) == 0).double() / (1 + ties)
    chance = (1.0 / (1 + counts))[comparable].mean()
    return Retrieval(ranks, float(firsts[comparable].mean()), float(chance))


@dataclass(frozen=True)
class MeanInterval:
    """A mean with its 95 % interval; NaN if undefined."""

    mean: float
    low: float
    high: float

    def within(self, least: float, most: float) -> "MeanInterval":
        """Returns the interval clipped to the quantity's range."""
        return MeanInterval(self.mean, max(self.low, least), min(self.high, most))


def clustered_mean(values: Tensor, clusters: Tensor) -> MeanInterval:
    """Returns the mean of cluster means, with Student's interval over clusters.

    Args:
        values: ``(n,)``; NaN is ignored.
        clusters: ``(n,)`` ids, such as clients; values of one cluster are not independent.
    """
    clustered = ~values.isnan()
    values, clusters = values[clustered].double(), clusters[clustered]
    means = numpy.array([float(values[clusters == c].mean()) for c in clusters.unique().tolist()])
    if not len(means):
        return MeanInterval(math.nan, math.nan, math.nan)
    mean = float(means.mean())
    if len(means) < 2:
        return MeanInterval(mean, math.nan, math.nan)
    half = float(means.std(ddof=1) / len(means) ** 0.5 * stats.t.ppf(0.975, len(means) - 1))
    return MeanInterval(mean, mean - half, mean + half)


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
