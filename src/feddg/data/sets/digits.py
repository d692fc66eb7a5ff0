"""Handwritten digits in four domains, built in, and MNIST rotated by six angles."""

import gzip
import lzma
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from feddg.data.data_set import define
from feddg.data.images import ImageTable
from feddg.data.published import compare_counts, folder_of, needs_root
from feddg.errors import DataError
from feddg.rng import numpy_stream
from feddg.storage import file_faults, open_file

PARTS = ("train", "t10k")
_IMAGES, _LABELS = 2051, 2049
ANGLES = (0, 15, 30, 45, 60, 75)
DOMAINS = ("ink", "chalk", "photo", "sketch")
DRAWN = Path(__file__).parents[1] / "digits" / "digits.npy.xz"
"""Two arrays: the images, ``(1797, 32, 32, 3)`` uint8, and the digit and domain of each."""


def draw_digits(root: Path | None = None) -> ImageTable:
    """Handwritten digits in four domains, drawn from 1,797 scans, each in one domain.

    - ``ink``: a pen on squared, stained paper;
    - ``chalk``: grainy bright strokes on a dusty slate;
    - ``photo``: bold print over crops of two photographs;
    - ``sketch``: pencil outlines on white.

    ``digits/SOURCES.md`` names the authors of scans and photographs, and their licences.

    Raises:
        DataError: a folder was given, which would not be used.
    """
    if root is not None:
        raise DataError("The data source 'digits' is built in and reads no folder: leave out root.")
    images, facts = _drawn()
    return _table(images.copy(), facts, DOMAINS, "04")


@cache
def _drawn() -> tuple[np.ndarray, np.ndarray]:
    with lzma.open(DRAWN) as file:
        return np.load(file), np.load(file)


def _table(
    images: np.ndarray, facts: np.ndarray, domains: tuple[str, ...], width: str = ""
) -> ImageTable:
    """Returns drawn digits as a table; their numbers in paths have ``width``."""
    rows = enumerate(facts.tolist())
    labels, places = facts.T.copy()
    return ImageTable(
        paths=tuple(f"{domains[domain]}/{label}/{n:{width}}" for n, (label, domain) in rows),
        labels=labels,
        domains=places,
        class_names=tuple(map(str, range(10))),
        domain_names=domains,
        images=images,
    )


define("digits", draw_digits)


def _find(root: Path, stem: str, kind: str) -> Path:
    names = [f"{stem}{dot}{kind}-ubyte{packed}" for dot in "-." for packed in ("", ".gz")]
    path = next((root / name for name in names if (root / name).is_file()), None)
    if path is None:
        raise DataError(f"{root} lacks {names[0]} or {names[1]}, which MNIST has.")
    return path


def turned_digits(
    files: Sequence[tuple[Path, Path]], angles: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Partitions digits evenly over as many domains as there are angles, and rotates them.

    Args:
        files: of images and labels.
        angles: degrees, counter-clockwise; between pixels, values are interpolated linearly.

    Returns:
        The images, ``(n, height, width)`` uint8, and label and domain of each, ``(n, 2)`` int64.

    Raises:
        DataError: a file has another format.
    """
    digits = np.concatenate([_read(images, _IMAGES) for images, _ in files])
    labels = np.concatenate([_read(labels, _LABELS) for _, labels in files])
    order = numpy_stream(0, "rotated mnist").permutation(len(digits))
    rows = [
        (row, domain)
        for domain in range(len(angles))
        for row in order[domain :: len(angles)].tolist()
    ]
    turned = [
        Image.fromarray(digits[row]).rotate(angles[domain], Image.Resampling.BILINEAR)
        for row, domain in rows
    ]
    facts = np.array([(labels[row], domain) for row, domain in rows], dtype=np.int64)
    return np.stack([np.asarray(image) for image in turned]), facts


def _read(file: Path, magic: int) -> np.ndarray:
    """Reads a file of unsigned bytes: a magic number, the dimensions, the values."""
    faults = file_faults(DataError, f"Cannot read {file}", EOFError, zlib.error, ValueError)
    with faults, open_file(file) as opened:
        unpacked = gzip.GzipFile(fileobj=opened) if file.suffix == ".gz" else opened
        content = unpacked.read()
        head = np.frombuffer(content, ">i4", 1 + magic % 256)
        if head[0] != magic:
            raise ValueError(f"it is no file of MNIST's, but begins with {head[0]}")
        return np.frombuffer(content, np.uint8, offset=head.nbytes).reshape(head[1:])


def draw_rotated_mnist(root: Path | None) -> ImageTable:
    """MNIST's 70,000 digits, partitioned evenly over six domains, each rotated by its angle.

    As DomainBed does, training and test digits are shuffled together and each is in one domain. Our
    shuffle is always the same; DomainBed's depends on its seed.

    Args:
        root: the folder of MNIST's four files, as published or unpacked, or one around it.

    Raises:
        DataError: a file is missing or has another format.
    """
    folder = folder_of(ROTATED_MNIST, root, lambda folder: any(folder.glob("*-ubyte*")))
    place = folder or needs_root(ROTATED_MNIST.name, root)
    files = [
        (_find(place, f"{part}-images", "idx3"), _find(place, f"{part}-labels", "idx1"))
        for part in PARTS
    ]
    grey, facts = turned_digits(files, ANGLES)
    images = np.broadcast_to(grey[..., None], (*grey.shape, 3))
    table = _table(images, facts, ROTATED_MNIST.domains)
    compare_counts(ROTATED_MNIST, table)
    return table


ROTATED_MNIST = define("rotated_mnist", draw_rotated_mnist)
