"""FedAvg and FedProx, and reference lines: centralised and local training."""

from collections.abc import Iterable
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from feddg.clients.client import Batch, Client
from feddg.errors import ExperimentError
from feddg.messages import Broadcast, EntrySchema, Update, Weights
from feddg.methods.base import (
    Method,
    MethodSettings,
    Presets,
    State,
    register,
    require,
    shared_parameters,
)
from feddg.models.network import Network
from feddg.settings import ExperimentSettings, NotNegative

STARTED = "local/started"
"""Name, in the state's extras, of the mask of clients that have a model of their own."""


@register
class FedAvg(Method):
    """FedAvg: clients train the global network, the server averages what they send.

    Each sampled client trains the global network on its own images; the server takes the mean of
    what comes back, in which a client counts by its number of images. Every other method changes
    some of this and keeps the rest.

    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data"
    (AISTATS 2017), Algorithm 1.

    Equations:
        w_k = w after local steps down the gradient of CE(g(f(x)), y) on the client's images
        w <- sum_k (n_k / n) w_k,   n = sum_k n_k over the round's clients

    Leaves the client:
        The network after local training, and the number of images.

    Decisions:
        Every client's optimizer starts afresh each round. Statistics of batch normalisation are
        averaged like weights; integer buffers are copied from the round's first client. The mean is
        a running one, in client order, so that its value does not depend on who answers first. All
        of this stands in ``feddg.methods.base`` as the default of every hook, because every other
        method starts from it; so no composition names ``fedavg``.
    """

    name = "fedavg"
    summary = "weighted mean of the clients' weights (McMahan et al. 2017)"


class FedProxSettings(MethodSettings):
    """Hyper-parameters of FedProx."""

    mu: NotNegative = Field(
        0.01,
        description="weight of the proximal term (code of CCST and FedBN: 0.01; FedIG: 0.1)",
    )


@register
class FedProx(Method):
    """FedProx: a proximal term holds clients near the weights they got (Li et al., MLSys 2020).

    Clients whose images differ pull the weights in different directions, and with many local steps
    their mean suits none of them. FedProx adds to every client's loss the squared distance to the
    weights it received, so that local training drifts less. With weight 0 it is FedAvg, bit for
    bit.

    Equations:
        L_k(w) = CE(w) + mu/2 ||w - w_t||^2, with w_t the weights that the round's broadcast held.

    Leaves the client:
        Its weights and its number of images, as in FedAvg.

    Decisions:
        The paper tunes mu in {0.001, 0.01, 0.1, 1}; the default 0.01 is that of the code published
        with CCST and FedBN, while FedIG compares with 0.1. Entries that stay with the client
        (FedBN) are not held: they did not come from the server.
    """

    name = "fedprox"
    summary = "FedAvg with a proximal term (Li et al. 2020)"
    settings: FedProxSettings
    outermost = True  # its term counts once, however often a part passes a batch on

    def begin(self, client: Client) -> None:
        """Pairs every shared parameter with its received value."""
        super().begin(client)
        shared = shared_parameters(self, client.network)
        client.scratch["fedprox"] = [(p, client.received[n].to(p)) for n, p in shared.items()]

    def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        """Adds mu/2 times the squared distance to the received weights to the loss."""
        terms = super().loss(client, batch)
        if self.settings.mu == 0:
            return terms
        pairs = client.scratch["fedprox"]
        distance = torch.stack([(p - received).square().sum() for p, received in pairs]).sum()
        return terms | {"proximal": self.settings.mu / 2 * distance}


def require_no_defences(experiment: ExperimentSettings, why: str) -> None:
    """Raises ExperimentError if an experiment asks for defences or update privacy.

    Args:
        experiment: the experiment.
        why: they would have no effect, as a sentence without its full stop.
    """
    if experiment.defences:
        raise ExperimentError(f"{why}: leave out defences, or name a federated method")
    require(experiment, why, {"privacy.clipping": "none"})


@register
class Centralised(Method):
    """Centralised: all training images in one place, as if nobody had anything to hide.

    The reference above every federation: it shows what privacy costs. One client holds the images
    of all, and in a round takes as many optimizer steps as the clients of a federation's round take
    together, on batches of the same size. Everything else is the same: split, network,
    augmentation, rounds and tables.

    Equations:
        w <- w after S local steps down the gradient of CE(g(f(x)), y) on all training images
        S = (K / N) sum_k steps_k, rounded: N clients, of which K take part in a round;
        steps_k = local_epochs * batches of client k, or local_steps.

    Leaves the client:
        The images, before training begins: in this reference line nothing is private. The ledger
        lists what the one client and the server exchange.

    Decisions:
        The number of steps is equal, not that of images, because a batch is what an update of the
        weights learns from. Clients' last batches are smaller, so a centralised round sees somewhat
        more images. Clients are partitioned as the experiment says first, for their number of
        steps; then all images go to one client. Each round begins a new random order, and the
        optimizer afresh, as every client's does. Defences and update privacy are refused. It
        combines with methods that change what a client does by itself (`centralised+mixstyle`), and
        runs in one process.
    """

    name = "centralised"
    aliases = ("centralized",)
    summary = "reference line: all training images in one place, equally many steps"
    gathers_images = True
    in_process_only = "it trains on all images in one place, and no image ever leaves a site"

    def check(self, experiment: ExperimentSettings) -> None:
        """Refuses settings that need several clients."""
        why = f"{self.name} has one client, with nobody to hide among"
        require_no_defences(experiment, why)
        require(experiment, why, {"server.min_updates": 1})
        super().check(experiment)


@register
class Local(Method):
    """Local: every client trains alone, on its own images, and keeps its own model.

    The reference below every federation: what a client reaches on its own. All start from the same
    network; from then on each continues with its own weights, round by round, with as many steps as
    it would take in a federation. There is no global model. What is shown for a domain is the mean,
    over all clients, of how each client's own model does on it: what a client picked at random can
    expect.

    Equations:
        w_k <- w_k after local steps down the gradient of CE(g(f(x)), y) on the client's images
        accuracy(domain) = (1/N) sum_k accuracy(w_k, domain);  every other metric alike.

    Leaves the client:
        No weights. Only the number of images, the time and the mean loss that are shown.

    Decisions:
        Every client counts once in the mean, however many images it holds, and a client that has
        not been drawn yet counts with the network it would start from. Every optimizer starts
        afresh each round, as in FedAvg. An evaluation takes as many passes as there are clients. A
        run of this method has no model to be loaded afterwards. Defences, update privacy and server
        optimizers are refused: nothing is sent that they could work on. It combines with methods
        that change what a client does by itself (`local+mixstyle`), and runs in one process.
    """

    name = "local"
    excludes: ClassVar[dict[str, str]] = {
        "fedprox": "local receives no weights that fedprox could stay close to",
        "scaffold": "local receives no weights, and scaffold corrects steps towards those of all",
    } | dict.fromkeys(
        ("copa", "csac", "feddg-ga", "fedgma", "fedig", "fedig-a"),
        "local sends no weights, and the other method's server works on them",
    )
    summary = "reference line: every client alone, with a model of its own"
    presets: ClassVar[Presets] = {"*": {"train": {"head": "random"}}}
    in_process_only = "its models stay with the clients, where nobody could measure them"
    sends: ClassVar[dict[str, EntrySchema]] = {
        key: schema for key, schema in Method.sends.items() if key != "update/weights/*"
    }

    def check(self, experiment: ExperimentSettings) -> None:
        """Refuses settings that work on updates, because there are none."""
        why = f"{self.name} sends no weights"
        require_no_defences(experiment, why)
        require(experiment, why, {"server.optimizer": "none", "server.wise_ft": "none"})
        super().check(experiment)

    def is_local(self, name: str, module: nn.Module) -> bool:
        """Returns True: all entries are local."""
        return True

    def initial_extras(self, network: Network, clients: int) -> Weights:
        """Returns the mask of clients that have trained, initially none."""
        started = torch.zeros(clients, dtype=torch.bool)
        return super().initial_extras(network, clients) | {STARTED: started}

    def broadcast(self, state: State) -> Broadcast:
        """Returns the starting network, as long as a client may need it."""
        sent = super().broadcast(state)
        if bool(state.extras[STARTED].all()):
            sent.weights = {}
        return sent

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """Marks the clients that now have their own model; the starting network does not change."""
        started = state.extras[STARTED].clone()
        for update in updates:
            started[update.client] = True
        state.extras[STARTED] = started
        return state
