"""Which images an attack is measured on, and which vector speaks of each."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from feddg.clients.client import Examples
from feddg.rng import stream
from feddg.runs.model import Subject

CLOSE = 0.5
"""A row is an image's own where the second nearest image is at least twice as far from it."""
MOST_LOOKED_AT = 256
"""Images of one client whose own rows are measured."""


@dataclass(frozen=True)
class Targets:
    """True images, and where each comes from.

    Attributes:
        images: ``(n, 3, S, S)`` uint8.
        labels: ``(n,)``.
        clients: ``(n,)`` ids of the clients that hold them.
        domains: ``(n,)`` ids of their domains.
    """

    images: Tensor
    labels: Tensor
    clients: Tensor
    domains: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def take(self, positions: Tensor) -> "Targets":
        """Returns some of them."""
        return Targets(
            self.images[positions],
            self.labels[positions],
            self.clients[positions],
            self.domains[positions],
        )

    @classmethod
    def joined(cls, parts: "Sequence[Targets]") -> "Targets":
        """Returns all of several."""
        fields = ("images", "labels", "clients", "domains")
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in fields))


def chosen_clients(subject: Subject, most: int, seed: int) -> list[int]:
    """Returns up to ``most`` clients that hold images, from every domain by turns."""
    counts = subject.images.partition.counts
    main = numpy.argmax(counts, axis=1)
    drawn = torch.randperm(len(main), generator=stream(seed, "clients")).tolist()
    holding = [client for client in drawn if counts[client].sum() > 0]
    turns: dict[int, int] = {}
    order = {}
    for client in holding:
        order[client] = turns.setdefault(int(main[client]), 0)
        turns[int(main[client])] += 1
    return sorted(sorted(holding, key=lambda client: order[client])[:most])


def looked_at(examples: Examples, client: int, seed: int) -> Tensor:
    """Returns positions of the images of a client that are looked at, ``(m,)``."""
    drawn = torch.randperm(len(examples), generator=stream(seed, "looked at", client))
    return drawn[:MOST_LOOKED_AT]


def targets_of(examples: Examples, client: int, positions: Tensor) -> Targets:
    """Returns some of a client's images as targets."""
    images = examples.images(positions)
    ids = torch.full((len(positions),), client)
    return Targets(images, examples.labels[positions], ids, examples.domains[positions])


def matched(rows: Tensor, samples: Tensor, count: int, chance: torch.Generator) -> list[list[int]]:
    """Says which image each of some rows is compared with.

    Where a row is one image's own, it is that image. A pooled row is compared with one of the
    images that are nearer to it than to the client's other rows, drawn at random.

    Args:
        rows: ``(r, d)`` standardised rows of one client.
        samples: ``(m, d)`` standardised rows of its images by themselves.
        count: pairs wanted; a single row is compared with as many images.
        chance: draws rows and images.

    Returns:
        At most ``count`` pairs of a row and an image.
    """
    if len(rows) == 1 and len(samples) <= count:
        return [[0, image] for image in range(len(samples))]
    distances = torch.cdist(rows.double(), samples.double())
    nearest = distances.argmin(0)
    turns = torch.randperm(len(rows), generator=chance).tolist()
    pairs: list[list[int]] = []
    taken: set[int] = set()
    while len(pairs) < min(count, len(samples)):
        before = len(pairs)
        for row in turns:
            image = _image_of(row, distances, nearest, taken, chance)
            if image is not None and len(pairs) < count:
                pairs.append([row, image])
                taken.add(image)
        if len(pairs) == before:
            break
    return pairs


def _image_of(
    row: int, distances: Tensor, nearest: Tensor, taken: set[int], chance: torch.Generator
) -> int | None:
    found = distances[row].sort()
    if len(found.values) > 1 and found.values[0] < CLOSE * found.values[1]:
        own = int(found.indices[0])
        return None if own in taken else own
    spoken_of = (nearest == row).nonzero().flatten().tolist()
    left = [image for image in spoken_of if image not in taken]
    return left[int(torch.randint(len(left), (), generator=chance))] if left else None
