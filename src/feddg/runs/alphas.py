"""Writes how much each layer adapts to each image, ``alphas.csv``."""

import csv
import io

import torch

from feddg.data.pixels import as_unit
from feddg.evaluation.accuracy import Evaluation
from feddg.methods.base import Adapts, Method
from feddg.models.network import Network
from feddg.records import as_cell
from feddg.runs.adapted import ALPHA_COLUMNS, ALPHAS
from feddg.runs.folder import RunFolder


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
    if not isinstance(method, Adapts):
        return
    network.eval()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    layers: list[str] = []
    for split, domain, rows in evaluation.parts():
        for batch in torch.from_numpy(rows).split(evaluation.batch_size):
            with torch.inference_mode(), evaluation.autocast():
                images = as_unit(evaluation.pixels.gather(batch), evaluation.device)
                shares = method.layer_shares(network, images)
            if not shares:
                return
            if not layers:
                layers = list(shares)
                writer.writerow((*ALPHA_COLUMNS, *layers))
            values = torch.stack(list(shares.values()), 1).float().cpu().numpy()
            for row, own in zip(batch.tolist(), values):
                image = evaluation.paths[row] if len(evaluation.paths) else row
                name = evaluation.domain_names[domain]
                writer.writerow(
                    (split, as_cell(name), as_cell(image), *(f"{value:.4f}" for value in own))
                )
    folder.replace(ALPHAS, text.getvalue())
