"""AFL: whoever has the largest loss counts most (Mohri et al., ICML 2019).

The mean over clients favours the majority. AFL instead minimises the largest loss over all mixtures
of clients: after every round the server raises their weights in proportion to their losses.

Mohri et al., "Agnostic Federated Learning" (ICML 2019), Algorithm 1 with local training between its
steps.

Equations:
    `afl_over: clients`  w <- sum_k l_k w_k / sum_k l_k over the round's clients
    `afl_over: domains`  the loss of a batch is sum_i l_g(i) CE_i; w is FedAvg's mean
    after the round      l / a <- projection of l / a + s L(w) on the simplex, of all that have a
                         loss, a the sum of their l; l is uniform at first
    L the mean loss of each client, or of each domain over the images of the round's clients.

Leaves the client:
    Its weights and its number of images; after the round its loss under the new average, by domain
    if domains are weighed. Then, before round 1, also how many images of each domain it has.

Decisions:
    Losses are of a client's training images without augmentation, in eval mode. A client that is
    not in the round has no loss and keeps its weight; a step of .1 times the loss is many times a
    weight of 1/100, and would leave weight only to the round's clients. If all clients have a loss,
    this is the paper's step. A client of weight 0 counts 1e-12. Over domains the loss is a sum over
    the batch, so SGD's steps are that many times longer.
"""

from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cross_entropy

from feddg.clients.client import Batch, Client
from feddg.errors import ClientError, ExperimentError
from feddg.messages import (
    MOST_ROWS,
    Broadcast,
    EntrySchema,
    Message,
    Range,
    SchemaContext,
    Update,
    Weights,
    joined,
)
from feddg.methods.base import Ask, Method, MethodSettings, State, Statistics, register
from feddg.methods.domains import PenalisedLosses, weighed_losses
from feddg.methods.vista import Vista
from feddg.models.network import Network
from feddg.settings import ExperimentSettings

WEIGHTS, IMAGES = "weights_by_loss", "domain_images"
QUESTION = "losses"
NEGLIGIBLE = 1e-12
MOST_DOMAINS = 100_000


def _counts(method: object, context: SchemaContext, name: str) -> Range:
    return 1, context.images or MOST_ROWS


def _over_domains(method: Any) -> bool:
    return bool(method.settings.afl_over == "domains")


_DOMAINS = EntrySchema("which ones", ("held",), torch.int64, low=0, high=MOST_DOMAINS)
_IMAGES = EntrySchema("how many images of each", ("held",), within=_counts)
_LOSSES = EntrySchema("its mean loss under the new average, of each", ("held",), low=0.0)


class AFLSettings(MethodSettings):
    """Hyper-parameters of AFL."""

    afl_over: Literal["clients", "domains"] = Field(
        "clients", description="what has weights (paper: clients; the benchmark: domains)"
    )
    afl_step: float = Field(0.1, ge=0, allow_inf_nan=False, description="s (the benchmark)")


@register
class AFL(Method):
    """Minimises the largest loss over all mixtures of clients, or of domains."""

    name = "afl"
    summary = "clients, or domains, with a large loss count more (Mohri et al. 2019)"
    settings: AFLSettings
    excludes: ClassVar[dict[str, str]] = dict.fromkeys(
        ("copa", "csac", "feddg-ga", "group_dro", "local", "scaffold"),
        "afl decides at the server what each client or domain counts, and the other method has its "
        "own weights, or no server; choose one",
    )
    sends: ClassVar[dict[str, EntrySchema]] = Method.sends | {
        "statistics/domains": replace(_DOMAINS, when=_over_domains),
        "statistics/images": replace(_IMAGES, when=_over_domains),
        f"answer:{QUESTION}/domains": _DOMAINS,
        f"answer:{QUESTION}/images": _IMAGES,
        f"answer:{QUESTION}/losses": _LOSSES,
    }

    def check(self, experiment: ExperimentSettings) -> None:
        """Refuses weights of domains where another part decides what an image counts."""
        super().check(experiment)
        if _over_domains(self) and isinstance(self, (PenalisedLosses, Vista)):
            raise ExperimentError(
                f"{self.name}: both decide how the images of a batch are weighted; choose one, or "
                "set method.afl_over to clients"
            )

    def client_statistics(self, client: Client) -> Message | None:
        """Adds how many images of each domain the client has."""
        others = super().client_statistics(client)
        if not _over_domains(self):
            return others
        domains, images = client.examples.domains.unique(return_counts=True)
        return joined(others, Message({"domains": domains, "images": images.float()}))

    def aggregate_statistics(self, client_statistics: Statistics) -> Message | None:
        """Adds the number of the federation's images of each domain."""
        others = super().aggregate_statistics(client_statistics)
        if not _over_domains(self):
            return others
        domains, images = (
            torch.cat([message.tensors[name].cpu() for _, message in client_statistics])
            for name in ("domains", "images")
        )
        return joined(others, Message({IMAGES: domains.bincount(images)}))

    def initial_extras(self, network: Network, clients: int) -> Weights:
        """Returns equal weights, of clients; those of domains follow from the statistics."""
        extras = {} if _over_domains(self) else {WEIGHTS: torch.full((clients,), 1 / clients)}
        return super().initial_extras(network, clients) | extras

    def weights(self, state: State) -> Tensor:
        """Returns the weights ``(G,)``, at first equal ones of all that have images."""
        if WEIGHTS in state.extras or state.context is None:
            return state.extras[WEIGHTS]
        known = (state.context.tensors[IMAGES] > 0).float()
        return known / known.sum()

    def broadcast(self, state: State) -> Broadcast:
        """Adds the weights of domains."""
        broadcast = super().broadcast(state)
        if _over_domains(self) and state.context is not None:
            weights = self.weights(state)
            weights = weights.to(next(iter(state.weights.values()), weights).device)
            broadcast.extras = joined(broadcast.extras, Message({WEIGHTS: weights}))
        return broadcast

    def begin(self, client: Client) -> None:
        """Takes the weights; refuses images of a domain that nobody had before round 1."""
        super().begin(client)
        if _over_domains(self):
            last, known = int(client.training.domains.max()), client.extras.tensors[WEIGHTS]
            client.scratch[WEIGHTS] = known.to(client.device)
            if last >= len(known):
                raise ClientError(
                    f"it has images of domain {last} (counted from 0), and before round 1 there "
                    f"were {len(known)} domains: start a new run"
                )

    def draws(self, client: Client, positions: Tensor, labels: Tensor) -> Weights:
        """Adds the images' domains."""
        drawn = {WEIGHTS: client.training.domains[positions]} if _over_domains(self) else {}
        return super().draws(client, positions, labels) | drawn

    def output_loss(self, client: Client, batch: Batch, outputs: Tensor) -> dict[str, Tensor]:
        """Returns the sum over images of their domain's weight times their loss."""
        terms = super().output_loss(client, batch, outputs)
        if not _over_domains(self):
            return terms
        losses, weights = weighed_losses(client, batch, outputs)
        factors = client.scratch[WEIGHTS][self.drawn(client, batch)[WEIGHTS]]
        total = len(batch) * ((factors * weights * losses).sum() / weights.sum())
        return terms | {client.worker.task.term: total}

    def answer(self, client: Client, name: str, question: Message) -> Message:
        """Returns the client's mean loss, or that of each of its domains, if they have weights."""
        if name != QUESTION:
            return super().answer(client, name, question)
        (outputs,) = client.of_images("outputs", lambda images: (client.network(images),))
        losses = cross_entropy(outputs.cpu(), client.examples.labels, reduction="none")
        ids = client.examples.domains
        ids = ids if _over_domains(self) else torch.full_like(ids, client.id)
        domains, place, images = ids.unique(return_inverse=True, return_counts=True)
        total = torch.zeros(len(domains)).double().index_add_(0, place, losses.double())
        means = (total / images).float()
        return Message({"domains": domains, "images": images.float(), "losses": means})

    def after_round(self, state: State, ask: Ask) -> State:
        """Asks for the losses under the new average, and moves the weights by them."""
        state = super().after_round(state, ask)
        before = self.weights(state)
        total, images = torch.zeros(2, len(before), dtype=torch.double)
        for id, reply in ask(QUESTION, Message()):
            tensors = {name: tensor.cpu() for name, tensor in reply.tensors.items()}
            domains, counts = tensors["domains"], tensors["images"].double()
            if not _over_domains(self):
                domains = torch.full_like(domains, id)  # whatever it says
            known = domains < len(before)
            total.index_add_(0, domains[known], (counts * tensors["losses"].double())[known])
            images.index_add_(0, domains[known], counts[known])
        seen, weights = images > 0, before.cpu().double()
        mass = weights[seen].sum()
        if mass > 0:
            losses = total[seen] / images[seen]
            up = weights[seen] / mass + self.settings.afl_step * losses
            weights[seen] = mass * on_simplex(up)
        state.extras[WEIGHTS] = weights.float().to(before.device)
        return state

    def share(self, state: State, update: Update) -> float:
        """Returns the client's weight, or FedAvg's if domains have weights."""
        if _over_domains(self):
            return super().share(state, update)
        return max(float(state.extras[WEIGHTS][update.client]), NEGLIGIBLE)


def on_simplex(values: Tensor) -> Tensor:
    """Returns the nearest point ``(G,)`` whose entries are at least 0 and have the sum 1."""
    falling = values.sort(descending=True).values
    excess = (falling.cumsum(0) - 1) / torch.arange(1, len(values) + 1)
    count = int((falling > excess).sum())
    return (values - excess[count - 1]).clamp_min(0)
