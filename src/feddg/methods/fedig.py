"""FedIG: features normalised by a random mix of image and federation must stay the same.

A client of one domain sees one kind of image. The statistics of batch normalisation, averaged
over all clients, hold what it does not see. FedIG passes each batch through the network twice:
normalised by the batch as usual, and with every layer normalised by moments drawn at random between
each image's own and the federation's (MixIG). The two embeddings are pulled together, and the
classifier learns to recognise the second one. Statistics stay with the clients, scales and shifts
are shared, and unseen domains are predicted by the average of the statistics.

"Client-agnostic Learning and Zero-shot Adaptation for Federated Domain Generalization" (anonymous
authors, under review; FedIG-A is its second half).

Equations:
    mu = u mu_i + (1 - u) mu_G,  sigma = u sigma_i + (1 - u) sigma_G,  u ~ U(0, 1)^C       (3)
    L = CE(C(f_i), y) + l1 CE(C(f_i'), y) + l2 |f_i - f_i'|^2                        (2, 4 - 6)

    in each layer: mu_i, sigma_i an image's moments over its map, mu_G, sigma_G the federation's;
    f_i is the embedding under batch normalisation, f_i' that under mu and sigma. u is drawn anew in
    every step and shared by the batch. The second term reaches the classifier C alone.

Leaves the client:
    Its weights, its statistics and its number of images, as in FedAvg: the average of the
    statistics is what the others mix with.

Decisions:
    The third term averages the squares over the d dimensions of f, where the paper's (4) is printed
    as their sum: d times less. With the sum, l2 = 4 and the paper's SGD, our first PACS round ended
    in NaN. `feature_distance: sum` is (4) as printed; there l2 = 4 / d is our default. The paper
    leaves open (inference): gradients pass through an image's moments; epsilon is inside both
    deviations. The server averages deviations, of which the paper speaks, not variances. Layers
    without a map of several pixels, such as the bottleneck's, use the federation's statistics in
    the second pass: one number has no moments. `instance_gate` trains batch-instance normalisation
    beside MixIG, the learned alpha of Table 3. The paper's protocol is the preset `fedig`, with
    `train.select_every: 20` for its choice of a client's model; with many clients, `fedig_silos`.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from feddg.clients.client import Batch, Client
from feddg.messages import Update, Weights
from feddg.methods.base import MethodSettings, State, register
from feddg.methods.fedbn import SiloBN
from feddg.models.network import Network
from feddg.models.normalization import (
    Rule,
    Stored,
    gates_apart,
    has_map,
    instance_moments,
    mix_instance_statistics,
    normalised_by,
    normalize,
    normalize_stored,
    stored_in,
)
from feddg.settings import Fraction, NotNegative, Positive

GLOBAL = "fedig/statistics"


class FedIGSettings(MethodSettings):
    """Hyper-parameters of FedIG."""

    classification_weight: NotNegative = Field(
        0.1, description="l1 of the classifier's term (paper, all data)"
    )
    feature_weight: NotNegative = Field(
        4.0, description="l2 of the embeddings' term (paper, all data)"
    )
    feature_distance: Literal["sum", "mean"] = Field(
        "mean", description="of the squares over the embedding's dimensions (paper's Eq. 4: sum)"
    )
    mixing: tuple[float, float] = Field(
        (0.0, 1.0),
        description="range of u (paper: 0 to 1; Table 6: 0 to 0.5, 0.5 to 1, -0.1 to 1.1, the "
        "widest taken; twice the same number holds u there, Table 1: 0 is global, 1 instance)",
    )
    instance_gate: Fraction | None = Field(
        None,
        description="begins rho of batch-instance normalisation (Table 3, learned alpha); none for "
        "plain batch normalisation",
    )
    instance_gate_lr: Positive = Field(
        10.0, description="learning rate of rho under SGD, times the others' (Nam and Kim 2018)"
    )

    @field_validator("mixing")
    @classmethod
    def _ordered(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not -0.1 <= value[0] <= value[1] <= 1.1:  # further out, more deviations fall below 0
            raise ValueError("must be two numbers from -0.1 to 1.1, the smaller first")
        return value


@register
class FedIG(SiloBN):
    """Keeps embeddings the same under mixed image and federation statistics."""

    name = "fedig"
    summary = "embeddings agree under mixed instance and global statistics (FedIG)"
    any_task = False  # its entropies are of classes
    settings: FedIGSettings
    excludes: ClassVar[dict[str, str]] = SiloBN.excludes | dict.fromkeys(
        ("csac", "l2d", "randconv", "rsc", "vista"),
        "fedig passes the batch's own images through the network a second time, and the other "
        "method passes other images or parts of them, or counts the passes; choose one",
    )

    def network(self, network: Network) -> Network:
        """Adds gates to the batch normalisation, if asked for."""
        network = super().network(network)
        if self.settings.instance_gate is not None:
            mix_instance_statistics(network.featurizer, self.settings.instance_gate)
        return network

    def begin(self, client: Client) -> None:
        """Stores the federation's statistics, fixed until the round ends."""
        super().begin(client)
        client.scratch[GLOBAL] = stored_in(client.network, client.received)

    def optimizer(self, client: Client) -> torch.optim.Optimizer:
        """Gives the gates their own learning rate, and keeps them in [0, 1]."""
        optimizer = super().optimizer(client)
        gates_apart(optimizer, client.network, client.train, self.settings.instance_gate_lr)
        return optimizer

    def draws(self, client: Client, positions: Tensor, labels: Tensor) -> Weights:
        """Adds u for every channel of every layer that may ask for it."""
        channels = sum(layer.num_features for layer in client.scratch[GLOBAL])
        drawn = torch.rand(channels, generator=client.stream("fedig", client.steps))
        return super().draws(client, positions, labels) | {"fedig": drawn}

    def head_loss(self, client: Client, batch: Batch, embeddings: Tensor) -> dict[str, Tensor]:
        """Adds the two client-agnostic terms."""
        terms = super().head_loss(client, batch, embeddings)
        chosen = self.settings
        if not chosen.classification_weight and not chosen.feature_weight:
            return terms
        with torch.set_grad_enabled(chosen.feature_weight > 0):
            varied = self._varied(client, batch)
        if chosen.classification_weight:
            logits = client.network.classifier(varied.detach())
            loss = client.task_loss(logits, batch.labels)
            terms = terms | {"agnostic_classification": chosen.classification_weight * loss}
        if chosen.feature_weight:
            squares = (embeddings.float() - varied.float()).square()
            whole = squares.sum() / len(batch)
            distance = whole if chosen.feature_distance == "sum" else squares.mean()
            terms = terms | {"agnostic_features": chosen.feature_weight * distance}
        return terms

    def _varied(self, client: Client, batch: Batch) -> Tensor:
        """Embeds the batch under mixed moments."""
        drawn = self.drawn(client, batch)["fedig"]
        rule = mixed(client.scratch[GLOBAL], self.settings.mixing, drawn)
        with normalised_by(client.network, rule):
            return client.network.features(batch.images)

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """Averages standard deviations instead of variances."""
        deviations = (replace(update, weights=_powered(update.weights, 0.5)) for update in updates)
        before = replace(state, weights=_powered(state.weights, 0.5))
        state = super().aggregate(before, deviations)
        state.weights = _powered(state.weights, 2.0)
        return state


def mixed(statistics: dict[_BatchNorm, Stored], mixing: tuple[float, float], drawn: Tensor) -> Rule:
    """Returns MixIG (Eq. 3) as a rule, with one u per channel for every pass through a layer.

    Args:
        statistics: the federation's statistics, by layer.
        mixing: the range of u.
        drawn: uniform in [0, 1], what u is made of, in the order of the passes: as many as the
            layers have channels.
    """
    low, high = mixing
    used = 0

    def rule(layer: _BatchNorm, inputs: Tensor) -> Tensor:
        nonlocal used
        ours = statistics[layer]
        if not has_map(inputs):
            return normalize_stored(layer, inputs, ours)
        u = low + (high - low) * drawn[used : used + layer.num_features]
        used += layer.num_features
        image = instance_moments(inputs, layer.eps)
        return normalize(layer, inputs, ours.moments(layer.eps).mixed(image, u.to(image.mean)))

    return rule


def _powered(weights: Weights, power: float) -> Weights:
    """Raises variances to a power, to convert to standard deviations and back."""
    names = [name for name in weights if name.rpartition(".")[2] == "running_var"]
    return weights | dict(zip(names, torch._foreach_pow([weights[n] for n in names], power)))
