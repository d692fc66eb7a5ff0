"""Completes an experiment by what is there: pretrained weights, the columns of a table.

Pretrained weights that are expected and cannot be had: the network then learns from scratch.
"""

from feddg.data.data_set import SCRATCH
from feddg.data.sets import features
from feddg.diagnostics import warn
from feddg.errors import WeightsError
from feddg.experiment import Experiment, explain
from feddg.models.backbones import fetch_imagenet
from feddg.settings import IMAGENET, ModelSettings, merge


def with_weights_at_hand(experiment: Experiment) -> Experiment:
    """Returns the experiment, without pretrained weights if a preset's cannot be downloaded.

    Of a table of features, the number of features is filled in.

    Weights that the user names are kept, and raise an error later if missing. Training from scratch
    for lack of weights is reported in one line.
    """
    data = experiment.data
    if data.source == features.SOURCE and data.features is None:
        counted = {"data": {"features": features.count_features(data)}}
        return Experiment(**merge(experiment.given, counted))
    if data.root is not None and not data.root.is_dir():
        return experiment  # which is an error, and the one thing to say
    written = experiment.given
    named = written.get("preset") or {"weights", "backbone"} & {*written.get("model", {})}
    if not named and not _can_be_had(experiment.model):
        written = merge(written, {"model": {"weights": None}})
        experiment = Experiment(**written)
    found = explain(written)
    if any(setting.source.startswith(f"preset {SCRATCH}") for setting in found.values()):
        train = experiment.train
        warn(
            "learns-from-scratch",
            f"No pretrained weights: {experiment.model.backbone} at {experiment.data.image_size} "
            f"pixels learns from scratch, learning rate {train.lr:g}, {train.rounds} rounds.",
            "Expect less than with weights from ImageNet (--weights imagenet, or a file).",
        )
    return experiment


def _can_be_had(model: ModelSettings) -> bool:
    if model.weights != IMAGENET:
        return True
    try:
        fetch_imagenet(model.backbone)
    except WeightsError as error:
        warn("weights-not-had", f"{error}. Nothing was said of weights, so it is the latter.")
        return False
    return True
