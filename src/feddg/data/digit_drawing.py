"""The built-in data set of handwritten digits in four domains, always the same, without download.

The 1,797 scans of the optical digits' test images (Alpaydin and Kaynak, UCI 1998; 8 by 8 pixels)
are partitioned over four domains, so that no scan appears in two, and drawn anew at 32 by 32 in
colour:

- ``ink``: a pen on squared, stained paper;
- ``chalk``: grainy bright strokes on a dusty slate;
- ``photo``: bold print over crops of two photographs;
- ``sketch``: pencil outlines on white.

Tone, texture, stroke and colour change with the domain; the digit stays readable. Scans and
photographs are those that scikit-learn ships, byte for byte; ``scans/SOURCES.md`` names their
authors and licences.
"""

import gzip

import numpy as np
from PIL import Image
from scipy import ndimage

from feddg.data.published import Drawn
from feddg.data.sets.digits import DOMAINS, SCANS
from feddg.rng import numpy_stream

SIZE = 32
_SEED = 0


def render_digits() -> Drawn:
    """Draws everything: images ``(1797, 32, 32, 3)``, labels and domains, sorted by these two."""
    scans, labels = read_scans()
    scans = scans / 16.0
    domains = _deal(labels)
    order = np.lexsort((np.arange(len(labels)), labels, domains))
    scans, labels, domains = scans[order], labels[order], domains[order]
    fields = _place(scans, numpy_stream(_SEED, "digits", "place"))
    draw = {"ink": _ink, "chalk": _chalk, "photo": _photo, "sketch": _sketch}
    images = np.concatenate(
        [
            draw[name](fields[domains == domain], numpy_stream(_SEED, "digits", name))
            for domain, name in enumerate(DOMAINS)
        ]
    )
    pixels = np.round(np.clip(images, 0.0, 1.0) * 255).astype(np.uint8)
    return pixels, np.stack([labels, domains], axis=1)


def read_scans() -> tuple[np.ndarray, np.ndarray]:
    """Returns the scans ``(1797, 8, 8)``, 0 to 16, and what digits they are, int64."""
    with gzip.open(SCANS / "digits.csv.gz", "rt", encoding="ascii") as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.int64)
    return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1]


def read_photograph(name: str) -> np.ndarray:
    """Returns one of the sample photographs, ``(height, width, 3)`` uint8."""
    with Image.open(SCANS / name) as photograph:
        return np.asarray(photograph)


def _deal(labels: np.ndarray) -> np.ndarray:
    """Returns a domain for each scan: each class is shuffled and split evenly over the domains."""
    domains = np.empty(len(labels), dtype=np.int64)
    random = numpy_stream(_SEED, "digits", "deal")
    for label in np.unique(labels):
        rows = random.permutation(np.flatnonzero(labels == label))
        domains[rows] = (np.arange(len(rows)) + label) % len(DOMAINS)
    return domains


def _place(scans: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Enlarges the scans to ``(n, SIZE, SIZE)``, each slightly rotated, scaled and shifted.

    The result is a smooth field, 0 on paper and 1 inside strokes; its level sets are outlines.
    """
    padded = np.pad(scans, ((0, 0), (1, 1), (1, 1)))
    # A cubic enlargement is linear and separable: one small matrix per axis.
    enlarge = ndimage.zoom(np.eye(padded.shape[1]), (4, 1), order=3)
    large = enlarge @ padded @ enlarge.T
    count, side = len(large), large.shape[1]
    angle = np.radians(random.uniform(-12, 12, (count, 1, 1)))
    scale = random.uniform(1.1, 1.4, (count, 1, 1))
    shift = random.uniform(-2, 2, (2, count, 1, 1))
    row, column = np.mgrid[:SIZE, :SIZE] - (SIZE - 1) / 2
    row, column = row - shift[0], column - shift[1]
    centre = (side - 1) / 2
    where = np.stack(
        [
            np.broadcast_to(np.arange(count).reshape(-1, 1, 1), (count, SIZE, SIZE)),
            (np.cos(angle) * row + np.sin(angle) * column) * scale + centre,
            (np.cos(angle) * column - np.sin(angle) * row) * scale + centre,
        ]
    )
    return np.asarray(ndimage.map_coordinates(large, where, order=1))


def _ink(fields: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Draws dark thin pen strokes that fade along the way, on cream squared paper with stains."""
    count = len(fields)
    fading = np.clip(0.9 + 0.2 * _noise(random, count, 4), 0.5, 1)
    stroke = _stroke(fields, level=0.62, softness=0.35) * fading
    paper = _colours(random, count, (0.90, 0.84, 0.70), 0.05)
    paper = paper + 0.05 * _noise(random, count, 6)[..., None] + 0.02 * _grain(random, count)
    period = random.integers(6, 10, (count, 1))
    lines = (np.arange(SIZE) + random.integers(0, 10, (2, count, 1))) % period == 0
    squares = lines[0, :, :, None] | lines[1, :, None, :]
    paper = paper - squares[..., None] * np.array([0.38, 0.24, 0.04])
    ink = _colours(random, count, (0.10, 0.10, 0.28), 0.10)
    return _blend(paper, ink, stroke)


def _chalk(fields: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Draws broken bright strokes on dark slate with wiped streaks and dust."""
    count = len(fields)
    grains = _noise(random, count, 0.6)
    stroke = _stroke(fields, level=0.35, softness=0.12) * np.clip(0.65 + 0.4 * grains, 0, 1)
    streaks = ndimage.gaussian_filter(random.normal(size=(count, SIZE, SIZE)), (0, 1, 8))
    slate = _colours(random, count, (0.14, 0.24, 0.20), 0.05)
    slate = slate + 0.5 * streaks[..., None] + 0.02 * _grain(random, count)
    dust = random.random((count, SIZE, SIZE)) < 0.03
    slate = slate + 0.35 * ndimage.gaussian_filter(dust.astype(float), (0, 0.5, 0.5))[..., None]
    chalk = _colours(random, count, (0.90, 0.88, 0.78), 0.10)
    return _blend(slate, chalk, stroke)


def _photo(fields: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Draws bold digits in bright or dark colours over a crop of a photograph."""
    count = len(fields)
    background = _crops(random, count)
    print_ = _colours(random, count, (0.5, 0.5, 0.5), 0.5)
    dark = background.mean(axis=(1, 2, 3), keepdims=True) < 0.5
    print_ = np.where(dark, 0.6 + 0.4 * print_, 0.3 * print_)
    return _blend(background, print_, 0.9 * _stroke(fields, level=0.42, softness=0.05))


def _sketch(fields: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Draws thin pencil outlines, hollow inside, on white."""
    count = len(fields)
    slope = np.hypot(np.gradient(fields, axis=1), np.gradient(fields, axis=2))
    distance = np.abs(fields - 0.38) / np.maximum(slope, 0.03)
    pressure = np.clip(0.8 + 0.25 * _noise(random, count, 2), 0.3, 1)
    line = np.clip(1.18 - distance, 0, 1) * pressure
    pencil = np.repeat(random.uniform(0.1, 0.4, (count, 1, 1, 1)), 3, axis=3)
    paper = np.full((count, SIZE, SIZE, 3), 0.98) + 0.01 * _grain(random, count)
    return _blend(paper, pencil, line)


def _stroke(fields: np.ndarray, level: float, softness: float) -> np.ndarray:
    """Returns each pixel's coverage: 0 below ``level``, 1 above, with a soft edge."""
    return np.clip((fields - level) / softness + 0.5, 0, 1)


def _blend(paper: np.ndarray, paint: np.ndarray, cover: np.ndarray) -> np.ndarray:
    return np.asarray(paper + (paint - paper) * cover[..., None])


def _colours(
    random: np.random.Generator, count: int, mean: tuple[float, float, float], spread: float
) -> np.ndarray:
    """Returns one colour per image, ``(count, 1, 1, 3)``, within ``spread`` of ``mean``."""
    return np.array(mean) + random.uniform(-spread, spread, (count, 1, 1, 3))


def _noise(random: np.random.Generator, count: int, width: float) -> np.ndarray:
    """Returns ``(n, SIZE, SIZE)`` smooth noise of unit deviation, with blobs of size ``width``."""
    noise = ndimage.gaussian_filter(random.normal(size=(count, SIZE, SIZE)), (0, width, width))
    return np.asarray(noise / noise.std())


def _grain(random: np.random.Generator, count: int) -> np.ndarray:
    return random.normal(size=(count, SIZE, SIZE, 1))


def _crops(random: np.random.Generator, count: int) -> np.ndarray:
    """Returns crops of the two sample photographs at a third of their size, in [0, 1].

    The crop with the most contrast of three random ones is taken, to avoid plain sky.
    """
    photographs = [
        ndimage.zoom(read_photograph(name) / 255.0, (1 / 3, 1 / 3, 1), order=1)
        for name in ("china.jpg", "flower.jpg")
    ]
    return np.stack(
        [
            max((_crop(photographs[random.integers(2)], random) for _ in range(3)), key=np.std)
            for _ in range(count)
        ]
    )


def _crop(photograph: np.ndarray, random: np.random.Generator) -> np.ndarray:
    top = random.integers(photograph.shape[0] - SIZE)
    left = random.integers(photograph.shape[1] - SIZE)
    return photograph[top : top + SIZE, left : left + SIZE]
