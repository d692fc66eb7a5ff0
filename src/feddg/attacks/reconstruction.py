"""Images drawn again from what clients send beside weights, by the server or by another client.

(i) The *server*, or whoever reads its mail, trains a generator on public images: it asks the
method what a client of one such image would send, and learns the way back. It then feeds the
generator what the run's clients sent. (ii) A malicious *client* trains it on its own images and
feeds it what the server sends to clients. PARDON's section on security has both attacks.

Every true image is compared with three reconstructions: from the row that was *sent*, from the row
that the image by itself would give (a *sample*: the worst that could be shared of it), and from the
row of an *unrelated* image, which is the chance line. All three sides have as many images.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import torch
from torch import Tensor

from feddg.attacks.entries import SentEntry
from feddg.attacks.extractors import perceptual_points
from feddg.attacks.generator import GeneratorTraining, TrainedGenerator, train_generator
from feddg.attacks.image_metrics import (
    Collection,
    Judges,
    clustered_mean,
    collection_scores,
    psnr,
    retrieval,
    ssim,
)
from feddg.attacks.senders import Senders, one_each
from feddg.attacks.targets import Targets, chosen_clients, looked_at, matched, targets_of
from feddg.errors import RunError
from feddg.records import DifferenceRow, ReconstructionRow
from feddg.rng import stream

SENT: Final = "sent"
SAMPLE: Final = "sample"
UNRELATED: Final = "unrelated"
FED: tuple[Literal["sent", "sample", "unrelated"], ...] = (SENT, SAMPLE, UNRELATED)
ALL = "all"
"""Stands for all domains together."""
PAIRWISE = {"psnr": psnr, "ssim": ssim}
TURNS = 8
"""Images looked at for each true image that is wanted, where asking is training."""
Attacker = Literal["server", "client"]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Effort:
    """How much an attack may take.

    Attributes:
        targets: true images it is measured on.
        training: of the generator.
    """

    targets: int = 64
    training: GeneratorTraining = field(default_factory=GeneratorTraining)

    @property
    def seed(self) -> int:
        """Of everything that is drawn."""
        return self.training.seed


@dataclass(frozen=True)
class Reconstruction:
    """What an attack on one entry drew.

    Attributes:
        attacker: who drew.
        entry: what was read.
        targets: the true images.
        drawn: for each kind of vector that was fed, ``(n, 3, S, S)`` in [0, 1].
        public: images that the generator was trained on.
        seed: the attack's.
    """

    attacker: Attacker
    entry: SentEntry
    targets: Targets
    drawn: dict[str, Tensor]
    public: int
    seed: int

    def rows(
        self, domain_names: Sequence[str], judges: Judges
    ) -> list[ReconstructionRow | DifferenceRow]:
        """Returns everything measured, domain by domain and over all."""
        return list(_Measured(self, judges).rows(domain_names))


def reconstruct(
    senders: Senders,
    entry: SentEntry,
    public: Tensor,
    labels: Tensor,
    effort: Effort,
    judges: Judges,
    *,
    attacker: int | None = None,
    victims: Sequence[int] | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Reconstruction:
    """Draws images again from what clients send under an entry.

    Args:
        senders: of the run.
        entry: what is read.
        public: ``(n, 3, S, S)`` uint8 images that the attacker has; the malicious client's own.
        labels: ``(n,)`` what they are taken for.
        effort: how much it may take.
        judges: its eye helps the generator's training.
        attacker: the malicious client's id; None for the server.
        victims: clients whose images are drawn; some of every domain by default.
        progress: called with (what, done, total).

    Raises:
        RunError: the clients send nothing of the kind.
    """
    classes = senders.subject.worker.network.classes
    progress(f"{entry.key}: asking", 0, 1)
    known = torch.cat(
        [rows[:1] for rows in senders.pretended(entry, one_each(public, labels, classes))]
    )
    generator = train_generator(
        known,
        public,
        effort.training,
        judges.eye,
        lambda done, total: progress(f"{entry.key}: training the generator", done, total),
    )
    if victims is None:
        victims = chosen_clients(senders.subject, effort.targets, effort.seed)
    rows = senders.real(entry, [client for client in victims if client != attacker])
    if attacker is not None:
        rows = _received(senders, entry, rows, attacker)
    if not rows:
        raise RunError(f"no client sent {entry.key}, so there is nothing to draw from")
    each = max(1, effort.targets // len(rows))
    parts = [
        _of_client(senders, entry, generator, client, sent, each, effort.seed)
        for client, sent in rows.items()
    ]
    targets = Targets.joined([part[0] for part in parts])
    fed = {SENT: torch.cat([p[1] for p in parts]), SAMPLE: torch.cat([p[2] for p in parts])}
    chance = stream(effort.seed, "unrelated")
    fed[UNRELATED] = known[torch.randint(len(known), (len(targets),), generator=chance)]
    drawn = {name: generator.images(vectors) for name, vectors in fed.items()}
    kind: Attacker = "server" if attacker is None else "client"
    return Reconstruction(kind, entry, targets, drawn, len(public), effort.seed)


def _received(
    senders: Senders, entry: SentEntry, sent: dict[int, Tensor], attacker: int
) -> dict[int, Tensor]:
    """What the malicious client can read of each other client: its rows, or those of nobody."""
    broadcast = senders.broadcast
    told = entry.received(senders.subject.state.agreed, broadcast.extras, broadcast.weights)
    if told is None:
        raise RunError(
            f"clients receive nothing of what is sent as {entry.key}: there is nothing that a "
            "malicious client could draw from; `--kind server` attacks what the server sees"
        )
    own = senders.real(entry, [attacker]).get(attacker)
    theirs = told if own is None else told[~_among(told, own)]
    if not len(theirs):
        raise RunError(f"all that client {attacker} receives as {entry.key} is its own")
    owned = {client: theirs[_among(theirs, rows)] for client, rows in sent.items()}
    if any(len(rows) for rows in owned.values()):
        return {client: rows for client, rows in owned.items() if len(rows)}
    return dict.fromkeys(sent, theirs)


def _among(rows: Tensor, others: Tensor) -> Tensor:
    """Which of some rows stand among others, ``(n,)`` bool."""
    scale = others.abs().mean().clamp(min=1e-12)
    nearest = torch.cdist(rows.double(), others.double()).amin(1) / rows.shape[1] ** 0.5
    among: Tensor = nearest < 1e-5 * scale
    return among


def _of_client(
    senders: Senders,
    entry: SentEntry,
    generator: TrainedGenerator,
    client: int,
    sent: Tensor,
    count: int,
    seed: int,
) -> tuple[Targets, Tensor, Tensor]:
    """Some of a client's images, the row that speaks of each, and the row of each by itself."""
    examples = senders.subject.images.examples(client)
    positions = looked_at(examples, client, seed)
    if not entry.has_rows:  # it speaks of all of them
        positions = positions[:count]
    elif entry.purpose == "update":  # it takes a turn of training to ask of one
        positions = positions[: TURNS * count]
    targets = targets_of(examples, client, positions)
    classes = senders.subject.worker.network.classes
    holdings = one_each(targets.images, targets.labels, classes)
    samples = torch.cat([rows[:1] for rows in senders.pretended(entry, holdings)])
    pairs = matched(
        generator.standardised(sent),
        generator.standardised(samples),
        count,
        stream(seed, "pairs", client),
    )
    rows, images = torch.tensor(pairs).T
    return targets.take(images), sent[rows], samples[images]


class _Measured:
    """Measures a reconstruction."""

    def __init__(self, found: Reconstruction, judges: Judges) -> None:
        self._found, self._judges = found, judges
        self._true = found.targets.images.float() / 255
        extractor = judges.extractor
        self._true_points = perceptual_points(judges.eye, self._true)
        self._points = {
            fed: perceptual_points(judges.eye, part) for fed, part in found.drawn.items()
        }
        self._of_true = Collection.of(self._true, extractor)
        self._of_drawn = {fed: Collection.of(part, extractor) for fed, part in found.drawn.items()}
        self._pairwise = {fed: self._of_pairs(fed) for fed in found.drawn}

    def _of_pairs(self, fed: str) -> dict[str, Tensor]:
        drawn = self._found.drawn[fed]
        scores = {name: work(drawn, self._true) for name, work in PAIRWISE.items()}
        scores[self._judges.perceptual_name] = self._judges.perceptual(drawn, self._true)
        found = retrieval(self._points[fed], self._true_points, self._found.targets.domains)
        return scores | {"rank": found.ranks}

    def rows(self, domain_names: Sequence[str]) -> Iterator[ReconstructionRow | DifferenceRow]:
        domains = self._found.targets.domains
        for domain in domains.unique().tolist():
            chosen = (domains == domain).nonzero().flatten()
            yield from (self._row(fed, domain_names[domain], chosen) for fed in FED)
        everything = torch.arange(len(domains))
        yield from (self._row(fed, ALL, everything) for fed in FED)
        yield from (self._difference(metric) for metric in self._pairwise[SENT])

    def _row(
        self, fed: Literal["sent", "sample", "unrelated"], domain: str, chosen: Tensor
    ) -> ReconstructionRow:
        found, judges = self._found, self._judges
        pairwise = {name: values[chosen] for name, values in self._pairwise[fed].items()}
        points = self._points[fed][chosen], self._true_points[chosen]
        among = retrieval(*points, found.targets.domains[chosen])
        rank = clustered_mean(pairwise["rank"], found.targets.clients[chosen]).within(0, 1)
        ours, theirs = (part.take(chosen) for part in (self._of_drawn[fed], self._of_true))
        scores = collection_scores(ours, theirs, judges.extractor, found.seed)
        scores[judges.perceptual_name] = float(pairwise[judges.perceptual_name].mean())
        return ReconstructionRow(
            attacker=found.attacker,
            entry=found.entry.key,
            fed=fed,
            domain=domain,
            images=len(chosen),
            clients=len(found.targets.clients[chosen].unique()),
            psnr=float(pairwise["psnr"].mean()),
            ssim=float(pairwise["ssim"].mean()),
            scores=scores,
            rank=rank.mean,
            rank_low=rank.low,
            rank_high=rank.high,
            first=among.first,
            first_chance=among.first_chance,
            public=found.public,
            seed=found.seed,
        )

    def _difference(self, metric: str) -> DifferenceRow:
        clients = self._found.targets.clients
        gap = self._pairwise[SAMPLE][metric] - self._pairwise[SENT][metric]
        mean = clustered_mean(gap, clients)
        return DifferenceRow(
            attacker=self._found.attacker,
            entry=self._found.entry.key,
            metric=metric,
            mean=mean.mean,
            low=mean.low,
            high=mean.high,
            clients=len(clients.unique()),
            images=len(clients),
        )
