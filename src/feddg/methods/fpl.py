"""FPL: prototypes clustered over clients guide every client's embeddings (Huang et al., CVPR 2023).

Every client sends the mean embedding of each class it holds. The server clusters a class's
prototypes with FINCH, so that a domain with many clients does not outvote the others, and sends the
cluster means to all. Clients draw their embeddings to the cluster prototypes of the own class and
away from those of all others, and towards the mean of the own class's.

Equations:
    p_k^c = mean embedding of class c at client k;  P^c = cluster means of FINCH over {p_k^c}_k;
    U^c = mean of P^c.   L = CE + CPCL + UPCR,
    CPCL = -log( sum_{p in P^y} e^{cos(z,p)/tau} / sum_{p in all P} e^{cos(z,p)/tau} ),
    UPCR = mean over dimensions of (z - U^y)^2.   Round 1, before there are prototypes: CE only.

Leaves the client:
    Its weights, its number of images, and the mean embedding of each class it holds (with the
    class ids), over the embeddings of its last local epoch.

Decisions:
    All prototypes count, by logsumexp (the code that PARDON compared with drops some), except those
    of a client whose largest entry is over ten times the round's median, since they would attract
    all. UPCR is the mean over dimensions and the whole set of prototypes is replaced every round,
    as in the authors' code (the paper: a sum). FINCH's last (coarsest) partition by cosine, as the
    authors' code; a single prototype is its own cluster. Images of a class without prototypes are
    left out of both terms. With sampling, classes may be absent from a round: `absent_classes:
    keep` keeps their last prototypes. An image's embedding is the last one that training saw, which
    is that of the last local epoch; where another part passes a batch on more than once, that of
    the first pass.
"""

import logging
import statistics
from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import mse_loss, normalize

from feddg.clients.client import Batch, Client
from feddg.messages import Broadcast, EntrySchema, Message, Update, Weights, joined, on_device
from feddg.methods.base import Method, MethodSettings, State, noting, register
from feddg.settings import Positive
from feddg.styles.statistics import finch

PROTOTYPES, CLASSES = "fpl/prototypes", "fpl/classes"
EMBEDDINGS = "fpl/embeddings"
SEEN, ROOM = "fpl/seen", "fpl/room"
NO_CLASS = -1
LARGEST = 10.0
"""Largest allowed ratio of a client's largest prototype entry to the round's median."""

log = logging.getLogger("feddg")


class FPLSettings(MethodSettings):
    """Hyper-parameters of FPL."""

    temperature: Positive = Field(0.02, description="tau of the contrast (authors' code)")
    absent_classes: Literal["drop", "keep"] = Field(
        "drop",
        description="prototypes of classes that no client of the round holds: dropped with the old "
        "set (authors' code), or kept",
    )
    contrast_over: Literal["known", "batch"] = Field(
        "known",
        description="what both terms are averaged over: images whose class has a prototype, or "
        "the whole batch (authors' code)",
    )


@register
class FPL(Method):
    """Pulls embeddings to prototypes that are clustered over the clients."""

    name = "fpl"
    summary = "clustered class prototypes guide the embeddings (Huang et al. 2023)"
    settings: FPLSettings
    shapes_embeddings = True
    sends: ClassVar[dict[str, EntrySchema]] = Method.sends | {
        f"update/{PROTOTYPES}": EntrySchema(
            "the mean embedding of each class it holds", ("held", "features"), rows="classes"
        ),
        f"update/{CLASSES}": EntrySchema(
            "which classes these are",
            ("held",),
            torch.int64,
            distinct=True,
            low=0,
            high="classes",
            rows="classes",
        ),
    }

    def broadcast(self, state: State) -> Broadcast:
        """Adds the cluster prototypes to the broadcast."""
        broadcast = super().broadcast(state)
        added = {name: state.extras[name] for name in (PROTOTYPES, CLASSES) if name in state.extras}
        broadcast.extras = joined(broadcast.extras, Message(added))
        return broadcast

    def begin(self, client: Client) -> None:
        """Allocates one embedding for every image."""
        super().begin(client)
        shape = (room(client, len(client.training)), client.network.features_dimension)
        client.scratch[EMBEDDINGS] = torch.full(shape, torch.nan, device=client.device)
        client.scratch[SEEN] = torch.zeros(len(client.training), dtype=torch.bool)
        if CLASSES in client.extras.tensors:
            prototypes, classes = (client.extras.tensors[n] for n in (PROTOTYPES, CLASSES))
            more = room(client, len(classes)) - len(classes)
            classes = nn.functional.pad(classes.cpu(), (0, more), value=NO_CLASS)
            padded = {PROTOTYPES: nn.functional.pad(prototypes, (0, 0, 0, more))}
            if more:
                padded[ROOM] = classes == NO_CLASS
            client.scratch |= {CLASSES: classes} | on_device(padded, client.device)

    def draws(self, client: Client, positions: Tensor, labels: Tensor) -> Weights:
        """Adds the images' positions, and which prototypes are of their classes."""
        drawn = {"fpl/positions": positions}
        client.scratch[SEEN][positions] = True
        if PROTOTYPES in client.scratch:
            known, of_class = met(labels, client.scratch[CLASSES])
            drawn |= {"fpl/known": known, "fpl/own": of_class}
            if self.settings.contrast_over == "batch":
                drawn["fpl/share"] = torch.isin(labels, client.scratch[CLASSES]).float().mean()
        return super().draws(client, positions, labels) | drawn

    def head_loss(self, client: Client, batch: Batch, embeddings: Tensor) -> dict[str, Tensor]:
        """Adds the contrast with all prototypes, and the distance to the mean of its class."""
        terms = super().head_loss(client, batch, embeddings)
        drawn = self.drawn(client, batch)
        if self.is_first_pass(client, batch, "fpl"):
            client.scratch[EMBEDDINGS][drawn["fpl/positions"]] = embeddings.detach().float()
        if PROTOTYPES not in client.scratch:
            return terms
        added = prototype_terms(
            embeddings.float(),
            drawn["fpl/known"],
            drawn["fpl/own"],
            client.scratch[PROTOTYPES],
            self.settings.temperature,
            client.scratch.get(ROOM),
        )
        if self.settings.contrast_over == "batch":
            added = {name: term * drawn["fpl/share"] for name, term in added.items()}
        return terms | added

    def report(self, client: Client) -> Message:
        """Adds the client's prototypes."""
        labels, rows = client.training.labels, client.scratch[SEEN].nonzero().squeeze(1)
        rows = rows[labels[rows].argsort(stable=True)]
        classes, counts = labels[rows].unique(return_counts=True)
        (places,) = on_device({"": rows}, client.device).values()
        parts = client.scratch[EMBEDDINGS][places].split(counts.tolist())
        reported = {PROTOTYPES: torch.stack([part.mean(0) for part in parts]), CLASSES: classes}
        return joined(super().report(client), Message(reported))

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """Averages the weights and clusters the received prototypes."""
        reported: dict[int, tuple[Tensor, Tensor]] = {}

        def note(update: Update) -> None:
            prototypes, classes = (update.extras.tensors[n] for n in (PROTOTYPES, CLASSES))
            reported[update.client] = prototypes.clone(), classes.to(prototypes.device)

        state = super().aggregate(state, noting(updates, note))
        used = of_like_size(reported)
        vectors, labels = clustered(*(torch.cat(parts) for parts in zip(*used)))
        if self.settings.absent_classes == "keep" and PROTOTYPES in state.extras:
            absent = ~torch.isin(state.extras[CLASSES], labels)
            vectors = torch.cat([vectors, state.extras[PROTOTYPES][absent]])
            labels = torch.cat([labels, state.extras[CLASSES][absent]])
        state.extras |= {PROTOTYPES: vectors, CLASSES: labels}
        return state


def of_like_size(own: dict[int, tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Returns prototypes and classes of the clients, without prototypes much larger than others.

    Such prototypes would attract the other clients' embeddings, whatever their images show. With
    two clients none is removed.

    Args:
        own: for each client ``(n, d)`` prototypes and ``(n,)`` classes.
    """
    largest = torch.stack([prototypes.abs().max() for prototypes, _ in own.values()])
    sizes = dict(zip(own, largest.tolist()))  # the host waits once
    limit = LARGEST * statistics.median(sizes.values())
    large = [client for client, size in sizes.items() if len(own) > 2 and size > limit > 0]
    for client in large:
        log.warning(
            "client %d: its prototypes are left out: up to %.3g, more than %g times the median of "
            "its round (%.3g)",
            *(client, sizes[client], LARGEST, limit),
        )
    return [pair for client, pair in own.items() if client not in large]


def clustered(prototypes: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the means of FINCH's coarsest clusters, class by class, and their classes.

    Args:
        prototypes: ``(n, d)``, n at least 1.
        classes: ``(n,)`` class ids.
    """
    means: list[Tensor] = []
    labels: list[int] = []
    for c in torch.unique(classes).tolist():
        members = prototypes[classes == c]
        groups = torch.from_numpy(finch(members.cpu().numpy())[-1]).to(members.device)
        means += [members[groups == group].mean(0) for group in range(int(groups.max()) + 1)]
        labels += [c] * (len(means) - len(labels))
    return torch.stack(means), torch.tensor(labels, device=classes.device)


def room(client: Client, count: int) -> int:
    """Returns for how many rows there is room; where steps are recorded, for few different ones."""
    return 1 << (count - 1).bit_length() if client.records_steps else count


def met(labels: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns which images have prototypes of their class, and which those are.

    Args:
        labels: ``(B,)`` class ids, on the CPU.
        classes: ``(P,)`` class ids of the prototypes, on the CPU.

    Returns:
        ``(K,)`` rows of images, and ``(K, P)`` bool.
    """
    matches = labels[:, None] == classes[None, :]
    known = matches.any(1).nonzero().squeeze(1)
    return known, matches[known]


def prototype_terms(
    embeddings: Tensor,
    known: Tensor,
    own: Tensor,
    prototypes: Tensor,
    temperature: float,
    empty: Tensor | None = None,
) -> dict[str, Tensor]:
    """Returns CPCL and UPCR; nothing if no image's class has a prototype.

    Args:
        embeddings: ``(B, d)``.
        known: ``(K,)`` rows of images with prototypes of their class.
        own: ``(K, P)`` bool, which prototypes are of an image's class.
        prototypes: ``(P, d)`` cluster prototypes of all classes.
        temperature: tau.
        empty: ``(P,)`` bool, rows without a prototype; None if there are none.
    """
    if not len(known):
        return {}
    embeddings = embeddings[known]
    shares = own.float() / own.sum(1, keepdim=True)
    # At a temperature of 0.02 half precision would be too coarse.
    with torch.autocast(embeddings.device.type, enabled=False):
        similarity = normalize(embeddings) @ normalize(prototypes).T / temperature
        means = shares @ prototypes
    if empty is not None:
        similarity = similarity.masked_fill(empty, -torch.inf)
    positive = similarity.masked_fill(~own, -torch.inf).logsumexp(1)
    return {
        "prototype_contrast": (similarity.logsumexp(1) - positive).mean(),
        "prototype_distance": mse_loss(embeddings, means),
    }
