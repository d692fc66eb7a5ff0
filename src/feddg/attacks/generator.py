"""From what was sent to an image: a light-weight generator, trained without an adversary.

As in CCST's ``reconstruct_img``, which PARDON follows: the generator of a light-weight GAN (Liu et
al., "Towards Faster and Stabilized GAN Training for High-fidelity Few-shot Image Synthesis", ICLR
2021: convolutions with gated linear units, and skip-layer excitation), trained to give back the
image that a vector was taken from, by a pixel loss and a perceptual loss; the weights with the best
validation PSNR are kept. Beside it stands what a linear attack finds in closed form, a ridge
regression from the vector to a thumbnail, so that the network only learns what is left over.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, mse_loss

from feddg.attacks.extractors import Extractor, perceptual_distances
from feddg.errors import DataError
from feddg.rng import derive_seed, stream

FEWEST = 16
"""Images that a generator can be trained on at all."""
THUMBNAIL = 8
RIDGES = (1e-4, 1e-2, 1e-1, 1.0)
"""Strengths of the ridge that are tried, as shares of the number of images."""
MOST_SIDE = 32
"""The network draws, and the perceptual loss looks at, images of at most this side: what moments,
spectra and prototypes say of finer detail is nothing, and 64 pixels are four times the work."""
LARGEST_SCORE = 10.0
"""Standardised numbers are cut off there: what the public images never show says nothing."""


@dataclass(frozen=True)
class GeneratorTraining:
    """How a generator is trained.

    Attributes:
        steps: of the network; 0 leaves the linear attack alone.
        batch_size: images of a step.
        lr: of Adam; falls to a tenth along a cosine.
        perceptual: weight of the perceptual loss beside the mean squared error of pixels.
        validation: share of the images that choose ridge and weights.
        seed: of initial weights and batches.
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
            nn.Linear(length, 256),
            nn.GELU(),
            nn.Linear(256, widths[0] * self.sides[0] ** 2),
        )
        self.blocks = nn.ModuleList(_gated(before, after) for before, after in pairwise(widths))
        self.excitations = nn.ModuleDict(
            {str(i + 3): _excitation(widths[i], widths[i + 3]) for i in range(len(widths) - 3)}
        )
        self.last = nn.Conv2d(widths[-1], 3, 3, padding=1)
        nn.init.zeros_(self.last.weight)  # it begins as the linear attack
        nn.init.zeros_(self.last.bias)  # type: ignore[arg-type]

    def forward(self, vectors: Tensor) -> Tensor:
        """Returns images; not clamped."""
        maps = [self.first(vectors).view(len(vectors), -1, self.sides[0], self.sides[0])]
        for i, block in enumerate(self.blocks, start=1):
            side = self.sides[i]
            grown: Tensor = block(interpolate(maps[-1], (side, side)))
            if str(i) in self.excitations:
                grown = grown * self.excitations[str(i)](maps[i - 3])
            maps.append(grown)
        drawn: Tensor = self.last(maps[-1])
        return _enlarged(drawn, self.size)


@dataclass
class TrainedGenerator:
    """A generator with what it needs to read a vector.

    Attributes:
        centre: ``(d,)`` means of the public vectors.
        scale: ``(d,)`` their deviations.
        ridge: ``(d, 3 t t)`` from a standardised vector to a thumbnail.
        thumbnail: ``(3, t, t)`` mean thumbnail.
        network: what adds detail, or None.
        size: side of the images.
        psnr: of the validation images, dB.
        losses: training loss every tenth step.
    """

    centre: Tensor
    scale: Tensor
    ridge: Tensor
    thumbnail: Tensor
    network: StyleGenerator | None
    size: int
    psnr: float = 0.0
    losses: Sequence[float] = ()

    def standardised(self, rows: Tensor) -> Tensor:
        """Returns vectors ``(n, d)`` with the mean and deviation of the public ones taken off."""
        scores = (rows.float() - self.centre) / self.scale
        return scores.clamp(-LARGEST_SCORE, LARGEST_SCORE)

    def images(self, rows: Tensor) -> Tensor:
        """Returns the images that vectors ``(n, d)`` lead to, ``(n, 3, S, S)`` in [0, 1]."""
        return self.of_scores(self.standardised(rows))

    def of_scores(self, scores: Tensor) -> Tensor:
        """Returns the images that standardised vectors lead to."""
        with torch.inference_mode():
            parts = [self.drawn(part).clamp(0, 1) for part in scores.split(64)]
        return torch.cat(parts).clone()

    def drawn(self, scores: Tensor) -> Tensor:
        """Returns images that are not clamped yet."""
        images = self.linear(scores)
        return images if self.network is None else images + self.network(scores)

    def linear(self, scores: Tensor) -> Tensor:
        """Returns what the ridge regression alone draws."""
        flat = scores @ self.ridge
        small = flat.view(-1, *self.thumbnail.shape) + self.thumbnail
        return _enlarged(small, self.size)


def train_generator(
    rows: Tensor,
    images: Tensor,
    training: GeneratorTraining,
    extractor: Extractor | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> TrainedGenerator:
    """Trains a generator to draw the images that vectors were taken from.

    Args:
        rows: ``(n, d)`` vectors.
        images: ``(n, 3, S, S)`` uint8, the image behind each.
        training: how.
        extractor: whose maps the perceptual loss compares; none for pixels alone.
        progress: called with (steps done, steps in all).

    Raises:
        DataError: there are too few images.
    """
    if len(rows) < FEWEST:
        raise DataError(
            f"{len(rows)} images are too few to train a generator on; give at least {FEWEST}"
        )
    order = torch.randperm(len(rows), generator=stream(training.seed, "validation"))
    held = max(2, round(training.validation * len(rows)))
    chosen, kept = order[held:], order[:held]
    generator = _linear(rows, images, chosen, kept)
    if training.steps:
        _train_network(generator, rows, images, chosen, kept, training, extractor, progress)
    return generator


def _linear(rows: Tensor, images: Tensor, chosen: Tensor, kept: Tensor) -> TrainedGenerator:
    """The best ridge regression from vectors to thumbnails, by the validation images."""
    size = images.shape[-1]
    centre, scale = rows[chosen].mean(0), rows[chosen].std(0).clamp(min=1e-8)
    small = interpolate(_unit(images), (min(THUMBNAIL, size),) * 2, mode="area")
    thumbnail = small[chosen].mean(0)
    generator = TrainedGenerator(centre, scale, torch.zeros(0), thumbnail, None, size)
    scores = generator.standardised(rows)
    targets = (small[chosen] - thumbnail).flatten(1)
    best = None
    for ridge in _ridges(scores[chosen], targets):
        error = mse_loss(scores[kept] @ ridge, (small[kept] - thumbnail).flatten(1))
        if best is None or error < best[0]:
            best = (error, ridge)
    assert best is not None
    generator.ridge = best[1]
    generator.psnr = _psnr(generator, rows, images, kept)
    return generator


def _ridges(scores: Tensor, targets: Tensor) -> list[Tensor]:
    """Ridge regressions of every strength, in the smaller of the two spaces."""
    count, length = scores.shape
    scores, targets = scores.double(), targets.double()
    wide = length > count
    gram = scores @ scores.T if wide else scores.T @ scores
    aim = targets if wide else scores.T @ targets
    eye = torch.eye(len(gram), dtype=torch.float64)
    solved = [torch.linalg.solve(gram + share * count * eye, aim) for share in RIDGES]
    return [(scores.T @ one if wide else one).float() for one in solved]


def _train_network(
    generator: TrainedGenerator,
    rows: Tensor,
    images: Tensor,
    chosen: Tensor,
    kept: Tensor,
    training: GeneratorTraining,
    extractor: Extractor | None,
    progress: Callable[[int, int], None],
) -> None:
    """Trains what adds detail; the generator keeps it only where it helps on validation images."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(training.seed, "generator"))
        network = StyleGenerator(rows.shape[1], generator.size)
    scores, best = generator.standardised(rows), (generator.psnr, None)
    optimizer = torch.optim.Adam(network.parameters(), training.lr, betas=(0.5, 0.99))
    falls = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, training.steps, eta_min=training.lr / 10
    )
    losses: list[float] = []
    for step in range(training.steps):
        progress(step, training.steps)
        chance = stream(training.seed, "batch", step)
        batch = chosen[torch.randint(len(chosen), (training.batch_size,), generator=chance)]
        network.train()
        drawn = generator.linear(scores[batch]) + network(scores[batch])
        loss = _loss(drawn, _unit(images[batch]), extractor, training.perceptual)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        falls.step()
        if step % 10 == 0:
            losses.append(float(loss.detach()))
        if (step + 1) % max(1, training.steps // 8) == 0:
            generator.network = network.eval()
            reached = _psnr(generator, rows, images, kept)
            if reached > best[0]:
                state = {name: t.clone() for name, t in network.state_dict().items()}
                best = (reached, state)  # type: ignore[assignment]
    generator.network, generator.losses = None, tuple(losses)
    if best[1] is not None:
        network.load_state_dict(best[1])
        generator.network, generator.psnr = network.eval(), best[0]


def _loss(drawn: Tensor, wanted: Tensor, extractor: Extractor | None, weight: float) -> Tensor:
    loss = mse_loss(drawn, wanted)
    if extractor is None or not weight:
        return loss
    side = min(MOST_SIDE, drawn.shape[-1])
    pair = [interpolate(part, (side, side), mode="area") for part in (drawn.clamp(0, 1), wanted)]
    return loss + weight * perceptual_distances(extractor, *pair).mean()


def _psnr(generator: TrainedGenerator, rows: Tensor, images: Tensor, kept: Tensor) -> float:
    drawn = generator.images(rows[kept])
    errors = (drawn - _unit(images[kept])).square().mean((1, 2, 3)).clamp(min=1e-10)
    return float((-10 * errors.log10()).mean())


def _enlarged(images: Tensor, size: int) -> Tensor:
    if images.shape[-1] == size:
        return images
    return interpolate(images, (size, size), mode="bilinear")


def _unit(images: Tensor) -> Tensor:
    return images.float() / 255


def _sides(size: int) -> list[int]:
    """Sides of the maps from about 4 pixels to ``size``, each about twice the one before."""
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
    """Skip-layer excitation: gates of a large map's channels, from a small map."""
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(4),
        nn.Conv2d(before, after, 4),
        nn.SiLU(),
        nn.Conv2d(after, after, 1),
        nn.Sigmoid(),
    )
