"""Where every setting of an experiment comes from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from feddg.experiment import Experiment, expand, layers
from feddg.settings import leaves, merge

DEFAULT = "default"


@dataclass(frozen=True)
class Origin:
    """A setting of an experiment.

    Attributes:
        value: what it is.
        source: where it comes from: ``you said``, the experiment file, a preset by name,
            ``default``, or what it follows from.
    """

    value: Any
    source: str


def explain(
    said: Mapping[str, Any], file: Mapping[str, Any] | None = None, file_name: str = "the file"
) -> dict[str, Origin]:
    """Returns every setting of an experiment by dotted path, with where it comes from.

    Args:
        said: what the user says.
        file: the fields of an experiment file that ``said`` is laid over.
        file_name: what the file is called.

    Raises:
        ExperimentError: together they are no valid experiment.
    """
    below, above = expand(dict(file or {})), expand(dict(said))
    fields = merge(below, above)
    *presets, (you, _) = layers(fields)[1]
    source, wanted = {}, {}
    for name, layer in [*presets, (file_name, below), (you, above)]:
        for path, value in leaves(layer).items():
            source[path], wanted[path] = name, value
    settings = leaves(Experiment(**fields).model_dump(mode="json"))
    return {
        path: Origin(value, _source(path, value, source.get(path, DEFAULT), wanted.get(path)))
        for path, value in settings.items()
    }


def _source(path: str, value: Any, source: str, wanted: Any) -> str:
    """Corrects the source of what completion decides itself."""
    if path == "clients.per_round" and value is None and wanted is not None:
        return f"fewer clients than the {wanted} of {source}, so all take part"
    if path == "model.normalization" and wanted in (None, "auto"):
        return "follows from model.weights"
    return "follows from data.source" if path == "preset" and wanted is None else source
