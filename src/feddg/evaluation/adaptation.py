"""Test-time adaptation: any trained model under any adaptation that suits it, by name.

    predictor = adapt(model, "fixed:alpha=0.3")
    predictor(images)      # as the model: RGB in [0, 1] -> logits
    predictor.reset()      # before images of another domain

``bin`` and ``adapter`` need parts that only training can make, ``ensemble`` the clients' own
normalisation; they refuse a model without, and say so.
"""

from typing import Any

from pydantic import ValidationError
from torch import nn

from feddg.errors import AdaptationError, nearest
from feddg.evaluation import predictors, streaming_adaptations
from feddg.evaluation.predictors import Parts, Predictor

ADAPTATIONS: dict[str, type[Predictor]] = {
    kind.name: kind
    for kind in (
        predictors.Global,
        predictors.Fixed,
        predictors.Random,
        predictors.Adapter,
        predictors.BatchInstance,
        predictors.Ensemble,
        streaming_adaptations.InstanceAware,
        streaming_adaptations.MixNorm,
        streaming_adaptations.TsmoBN,
        streaming_adaptations.Tent,
    )
}
"""By name, in the order of tables."""


def adapt(model: nn.Module, spelling: str, parts: Parts | None = None) -> Predictor:
    """Returns ``model`` under an adaptation; the model itself stays as it is.

    Args:
        model: maps RGB images in [0, 1] to logits; in evaluation mode.
        spelling: a name of :data:`ADAPTATIONS`, with settings after a colon if wanted:
            ``tent``, ``fixed:alpha=0.3``, ``tent:lr=0.0003,steps=2``.
        parts: what the run keeps beside the model.

    Raises:
        AdaptationError: the name or a setting is unknown, or the model lacks what is needed.
    """
    kind, settings = read(spelling)
    predictor = kind(model, settings, parts or Parts())
    return predictor.eval()


def read(spelling: str) -> tuple[type[Predictor], Any]:
    """Returns the adaptation that ``spelling`` names, and its settings.

    Raises:
        AdaptationError: the name or a setting is unknown.
    """
    name, _, rest = spelling.partition(":")
    name = name.strip().lower()
    if name not in ADAPTATIONS:
        raise AdaptationError(
            f"unknown adaptation {name!r}{nearest(name, ADAPTATIONS)}; there are: "
            f"{', '.join(ADAPTATIONS)}"
        )
    kind = ADAPTATIONS[name]
    pairs = [pair.partition("=") for pair in rest.split(",")] if rest else []
    fields = {key.strip(): _number(value) for key, _, value in pairs}
    try:
        return kind, kind.Settings(**fields)
    except ValidationError as error:
        fault = error.errors()[0]
        known = ", ".join(kind.Settings.model_fields) or "none at all"
        field = ".".join(str(part) for part in fault["loc"])
        raise AdaptationError(
            f"adaptation {spelling!r}, setting {field!r}: {fault['msg']}; {name} has: {known}"
        ) from None


def _number(text: str) -> Any:
    """Reads a number, or ``none``; anything else is left for the settings to refuse."""
    if text.strip().lower() == "none":
        return None
    try:
        return float(text) if not text.strip().lstrip("+-").isdigit() else int(text)
    except ValueError:
        return text
