"""What methods share that compare the domains of a client's own images."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from feddg.clients.client import Batch, Client, steps_of_round
from feddg.messages import Weights
from feddg.methods.base import Method
from feddg.models.task import losses_by_image

MEMBER = "domains/member"
"""Name of ``(B, G)``, drawn for a batch: 1 where an image is of a domain of its client, else 0."""
WEIGHT = "domains/weight"
"""Name of what a penalty counts at a step, drawn for a batch."""
NUMBERS, COUNT = "domains/numbers", "domains/count"


def numbers_of(client: Client) -> Tensor:
    """Returns the domain of each image a client trains on, ``(n,)``, from 0 as they appear."""
    if NUMBERS not in client.scratch:
        places: dict[int, int] = {}
        each = client.training.domains.tolist()
        client.scratch[NUMBERS] = torch.tensor([places.setdefault(d, len(places)) for d in each])
    return client.scratch[NUMBERS]


def weighed_losses(client: Client, batch: Batch, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each image's loss, and what it counts in a mean by its class, ``(B,)`` both."""
    logits = logits.float()
    by_class = client.class_weights(logits)
    return losses_by_image(logits, batch.labels, by_class, client.worker.train)


def spread(order: Tensor, numbers: Tensor, together: int = 1) -> Tensor:
    """Returns the order in which every stretch holds each domain by its share of the images.

    Args:
        order: ``(n,)``, random.
        numbers: ``(n,)`` domains of the images, from 0.
        together: how many images of a domain follow one another, where it has as many.
    """
    ordered = numbers[order]
    member = one_hot(ordered)
    groups = (member.sum(0) // together).clamp_min(1)[ordered]
    group = (((member.cumsum(0) * member).sum(1) - 1) // together).minimum(groups - 1)
    return order[((group + 0.5) / groups).argsort(stable=True)]


def domain_means(values: Tensor, weights: Tensor) -> Tensor:
    """Returns each domain's weighted mean, ``(G,)`` or ``(G, d)``; 0 of a domain without images.

    Args:
        values: ``(B,)`` or ``(B, d)``, one an image.
        weights: ``(B, G)``, 0 where an image is not of the domain.
    """
    shares = weights / weights.sum(0).clamp_min(torch.finfo(weights.dtype).tiny)
    if values.dim() == 1:
        return (shares * values[:, None]).sum(0)
    return shares.T @ values


def mean_over(values: Tensor, present: Tensor) -> Tensor:
    """Returns the mean of ``values``, ``(G,)`` or ``(G, G)``, where ``present`` is 1, or 0."""
    return (values * present).sum() / present.sum().clamp_min(1)


def squared_distances(products: Tensor) -> Tensor:
    """Returns ``||a_g - a_h||^2``, ``(G, G)``, from the inner products ``<a_g, a_h>``."""
    norms = products.diagonal()
    return norms[:, None] + norms[None, :] - 2 * products


def pairs_of(present: Tensor) -> Tensor:
    """Returns 1 for each pair g < h of which both are present, ``(G, G)``."""
    return torch.outer(present, present).triu(1)


class DomainMethod(Method):
    """A method that compares the domains of a client's images.

    Batches hold each domain by its share of the client's images. A step finds domains as a mask of
    fixed shape. A client with one domain trains plainly.
    """

    together: ClassVar[int] = 1
    """How many images of a domain are to be in a batch that has any."""

    def begin(self, client: Client) -> None:
        """Has every batch hold the client's domains."""
        super().begin(client)
        client.arrange = lambda order: spread(order, numbers_of(client), self.together)
        self.domains(client)  # counted before a step

    def draws(self, client: Client, positions: Tensor, labels: Tensor) -> Weights:
        """Adds which image is of which domain."""
        member = one_hot(numbers_of(client)[positions], self.domains(client)).float()
        return super().draws(client, positions, labels) | {MEMBER: member}

    def domains(self, client: Client) -> int:
        """Returns the number of a client's domains, G."""
        if COUNT not in client.scratch:
            client.scratch[COUNT] = int(numbers_of(client).max()) + 1
        return client.scratch[COUNT]

    def member(self, client: Client, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns which image is of which domain, ``(B, G)``, and which the batch has, ``(G,)``."""
        member = self.drawn(client, batch)[MEMBER]
        return member, (member.sum(0) > 0).to(member)

    def losses(self, client: Client, batch: Batch, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the losses ``(B,)``, and what each counts in its domain's mean, ``(B, G)``."""
        losses, weights = weighed_losses(client, batch, logits)
        return losses, self.member(client, batch)[0] * weights[:, None]

    def compared(
        self,
        client: Client,
        batch: Batch,
        embeddings: Tensor,
        term: str,
        penalty: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> dict[str, Tensor]:
        """Returns the term of a penalty that compares domains; none of a single one.

        Args:
            client: the client.
            batch: the batch.
            embeddings: ``(B, d)``.
            term: its name.
            penalty: of the embeddings in float32, without mixed precision, and of what
                :meth:`member` returns.
        """
        if self.domains(client) < 2:
            return {}
        with torch.autocast(embeddings.device.type, enabled=False):
            return {term: penalty(embeddings.float(), *self.member(client, batch))}


class PenalisedLosses(DomainMethod):
    """Adds a penalty to the mean of the domains' losses, with a weight that grows once."""

    excludes: ClassVar[dict[str, str]] = dict.fromkeys(
        ("irm", "vrex", "group_dro"),
        "each replaces the mean over images by one of its own over domains; choose one",
    )

    weighs: ClassVar[str] = ""
    """The setting with the penalty's own weight."""
    anneals: ClassVar[str] = ""
    """The setting with the number of steps before the penalty has its own weight."""

    @property
    def weight(self) -> float:
        """The penalty's own weight."""
        return float(getattr(self.settings, self.weighs))

    @property
    def annealing(self) -> int:
        """The number of steps for which a weight above 1 is 1."""
        return int(getattr(self.settings, self.anneals))

    def draws(self, client: Client, positions: Tensor, labels: Tensor) -> Weights:
        """Adds the penalty's weight, with steps counted as if the client were in every round."""
        turn = steps_of_round(client.worker.train, len(client.training))
        waits = (client.round - 1) * turn + client.steps < self.annealing
        weight = torch.tensor(min(self.weight, 1.0) if waits else self.weight)
        return super().draws(client, positions, labels) | {WEIGHT: weight}

    def step(self, client: Client, batch: Batch) -> None:
        """Takes a step of the same length whatever the weight: all terms' gradients are divided."""
        terms = self.loss(client, batch)
        if self.domains(client) > 1:
            terms = gently(terms, self.drawn(client, batch)[WEIGHT])
        client.descend(terms)


def gently(terms: dict[str, Tensor], weight: Tensor) -> dict[str, Tensor]:
    """Returns loss terms of the same values, whose gradients are divided by a weight above 1."""
    found = {}
    for name, term in terms.items():
        less = term / weight.clamp_min(1)
        found[name] = less + (term - less).detach()
    return found
