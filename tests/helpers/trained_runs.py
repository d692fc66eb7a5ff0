"""A small trained run on digits, and some of its images as files."""

import csv
from pathlib import Path

import numpy
from PIL import Image

from feddg.api import run
from feddg.data.data_set import load_source
from feddg.experiment import Experiment

SETTINGS = {
    "data": {"source": "digits", "id_val": 0.1, "id_test": 0},
    "hold_out": "sketch",
    "clients": {"number": 3, "partition": "domain"},
    "train": {"rounds": 2, "local_steps": 25, "batch_size": 32, "augmentation": "none"},
    "evaluate": {"every": 2},
    "precision": "float32",
}
SHORT = {
    "data": {**SETTINGS["data"], "image_size": 16},
    "train": {"rounds": 1, "local_steps": 8, "batch_size": 32, "augmentation": "none"},
}
"""What makes it shorter still."""


def trained_run(out: Path, cache: Path, method: str = "fedavg", **changes) -> Path:
    """Trains for seconds; returns the run folder."""
    experiment = Experiment(**{**SETTINGS, "method": method, **changes})
    return run(experiment, out, cache=cache, report=False).folder


def write_images(folder: Path, count: int = 30, domain: str = "ink") -> list[Path]:
    """Writes images of one domain of digits as PNG files."""
    table = load_source("digits")
    rows = numpy.flatnonzero(table.domains == table.domain_id(domain))[:count]
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{number:05d}.png" for number in range(len(rows))]
    for file, row in zip(files, rows):
        Image.fromarray(table.images[row]).save(file)
    return files


def read_csv(path):
    """The rows of a table, by column."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
