"""What a run's folder holds about test-time adaptation, read back.

``adaptation.jsonl``: accuracy under each adaptation that was tried. ``alphas.csv``: how much each
layer adapts to each image (FedIG-A's alpha), a row per evaluated image with its split, its domain
and its file, then a column per layer.
"""

import csv
import io
from dataclasses import dataclass
from pathlib import Path

import numpy

from feddg.errors import RunError
from feddg.records import ADAPTATION_ROWS, AdaptationRow, from_cell
from feddg.storage import is_file, read_text

ADAPTED = "adaptation.jsonl"
OWN = "own statistics"
ALPHAS = "alphas.csv"
ALPHA_COLUMNS = ("split", "domain", "image")


def read_adapted(folder: Path) -> list[AdaptationRow]:
    """Returns the scores under adaptations that a run's folder holds."""
    return ADAPTATION_ROWS.read(folder / ADAPTED)


@dataclass(frozen=True)
class Alphas:
    """The content of ``alphas.csv``.

    Attributes:
        layers: names of the layers, shallow to deep.
        splits: ``(n,)`` split of each image.
        domains: ``(n,)`` domain name of each image.
        values: ``(n, layers)`` in [0, 1].
    """

    layers: tuple[str, ...]
    splits: numpy.ndarray
    domains: numpy.ndarray
    values: numpy.ndarray

    def by_domain(self) -> dict[str, numpy.ndarray]:
        """Returns the values of each domain's images, whatever their split; test domains first."""
        first = list(dict.fromkeys(self.domains[self.splits == "test"].tolist()))
        names = dict.fromkeys([*first, *self.domains.tolist()])
        return {name: self.values[self.domains == name] for name in names}


def read_alphas(folder: Path) -> Alphas | None:
    """Returns what a run's ``alphas.csv`` holds, or None if it has none.

    Raises:
        RunError: the file is damaged.
    """
    path = folder / ALPHAS
    if not is_file(path):
        return None
    try:
        text = io.StringIO(read_text(path, errors="strict"), newline="")
        header, *rows = csv.reader(text)
        values = numpy.array([row[len(ALPHA_COLUMNS) :] for row in rows], dtype=numpy.float64)
        splits, domains = (numpy.array([from_cell(row[i]) for row in rows]) for i in (0, 1))
        layers = tuple(header[len(ALPHA_COLUMNS) :])
        return Alphas(layers, splits, domains, values.reshape(len(rows), len(layers)))
    except (ValueError, IndexError, csv.Error) as error:
        raise RunError(f"{path} is damaged: {error}.") from None
