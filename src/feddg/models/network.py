"""The network every method trains: featurizer, optional embedding, classifier."""

from collections.abc import Callable
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from feddg.rng import derive_seed

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
Embedding = Literal["none", "linear", "bottleneck"]
Layer = TypeVar("Layer", bound=nn.Module)


class Network(nn.Module):
    """A featurizer ``f`` with embedding ``z = f(x)`` and a linear classifier ``g``.

    Images come in as RGB in [0, 1]; they are normalised with ImageNet's mean and standard deviation
    inside, so that everything before the network (augmentation, style transfer, frequency mixing)
    works on plain images.

    Args:
        featurizer: maps normalised images ``(B, 3, H, W)`` to ``(B, d)``; has ``out_features``.
        classes: number of classes.
        embedding: ``none``; ``linear``, PARDON's Linear(d -> d) in front of the classifier; or
            ``bottleneck``, CSAC's and FedIG's Linear(d -> 256), BatchNorm1d, ReLU.
        seed: the experiment's seed, for the layers that a method adds.

    Attributes:
        heads: extra heads that a method adds, by name.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self, featurizer: nn.Module, classes: int, embedding: Embedding = "none", seed: int = 0
    ) -> None:
        super().__init__()
        self.classes = classes
        self.seed = seed
        self.featurizer = featurizer
        features = int(featurizer.out_features)  # type: ignore[arg-type]
        self.embedding, self.features_dimension = _embedding(embedding, features)
        self.classifier: nn.Module = nn.Linear(self.features_dimension, classes)
        self.heads = nn.ModuleDict()
        mean, std = (torch.tensor(m).view(3, 1, 1) for m in (IMAGENET_MEAN, IMAGENET_STD))
        self.register_buffer("scale", 1 / std, persistent=False)
        self.register_buffer("shift", -mean / std, persistent=False)

    def normalize(self, images: Tensor) -> Tensor:
        """Normalises RGB images in [0, 1] with ImageNet's moments."""
        return torch.addcmul(self.shift, images, self.scale)

    def denormalize(self, values: Tensor) -> Tensor:
        """Undoes :meth:`normalize`."""
        return (values - self.shift) / self.scale

    def features(self, images: Tensor) -> Tensor:
        """Returns embeddings ``z`` of shape ``(B, d)`` for RGB images in [0, 1]."""
        embeddings: Tensor = self.embedding(self.featurizer(self.normalize(images)))
        return embeddings

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits of shape ``(B, classes)`` for RGB images in [0, 1]."""
        logits: Tensor = self.classifier(self.features(images))
        return logits

    def initialised(self, name: str, build: Callable[[], Layer]) -> Layer:
        """Returns the layer that ``build`` makes, initialised from a stream of its own.

        Methods make their heads this way: ``heads["x"] = network.initialised("x", lambda: ...)``.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(self.seed, "init", name))
            return build()

    @property
    def stages(self) -> list[nn.Module]:
        """The featurizer's blocks from shallow to deep, for methods that work on feature maps."""
        return list(getattr(self.featurizer, "stages", []))


def _embedding(kind: Embedding, features: int) -> tuple[nn.Module, int]:
    if kind == "linear":
        return nn.Linear(features, features), features
    if kind == "bottleneck":
        return nn.Sequential(nn.Linear(features, 256), nn.BatchNorm1d(256), nn.ReLU()), 256
    return nn.Identity(), features
