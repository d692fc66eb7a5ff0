"""What a run does where a preset asks for pretrained weights that cannot be had."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from feddg.comparison.plan import Plan
    from feddg.experiment import Experiment


def with_weights_at_hand(said: dict[str, Any], file: Path | None) -> dict[str, Any]:
    """Returns what is said, or that without weights, where a preset's cannot be downloaded.

    Weights that the user names stay: then it is an error that they cannot be had. A network that
    is to learn from scratch because nobody has weights is told of in a line.

    Args:
        said: the fields that flags set.
        file: the experiment file below them.

    Raises:
        ExperimentError: together they are no valid experiment.
    """
    from feddg.data.data_set import SCRATCH
    from feddg.experiment import expand, explain, load_experiment, read_fields
    from feddg.settings import merge

    below = read_fields(file, expand(said))
    named = merge(below, expand(said))
    chosen = load_experiment(file, said)
    if chosen.data.root is not None and not chosen.data.root.is_dir():
        return said  # which is an error, and the one thing to say
    unsaid = not named.get("preset") and not {"weights", "backbone"} & {*named.get("model", {})}
    if unsaid and not _can_be_had(chosen):
        said = merge(said, {"model": {"weights": None}})
    found = explain(said, below)
    if any(setting.source.startswith(f"preset {SCRATCH}") for setting in found.values()):
        backbone, size, rate, rounds = (
            found[path].value
            for path in ("model.backbone", "data.image_size", "train.lr", "train.rounds")
        )
        typer.echo(
            f"no pretrained weights: {backbone} at {size} pixels learns from scratch, learning "
            f"rate {rate:g}, {rounds} rounds; expect less than with weights from ImageNet "
            "(--weights imagenet, or a file)",
            err=True,
        )
    return said


def plan_with_weights_at_hand(plan: "Plan") -> "Plan":
    """Returns a plan as it is, or without weights; see :func:`with_weights_at_hand`.

    What single methods say of weights stays, as does a plan that compares weights or networks.

    Args:
        plan: a plan with all that flags set.
    """
    from feddg.errors import ExperimentError
    from feddg.settings import merge

    if {"model.weights", "model.backbone", "preset"} & {*plan.settings}:
        return plan
    try:
        base = with_weights_at_hand(plan.base, None)
    except ExperimentError:
        return plan  # an axis may complete it; else its runs say what is wrong
    if base == plan.base:
        return plan
    return plan.model_copy(update={"base": merge(plan.base, {"model": {"weights": None}})})


def _can_be_had(experiment: "Experiment") -> bool:
    from feddg.settings import TORCHVISIONS

    if experiment.model.weights != TORCHVISIONS:
        return True
    from feddg.errors import WeightsError
    from feddg.models.backbones import fetch_imagenet

    try:
        fetch_imagenet(experiment.model.backbone)
    except WeightsError as error:
        typer.echo(f"{error}. Nothing was said of weights, so it is the latter", err=True)
        return False
    return True
