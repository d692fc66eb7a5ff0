"""Test-time adaptation: any trained model under any adaptation that suits it, by name.

    predictor = adapt(model, "fixed:alpha=0.3")
    predictor(images)      # as the model: RGB in [0, 1] -> logits
    predictor.reset()      # before images of another domain

``bin`` and ``adapter`` need parts that only training can make, ``ensemble`` the clients' own
normalisation; they refuse a model without, and say so.

Ours are in :mod:`feddg.evaluation.adaptations`, one file for each or for each family. Another is a
subclass of :class:`feddg.evaluation.predictors.Predictor` under ``@register_adaptation``, or behind
an entry point of the group ``feddg.adaptations``.
"""

from typing import Any, TypeVar

from pydantic import ValidationError
from torch import nn

from feddg.errors import AdaptationError
from feddg.evaluation.predictors import Parts, Predictor
from feddg.registry import Registry

P = TypeVar("P", bound=type[Predictor])


def _adopt(name: str, loaded: Any) -> type[Predictor]:
    if not (isinstance(loaded, type) and issubclass(loaded, Predictor) and loaded.name == name):
        raise AdaptationError(f"expected a subclass of Predictor called {name!r}, found {loaded!r}")
    return loaded


ADAPTATIONS: Registry[type[Predictor]] = Registry(
    "adaptation",
    "feddg.evaluation.adaptations",
    group="feddg.adaptations",
    error=AdaptationError,
    order=lambda kind: (kind.order, kind.name),
    adopt=_adopt,
)
"""By name, in the order of tables."""


def register_adaptation(kind: P) -> P:
    """Class decorator that makes an adaptation known by its name.

    Raises:
        AdaptationError: another one has the name.
    """
    ADAPTATIONS.add(kind.name, kind)
    return kind


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
    kind = ADAPTATIONS.find(name)
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
