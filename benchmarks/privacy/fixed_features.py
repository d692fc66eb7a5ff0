"""A few trained features on fixed ones, for noise that grows with the number of trained weights.

Private training wants few weights and good features (Tramer and Boneh, "Differentially Private
Learning Needs Better Features (or Much More Data)", ICLR 2021). Here most of the network is not
trained: edges by direction for digits, a ResNet-18 with ImageNet weights for PACS. What is trained,
sent and noised is a layer of 16 features on top, so that a loss on features (PARDON's triplets) has
something to train, and the head.

Importing registers the backbones ``fixed_edges`` and ``fixed_resnet18``. The second reads the file
named by the environment variable FEDDG_RESNET18. Features of an image are computed once a process.
"""

import hashlib
import os
from collections.abc import Callable

import torch
from torch import Tensor, nn

from feddg.models.backbones import build_network, register_backbone

GRID = 4
FIXED = 4 * GRID**2
TRAINED = 16


class OnFixedFeatures(nn.Module):
    """16 trained features on 64 that are not trained and belong to no message."""

    def __init__(self, features: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.out_features = TRAINED
        self.layer = nn.Linear(FIXED, TRAINED)
        self._features: Callable[[Tensor], Tensor] = features

    @property
    def stages(self) -> list[nn.Module]:
        """None."""
        return []

    def forward(self, images: Tensor) -> Tensor:
        """Maps ``(B, 3, H, W)`` to ``(B, 16)``."""
        found: Tensor = self.layer(self._features(images)).relu()
        return found


def edges(images: Tensor) -> Tensor:
    """Returns ``(B, 64)``: edge strength in 4 directions over a 4 x 4 grid, of length 8.

    Directions have no sign, so that dark on light is as light on dark.
    """
    grey = images.mean(1, keepdim=True)
    sobel = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]])
    diagonal = torch.tensor([[0.0, 1, 2], [-1, 0, 1], [-2, -1, 0]])
    kernels = torch.stack([sobel, sobel.T, diagonal, diagonal.flip(1)])[:, None]
    strength = nn.functional.conv2d(grey, kernels.to(grey), padding=1).abs()
    found = nn.functional.adaptive_avg_pool2d(strength, GRID).flatten(1)
    return centred(found)


def centred(features: Tensor) -> Tensor:
    """Returns features ``(B, d)`` less their mean over the d, of length 8."""
    return 8 * nn.functional.normalize(features - features.mean(1, keepdim=True))


class Remembered:
    """Features of images, each computed once."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        self._compute = compute
        self._known: dict[bytes, Tensor] = {}

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Returns the features of each image, ``(B, features)``."""
        arrays = images.detach().contiguous().numpy()
        keys = [hashlib.blake2b(image.tobytes(), digest_size=16).digest() for image in arrays]
        new = [place for place, key in enumerate(keys) if key not in self._known]
        if new:
            for place, found in zip(new, self._compute(images[new])):
                self._known[keys[place]] = found.clone()
        return torch.stack([self._known[key] for key in keys])

    def __deepcopy__(self, memo: object) -> "Remembered":
        return self


def resnet18_features(file: str) -> Callable[[Tensor], Tensor]:
    """Returns a function to ``(B, 64)``: pooled features, projected by fixed random signs."""
    return projected(build_network("resnet18", 7, weights=file).eval().featurizer)


def projected(trunk: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Returns a function to ``(B, 64)`` from one to ``(B, 512)``."""
    signs = torch.randint(2, (512, FIXED), generator=torch.Generator().manual_seed(0))
    project = (2.0 * signs - 1) / FIXED**0.5

    def compute(images: Tensor) -> Tensor:
        with torch.no_grad():
            found = trunk(images)  # a network normalises before it asks a backbone
        return centred(centred(found) @ project)

    return compute


_KNOWN: dict[str, Remembered] = {}


@register_backbone("fixed_edges")
def fixed_edges() -> nn.Module:
    """1,210 weights with a head for 10 classes."""
    return OnFixedFeatures(_KNOWN.setdefault("edges", Remembered(edges)))


@register_backbone("fixed_resnet18")
def fixed_resnet18() -> nn.Module:
    """1,159 weights with a head for 7 classes."""
    if "resnet18" not in _KNOWN:
        _KNOWN["resnet18"] = Remembered(resnet18_features(os.environ["FEDDG_RESNET18"]))
    return OnFixedFeatures(_KNOWN["resnet18"])
