"""Handwritten digits in four domains, built in, and MNIST rotated by six angles."""

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from feddg.data.data_set import define
from feddg.data.images import ImageTable
from feddg.data.published import Drawn, compare_counts, folder_of, kept_drawn, needs_root
from feddg.errors import DataError
from feddg.rng import numpy_stream
from feddg.storage import file_faults, open_file

PARTS = ("train", "t10k")
_IMAGES, _LABELS = 2051, 2049
ANGLES = (0, 15, 30, 45, 60, 75)
DOMAINS = ("ink", "chalk", "photo", "sketch")
SCANS = Path(__file__).parents[1] / "scans"


def draw_digits(root: Path | None = None) -> ImageTable:
    """Handwritten digits in four domains: see :mod:`feddg.data.digit_drawing`.

    Raises:
        DataError: a folder was given, which would not be used.
    """
    if root is not None:
        raise DataError("The data source 'digits' is built in and reads no folder: leave out root.")

    def drawn() -> Drawn:
        from feddg.data.digit_drawing import render_digits  # SciPy is slow to import

        return render_digits()

    images, facts = kept_drawn([*sorted(SCANS.iterdir())], "digits 2", drawn)
    return _table(np.array(images), facts, DOMAINS, "04")


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


def turned_digits(files: Sequence[tuple[Path, Path]], angles: Sequence[float]) -> Drawn:
    """Partitions digits evenly over as many domains as there are angles, and rotates them.

    Args:
        files: of images and labels.
        angles: degrees, counter-clockwise; between pixels, values are interpolated linearly.

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
    grey, facts = kept_drawn(
        [file for pair in files for file in pair],
        "rotated mnist 2",
        lambda: turned_digits(files, ANGLES),
    )
    images = np.broadcast_to(grey[..., None], (*grey.shape, 3))
    table = _table(images, facts, ROTATED_MNIST.domains)
    compare_counts(ROTATED_MNIST, table)
    return table


ROTATED_MNIST = define("rotated_mnist", draw_rotated_mnist)
