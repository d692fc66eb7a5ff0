"""Experiment: the complete, validated description of a run.

A YAML file, this Python object and the command line are three spellings of it. What the user does
not say is filled in when the object is made, from the presets of the data set and of the method,
so that the experiment in a run folder says everything and later presets cannot change it.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError, model_validator

from feddg.errors import ExperimentError, nearest
from feddg.methods.registry import build_method, method_class
from feddg.settings import (
    ClientSettings,
    DataSettings,
    EvaluateSettings,
    HoldOut,
    MethodChoice,
    ModelSettings,
    ServerSettings,
    Settings,
    TrainSettings,
    merge,
)

_PAPER = {
    "data": {"image_size": 224},
    "clients": {"number": 100, "per_round": 20, "heterogeneity": 0.1},
    "model": {"backbone": "resnet50", "weights": "imagenet", "embedding": "linear"},
    "train": {"rounds": 50, "lr": 3e-5, "batch_size": 32, "augmentation": "pacs"},
}
_FEDIG = {
    "data": {"image_size": 224, "id_val": 0.2, "id_test": 0.0},
    "clients": {"number": 3, "partition": "domain"},
    "model": {
        "backbone": "resnet18",
        "weights": "imagenet",
        "embedding": "bottleneck",
        "normalization": "train",
    },
    "train": {
        "rounds": 40,
        "local_steps": 200,
        "batch_size": 64,
        "optimizer": "sgd",
        "lr": 0.01,
        "momentum": 0.5,
        "augmentation": "pacs",
    },
}
PRESETS: dict[str, dict[str, Any]] = {
    "digits": {
        "data": {"image_size": 32},
        "clients": {"number": 6, "heterogeneity": 0.1},
        "model": {"backbone": "cnn", "weights": None},
        "train": {
            "rounds": 10,
            "local_epochs": 2,
            "batch_size": 16,
            "lr": 1e-3,
            "augmentation": "digits",
        },
    },
    "folder": {
        "model": {"backbone": "resnet18", "weights": "imagenet", "embedding": "linear"},
        "train": {"lr": 1e-4, "augmentation": "pacs"},
    },
    "pacs": _PAPER,
    "office_home": merge(_PAPER, {"train": {"augmentation": "office_home"}}),
    "iwildcam": merge(
        _PAPER, {"clients": {"number": 243, "per_round": 24}, "train": {"rounds": 100}}
    ),
    "fedig": _FEDIG,
    "fedig_silos": merge(
        _FEDIG,
        {
            "clients": {"number": 30, "per_round": 10},
            "train": {"rounds": 120, "local_steps": 20},
        },
    ),
}
"""Experiment values by data set; the benchmarks' are PARDON's protocol (its section V).

``fedig`` and ``fedig_silos`` are FedIG's protocol for four domains of any data set (its sections
4.1 and A.6): one domain per client, and ten clients per domain, with ``clients.alpha`` for label
skew.
"""

_NOT_IDENTITY = {"name", "device"}
_LATER = (("train", "select_every"), ("train", "decay"), ("train", "gradient_clipping"))
"""Fields younger than some run folders: left out of the hash where they say nothing new."""


class Experiment(Settings):
    """One experiment, complete.

    Shorthands are accepted wherever they are unambiguous: ``data="digits"``, ``method="pardon"``,
    ``hold_out="sketch"`` (or a list, or ``{"val": ..., "test": ...}``), and a method's
    hyper-parameters directly beside its name.

    Raises:
        ExperimentError: a field is unknown, out of range or contradicts another one.
    """

    name: str | None = None
    preset: str | None = None
    data: DataSettings = DataSettings()
    hold_out: HoldOut = HoldOut()
    clients: ClientSettings = ClientSettings()
    method: MethodChoice = MethodChoice()
    model: ModelSettings = ModelSettings()
    train: TrainSettings = TrainSettings()
    server: ServerSettings = ServerSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    seed: int = 0
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "auto"

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ExperimentError(_explain(error)) from None

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, fields: Any) -> Any:
        return complete(fields)

    @property
    def id(self) -> str:
        """Eight hexadecimal digits that differ for every different experiment."""
        content = self.model_dump(mode="json", exclude=_NOT_IDENTITY)
        for part, field in _LATER:
            default = type(getattr(self, part)).model_fields[field].default
            if content[part][field] == default:
                del content[part][field]
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    @property
    def label(self) -> str:
        """A readable folder name that ends in :attr:`id`."""
        held = "-".join((*self.hold_out.val, *self.hold_out.test)) or "none"
        words = self.name or f"{self.method.name}-{self.data.source}-{held}-s{self.seed}"
        return f"{re.sub(r'[^A-Za-z0-9._+-]+', '_', words)}-{self.id}"

    def to_yaml(self) -> str:
        """Returns the complete experiment as YAML."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def load_experiment(path: Path | None, overrides: Mapping[str, Any] | None = None) -> Experiment:
    """Reads an experiment file and lays ``overrides`` on top.

    Raises:
        ExperimentError: the file is missing, is not YAML, or describes no valid experiment.
    """
    fields: dict[str, Any] = {}
    if path is not None:
        if not path.is_file():
            raise ExperimentError(f"experiment file {path} does not exist")
        try:
            fields = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ExperimentError(f"experiment file {path} is not valid YAML: {error}") from None
        if not isinstance(fields, dict):
            raise ExperimentError(
                f"experiment file {path} must hold fields such as 'data:' and 'method:'"
            )
    return Experiment(**merge(expand(fields), expand(dict(overrides or {}))))


def expand(fields: dict[str, Any]) -> dict[str, Any]:
    """Writes shorthands out: ``data="digits"`` becomes ``data={"source": "digits"}``, and so on."""
    out = dict(fields)
    for key, inner in (("data", "source"), ("method", "name"), ("model", "backbone")):
        if isinstance(out.get(key), str):
            out[key] = {inner: out[key]}
    if isinstance(out.get("clients"), int):
        out["clients"] = {"number": out["clients"]}
    held = out.get("hold_out")
    if isinstance(held, str | list | tuple):
        out["hold_out"] = {"test": held}
    method = out.get("method")
    if isinstance(method, dict):
        settings = {k: v for k, v in method.items() if k not in ("name", "settings")}
        rest = {k: v for k, v in method.items() if k in ("name", "settings")}
        out["method"] = merge(rest, {"settings": settings}) if settings else rest
    return {key: _plain(value) for key, value in out.items()}


def _plain(value: Any) -> Any:
    return value.model_dump() if isinstance(value, Settings) else value


def complete(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fills in what the user did not say from the presets.

    From weakest to strongest: the data set's preset, the method's for every data set (``"*"``),
    the method's for this one, the user's own words.
    """
    said = expand(dict(fields))
    source = str(said.get("data", {}).get("source", "folder"))
    preset = said.get("preset") or (source if source in PRESETS else "folder")
    if preset not in PRESETS:
        raise ExperimentError(
            f"unknown preset {preset!r}{nearest(preset, PRESETS)}; there are: {', '.join(PRESETS)}"
        )
    choice = said.get("method", {})
    name = str(choice.get("name", "fedavg")).lower()
    method = method_class(name)
    over = [method.presets.get("*", {}), method.presets.get(preset, {})]
    full = PRESETS[preset]
    for layer in (*over, said):
        full = merge(full, expand(layer) if layer is not said else layer)
    settings = full.get("method", {}).get("settings", {})
    built = build_method(name, settings)
    resolved = {"name": method.name, "settings": built.settings.model_dump(mode="json")}
    return _decide({**full, "preset": preset, "method": resolved})


def _decide(full: dict[str, Any]) -> dict[str, Any]:
    model = dict(full.get("model", {}))
    if isinstance(model.get("weights"), str) and model["weights"].lower() == "none":
        model["weights"] = None
    if model.get("normalization", "auto") == "auto":
        model["normalization"] = "frozen" if model.get("weights") else "train"
    return {**full, "model": model}


def _explain(error: ValidationError) -> str:
    fault = error.errors()[0]
    where = ".".join(str(part) for part in fault["loc"]) or "experiment"
    if fault["type"] == "extra_forbidden":
        *parents, field = fault["loc"]
        fields = _fields_at([str(part) for part in parents])
        return (
            f"unknown field {where!r}{nearest(str(field), fields)}; there are: {', '.join(fields)}"
        )
    return f"{where}: {fault['msg']} (got {fault['input']!r})"


def _fields_at(parents: list[str]) -> list[str]:
    model: Any = Experiment
    for parent in parents:
        model = model.model_fields[parent].annotation
    return list(model.model_fields)
