"""What a run does where a preset asks for pretrained weights that cannot be had."""

from pathlib import Path
from typing import Any

import typer


def with_weights_at_hand(said: dict[str, Any], file: Path | None) -> dict[str, Any]:
    """Returns what is said, or that without weights, where a preset's cannot be downloaded.

    Weights that the user names stay: then it is an error that they cannot be had.

    Args:
        said: the fields that flags set.
        file: the experiment file below them.

    Raises:
        ExperimentError: together they are no valid experiment.
    """
    from feddg.errors import WeightsError
    from feddg.experiment import expand, load_experiment, read_fields
    from feddg.settings import merge

    below = read_fields(file, expand(said))
    named = merge(below, expand(said)).get("model", {})
    if "weights" in named or "backbone" in named or (said | below).get("preset"):
        return said
    model = load_experiment(file, said).model
    if model.weights != "imagenet":
        return said
    from feddg.models.backbones import fetch_imagenet

    try:
        fetch_imagenet(model.backbone)
    except WeightsError as error:
        typer.echo(f"{error}. Nothing was said of weights, so it is the latter", err=True)
        return merge(said, {"model": {"weights": None}})
    return said
