"""What real and simulated clients send, and the images used to measure an attack."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy
import pandas
import torch
from pydantic import Field
from torch import Tensor

from feddg.clients.client import Examples, Worker, steps_of_round
from feddg.data.data_set import find_augmentation
from feddg.data.images import ImageTable
from feddg.data.pixels import ArrayPixels, Pixels, as_unit
from feddg.errors import ExperimentError, RunError, nearest
from feddg.federation.federation import Federation
from feddg.federation.inprocess import InProcess
from feddg.federation.server import Hooks
from feddg.messages import Broadcast, Message, SchemaContext, Update, Weights
from feddg.methods.base import Method, Round, has_global_model, local_names
from feddg.models.network import Network
from feddg.models.normalization import statistics_names
from feddg.rng import stream
from feddg.runs.prepare import images_of
from feddg.settings import Settings, grouped

# What a method sends beside weights, found by what it declares: the entries an attack can read.
#
# An *entry* is one declared thing of a message, named as in the ledger (``statistics/style``). What
# a client sends under it becomes *rows*, one vector each: an entry whose first length only the
# sender knows (a number of styles, of images, of classes held) has a row for each, every other has
# one. The statistics of batch normalisation travel among the weights; they are an entry of their
# own, ``update/statistics``.


LONGEST = 16_384
"""Longest row kept as it is; longer ones are hashed to this length."""
STATISTICS = "update/statistics"
CLOSE = 0.5
"""A row belongs to one image if the second nearest image is at least 1 / CLOSE times as far away.
"""
MOST_LOOKED_AT = 256
"""Largest number of a client's images whose own rows are measured."""
PLAIN = find_augmentation("none")
MOST_STEPS = 16
"""Most training steps of a simulated client, of which there are hundreds."""
FEWEST_MEMBERS = 4
"""Clients with fewer members or others are left out."""


@dataclass(frozen=True)
class SentEntry:
    """One entry that leaves a client besides its weights.

    Attributes:
        key: ``purpose/name`` as in the ledger; the name may end in ``*``.
        has_rows: whether the first dimension counts rows.
        names: names of the weights it consists of; empty for a separate entry.
    """

    key: str
    has_rows: bool = False
    names: tuple[str, ...] = ()

    @property
    def purpose(self) -> str:
        """The message that contains it: ``statistics`` or ``update``."""
        return self.key.partition("/")[0]

    @property
    def name(self) -> str:
        """Its name in the message."""
        return self.key.partition("/")[2]

    def rows(self, weights: Weights, extras: Weights) -> Tensor | None:
        """Returns the entry's values in a message, ``(rows, length)`` float32, or None.

        Args:
            weights: weights in the message.
            extras: other tensors in it.
        """
        tensors = weights if self.names else extras
        names = self.names or sorted(name for name in tensors if fnmatchcase(name, self.name))
        sent = [tensors[name].detach().float().cpu() for name in names if name in tensors]
        if not sent:
            return None
        joined = torch.cat([part.flatten(1 if self.has_rows else 0) for part in sent], dim=-1)
        return hashed(joined if self.has_rows else joined[None]).clone()


def hashed(rows: Tensor) -> Tensor:
    """Returns rows of at most ``LONGEST`` values; longer ones as a count sketch.

    Every value is added with a random sign to one of the places (Charikar et al., "Finding frequent
    items in data streams", ICALP 2002), so inner products are preserved on average.
    """
    length = rows.shape[1]
    if length <= LONGEST:
        return rows
    rng = stream(0, "sketch", length)
    places = torch.randint(LONGEST, (length,), generator=rng)
    signs = torch.randint(2, (length,), generator=rng) * 2.0 - 1
    return torch.zeros(len(rows), LONGEST).index_add_(1, places, rows * signs)


def entries_of(method: Method, network: Network) -> dict[str, SentEntry]:
    """Returns everything except weights that leaves a client under a method, by key.

    Scalars and class ids are left out. Normalisation statistics are included if the method treats
    them separately (FedBN, SiloBN, FedIG).
    """
    context = SchemaContext(network.classes, 0, network.features_dimension)
    entries = {}
    for key, schema in method.sends.items():
        sent = key not in Method.sends and schema.sent_by(method)
        if not sent or not key.startswith(("statistics/", "update/")):
            continue
        shape = schema.shape(method, context) if callable(schema.shape) else schema.shape
        if schema.dtype.is_floating_point and (shape or schema.entry_of is not None):
            first, *rest = shape or (0,)
            of_sender = isinstance(first, str) and first not in context.dimensions
            entries[key] = SentEntry(key, of_sender or (first == 1 and len(rest) > 0))
    statistics = local_names(method, network) & statistics_names(network)
    shared = statistics and has_global_model(method, network)
    return entries | (_statistics(network) if shared else {})


def chosen_entries(method: Method, network: Network, wanted: str | None) -> dict[str, SentEntry]:
    """Returns the entries to attack: all of the method's, or the requested one.

    Args:
        method: the run's method.
        network: the network it trains.
        wanted: an entry's key or name; ``statistics`` for normalisation statistics under any method
            that trains them; None for all.

    Raises:
        ExperimentError: the method does not send it; the message lists what it sends.
    """
    entries = entries_of(method, network)
    if wanted in ("statistics", STATISTICS) and (statistics := _statistics(network)):
        return statistics
    if not entries:
        raise ExperimentError(
            f"{method.name} shares no style, spectrum or prototype to attack. Where weights leave "
            "the clients, `--kind update` and `--kind membership` attack them, and `--entry "
            "statistics` the normalisation statistics among them"
        )
    if wanted is None:
        return entries
    chosen = {key: entry for key, entry in entries.items() if wanted in (key, entry.name)}
    if not chosen:
        raise ExperimentError(
            f"{method.name} sends no {wanted!r}{nearest(wanted, entries)}; it sends: "
            f"{', '.join(entries)}"
        )
    return chosen


def _statistics(network: Network) -> dict[str, SentEntry]:
    state = network.state_dict()
    names = sorted(n for n in statistics_names(network) if state[n].is_floating_point())
    if not names:
        return {}
    return {STATISTICS: SentEntry(STATISTICS, names=tuple(names))}


@dataclass(frozen=True)
class Targets:
    """True images and their origin.

    Attributes:
        images: ``(n, 3, S, S)`` uint8.
        labels: ``(n,)``.
        clients: ``(n,)`` ids of their clients.
        domains: ``(n,)`` ids of their domains.
    """

    images: Tensor
    labels: Tensor
    clients: Tensor
    domains: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def take(self, positions: Tensor) -> "Targets":
        """Returns some of the targets."""
        return Targets(*(column[positions] for column in vars(self).values()))

    @classmethod
    def joined(cls, parts: "Sequence[Targets]") -> "Targets":
        """Returns several sets of targets as one."""
        return cls(*map(torch.cat, zip(*(vars(part).values() for part in parts))))


def chosen_clients(loaded: Federation, most: int, seed: int, least: int = 1) -> list[int]:
    """Returns up to ``most`` clients that hold ``least`` images, taking domains in turn."""
    counts = images_of(loaded).partition.counts
    drawn = torch.randperm(len(counts), generator=stream(seed, "clients")).numpy()
    holding = drawn[counts[drawn].sum(axis=1) >= least]
    domains = counts[holding].argmax(axis=1)
    turns = pandas.Series(domains).groupby(domains).cumcount()
    return sorted(holding[turns.argsort(kind="stable")[:most]].tolist())


def looked_at(examples: Examples, client: int, seed: int) -> Tensor:
    """Returns the positions of the client's images to measure, ``(m,)``."""
    drawn = torch.randperm(len(examples), generator=stream(seed, "looked at", client))
    return drawn[:MOST_LOOKED_AT]


def targets_of(examples: Examples, client: int, positions: Tensor) -> Targets:
    """Returns some of a client's images as targets."""
    images = examples.images(positions)
    ids = torch.full((len(positions),), client)
    return Targets(images, examples.labels[positions], ids, examples.domains[positions])


def matched(rows: Tensor, samples: Tensor, count: int, rng: torch.Generator) -> list[list[int]]:
    """Returns which image each of some rows is compared with.

    A row that belongs to one image is compared with that image. A pooled row is compared with a
    random one of the images that are nearer to it than to the client's other rows.

    Args:
        rows: ``(r, d)`` standardised rows of one client.
        samples: ``(m, d)`` standardised rows of its single images.
        count: number of pairs; a single row is compared with this many images.
        rng: random generator for rows and images.

    Returns:
        At most ``count`` pairs of a row and an image.
    """
    if len(rows) == 1 and len(samples) <= count:
        return [[0, image] for image in range(len(samples))]
    distances = torch.cdist(rows.double(), samples.double())
    nearest = distances.argmin(0)
    turns = torch.randperm(len(rows), generator=rng).tolist()
    pairs: list[list[int]] = []
    taken: set[int] = set()
    while len(pairs) < min(count, len(samples)):
        before = len(pairs)
        for row in turns:
            image = _image_of(row, distances, nearest, taken, rng)
            if image is not None and len(pairs) < count:
                pairs.append([row, image])
                taken.add(image)
        if len(pairs) == before:
            break
    return pairs


def _image_of(
    row: int, distances: Tensor, nearest: Tensor, taken: set[int], rng: torch.Generator
) -> int | None:
    ordered = distances[row].sort()
    if len(ordered.values) > 1 and ordered.values[0] < CLOSE * ordered.values[1]:
        closest = int(ordered.indices[0])
        return None if closest in taken else closest
    spoken_of = (nearest == row).nonzero().flatten().tolist()
    left = [image for image in spoken_of if image not in taken]
    return left[int(torch.randint(len(left), (), generator=rng))] if left else None


def in_memory(images: Tensor) -> ArrayPixels:
    """Returns images ``(n, 3, S, S)`` uint8 as a pixel store."""
    return ArrayPixels(images.permute(0, 2, 3, 1).numpy())


class Senders:
    """Computes what clients of a finished run, or simulated ones, would send.

    Args:
        loaded: the run's federation.
    """

    def __init__(self, loaded: Federation) -> None:
        self.loaded = loaded

    @property
    def hides_training(self) -> str | None:
        """Why the server saw no single client's trained weights, or None if it did."""
        loaded = self.loaded
        if loaded.defences.masking is not None:
            return "the server of this run saw sums of updates alone (secure aggregation)"
        if loaded.method.one_round:
            return f"{loaded.method.name} trains nothing: clients send sums over their images"
        shared = has_global_model(loaded.method, loaded.network)
        return None if shared else f"under {loaded.method.name} no weights leave a client"

    @property
    def broadcast(self) -> Broadcast:
        """The message to the clients of the next round."""
        sent = self.loaded.method.broadcast(self.loaded.server.state)
        round = Round(sent.round, [], self.loaded.server.state)
        return Hooks(self.loaded.defences.defences).broadcast(sent, round)

    def real(self, entry: SentEntry, clients: Sequence[int]) -> dict[int, Tensor]:
        """Returns what clients of the run send in an entry.

        Setup messages are computed again from the same seed. Updates are those of the round after
        the last, starting from the run's final weights.

        Args:
            entry: the attacked entry.
            clients: their ids.

        Returns:
            By client ``(rows, length)``.

        Raises:
            RunError: none of them sends it.
        """
        loaded, here = self.loaded, self.loaded.clients
        memories = dict(loaded.transport.memories)
        transport = loaded.others(here.__getitem__, len(here), loaded.worker, memories)
        return self._sent(transport, entry, clients)

    def pretended(self, entry: SentEntry, client_data: Sequence[Examples]) -> list[Tensor]:
        """Returns what clients with the given images would send in an entry.

        They train without augmentation for as many steps as the run's clients do, up to
        ``MOST_STEPS``, and store nothing on disk.

        Args:
            entry: the attacked entry.
            client_data: the images of each client.

        Returns:
            For each ``(rows, length)``.

        Raises:
            RunError: one of them does not send the entry.
        """
        hold = [_twice(h) if entry.names and len(h) == 1 else h for h in client_data]
        transport = self.loaded.others(hold.__getitem__, len(hold), self.pretender())
        sent = self._sent(transport, entry, range(len(hold)))
        if len(sent) < len(hold):
            raise RunError(f"a client of some images of its own sends no {entry.key} here")
        return [sent[id] for id in range(len(hold))]

    def one_each(self, entry: SentEntry, images: Tensor, labels: Tensor) -> Tensor:
        """Returns the first row that a client of one image alone would send, for each image.

        Args:
            entry: the attacked entry.
            images: ``(n, 3, S, S)`` uint8.
            labels: ``(n,)``.

        Returns:
            ``(n, length)``.

        Raises:
            RunError: see :meth:`pretended`.
        """
        pixels, classes = in_memory(images), self.loaded.network.classes
        rows = torch.arange(len(images)).split(1)
        sent = self.pretended(entry, [held(pixels, row, labels, classes) for row in rows])
        return torch.cat([part[:1] for part in sent])

    def trained(
        self, client_data: Sequence[Examples], worker: Worker, broadcast: Broadcast
    ) -> Iterator[Update]:
        """Yields the updates of simulated clients; each is valid until the next is drawn."""
        transport = self.loaded.others(client_data.__getitem__, len(client_data), worker)
        for reply in transport.train(range(len(client_data)), broadcast):
            if not isinstance(reply, Update):
                raise RunError(f"a pretended client cannot train: {reply.reason}")
            yield reply

    def pretender(self, **changes: object) -> Worker:
        """Returns the worker for simulated clients.

        Args:
            changes: changed fields of the training settings.
        """
        sizes, train = images_of(self.loaded).partition.sizes, self.loaded.worker.train
        usual = steps_of_round(train, math.ceil(numpy.median(sizes[sizes > 0])))
        alike = {"local_steps": min(MOST_STEPS, usual), "select_every": None}
        train = train.model_copy(update=alike | changes)
        return replace(self.loaded.worker, train=train, augmentation=PLAIN, cache=None)

    def _sent(
        self, transport: InProcess, entry: SentEntry, clients: Sequence[int]
    ) -> dict[int, Tensor]:
        sent: dict[int, Tensor | None] = {}
        if entry.purpose == "statistics":
            start = Broadcast(0, self.loaded.untrained())
            for id, reply in transport.client_statistics(clients, start):
                if isinstance(reply, Message):
                    sent[id] = entry.rows({}, reply.tensors)
        else:
            for update in transport.train(clients, self.broadcast):
                if isinstance(update, Update):
                    sent[update.client] = entry.rows(update.weights, update.extras.tensors)
        found = {id: rows for id, rows in sent.items() if rows is not None}
        if not found:
            raise RunError(f"no client sends {entry.key}, so there is nothing to attack")
        return found

    def labels(self, images: Tensor) -> Tensor:
        """Returns the run's model's predictions for images ``(n, 3, H, W)`` uint8: ``(n,)``."""
        predictor = self.loaded.predictor(self.loaded.server.state.weights)
        device = self.loaded.worker.device
        with torch.inference_mode():
            parts = [predictor(as_unit(part, device)).argmax(1).cpu() for part in images.split(64)]
        return torch.cat(parts).clone()


def held(pixels: Pixels, rows: Tensor, labels: Tensor, classes: int) -> Examples:
    """Returns some images of a store as a client's; ``labels`` are those of the whole store."""
    return Examples(pixels, rows, labels[rows], torch.zeros_like(rows), classes)


def _twice(examples: Examples) -> Examples:
    """Repeats a single image, because one image has no batch statistics."""
    rows, labels, domains = (
        part.repeat(2) for part in (examples.rows, examples.labels, examples.domains)
    )
    return replace(examples, rows=rows, labels=labels, domains=domains)


class MembershipEffort(Settings):
    """The size of the membership attack.

    Attributes:
        clients: number of attacked clients, for membership.
        images: members, and others, per client.
        shadows: number of shadow clients for each of them.
    """

    clients: int = Field(8, ge=1)
    images: int = Field(32, ge=FEWEST_MEMBERS)
    shadows: int = Field(4, ge=0)


@dataclass(frozen=True)
class Case:
    """Images for which membership in a client is asked.

    Attributes:
        holding: the client's images.
        asked: the images, members first.
        members: ``(n,)`` bool.
    """

    holding: Examples
    asked: Examples
    members: numpy.ndarray


@dataclass(frozen=True)
class Victim:
    """An attacked client.

    Attributes:
        client: its id.
        case: the images asked about.
        shadows: simulated clients like it, with others' images.
    """

    client: int
    case: Case
    shadows: list[Case]


def victims_of(senders: Senders, effort: MembershipEffort, seed: int = 0) -> Iterator[Victim]:
    """Yields the attacked clients with their shadow clients."""
    loaded, images = senders.loaded, images_of(senders.loaded)
    table = images.table
    aside = numpy.concatenate([images.splits.id_test, images.splits.id_val])
    for client in chosen_clients(loaded, effort.clients, seed, 2 * FEWEST_MEMBERS):
        holding = images[client]
        domains = holding.domains.unique().numpy()
        generator = stream(seed, "membership", client)
        own = holding.rows.numpy()
        elsewhere = numpy.setdiff1d(images.splits.train, own)
        elsewhere = elsewhere[numpy.isin(table.domains[elsewhere], domains)]
        members, others = _pairs(own, aside, effort.images, generator, table)
        if len(members) < FEWEST_MEMBERS:
            members, others = _pairs(own, elsewhere, effort.images, generator, table)
        rest = numpy.setdiff1d(elsewhere, others)
        if len(members) < FEWEST_MEMBERS:
            continue
        case = _case(holding, members, others, table)
        shadows = list(_shadows(holding, rest, effort, generator, table))
        yield Victim(client, case, shadows)


def _pairs(
    members: numpy.ndarray,
    others: numpy.ndarray,
    count: int,
    generator: torch.Generator,
    table: ImageTable,
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Draws members and as many others, each of the domain and class of its member.

    Otherwise whoever guesses by domain, or by class, would do better than chance.
    """
    kinds = list(zip(table.domains.tolist(), table.labels.tolist()))
    free = grouped((kinds[row], row) for row in _drawn(others, len(others), generator).tolist())
    drawn = _drawn(members, len(members), generator).tolist()
    pairs = [(row, free[kinds[row]].pop()) for row in drawn if free.get(kinds[row])]
    found = numpy.array(pairs[:count], dtype=members.dtype).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def _shadows(
    like: Examples,
    rows: numpy.ndarray,
    effort: MembershipEffort,
    generator: torch.Generator,
    table: ImageTable,
) -> Iterator[Case]:
    """Yields clients with as many images of the same domains, none of them this client's."""
    for _ in range(effort.shadows):
        drawn = _drawn(rows, min(2 * len(like), len(rows)), generator)
        half = len(drawn) // 2
        if half < FEWEST_MEMBERS:
            return
        holding = _held_rows(like, drawn[:half], table)
        count = min(effort.images, half)
        yield _case(holding, drawn[:count], drawn[half : half + count], table)


def _case(
    holding: Examples, members: numpy.ndarray, others: numpy.ndarray, table: ImageTable
) -> Case:
    asked = _held_rows(holding, numpy.concatenate([members, others]), table)
    return Case(holding, asked, numpy.arange(len(members) + len(others)) < len(members))


def _held_rows(like: Examples, rows: numpy.ndarray, table: ImageTable) -> Examples:
    columns = (rows, table.labels[rows], table.domains[rows])
    positions, of_class, of_domain = map(torch.from_numpy, columns)
    return Examples(like.pixels, positions, of_class, of_domain, like.classes)


def _drawn(rows: numpy.ndarray, count: int, generator: torch.Generator) -> numpy.ndarray:
    order = torch.randperm(len(rows), generator=generator).numpy()
    return rows[order[:count]]
