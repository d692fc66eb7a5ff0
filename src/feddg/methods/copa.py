"""COPA: one shared extractor, and an ensemble of the domains' classifiers (Wu and Gong, ICCV 2021).

Averaging classifiers blurs what each domain has learnt, so COPA averages the extractor only and
assembles the classifiers. Every client trains its extractor to satisfy the other domains'
classifiers too, which stay frozen meanwhile. An image of an unseen domain is predicted by all
classifiers together.

Equations:
    At a client of domain g, over the heads h_j that have trained so far:
    L = CE(h_g(f(x)), y) + sum_{j != g} w_j CE(h_j(f(x)), y),  w_j = 1 / (number of them),
    with h_j frozen.  Server: f <- sum_k (n_k/n) f_k;  h_g <- the same mean over g's clients.
    Prediction: log of the mean over heads of softmax(h_j(f(x))).
    Batch-instance normalisation in f: y = gamma (rho x_BN + (1 - rho) x_IN) + beta, rho learnt.

Leaves the client:
    Its weights, its number of images, and the number of its domain (or its own). Every client is
    sent all classifiers; it sends the unused ones back unchanged as part of the network's weights.

Decisions:
    All of this is inference: the weight of the second term, the form of the hybrid normalisation
    (ours: Nam and Kim's gate per channel, beginning at 1, ten times the learning rate under SGD, no
    weight decay) and the optimizer (ours: the experiment's) could not be checked. One head per
    domain, and a client trains that of its main domain, which must be known; `heads_by: client`
    makes every client its own. In a head's first round it starts from the mean of all classifiers,
    and heads that nobody has trained yet take no part, so round 1 is plain cross-entropy. Heads
    without a client in a round stay as they are. The prediction-agreement step of the paper's
    domain adaptation variant is left out.
"""

from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from feddg.clients.client import Batch, Client
from feddg.diagnostics import Diagnostic, warning
from feddg.errors import ClientError, ExperimentError
from feddg.messages import EntrySchema, Message, Update, Weights, joined, on_device
from feddg.methods.base import Method, MethodSettings, State, noting, register, weighted_mean
from feddg.models.network import Heads, MeanOverHeads, Network
from feddg.models.normalization import gates_apart, mix_instance_statistics
from feddg.settings import ExperimentSettings, Fraction, NotNegative, Positive

HEAD = "copa/head"
PREFIX = "heads.copa."


class COPASettings(MethodSettings):
    """Hyper-parameters of COPA."""

    heads: int = Field(
        6, ge=1, description="room for classifiers: at least the number of domains (or clients)"
    )
    heads_by: Literal["domain", "client"] = Field(
        "domain", description="who shares a classifier: clients of one main domain, or nobody"
    )
    others: NotNegative = Field(1.0, description="weight of the other heads' mean loss (ours)")
    gate: Fraction | None = Field(
        1.0,
        description="rho to begin with (Nam and Kim 2018: 1); none keeps plain batch normalisation",
    )
    gate_lr: Positive = Field(
        10.0, description="learning rate of rho under SGD, times the others' (Nam and Kim 2018)"
    )


def heads_of(network: Network) -> Heads:
    """Returns the classifiers of all domains."""
    heads = network.heads["copa"]
    assert isinstance(heads, Heads)
    return heads


@register
class COPA(Method):
    """Assembles classifiers instead of averaging them; the extractor learns to suit them all."""

    name = "copa"
    summary = "a shared extractor under an ensemble of domain classifiers (Wu and Gong 2021)"
    settings: COPASettings
    excludes: ClassVar[dict[str, str]] = {
        "fedprox": "fedprox holds a client to the mean classifier, and copa trains that of its "
        "domain; choose one"
    }
    sends: ClassVar[dict[str, EntrySchema]] = Method.sends | {
        f"update/{HEAD}": EntrySchema(
            "the number of its main domain, or its own number",
            integer=True,
            within=lambda method, context, name: (0, method.settings.heads - 1),
        )
    }

    def check(self, experiment: ExperimentSettings) -> None:
        """Refuses more clients than heads, if each client has a head."""
        super().check(experiment)
        number = experiment.clients.number
        if self.settings.heads_by == "client" and number > self.settings.heads:
            raise ExperimentError(
                f"copa with a classifier for each of {number} clients has room for "
                f"{self.settings.heads} only: set method.heads to {number}"
            )

    def diagnostics(self, experiment: ExperimentSettings) -> Iterable[Diagnostic]:
        """Warns where a mean over rounds may hold classifiers that nobody had trained yet."""
        yield from super().diagnostics(experiment)
        clients = experiment.clients
        if experiment.server.averaging != "none" and clients.per_round:
            yield warning(
                "untrained-classifiers",
                f"Each round has {clients.per_round} of {clients.number} clients, and in the mean "
                "over rounds (server.averaging) a classifier of copa counts with zeros until its "
                "first client has trained.",
                "Set server.averaging to none, or let all clients take part in every round.",
            )

    def network(self, network: Network) -> Network:
        """Adds the classifiers, and gates in batch normalisation."""
        network = super().network(network)
        if self.settings.gate is not None:
            mix_instance_statistics(network.featurizer, self.settings.gate)
        network.heads["copa"] = Heads(
            self.settings.heads, network.classes, network.features_dimension
        )
        return network

    def head(self, client: Client) -> int:
        """Returns which classifier the client trains.

        Raises:
            ClientError: there is no room for it.
        """
        domain = int(torch.bincount(client.examples.domains).argmax())
        head = client.id if self.settings.heads_by == "client" else domain
        if head >= self.settings.heads:
            raise ClientError(
                f"trains classifier {head} (counted from 0), but copa has room for "
                f"{self.settings.heads} only: set method.heads to at least {head + 1}"
            )
        return head

    def begin(self, client: Client) -> None:
        """Loads the classifier of the client's domain into the network."""
        super().begin(client)
        head, heads = self.head(client), heads_of(client.network)
        trained = heads.trained.cpu().clone()
        if trained[head]:
            head_weights = {"weight": heads.weight[head], "bias": heads.bias[head]}
            client.network.classifier.load_state_dict(head_weights)
        trained[head] = False
        others = {HEAD: trained.nonzero().squeeze(1)}
        client.scratch |= on_device(others, client.device)

    def optimizer(self, client: Client) -> torch.optim.Optimizer:
        """Gives the gates their own learning rate, and keeps them in [0, 1]."""
        optimizer = super().optimizer(client)
        gates_apart(optimizer, client.network, client.train, self.settings.gate_lr)
        return optimizer

    def head_loss(self, client: Client, batch: Batch, embeddings: Tensor) -> dict[str, Tensor]:
        """Adds the mean cross-entropy under the other domains' frozen classifiers."""
        terms = super().head_loss(client, batch, embeddings)
        others = client.scratch[HEAD]
        if not len(others):
            return terms
        logits = heads_of(client.network)(embeddings, others)
        labels = batch.labels.expand(len(logits), -1)
        loss = client.task_loss(logits.flatten(0, 1), labels.flatten())
        return terms | {"other_classifiers": self.settings.others * loss}

    def report(self, client: Client) -> Message:
        """Adds the number of the classifier that the client trained."""
        return joined(super().report(client), Message(scalars={HEAD: self.head(client)}))

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """Averages all weights, the classifiers within each domain."""
        before = state.weights
        classifiers: dict[int, list[tuple[Weights, float]]] = {}

        def note(update: Update) -> None:
            head = int(update.extras.scalars[HEAD])
            tensors = {n: update.weights[f"classifier.{n}"].clone() for n in ("weight", "bias")}
            classifiers.setdefault(head, []).append((tensors, self.share(state, update)))

        state = super().aggregate(state, noting(updates, note))
        heads = {n: before[PREFIX + n].clone() for n in ("weight", "bias", "trained")}
        for head, items in classifiers.items():
            mean = weighted_mean(items)
            heads["weight"][head], heads["bias"][head] = mean["weight"], mean["bias"]
            heads["trained"][head] = True
        state.weights |= {PREFIX + name: tensor for name, tensor in heads.items()}
        return state

    def predictor(self, network: Network) -> nn.Module:
        """Predicts with all classifiers together."""
        return MeanOverHeads(network, heads_of(network))
