"""Networks that judge images, and the names that their verdicts may carry.

A metric is called FID, KID, IS or LPIPS only where the published weights behind that name were read
from a file that the user gave. Everything else carries the name of its network: ``FD[resnet18]``.
Nothing is ever downloaded.
"""

import hashlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import interpolate, normalize

from feddg.errors import WeightsError
from feddg.models.backbones import build_network, read_weights
from feddg.storage import is_file
from feddg.styles.codec import load_codec

COMPACT = "compact"
INCEPTION = "inception"
PUBLISHED = {
    INCEPTION: "6726825d",
    "alex": "7be5be79",
    "vgg": "397923af",
    "squeeze": "b8a52dc0",
}
"""How the SHA-256 of the published files begins: FID's Inception, and LPIPS's trunks."""
LEAST_SIDE = 64
"""Side to which images are enlarged for networks that were trained on larger ones."""
AT_ONCE = 64
PARTS = ("weight", "bias")

Images = Tensor
"""``(n, 3, H, W)``, RGB in [0, 1]."""


@dataclass(frozen=True)
class Extractor:
    """A network that judges images.

    Attributes:
        name: what stands in the names of its metrics.
        maps: from images to feature maps ``(n, C, h, w)``, shallow to deep; None if it has none.
        vectors: from images to ``(n, d)``.
        head: from vectors to logits ``(n, classes)``; None if it knows no classes.
        published: whether its metrics may carry the published names.
    """

    name: str
    maps: Callable[[Images], list[Tensor]] | None
    vectors: Callable[[Images], Tensor]
    head: Callable[[Tensor], Tensor] | None = None
    published: bool = False

    def named(self, short: str, published: str) -> str:
        """Returns what a metric of this network is called."""
        return published if self.published else f"{short}[{self.name}]"


def read_extractor(spelling: str) -> Extractor:
    """Returns the network that ``compact``, ``inception=FILE`` or ``BACKBONE=FILE`` names.

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
    """Returns the encoder inside this package; it knows no classes."""
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
    known = own.keys() == set(PARTS)
    classes = len(own["bias"]) if known else 2
    network = build_network(name, classes, weights=str(file)).eval().requires_grad_(False)
    if known:
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
        network.classifier if known else None,
    )


def _inception(file: Path) -> Extractor:
    require_published(file, INCEPTION)
    try:
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    except ImportError:
        raise WeightsError(
            "FID's network comes with torch-fidelity: pip install feddg[attacks]"
        ) from None
    network = FeatureExtractorInceptionV3(INCEPTION, ["2048"], feature_extractor_weights_path=file)

    def vectors(images: Images) -> Tensor:
        found: Tensor = network((images * 255).round().to(torch.uint8))[0]
        return found

    # The published score leaves the last layer's bias out.
    head = lambda found: found @ network.fc.weight.T  # noqa: E731
    return Extractor(INCEPTION, None, vectors, head, published=True)


def read_lpips(spelling: str) -> Callable[[Images, Images], Tensor]:
    """Returns LPIPS: its published heads, and the trunk of ``alex=FILE``, ``vgg=`` or ``squeeze=``.

    Raises:
        WeightsError: the file is not torchvision's published one for that trunk.
    """
    name, _, file = spelling.partition("=")
    if name not in PUBLISHED or name == INCEPTION or not file:
        raise WeightsError("LPIPS needs its trunk's weights: alex=FILE, vgg=FILE or squeeze=FILE")
    require_published(Path(file), name)
    try:
        from lpips import LPIPS
    except ImportError:
        raise WeightsError("LPIPS comes with: pip install feddg[attacks]") from None
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks torchvision in words that are going out of use
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
    """Raises WeightsError unless a file is the published one; its hash must begin as it should."""
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
    """Returns how unlike two images look, pair by pair, ``(n,)``: LPIPS without learnt weights.

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
