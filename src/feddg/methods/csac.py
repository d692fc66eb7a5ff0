"""CSAC: layers are aggregated by how much they differ, then calibrated (Yuan et al., TKDE 2023).

Layers that differ between clients hold what is particular to their domains, so the server weights
each client's layer by its distance to the mean instead of averaging. Aggregating layers one by one
breaks their interplay; each client repairs it on its own images by aligning the aggregated model's
features with those of its own last model, layer across layer, weighted by attention. A client keeps
one model's worth of memory.

Equations:
    Server, for each layer l:  m = mean_k w_k^l,  d_k = ||w_k^l - m||_2,
        w^l = sum_k (d_k / sum_j d_j) w_k^l;  if all d_k are 0, w^l = m.
    Client, from the aggregated model, with its own last model frozen (features G_j, logits q):
        L = CE + 0.6 * ( mean_i sum_j a_ij MMD(F_i, G_j) + MMD(logits, q) ),
        a_i = softmax_j of the cosine between the batch's similarity matrices under F_i and G_j,
        MMD with five Gaussian kernels exp(-d^2 / (2 sigma^2)), sigma^2 = 3^-3 to 3^1 times the mean
        squared distance.
    A client's first round has no last model: cross-entropy only.

Leaves the client:
    Its weights and its number of images, as in FedAvg.

Decisions:
    Inference: which parts are aligned and how. We take the backbone's stages, pool them over space,
    and bring a pair of different widths to the smaller one by averaging neighbouring channels; the
    attention has no parameters and no gradient; the private model is the client's last trained one,
    in eval mode. A layer is an entry of the network's state, statistics included, as in the
    published code; all clients count alike in m. The server must see all updates at once: memory
    for K models.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import adaptive_avg_pool1d, cosine_similarity, normalize

from feddg.clients.client import Batch, Client
from feddg.errors import ExperimentError
from feddg.messages import Message, Update, Weights, copied
from feddg.methods.base import Method, MethodSettings, State, noting, register
from feddg.models.network import Network
from feddg.settings import NotNegative

PRIVATE = "csac/"
BANDWIDTHS = (1 / 27, 1 / 9, 1 / 3, 1.0, 3.0)
"""The kernels' sigma^2 as factors of the mean squared distance (authors' code)."""


class CSACSettings(MethodSettings):
    """Hyper-parameters of CSAC."""

    calibration: NotNegative = Field(0.6, description="weight of both alignments (authors' code)")
    kernels: Literal["mean", "sum"] = Field(
        "mean",
        description="of the five kernels; sum: added up, on pairs of different images (authors' "
        "code)",
    )
    layers: Literal["mean", "sum"] = Field("mean", description="of the distances of the layers")
    private: Literal["last", "first"] = Field(
        "last", description="which own model is aligned with: the last trained one, or the first"
    )


@register
class CSAC(Method):
    """Layer-wise aggregation by distance, and calibration against the client's own model."""

    name = "csac"
    summary = "layer-wise semantic fusion and calibration (Yuan et al. 2023)"
    settings: CSACSettings
    shapes_embeddings = True
    excludes: ClassVar[dict[str, str]] = {
        "copa": "csac takes every layer from the clients, and copa makes its classifiers at the "
        "server; choose one",
        "fedgma": "csac replaces the mean that fedgma masks; choose one",
    } | dict.fromkeys(
        (
            *("dart", "jigen", "l2d", "mixup", "outlines", "pardon"),
            *("randaug", "randconv", "rsc", "vista"),
        ),
        "csac compares the features of the batch's own images, once per step, and the other method "
        "passes other images or parts of them through the network; choose one",
    )

    def network(self, network: Network) -> Network:
        """Refuses a backbone without known stages."""
        if not network.stages:
            raise ExperimentError(
                "csac aligns the backbone's stages, but this one names none; choose cnn, a ResNet "
                "or a DenseNet, or give your backbone an attribute `stages`"
            )
        return super().network(network)

    def begin(self, client: Client) -> None:
        """Loads the client's own last model, to align with the aggregated one."""
        super().begin(client)
        # Into tensors like the network's own, so that a restart finds the same memory layout.
        client.scratch[PRIVATE] = {
            name: torch.empty_like(tensor).copy_(client.memory[PRIVATE + name])
            for name, tensor in client.network.state_dict().items()
            if PRIVATE + name in client.memory
        }

    def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        """Adds both alignment terms with the client's own last model."""
        if not client.scratch[PRIVATE]:
            return super().loss(client, batch)
        private = self._private_features(client, batch.images)
        with captured(client.network) as public:
            terms = super().loss(client, batch)
        *features, logits = public[: len(private)]
        *frozen, frozen_logits = private
        weight = self.settings.calibration
        summed = self.settings.kernels == "sum"
        distance = cross_layer_distance(features, frozen, summed=summed)
        scale = len(features) if self.settings.layers == "sum" else 1
        terms["layer_alignment"] = weight * scale * distance
        return terms | {"logit_alignment": weight * mmd(logits, frozen_logits, summed=summed)}

    def _private_features(self, client: Client, images: Tensor) -> list[Tensor]:
        with client.evaluating(), torch.no_grad(), captured(client.network) as features:
            functional_call(client.network, client.scratch[PRIVATE], (images,))
        return features

    def report(self, client: Client) -> Message:
        """Stores the trained model for the client's next rounds."""
        if self.settings.private == "last" or not client.scratch[PRIVATE]:
            client.memory |= copied(client.network.state_dict(prefix=PRIVATE))
        return super().report(client)

    def share(self, state: State, update: Update) -> float:
        """Returns the same weight for all clients, in the mean that distances are taken to."""
        return 1.0

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """Aggregates every layer with weights from the clients' distances to the mean."""
        collected: list[Weights] = []
        noted = noting(updates, lambda update: collected.append(update.keep().weights))
        state = super().aggregate(state, noted)
        state.weights = {
            name: aggregated([weights[name] for weights in collected], mean)
            for name, mean in state.weights.items()
        }
        return state


def aggregated(layers: list[Tensor], mean: Tensor) -> Tensor:
    """Returns the layers' mean weighted by distance to ``mean``; ``mean`` if all are 0."""
    if not mean.is_floating_point():
        return mean
    distances = torch.stack([(layer - mean).flatten().float().norm() for layer in layers])
    total = distances.sum()
    if not total > 0:
        return mean
    return sum((layer * share for layer, share in zip(layers, distances / total)), 0 * mean)


@contextmanager
def captured(network: Network) -> Iterator[list[Tensor]]:
    """Collects the outputs of stages (pooled over space) and classifier, ``(B, c)`` each."""
    outputs: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        outputs.append((output.mean((2, 3)) if output.ndim == 4 else output).float())

    with ExitStack() as hooks:
        for layer in (*network.stages, network.classifier):
            hooks.enter_context(layer.register_forward_hook(keep))
        yield outputs


def cross_layer_distance(
    features: list[Tensor], frozen: list[Tensor], *, summed: bool = False
) -> Tensor:
    """Returns mean_i sum_j a_ij MMD(F_i, G_j).

    Args:
        features: F_i, ``(B, c_i)`` each.
        frozen: G_j, ``(B, c_j)`` each.
        summed: see :func:`mmd`.
    """
    weights = attention(features, frozen)
    distances = [
        torch.stack([mmd(*_same_width(f, g), summed=summed) for g in frozen]) for f in features
    ]
    return (weights * torch.stack(distances)).sum(1).mean()


def attention(features: list[Tensor], frozen: list[Tensor]) -> Tensor:
    """Returns a_ij, ``(len(features), len(frozen))``, rows summing to 1, without gradient."""
    ours, theirs = ([_similarities(f.detach()) for f in each] for each in (features, frozen))
    cosines = [[cosine_similarity(one, other, dim=0) for other in theirs] for one in ours]
    return torch.stack([torch.stack(row) for row in cosines]).softmax(1)


def _similarities(features: Tensor) -> Tensor:
    unit = normalize(features)
    return (unit @ unit.T).flatten()


def _same_width(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    width = min(one.shape[1], other.shape[1])
    return adaptive_avg_pool1d(one, width), adaptive_avg_pool1d(other, width)


def mmd(one: Tensor, other: Tensor, *, summed: bool = False) -> Tensor:
    """Returns the squared maximum mean discrepancy of two samples, ``(n, d)`` and ``(m, d)``.

    Biased (V-statistic), so never negative; the mean of Gaussian kernels whose sigma^2 are
    :data:`BANDWIDTHS` times the mean squared distance of all pairs. 0 if all points coincide.

    Args:
        one: a sample, ``(n, d)``.
        other: another sample, ``(m, d)``.
        summed: as the authors' code: adds the kernels up, leaves a point's pair with itself out of
            the means within a sample, and adds 2 / (n - 1).
    """
    points = torch.cat([one, other])
    squares = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist").square()
    base = squares.detach().mean().clamp_min(torch.finfo(squares.dtype).tiny)
    kernels = torch.stack([torch.exp(-squares / (2 * width * base)) for width in BANDWIDTHS])
    kernel = kernels.sum(0) if summed else kernels.mean(0)
    count = len(one)
    samples = [kernel[:count, :count], kernel[count:, count:]]
    if summed:
        means = [
            (part.sum() - part.trace() + len(part)) / max(1, len(part) * (len(part) - 1))
            for part in samples
        ]
    else:
        means = [part.mean() for part in samples]
    return means[0] + means[1] - 2 * kernel[:count, count:].mean()
