"""Training that starts from a classifier in closed form (``train.head: ridge``).

Before round 1 comes a round of :class:`feddg.methods.ridge.Ridge` over the features of the network
that training starts from: round 0, of all clients, in which nothing is sent but sums.
"""

import copy
import time
from collections.abc import Iterator

from torch import Tensor, nn

from feddg.clients.client import Client
from feddg.diagnostics import Progress, arriving
from feddg.errors import ExperimentError
from feddg.messages import Message, Update, Weights, on_device
from feddg.methods.base import Method, Round, RoundHook, State, has_global_model
from feddg.methods.ridge import BIAS, CROSS, GRAM, WEIGHT, Ridge
from feddg.models.closed_form import means, packed
from feddg.models.network import Network
from feddg.settings import ExperimentSettings

CLASSIFIER = "classifier."


class HeadStart(Ridge):
    """Ridge over all versions that a method has of the images, as they are, in their order.

    Clients need no network but the method's: they put their sums into the message.

    Args:
        method: the method that training goes on with.
    """

    def __init__(self, method: Method) -> None:
        super().__init__()
        self._method = method

    # At the server

    def network(self, network: Network) -> Network:
        """Returns a copy with sums in place of the classifier, which alone are sent."""
        summing = copy.copy(network)
        summing._modules = dict(network._modules)
        summing = super().network(summing)
        del summing.classifier.weight, summing.classifier.bias  # nobody sends what is solved for
        summing.frozen = frozenset(n for n in network.state_dict() if not n.startswith(CLASSIFIER))
        return summing

    def state(self, summing: Network, state: State, clients: int) -> State:
        """Returns the state before the round, from that of the federation."""
        device = state.weights[WEIGHT].device
        rest = {name: state.weights[name] for name in state.weights if name in summing.frozen}
        sums = summing.classifier.state_dict(prefix=CLASSIFIER)
        head = {name: tensor.detach().to(device) for name, tensor in sums.items()}
        return State(rest | head, self.initial_extras(summing, clients), round=-1)

    def solution(self, state: State) -> Weights:
        """Returns the classifier, from the state after the round."""
        return {name: state.weights[name] for name in (WEIGHT, BIAS)}

    # At a client

    def update(self, client: Client) -> Update:
        """At a client: returns its sums."""
        started, count = time.perf_counter(), len(client.examples)
        (gram, cross), _, _ = self._own(client)
        seconds = time.perf_counter() - started
        return Update(client.id, count, {GRAM: gram, CROSS: cross}, Message(), {}, seconds, count)

    def _own(self, client: Client) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        network, method = client.network, self._method

        def seen(images: Tensor) -> list[Tensor]:
            return [network.features(version) for version in method.head_images(images)]

        names = [n for n in network.state_dict() if n.startswith(("featurizer.", "embedding."))]
        shared = client.together.shared  # the network is the same at all of them
        if "head" not in shared:
            shared["head"] = client.features_digest(names, seen)
        # First of all images unchanged, then of the next version of all of them.
        features = client.kept_features(seen, shared["head"])
        sent = on_device({"f": features, "labels": client.examples.labels}, client.device)
        features, labels = sent["f"].double(), sent["labels"]
        again = labels.repeat(len(features) // len(labels))
        gram, cross = means(features, again, client.examples.classes)
        return (packed(gram), cross), features[: len(labels)], labels


class Arrivals(RoundHook):
    """Says how many clients have sent their sums."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def collected(self, updates: Iterator[Update], round: Round) -> Iterator[Update]:
        """See :class:`RoundHook`."""
        return arriving(updates, self._progress, "setup", len(round.clients))


def check_head(method: Method, network: Network) -> None:
    """Raises ExperimentError if the classifier of a network cannot be solved for.

    Args:
        method: the method that trains it.
        network: the network.
    """
    shared = has_global_model(method, network)
    if not isinstance(network.classifier, nn.Linear) or not shared:
        reason = "has no linear classifier of its own" if shared else "shares no classifier"
        raise ExperimentError(f"train.head: ridge excludes {method.name}, which {reason}")
    if network.classifier.bias is None:
        raise ExperimentError(
            "train.head: ridge also solves for a bias, but the network's last layer has none: "
            "make it nn.Linear(..., bias=True)"
        )


def one_round(settings: ExperimentSettings) -> ExperimentSettings:
    """Returns the settings of the round, in which all clients take part once."""
    once = {"min_updates": 1, "attempts": 1, "optimizer": "none", "largest_change": None}
    changed = {
        "server": settings.server.model_copy(update=once),
        "clients": settings.clients.model_copy(update={"per_round": None}),
    }
    return settings.model_copy(update=changed)
