"""How much each layer adapts to each image (FedIG-A's alpha), as a table in the run's folder.

``alphas.csv`` has a row per evaluated image: split, domain, image, then a column per layer.
"""

import csv
import io
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

from feddg.errors import RunError
from feddg.evaluation.accuracy import Evaluation, as_input
from feddg.methods.base import Method
from feddg.models.network import Network
from feddg.runs.folder import RunFolder

ALPHAS = "alphas.csv"
_COLUMNS = ("split", "domain", "image")


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


def write_alphas(
    folder: RunFolder,
    method: Method,
    network: Network,
    evaluation: Evaluation,
) -> None:
    """Writes ``alphas.csv`` for all evaluated images; nothing if no layer of the method adapts.

    Args:
        folder: the run's.
        method: what was run.
        network: holds the global weights.
        evaluation: the images.
    """
    network.eval()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    layers: list[str] = []
    for split, domain, rows in evaluation.parts():
        for batch in torch.from_numpy(rows).split(evaluation.batch_size):
            with torch.inference_mode(), evaluation.autocast():
                images = as_input(evaluation.pixels.gather(batch), evaluation.device)
                shares = method.layer_shares(network, images)
            if not shares:
                return
            if not layers:
                layers = list(shares)
                writer.writerow((*_COLUMNS, *layers))
            values = torch.stack(list(shares.values()), 1).float().cpu().numpy()
            for row, own in zip(batch.tolist(), values):
                image = evaluation.paths[row] if len(evaluation.paths) else row
                name = evaluation.domain_names[domain]
                writer.writerow((split, name, image, *(f"{value:.4f}" for value in own)))
    folder.replace(ALPHAS, text.getvalue())


def read_alphas(folder: Path) -> Alphas | None:
    """Returns what a run's ``alphas.csv`` holds, or None if it has none.

    Raises:
        RunError: the file is damaged.
    """
    path = folder / ALPHAS
    if not path.is_file():
        return None
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    try:
        values = numpy.array([row[len(_COLUMNS) :] for row in rows], dtype=numpy.float64)
        splits, domains = (numpy.array([row[i] for row in rows]) for i in (0, 1))
        layers = tuple(header[len(_COLUMNS) :])
        return Alphas(layers, splits, domains, values.reshape(len(rows), len(layers)))
    except (ValueError, IndexError) as error:
        raise RunError(f"{path} is damaged: {error}.") from None
