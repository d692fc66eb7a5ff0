"""Writes what a fixed network makes of an experiment's images, for runs with ``data: features``."""

from pathlib import Path

import pandas
import torch

from feddg.data.pixels import as_unit
from feddg.experiment import Experiment
from feddg.models.network import Network
from feddg.runs.prepare import load_table


def write_table(experiment: Experiment, network: Network, file: Path) -> Path:
    """Writes domain, label and features of every image as Parquet; returns the file."""
    table, pixels, *_ = load_table(experiment, None, lambda *_: None)
    with torch.inference_mode():
        parts = torch.arange(len(table)).split(64)
        found = [network.eval().features(as_unit(pixels.gather(rows))) for rows in parts]
    columns = {
        "domain": [table.domain_names[domain] for domain in table.domains],
        "label": [table.class_names[label] for label in table.labels],
        "features": list(torch.cat(found).numpy()),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(columns).to_parquet(file)
    return file
