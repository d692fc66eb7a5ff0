"""The warning light of a run's model: the energy above which an image is unlike training.

``warning_light.json`` keeps a threshold for each model by the fingerprint of its weights, so that
no model is ever served with another one's.
"""

import hashlib
from pathlib import Path

import numpy
import torch
from pydantic import Field
from torch import nn

from feddg.evaluation.accuracy import INSIDE_SHARE, Evaluation, Resettable, energy, energy_threshold
from feddg.records import ID_VAL, EnergyThreshold, JsonFile
from feddg.runs.folder import RunFolder

WARNING_LIGHT = "warning_light.json"


class WarningLights(JsonFile):
    """The file: thresholds by the fingerprint of the weights they were measured with."""

    models: dict[str, EnergyThreshold] = Field(default_factory=dict)


def fingerprint(model: nn.Module) -> str:
    """Returns a hash of a model's state: names and bits."""
    digest = hashlib.blake2b(digest_size=12)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_warning_light(folder: RunFolder, model: nn.Module, evaluation: Evaluation) -> None:
    """Measures the threshold on the in-domain validation images and keeps it in the folder.

    Nothing is kept where there are none, or where the model gives log-probabilities.

    Args:
        folder: the run's.
        model: predicts as the run's method does.
        evaluation: the images.
    """
    rows = evaluation.splits.get(ID_VAL, numpy.empty(0, numpy.int64))
    if not len(rows):
        return
    model.eval()
    if isinstance(model, Resettable):
        model.reset()
    energies = energy(evaluation.predict(model, rows))
    threshold = energy_threshold(energies)
    if threshold is None:
        return
    found = WarningLights.read(folder.path / WARNING_LIGHT) or WarningLights()
    row = EnergyThreshold(threshold=threshold, inside=INSIDE_SHARE, images=len(rows))
    lights = WarningLights(models=found.models | {fingerprint(model): row})
    folder.write_json(WARNING_LIGHT, lights)


def read_warning_light(folder: Path, model: nn.Module) -> EnergyThreshold | None:
    """Returns the threshold of a model, or None where the folder has none for its weights.

    Raises:
        RunError: the file is damaged.
    """
    found = WarningLights.read(folder / WARNING_LIGHT)
    return None if found is None else found.models.get(fingerprint(model))
