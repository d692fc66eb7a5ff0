"""Local: every client trains alone, on its own images, and keeps its own model.

The reference line below every federation: what a client reaches that takes part in nothing. All
start from the same network; from then on each goes on with its own weights, round by round, with
as many steps as it would take in a federation. There is no global model. What is shown for a
domain is the mean, over all clients, of how each client's own model does on it: what a client
picked at random can expect.

Equations:
    w_k <- w_k after local steps down the gradient of CE(g(f(x)), y) on the client's images
    accuracy(domain) = (1/N) sum_k accuracy(w_k, domain);  every other metric alike.

Leaves the client:
    No weights. Only the number of images, the time and the mean loss that are shown.

Decisions:
    Every client counts once in the mean, however many images it holds, and a client that has not
    been drawn yet counts with the network it would start from. So with fewer clients a round than
    there are, clients train in as few rounds as in a federation. Every optimizer starts afresh
    each round, as in FedAvg. An evaluation takes as many passes as there are clients
    (evaluate.every makes them rarer). The starting network is sent until every client has trained
    once. A run of this method has no model to be loaded afterwards. Guards, update privacy and
    server optimizers are refused: nothing is sent that they could work on. It combines with
    methods that change what a client does by itself (`local+mixstyle`). It runs in one process:
    over a network the models stay at the sites, where nobody could measure them.
"""

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import nn

from feddg.errors import ExperimentError
from feddg.messages import Broadcast, Sent, Update, Weights
from feddg.methods.base import Method, State
from feddg.methods.catalogue import register
from feddg.methods.reference import Reference
from feddg.methods.reference_lines import refuse_guards
from feddg.models.network import Network
from feddg.settings import ExperimentSettings

STARTED = "local/started"
"""Which clients have a model of their own, among the state's extras."""


@register
class Local(Method):
    """All of the network stays with each client; nothing is averaged."""

    name = "local"
    title = "Local"
    summary = "reference line: every client alone, with a model of its own"
    reference = Reference("none: a reference line of this project")
    in_process_only = "its models stay with the clients, where nobody could measure them"
    sends: ClassVar[dict[str, Sent]] = {
        key: form for key, form in Method.sends.items() if key != "update/weights/*"
    }

    def check(self, experiment: ExperimentSettings) -> None:
        """Refuses what would work on updates: there are none."""
        refuse_guards(experiment, self.name, "sends no weights")
        if experiment.server.optimizer != "none":
            raise ExperimentError(
                f"{self.name} sends no weights for server.optimizer to work on; set it to none"
            )
        super().check(experiment)

    def is_local(self, name: str, module: nn.Module) -> bool:
        """Everything."""
        return True

    def initial_extras(self, network: Network, clients: int) -> Weights:
        """Which clients have trained: none yet."""
        started = torch.zeros(clients, dtype=torch.bool)
        return super().initial_extras(network, clients) | {STARTED: started}

    def broadcast(self, state: State) -> Broadcast:
        """The starting network, for as long as a client may need it."""
        told = super().broadcast(state)
        if bool(state.extras[STARTED].all()):
            told.weights = {}
        return told

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """Notes who has a model of its own; the starting network stays as it is."""
        started = state.extras[STARTED].clone()
        for update in updates:
            started[update.client] = True
        state.extras[STARTED] = started
        return state
