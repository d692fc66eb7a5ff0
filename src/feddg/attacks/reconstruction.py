"""Reconstructs images from what clients send besides weights, with a trained generator."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, mse_loss

from feddg.attacks.image_metrics import (
    PERCEPTUAL,
    Retrieval,
    clustered_mean,
    perceptual_distances,
    perceptual_points,
    psnr,
    retrieval,
    ssim,
)
from feddg.attacks.senders import (
    Senders,
    SentEntry,
    Targets,
    chosen_clients,
    looked_at,
    matched,
    targets_of,
)
from feddg.diagnostics import Progress, silent
from feddg.errors import DataError, RunError
from feddg.records import DifferenceRow, ReconstructionRow
from feddg.rng import DrawnFrom, derive_seed, stream

# From what was sent to an image: a light-weight generator, trained without an adversary.
#
# As in CCST's ``reconstruct_img``, which PARDON follows: the generator of a light-weight GAN (Liu
# et al., "Towards Faster and Stabilized GAN Training for High-fidelity Few-shot Image Synthesis",
# ICLR 2021: convolutions with gated linear units, and skip-layer excitation), trained to give back
# the image that a vector was taken from, by a pixel loss and a perceptual loss; the weights with
# the best validation PSNR are kept. Beside it stands what a linear attack finds in closed form, a
# ridge regression from the vector to a thumbnail, so that the network only learns what is left
# over.


FEWEST = 16
"""Fewest images to train a generator on."""
THUMBNAIL = 8
RIDGES = (1e-4, 1e-2, 1e-1, 1.0)
"""Ridge strengths to try, as shares of the number of images."""
MOST_SIDE = 32
"""Largest side of images in the network and the perceptual loss: moments, spectra and prototypes
contain no finer detail, and 64 pixels would take four times as long.
"""
LARGEST_SCORE = 10.0
"""Standardised values are clipped to this, because larger ones do not occur for public images."""
Fed = Literal["sent", "sample", "unrelated"]
FED: tuple[Fed, ...] = get_args(Fed)
ALL = "all"
"""The name for all domains together."""
PAIRWISE = {"psnr": psnr, "ssim": ssim}
Pairs = tuple[Tensor, Tensor]
"""Vectors ``(n, d)``, and the image of each, ``(n, 3, S, S)`` uint8."""
TURNS = 8
"""Candidate images per true image wanted, if reading them needs training."""


@dataclass(frozen=True)
class GeneratorTraining:
    """Settings for training a generator.

    Attributes:
        steps: training steps of the network; 0 uses only the linear attack.
        batch_size: images per step.
        lr: Adam's learning rate; falls to a tenth along a cosine.
        perceptual: weight of the perceptual loss relative to the mean squared pixel error.
        validation: share of the images for choosing ridge and weights.
        seed: seed of initial weights, batches, and all other random draws.
    """

    steps: int = 300
    batch_size: int = 32
    lr: float = 2e-3
    perceptual: float = 0.02
    validation: float = 0.1
    seed: int = 0


class StyleGenerator(nn.Module):
    """Maps standardised vectors ``(B, d)`` to images ``(B, 3, size, size)`` around zero."""

    def __init__(self, length: int, size: int) -> None:
        super().__init__()
        self.size, self.sides = size, _sides(min(size, MOST_SIDE))
        widths = [_width(side) for side in self.sides]
        self.first = nn.Sequential(
            nn.Linear(length, 256), nn.GELU(), nn.Linear(256, widths[0] * self.sides[0] ** 2)
        )
        self.blocks = nn.ModuleList(_gated(before, after) for before, after in pairwise(widths))
        # MOST_SIDE is three doublings from the smallest map: there is one map to excite, or none.
        self.excitation = _excitation(widths[0], widths[-1]) if len(widths) > 3 else None
        self.last = nn.Conv2d(widths[-1], 3, 3, padding=1)
        nn.init.zeros_(self.last.weight)  # it begins as the linear attack
        nn.init.zeros_(self.last.bias)  # type: ignore[arg-type]

    def forward(self, vectors: Tensor) -> Tensor:
        """Returns images; not clamped."""
        smallest: Tensor = self.first(vectors).view(len(vectors), -1, self.sides[0], self.sides[0])
        maps = smallest
        for side, block in zip(self.sides[1:], self.blocks):
            maps = block(interpolate(maps, (side, side)))
        if self.excitation is not None:
            maps = maps * self.excitation(smallest)
        return _enlarged(self.last(maps), self.size)


@dataclass
class TrainedGenerator:
    """A trained generator, with the constants that normalise its input.

    Attributes:
        centre: ``(d,)`` means of the public vectors.
        scale: ``(d,)`` standard deviations of the public vectors.
        ridge: ``(d, 3 t t)`` linear map from a standardised vector to a thumbnail.
        thumbnail: ``(3, t, t)`` mean thumbnail.
        network: adds detail to the thumbnail; None if it does not help.
        size: side of the images.
        psnr: PSNR of the validation images in dB.
    """

    centre: Tensor
    scale: Tensor
    ridge: Tensor
    thumbnail: Tensor
    network: StyleGenerator | None
    size: int
    psnr: float = 0.0

    def standardised(self, rows: Tensor) -> Tensor:
        """Returns vectors ``(n, d)`` standardised by the public mean and deviation."""
        scores = (rows.float() - self.centre) / self.scale
        return scores.clamp(-LARGEST_SCORE, LARGEST_SCORE)

    def images(self, rows: Tensor) -> Tensor:
        """Returns the images generated from vectors ``(n, d)``: ``(n, 3, S, S)`` in [0, 1]."""
        with torch.inference_mode():
            parts = []
            for scores in self.standardised(rows).split(64):
                images = self.linear(scores)
                images = images if self.network is None else images + self.network(scores)
                parts.append(images.clamp(0, 1))
        return torch.cat(parts).clone()

    def linear(self, scores: Tensor) -> Tensor:
        """Returns the images of the ridge regression only."""
        flat = scores @ self.ridge
        small = flat.view(-1, *self.thumbnail.shape) + self.thumbnail
        return _enlarged(small, self.size)


def train_generator(
    rows: Tensor,
    images: Tensor,
    training: GeneratorTraining,
    progress: Progress = silent,
) -> TrainedGenerator:
    """Trains a generator to reconstruct images from their vectors.

    Args:
        rows: ``(n, d)`` vectors.
        images: ``(n, 3, S, S)`` uint8, the image of each vector.
        training: settings of the training.
        progress: called with (what, steps done, total steps).

    Raises:
        DataError: there are too few images.
    """
    if len(rows) < FEWEST:
        raise DataError(
            f"{len(rows)} images are too few to train a generator on; give at least {FEWEST}"
        )
    order = torch.randperm(len(rows), generator=stream(training.seed, "validation"))
    count = max(2, round(training.validation * len(rows)))
    chosen = rows[order[count:]], images[order[count:]]
    validation = rows[order[:count]], images[order[:count]]
    generator = _linear(chosen, validation)
    if training.steps:
        _train_network(generator, chosen, validation, training, progress)
    return generator


def _linear(chosen: Pairs, validation: Pairs) -> TrainedGenerator:
    """Returns the ridge regression from vectors to thumbnails that is best on validation images."""
    rows, images = chosen
    size = images.shape[-1]
    centre, scale = rows.mean(0), rows.std(0).clamp(min=1e-8)
    small, wanted = (
        interpolate(_unit(part), (min(THUMBNAIL, size),) * 2, mode="area")
        for part in (images, validation[1])
    )
    thumbnail = small.mean(0)
    generator = TrainedGenerator(centre, scale, torch.zeros(0), thumbnail, None, size)
    scores, goal = generator.standardised(validation[0]), (wanted - thumbnail).flatten(1)
    ridges = _ridges(generator.standardised(rows), (small - thumbnail).flatten(1))
    generator.ridge = min(ridges, key=lambda ridge: float(mse_loss(scores @ ridge, goal)))
    generator.psnr = _psnr(generator, validation)
    return generator


def _ridges(scores: Tensor, targets: Tensor) -> Iterator[Tensor]:
    """Yields ridge regressions of all strengths."""
    from sklearn.linear_model import Ridge

    given, aim = scores.double().numpy(), targets.double().numpy()
    for share in RIDGES:
        fitted = Ridge(alpha=share * len(given), fit_intercept=False).fit(given, aim)
        yield torch.from_numpy(fitted.coef_.T).float()


def _train_network(
    generator: TrainedGenerator,
    chosen: Pairs,
    validation: Pairs,
    training: GeneratorTraining,
    progress: Progress,
) -> None:
    """Trains the network that adds detail; it is used only if it helps on validation images."""
    rows, images = chosen
    with DrawnFrom(derive_seed(training.seed, "generator")):
        network = StyleGenerator(rows.shape[1], generator.size)
    scores, best = generator.standardised(rows), None
    optimizer = torch.optim.Adam(network.parameters(), training.lr, betas=(0.5, 0.99))
    falls = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, training.steps, eta_min=training.lr / 10
    )
    for step in range(training.steps):
        progress("training the generator", step, training.steps)
        rng = stream(training.seed, "batch", step)
        batch = torch.randint(len(rows), (training.batch_size,), generator=rng)
        network.train()
        drawn = generator.linear(scores[batch]) + network(scores[batch])
        loss = _loss(drawn, _unit(images[batch]), training.perceptual)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        falls.step()
        if (step + 1) % max(1, training.steps // 8) == 0:
            generator.network = network.eval()
            reached = _psnr(generator, validation)
            if reached > generator.psnr:
                generator.psnr, best = reached, copy.deepcopy(network)
    generator.network = best


def _loss(drawn: Tensor, wanted: Tensor, weight: float) -> Tensor:
    side = min(MOST_SIDE, drawn.shape[-1])
    pair = [interpolate(part, (side, side), mode="area") for part in (drawn.clamp(0, 1), wanted)]
    return mse_loss(drawn, wanted) + weight * perceptual_distances(*pair).mean()


def _psnr(generator: TrainedGenerator, validation: Pairs) -> float:
    rows, images = validation
    return float(psnr(generator.images(rows), _unit(images)).mean())


def _enlarged(images: Tensor, size: int) -> Tensor:
    if images.shape[-1] == size:
        return images
    return interpolate(images, (size, size), mode="bilinear")


def _unit(images: Tensor) -> Tensor:
    return images.float() / 255


def _sides(size: int) -> list[int]:
    """Returns sides of maps from about 4 pixels to ``size``, each about twice the previous."""
    sides = [size]
    while sides[0] > 5:
        sides.insert(0, -(-sides[0] // 2))
    return sides


def _width(side: int) -> int:
    return max(16, min(64, 512 // side))


def _gated(before: int, after: int) -> nn.Module:
    """Convolution, batch normalisation, gated linear unit."""
    convolution = nn.Conv2d(before, 2 * after, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(2 * after), nn.GLU(1))


def _excitation(before: int, after: int) -> nn.Module:
    """Skip-layer excitation: gates for a large map's channels, computed from a small map."""
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(4),
        nn.Conv2d(before, after, 4),
        nn.SiLU(),
        nn.Conv2d(after, after, 1),
        nn.Sigmoid(),
    )


Attacker = Literal["server", "client"]


@dataclass(frozen=True)
class Reconstruction:
    """The result of an attack on one entry.

    Attributes:
        attacker: the attacker.
        entry: the attacked entry.
        targets: the true images.
        drawn: for each kind of input vector, ``(n, 3, S, S)`` in [0, 1].
        public: number of images that the generator was trained on.
        seed: the attack's seed.
    """

    attacker: Attacker
    entry: SentEntry
    targets: Targets
    drawn: dict[str, Tensor]
    public: int
    seed: int

    def rows(self, domain_names: Sequence[str]) -> list[ReconstructionRow | DifferenceRow]:
        """Returns all measurements, by domain and over all domains."""
        true, domains = self.targets.images.float() / 255, self.targets.domains
        of_true = perceptual_points(true)
        points = {fed: perceptual_points(drawn) for fed, drawn in self.drawn.items()}
        scores = {
            fed: {name: work(drawn, true) for name, work in PAIRWISE.items()}
            | {PERCEPTUAL: (points[fed] - of_true).square().sum(1)}
            | {"rank": retrieval(points[fed], of_true, domains).ranks}
            for fed, drawn in self.drawn.items()
        }
        parts = [
            (domain_names[domain], (domains == domain).nonzero().flatten())
            for domain in domains.unique().tolist()
        ]
        rows: list[ReconstructionRow | DifferenceRow] = []
        for domain, chosen in [*parts, (ALL, torch.arange(len(domains)))]:
            for fed in FED:
                first = retrieval(points[fed][chosen], of_true[chosen], domains[chosen])
                rows.append(self._row(fed, domain, chosen, scores[fed], first))
        gaps = {name: scores["sample"][name] - sent for name, sent in scores["sent"].items()}
        return rows + [self._difference(name, gap) for name, gap in gaps.items()]

    def _row(
        self, fed: Fed, domain: str, chosen: Tensor, scores: dict[str, Tensor], first: Retrieval
    ) -> ReconstructionRow:
        clients = self.targets.clients[chosen]
        means = {name: float(values[chosen].mean()) for name, values in scores.items()}
        rank = clustered_mean(scores["rank"][chosen], clients).within(0, 1)
        return ReconstructionRow(
            attacker=self.attacker,
            entry=self.entry.key,
            fed=fed,
            domain=domain,
            images=len(chosen),
            clients=len(clients.unique()),
            psnr=means["psnr"],
            ssim=means["ssim"],
            scores={PERCEPTUAL: means[PERCEPTUAL]},
            rank=rank.mean,
            rank_low=rank.low,
            rank_high=rank.high,
            first=first.first,
            first_chance=first.first_chance,
            public=self.public,
            seed=self.seed,
        )

    def _difference(self, metric: str, gap: Tensor) -> DifferenceRow:
        clients = self.targets.clients
        mean = clustered_mean(gap, clients)
        return DifferenceRow(
            attacker=self.attacker,
            entry=self.entry.key,
            metric=metric,
            mean=mean.mean,
            low=mean.low,
            high=mean.high,
            clients=len(clients.unique()),
            images=len(clients),
        )


def reconstruct(
    senders: Senders,
    entry: SentEntry,
    public: Tensor,
    labels: Tensor,
    count: int,
    training: GeneratorTraining,
    *,
    attacker: int | None = None,
    victims: Sequence[int] | None = None,
    progress: Progress = silent,
) -> Reconstruction:
    """Reconstructs images from what clients send in an entry.

    Args:
        senders: the clients of the run.
        entry: the attacked entry.
        public: ``(n, 3, S, S)`` uint8 images of the attacker; for a malicious client its own.
        labels: ``(n,)`` their labels.
        count: number of true images to compare with.
        training: settings of the training of the generator, and the seed of all random draws.
        attacker: the malicious client's id; None for the server.
        victims: clients whose images are reconstructed; by default some of every domain.
        progress: called with (what, done, total).

    Raises:
        RunError: the clients do not send this entry.
    """

    def tell(what: str, done: int, total: int) -> None:
        progress(f"{entry.key}: {what}", done, total)

    tell("asking", 0, 1)
    others = senders.one_each(entry, public, labels)
    generator = train_generator(others, public, training, tell)
    if victims is None:
        victims = chosen_clients(senders.loaded, count, training.seed)
    rows = senders.real(entry, [client for client in victims if client != attacker])
    if attacker is not None:
        rows = _received(senders, entry, rows, attacker)
    each = max(1, count // len(rows))
    parts = [
        _of_client(senders, entry, generator, client, sent, each, training.seed)
        for client, sent in rows.items()
    ]
    targets = Targets.joined([part[0] for part in parts])
    fed = {"sent": torch.cat([p[1] for p in parts]), "sample": torch.cat([p[2] for p in parts])}
    rng = stream(training.seed, "unrelated")
    fed["unrelated"] = others[torch.randint(len(others), (len(targets),), generator=rng)]
    drawn = {name: generator.images(vectors) for name, vectors in fed.items()}
    kind: Attacker = "server" if attacker is None else "client"
    return Reconstruction(kind, entry, targets, drawn, len(public), training.seed)


def _received(
    senders: Senders, entry: SentEntry, sent: dict[int, Tensor], attacker: int
) -> dict[int, Tensor]:
    """Returns what the malicious client sees of other clients: rows by client, or unassigned."""
    context, broadcast = senders.loaded.server.state.context, senders.broadcast
    told = (context.tensors if context else {}) | broadcast.extras.tensors
    received = entry.rows(broadcast.weights, told)
    if received is None:
        raise RunError(
            f"clients receive nothing of what is sent as {entry.key}: a malicious client has "
            "nothing to reconstruct images from; `--kind server` attacks what the server sees"
        )
    real = senders.real(entry, [attacker]).get(attacker)
    theirs = received if real is None else received[~_among(received, real)]
    if not len(theirs):
        raise RunError(f"all that client {attacker} receives as {entry.key} is its own")
    owned = {client: theirs[_among(theirs, rows)] for client, rows in sent.items()}
    if any(len(rows) for rows in owned.values()):
        return {client: rows for client, rows in owned.items() if len(rows)}
    return dict.fromkeys(sent, theirs)


def _among(rows: Tensor, others: Tensor) -> Tensor:
    """Returns which rows occur among others, ``(n,)`` bool."""
    scale = others.abs().mean().clamp(min=1e-12)
    nearest = torch.cdist(rows.double(), others.double()).amin(1) / rows.shape[1] ** 0.5
    return nearest < 1e-5 * scale


def _of_client(
    senders: Senders,
    entry: SentEntry,
    generator: TrainedGenerator,
    client: int,
    sent: Tensor,
    count: int,
    seed: int,
) -> tuple[Targets, Tensor, Tensor]:
    """Returns some of a client's images, the sent row of each, and each one's own row."""
    examples = senders.loaded.clients[client]
    positions = looked_at(examples, client, seed)
    if not entry.has_rows:  # it speaks of all of them
        positions = positions[:count]
    elif entry.purpose == "update":  # it takes a turn of training to ask of one
        positions = positions[: TURNS * count]
    targets = targets_of(examples, client, positions)
    samples = senders.one_each(entry, targets.images, targets.labels)
    rng, standardised = stream(seed, "pairs", client), generator.standardised
    pairs = matched(standardised(sent), standardised(samples), count, rng)
    rows, images = torch.tensor(pairs).T
    return targets.take(images), sent[rows], samples[images]
