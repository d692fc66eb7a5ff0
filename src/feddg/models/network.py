"""The network every method trains: featurizer, optional embedding, classifier."""

import math
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.nn.modules.batchnorm import _BatchNorm

from feddg.rng import Ahead, DrawnFrom, derive_seed, stream

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
Embedding = Literal["none", "linear", "bottleneck"]
Layer = TypeVar("Layer", bound=nn.Module)
SMALLEST_DEVIATION = 1e-6


class Network(nn.Module):
    """A featurizer ``f`` with embedding ``z = f(x)`` and a linear classifier ``g``.

    Images come in as RGB in [0, 1]; they are normalised inside, as the featurizer's pretrained
    weights expect, so that everything before the network (augmentation, style transfer, frequency
    mixing) works on plain images.

    Args:
        featurizer: maps normalised images ``(B, 3, H, W)`` to ``(B, d)``; has ``out_features``.
        classes: number of classes.
        embedding: ``none``; ``linear``, PARDON's Linear(d -> d) in front of the classifier; or
            ``bottleneck``, CSAC's and FedIG's Linear(d -> 256), BatchNorm1d, ReLU.
        seed: the experiment's seed, for the layers that a method adds.
        mean: channel means of the colours that the featurizer expects; ImageNet's by default.
        std: their standard deviations.

    Attributes:
        heads: extra heads that a method adds, by name.
        frozen: entries of its state that are not trained, see :mod:`feddg.models.trained`.
        frozen_digest: digest of these entries; empty until it is first needed.
        mean: of the colours, as above.
        std: as above.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        featurizer: nn.Module,
        classes: int,
        embedding: Embedding = "none",
        seed: int = 0,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
    ) -> None:
        super().__init__()
        self.classes = classes
        self.seed = seed
        self.featurizer = featurizer
        features = int(featurizer.out_features)  # type: ignore[arg-type]
        self.embedding, self.features_dimension = _embedding(embedding, features)
        self.classifier: nn.Module = nn.Linear(self.features_dimension, classes)
        self.heads = nn.ModuleDict()
        self.frozen: frozenset[str] = frozenset()
        self.frozen_digest = ""
        self.register_buffer("scale", torch.ones(3, 1, 1), persistent=False)
        self.register_buffer("shift", torch.zeros(3, 1, 1), persistent=False)
        self.normalize_by(mean, std)

    def normalize_by(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Sets the mean and standard deviation for normalising images, three numbers each."""
        self.mean, self.std = tuple(mean), tuple(std)
        means, deviations = (torch.tensor(m).view(3, 1, 1).to(self.scale) for m in (mean, std))
        self.scale, self.shift = 1 / deviations, -means / deviations

    def normalize(self, images: Tensor) -> Tensor:
        """Normalises RGB images in [0, 1] by :attr:`mean` and :attr:`std`; features stay."""
        if images.dim() == 2:
            return images
        return torch.addcmul(self.shift, images, self.scale)

    def denormalize(self, values: Tensor) -> Tensor:
        """Undoes :meth:`normalize`."""
        return (values - self.shift) / self.scale

    def features(self, images: Tensor) -> Tensor:
        """Returns embeddings ``z`` of shape ``(B, d)`` for RGB images in [0, 1]."""
        return self.embedding(self.featurizer(self.normalize(images)))

    def features_of(self, versions: Sequence[Tensor]) -> list[Tensor]:
        """Returns the embeddings ``(B, d)`` of several versions ``(B, 3, H, W)`` of a batch.

        One pass serves all of them where an image's embedding does not depend on its batch; under
        training batch statistics, MixStyle and the like every version has a pass of its own.
        """
        if len(versions) == 1 or any(map(_looks_at_batches, self.modules())):
            return [self.features(images) for images in versions]
        return list(self.features(torch.cat(list(versions))).split([len(v) for v in versions]))

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits of shape ``(B, classes)`` for RGB images in [0, 1]."""
        return self.classifier(self.features(images))

    def initialised(self, name: str, build: Callable[[], Layer]) -> Layer:
        """Returns the layer that ``build`` makes, initialised from its own random stream.

        Methods create their heads like this: ``heads["x"] = network.initialised("x", lambda:
        ...)``.
        """
        with DrawnFrom(derive_seed(self.seed, "init", name)):
            return build()

    @property
    def stages(self) -> list[nn.Module]:
        """The featurizer's blocks from shallow to deep, for methods that work on feature maps."""
        return list(getattr(self.featurizer, "stages", []))


def tried(model: nn.Module, inputs: Tensor) -> Tensor:
    """Returns a model's outputs, in eval mode from now on; another call draws the same again."""
    with torch.no_grad(), DrawnFrom(0):
        outputs: Tensor = model.eval()(inputs)
    return outputs


def _looks_at_batches(layer: nn.Module) -> bool:
    """Whether a layer, or what is hooked to it, treats a pass as a whole; if in doubt, True."""
    watched = bool(layer._forward_hooks) or "forward" in vars(layer)
    return watched or (layer.training and isinstance(layer, (_BatchNorm, GaussianEmbedding)))


def _embedding(kind: Embedding, features: int) -> tuple[nn.Module, int]:
    if kind == "linear":
        return nn.Linear(features, features), features
    if kind == "bottleneck":
        return nn.Sequential(nn.Linear(features, 256), nn.BatchNorm1d(256), nn.ReLU()), 256
    return nn.Identity(), features


class Heads(nn.Module):
    """Frozen classifiers, one for each domain or client.

    Attributes:
        weight: ``(heads, classes, d)``.
        bias: ``(heads, classes)``.
        trained: ``(heads,)`` bool: the heads that a client has trained.
    """

    weight: Tensor
    bias: Tensor
    trained: Tensor

    def __init__(self, heads: int, classes: int, dimension: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(heads, classes, dimension))
        self.register_buffer("bias", torch.zeros(heads, classes))
        self.register_buffer("trained", torch.zeros(heads, dtype=torch.bool))

    def forward(self, embeddings: Tensor, which: Tensor) -> Tensor:
        """Returns the logits ``(n, B, classes)`` of the chosen heads.

        Args:
            embeddings: ``(B, d)``.
            which: ``(heads,)`` bool, or ``(n,)`` numbers of heads.
        """
        logits: Tensor = torch.einsum("bd,hcd->hbc", embeddings, self.weight[which])
        return logits + self.bias[which][:, None]


class MeanOverHeads(nn.Module):
    """Predicts with the mean softmax of the trained heads; returns its logarithm.

    Before any head is trained, the network's own classifier predicts.
    """

    def __init__(self, network: Network, heads: Heads) -> None:
        super().__init__()
        self.network = network
        self._heads = [heads]  # part of the network: a graph cannot hold a layer twice

    def forward(self, images: Tensor) -> Tensor:
        """Returns log-probabilities ``(B, classes)``; no branch, so that a graph can hold it."""
        network, (heads,) = self.network, self._heads
        embeddings = network.features(images)
        logits = torch.einsum("bd,hcd->hbc", embeddings, heads.weight) + heads.bias[:, None]
        logits = torch.cat([logits, network.classifier(embeddings)[None]]).float()
        counts = torch.cat([heads.trained, ~heads.trained.any(0, keepdim=True)])
        shares = logits.log_softmax(-1).masked_fill(~counts[:, None, None], -torch.inf)
        return shares.logsumexp(0) - counts.sum().log()


class GaussianEmbedding(nn.Module):
    """Maps features to a Gaussian; returns a sample of it in training, otherwise its mean.

    Attributes:
        ahead: the draws of the training samples; None returns the mean.
        last: mean and deviation, ``(B, d)`` each, of the last forward pass.
    """

    last: tuple[Tensor, Tensor]

    def __init__(self, inner: nn.Module, dimension: int) -> None:
        super().__init__()
        self.inner = inner
        self.moments = nn.Linear(dimension, 2 * dimension)
        self.ahead: Ahead | None = None

    def distribution(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mean and standard deviation, ``(B, d)`` each, in float32."""
        mean, raw = self.moments(self.inner(features)).float().chunk(2, dim=1)
        return mean, softplus(raw).clamp_min(SMALLEST_DEVIATION)

    def forward(self, features: Tensor) -> Tensor:
        """Returns ``(B, d)`` embeddings."""
        mean, deviation = self.last = self.distribution(features)
        if not self.training or self.ahead is None:
            return mean
        (noise,) = self.ahead.take(mean.device, mean.shape)
        sample = mean + deviation * noise
        sample.drawn_from = self.last  # type: ignore[attr-defined]
        return sample

    def moments_of(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mean and deviation of its embeddings; of the last pass, if they were changed."""
        return getattr(embeddings, "drawn_from", self.last)

    def draw_from(self, generator: torch.Generator | None) -> None:
        """Draws the training samples from a generator; None returns the mean from now on."""
        self.ahead = None if generator is None else Ahead(generator, _normal, self.ahead)


def _normal(generator: torch.Generator, shape: Sequence[int]) -> list[Tensor]:
    return [torch.randn(shape, generator=generator)]


def embedding_of(network: Network) -> GaussianEmbedding:
    """Returns the network's Gaussian embedding."""
    embedding = network.embedding
    assert isinstance(embedding, GaussianEmbedding)
    return embedding


class MeanOverSamples(nn.Module):
    """Predicts with the mean softmax over samples of the embedding; returns its logarithm."""

    noise: Tensor

    def __init__(self, network: Network, samples: int) -> None:
        super().__init__()
        self.network = network
        rng = stream(network.seed, "samples of the embedding")
        noise = torch.randn((samples, 1, network.features_dimension), generator=rng)
        device = next(network.parameters()).device
        self.register_buffer("noise", noise.to(device), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Returns log-probabilities ``(B, classes)``."""
        network = self.network
        features = network.featurizer(network.normalize(images))
        mean, deviation = embedding_of(network).distribution(features)
        logits: Tensor = network.classifier(mean + deviation * self.noise)
        samples = logits.float().log_softmax(-1)
        return samples.logsumexp(0) - math.log(len(samples))
