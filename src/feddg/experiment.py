"""The complete, validated description of a run.

It can be given as a YAML file, as this Python object or on the command line. Missing values are
filled in from the presets of data set and method when the object is created. So the experiment in a
run folder is complete, and later presets cannot change it.
"""

import hashlib
import json
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, model_validator
from pydantic_core import to_jsonable_python

from feddg.data.data_set import (
    DATA_SETS,
    SCRATCH,
    checked_options,
    expects_weights,
    find_augmentation,
    preset_of,
    presets,
)
from feddg.data.partition import counts_clients, rules_of
from feddg.diagnostics import warn
from feddg.errors import ExperimentError, nearest, schema_faults
from feddg.evaluation.metrics import METRICS
from feddg.methods.base import Method
from feddg.methods.composition import build_method, method_class
from feddg.privacy.building import defence_of, resolved_choice
from feddg.settings import (
    IMAGENET,
    SHORTHANDS,
    ClientSettings,
    EvaluateSettings,
    ExperimentSettings,
    Fields,
    Settings,
    leaves,
    merge,
    nested,
)
from feddg.storage import read_fields_of

SCHEMA = 1
"""Part of every id. Ids depend only on settings that differ from their defaults, so increase it
when a default changes. A new field whose default keeps the earlier behaviour changes neither it nor
any id.
"""
NOT_IDENTITY = {"name", "device"}
"""Fields that are no part of an id."""
_PARTS = {
    name
    for name, field in ExperimentSettings.model_fields.items()
    if isinstance(field.default, Settings)
}
_FIELDS = SHORTHANDS | ExperimentSettings.model_fields
_MAY_BE_EMPTY = {*_PARTS, "defences"}
"""Fields that a file may name and say nothing of."""
ONE_ROUND = {
    "train": {
        **{"rounds": 1, "local_epochs": 1, "local_steps": None},
        **{"select_every": None, "drop_last": False},
        **{"warmup_rounds": 0, "head_rounds": 0, "head": "random"},
    }
}
"""How a method of one round trains, whatever is said for others beside it: one whole pass."""
DEFAULT = "default"


def _changed(settings: BaseModel) -> Fields:
    """Returns what differs from its default; everything if another package set the defaults."""
    modules = {part.__module__.partition(".")[0] for part in type(settings).__mro__}
    return settings.model_dump(exclude_defaults=modules <= {"feddg", "pydantic", "builtins"})


class Experiment(ExperimentSettings):
    """One experiment, complete.

    Shorthands are accepted wherever they are unambiguous: ``data="digits"``, ``method="pardon"``,
    ``hold_out="sketch"`` (or a list, or ``{"val": ..., "test": ...}``), ``defences="median"`` (or a
    list), settings of a method or defence beside its name, a method's class or object
    (``method=Pardon(gamma1=0.5)``), and ``rounds=20`` or ``lr=0.01`` for fields of the parts, named
    as on the command line.

    Raises:
        ExperimentError: a field is unknown, out of range or contradicts another one.
    """

    def __init__(self, **fields: object) -> None:
        with schema_faults(ExperimentError, fields=_FIELDS):
            super().__init__(**fields)
        vars(self)["given"] = expand(fields)

    @cached_property
    def given(self) -> Fields:
        """The values given by the user, shorthands expanded; for a changed copy, all values."""
        return self.model_dump(mode="json")

    def model_copy(self, *, update: Mapping[str, object] | None = None, deep: bool = False) -> Self:
        """Returns a changed copy; see pydantic."""
        copy = super().model_copy(update=update, deep=deep)
        if update and update.keys() <= NOT_IDENTITY:
            vars(copy)["given"] = merge(self.given, update)
        elif update:
            vars(copy).pop("given", None)
        return copy

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, fields: Any) -> Any:
        return complete(fields)

    @model_validator(mode="after")
    def _check_names(self) -> "Experiment":
        find_augmentation(self.train.augmentation)
        rules_of(self.clients.partition, self.clients.model_dump())
        _check_selection(self.evaluate)
        return self

    @property
    def id(self) -> str:
        """Eight hexadecimal digits that identify the experiment."""
        return self._hash(str)

    @property
    def without_weights(self) -> "Experiment":
        """The same without pretrained weights, for a network that is sent its weights."""
        model = self.model.model_copy(update={"weights": None})
        return self.model_copy(update={"model": model})

    @property
    def portable_id(self) -> str:
        """An id that does not depend on where the experiment's files are.

        It depends on whether files are given, but not on their names; their content is compared
        elsewhere (:mod:`feddg.comparison.results_file`).
        """
        return self._hash(lambda path: "a file")

    def _hash(self, path_as: Callable[[Path], str]) -> str:
        """Returns a hash of the settings that differ from their defaults."""
        content = self.model_dump(exclude=NOT_IDENTITY, exclude_defaults=True)
        if self.model.weights not in (None, IMAGENET):
            content["model"]["weights"] = Path(str(self.model.weights))
        method = build_method(self.method.name, self.method.settings)
        content["method"] = self.method.name, _changed(method.settings)
        content["defences"] = [
            (defence.name, _changed(defence_of(defence).settings)) for defence in self.defences
        ]
        definition = DATA_SETS.get(self.data.source)
        if definition is not None and definition.options is not None:
            content.setdefault("data", {})["options"] = _changed(
                definition.options(**self.data.all_options)
            )

        def plain(value: object) -> object:
            if isinstance(value, Path):
                return path_as(value)
            if isinstance(value, set | frozenset):
                return sorted(value, key=repr)
            return to_jsonable_python(value)

        text = json.dumps([SCHEMA, content], sort_keys=True, default=plain)
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    @property
    def label(self) -> str:
        """The run folder's name: readable, and ends in :attr:`id`."""
        domains = "-".join((*self.hold_out.val, *self.hold_out.test)) or "none"
        words = self.name or f"{self.method.name}-{self.data.source}-{domains}-s{self.seed}"
        words = re.sub(r"[^A-Za-z0-9._+-]+", "_", words)[:200]  # file systems take 255 characters
        return f"{words}-{self.id}"

    def to_yaml(self) -> str:
        """Returns the complete experiment as YAML."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def checked_settings(fields: Mapping[str, object]) -> ExperimentSettings:
    """Returns checked settings of an incomplete experiment, without presets.

    Raises:
        ExperimentError: a field is unknown or out of range.
    """
    with schema_faults(ExperimentError, fields=_FIELDS):
        return ExperimentSettings(**fields)


def _check_selection(evaluate: EvaluateSettings) -> None:
    """Refuses a metric that cannot choose a round."""
    metric = METRICS.find(evaluate.select_by)
    if metric.higher_is_better is None:
        able = [name for name, other in METRICS.items() if other.higher_is_better is not None]
        raise ExperimentError(
            f"evaluate.select_by: {evaluate.select_by} describes the images, not the model; choose "
            f"one of {', '.join(able)}"
        )
    if evaluate.select_over == "pooled" and evaluate.select_by != "accuracy":
        raise ExperimentError(
            f"evaluate.select_over: {evaluate.select_by} is not pooled during a run, only accuracy "
            "is; use domain_mean or worst_domain"
        )


def load_experiment(
    source: Experiment | Path | str | None, overrides: Mapping[str, object] | None = None
) -> Experiment:
    """Reads an experiment or its file, with ``overrides`` on top.

    Raises:
        ExperimentError: the file is missing, is not YAML, or is not a valid experiment.
    """
    if not isinstance(source, Experiment | Path | str | None):
        raise ExperimentError(
            "an experiment is a feddg.Experiment, the path of a file, or fields by name: "
            f'feddg.run(data="digits", method="fedavg"), or feddg.run(**fields); this is a '
            f"{type(source).__name__}"
        )
    if isinstance(source, Experiment) and not overrides:
        return source
    given = expand(dict(overrides or {}))
    return Experiment(**merge(read_fields(source, given), given))


def load_stored(path: Path) -> Experiment:
    """Reads the complete experiment stored in a run folder.

    Raises:
        ExperimentError: see :func:`load_experiment`; or a field is missing, because present presets
            and defaults may differ from those of the run.
    """
    fields = read_fields(path)
    try:
        experiment = Experiment(**fields)
        lacking = leaves(experiment.model_dump(mode="json")).keys() - leaves(fields).keys()
        if lacking:
            raise ExperimentError(f"it lacks {', '.join(sorted(lacking))}")
    except ExperimentError as error:
        raise ExperimentError(
            f"{path} was changed, names what your own code registers and was not imported, or was "
            f"written by another version of feddg: {error}"
        ) from None
    return experiment


def read_fields(source: Experiment | Path | str | None, over: Fields | None = None) -> Fields:
    """Returns the fields of an experiment file, shorthands expanded; empty without a file.

    Args:
        source: the file; for an experiment, the values given by its user.
        over: fields that will override them. If these name another method than the file, the file's
            method settings are dropped with a warning.

    Raises:
        ExperimentError: the file is missing, is not YAML, or contains no fields.
    """
    if source is None:
        return {}
    if isinstance(source, Experiment):
        return _without_other_method(source.given, over or {}, "the experiment")
    fields = read_fields_of(Path(source), "experiment file", ExperimentError)
    return _without_other_method(expand(fields), over or {}, str(source))


def _without_other_method(fields: Fields, over: Fields, named: str) -> Fields:
    """Removes a file's settings of the method that ``over`` replaces by another one."""
    own, wanted = fields.get("method") or {}, (over.get("method") or {}).get("name")
    if wanted is None or not isinstance(own, dict) or not own.get("settings"):
        return fields
    before, after = method_class(str(own.get("name", "fedavg"))), method_class(str(wanted))
    if before.name == after.name:
        return fields
    warn(
        "settings-left-out",
        f"{named} is for {before.name}; its settings {', '.join(own['settings'])} are left out, as "
        f"the method is now {after.name}.",
    )
    return {**fields, "method": {"name": own.get("name", "fedavg")}}


def expand(fields: Mapping[str, Any]) -> Fields:
    """Expands shorthands: ``data="digits"`` becomes ``data={"source": "digits"}``, and so on.

    An empty part (``data:`` alone, or a method's ``settings:``) is removed. ``rounds=20`` and the
    other :data:`feddg.settings.SHORTHANDS` are moved to their parts.

    Raises:
        ExperimentError: a part does not contain fields, or a field is given twice.
    """
    out = {k: v for k, v in fields.items() if v is not None or k not in _MAY_BE_EMPTY}
    flat = {key: out.pop(key) for key in SHORTHANDS if key in out and key not in _PARTS}
    method = out.get("method")
    if isinstance(method, Method) or (isinstance(method, type) and issubclass(method, Method)):
        settings = {} if isinstance(method, type) else method.settings.model_dump(mode="json")
        out["method"] = {"name": method.name, "settings": settings}
    for key, inner in (("data", "source"), ("method", "name"), ("model", "backbone")):
        if isinstance(out.get(key), str):
            out[key] = {inner: out[key]}
    if isinstance(out.get("clients"), int):
        out["clients"] = {"number": out["clients"]}
    hold_out = out.get("hold_out")
    if isinstance(hold_out, str | int | float | list | tuple):
        out["hold_out"] = {"test": hold_out, "val": ()}
    if isinstance(out.get("method"), dict):
        out["method"] = _choice(out["method"])
    if "defences" in out:
        defences = out["defences"]
        listed = defences if isinstance(defences, list | tuple) else [defences]
        out["defences"] = [_choice(_plain(defence)) for defence in listed]
    plain = {key: _plain(value) for key, value in out.items()}
    for part in _PARTS & plain.keys():
        if not isinstance(plain[part], Mapping):
            raise ExperimentError(f"{part}: must hold fields (got {reprlib.repr(plain[part])})")
    for key, value in flat.items():
        written = leaves(plain).get(SHORTHANDS[key], value)
        if written != value:
            raise ExperimentError(
                f"{key} is {reprlib.repr(value)} and {SHORTHANDS[key]} is {reprlib.repr(written)}, "
                "which are the same field; use one of them"
            )
        plain = merge(plain, nested(SHORTHANDS[key], value))
    return plain


def _choice(given: object) -> object:
    """Expands a method or defence whose settings are beside its name."""
    if isinstance(given, str):
        return {"name": given}
    if not isinstance(given, Mapping):
        return given
    if not isinstance(given.get("settings") or {}, Mapping):
        raise ExperimentError(
            f"the settings of {reprlib.repr(given.get('name'))} must be fields "
            f"(got {reprlib.repr(given['settings'])})"
        )
    settings = {k: v for k, v in given.items() if k not in ("name", "settings")}
    rest = {k: v for k, v in given.items() if k == "name" or (k == "settings" and v is not None)}
    return merge(rest, {"settings": settings}) if settings else rest


def _plain(value: object) -> object:
    return value.model_dump() if isinstance(value, Settings) else value


def complete(fields: Mapping[str, object]) -> Fields:
    """Fills in missing values from the presets.

    From weakest to strongest: the data set's preset; the preset ``scratch``, if that one is for a
    pretrained network and the user sets no weights; the method's preset for all data sets
    (``"*"``); the method's for this one; the user's values; :data:`ONE_ROUND` for a method of one
    round.

    Raises:
        ExperimentError: a name is unknown, a method's setting out of range, or a round needs more
            clients than there are.
    """
    given = expand(dict(fields))
    preset, named_layers = layers(given)
    full: Fields = {}
    for _, layer in named_layers:
        full = merge(full, layer)
    method = _method_of(full)
    if method.one_round:
        full = merge(full, ONE_ROUND)
    full = _with_possible_head(_with_possible_clients(full, given), given)
    built = method(**full.get("method", {}).get("settings", {}))
    resolved = {"name": method.name, "settings": built.settings.model_dump(mode="json")}
    defences = [resolved_choice(choice) for choice in full.get("defences", ())]
    full |= {"preset": preset, "data": _with_options(full.get("data", {}))}
    model = dict(full.get("model", {}))
    if isinstance(model.get("weights"), str) and model["weights"].lower() == "none":
        model["weights"] = None
    if model.get("normalization", "auto") == "auto":
        model["normalization"] = "frozen" if model.get("weights") else "train"
    return full | {"model": model, "method": resolved, "defences": defences}


def _method_of(fields: Fields) -> type[Method]:
    return method_class(str(fields.get("method", {}).get("name", "fedavg")))


def _with_options(data: Mapping[str, object]) -> Mapping[str, object]:
    """Fills in a data set's own options, if it has any."""
    definition = DATA_SETS.get(str(data.get("source", "folder")))
    given = data.get("options") or {}
    if definition is None or definition.options is None or not isinstance(given, Mapping):
        return data
    options = checked_options(definition.name, definition.options, given, ExperimentError)
    return {**data, "options": options.model_dump(mode="json")}


def chosen_preset(given: Fields) -> str | None:
    """Returns the preset that somebody names; none for ``none``, which is the data set's own."""
    named = given.get("preset")
    return None if named in (None, "", "none") else str(named)


def layers(given: Fields) -> tuple[str, list[tuple[str, Fields]]]:
    """Returns the preset's name, and the layers that fill in an experiment, weakest first.

    Args:
        given: the user's values, shorthands expanded; they are the last layer.

    Raises:
        ExperimentError: a preset or method is unknown.
    """
    source = str(given.get("data", {}).get("source", "folder"))
    preset = chosen_preset(given) or preset_of(source)
    defined = presets()
    if preset not in defined:
        raise ExperimentError(
            f"unknown preset {preset!r}{nearest(preset, defined)}; there are: {', '.join(defined)}"
        )
    method = _method_of(given)
    train = given.get("train", {})
    passes = train.get("local_epochs") is not None and "local_steps" not in train
    scratch = _from_scratch(given, preset, source)
    methods = [("*", f"preset of {method.name}")]
    methods += [(SCRATCH, f"preset of {method.name} from scratch")] * bool(scratch)
    return preset, [
        (f"preset {preset}", expand(dict(defined[preset]))),
        *scratch,
        *((text, expand(method.presets.get(name, {}))) for name, text in methods),
        (f"preset of {method.name} for {preset}", expand(method.presets.get(preset, {}))),
        # A preset's number of steps would be taken in place of the passes that are asked for.
        *([("local_epochs", {"train": {"local_steps": None}})] if passes else []),
        ("you said", given),
    ]


def _from_scratch(given: Fields, preset: str, source: str) -> list[tuple[str, Fields]]:
    """Returns the layer over a preset for pretrained networks if there are no weights.

    A preset that the user names, other than the data set's own, is not changed.
    """
    weights = given.get("model", {}).get("weights", "unsaid")
    without = weights is None or str(weights).lower() == "none"
    chosen = chosen_preset(given) not in (None, source, preset_of(source))
    if not without or chosen or not expects_weights(preset):
        return []
    fields = presets()[SCRATCH]
    return [(f"preset {SCRATCH}, without pretrained weights", expand(dict(fields)))]


def _with_possible_clients(full: Fields, given: Fields) -> Fields:
    """Lets all clients take part if a preset asks for more than there are.

    Raises:
        ExperimentError: the user asks for more.
    """
    clients = full.get("clients", {})
    if "partition" in clients and counts_clients(str(clients["partition"])):
        return full  # the images say how many there are
    number, per_round = clients.get("number"), clients.get("per_round")
    number = ClientSettings().number if number is None else number
    if not isinstance(number, int) or not isinstance(per_round, int) or per_round <= number:
        return full
    if given.get("clients", {}).get("per_round") is not None:
        raise ExperimentError(
            f"clients.per_round is {per_round}, but there are {number} clients; use at most "
            f"{number}, or leave it out for all of them"
        )
    return merge(full, {"clients": {"per_round": None}})


def _with_possible_head(full: Fields, given: Fields) -> Fields:
    """Starts the classifier at random if a preset's closed-form start would bypass a defence.

    If the user asks for both, the defence refuses the combination.
    """
    privacy, train = full.get("privacy", {}), full.get("train", {})
    if _method_of(full).one_round:
        return full
    names = "clipping", "epsilon", "record_epsilon", "style_epsilon"
    private = any(privacy.get(name) not in (None, "none") for name in names)
    asked = given.get("train", {}).get("head") is not None
    if train.get("head") == "random" or asked or not (private or full.get("defences")):
        return full
    return merge(full, {"train": {"head": "random"}})


@dataclass(frozen=True)
class Origin:
    """A setting of an experiment.

    Attributes:
        value: the value.
        source: where it comes from: ``you said``, the experiment file, a preset by name,
            ``default``, or what it follows from.
    """

    value: object
    source: str


def explain(
    given: Mapping[str, object],
    file: Mapping[str, object] | None = None,
    file_name: str = "the file",
) -> dict[str, Origin]:
    """Returns every setting of an experiment by dotted path, with its source.

    Args:
        given: the user's values.
        file: fields of an experiment file; ``given`` overrides them.
        file_name: name of the file.

    Raises:
        ExperimentError: together they are not a valid experiment.
    """
    below, above = expand(dict(file or {})), expand(dict(given))
    fields = merge(below, above)
    *presets, (you, _) = layers(fields)[1]
    source, wanted = {}, {}
    for name, layer in [*presets, (file_name, below), (you, above)]:
        for path, value in leaves(layer).items():
            if value != [] or path in wanted:  # a list that is empty by default was not chosen
                source[path], wanted[path] = name, value
    experiment = Experiment(**fields)
    settings = leaves(experiment.model_dump(mode="json"))
    if method_class(experiment.method.name).one_round:
        source |= dict.fromkeys(leaves(ONE_ROUND), f"{experiment.method.name} has one round")
    return {
        path: Origin(value, _source(path, value, source.get(path, DEFAULT), wanted.get(path)))
        for path, value in settings.items()
    }


def _source(path: str, value: object, source: str, wanted: object) -> str:
    """Returns the corrected source of values that completion sets itself."""
    if path == "clients.per_round" and value is None and wanted is not None:
        return f"fewer clients than the {wanted} of {source}, so all take part"
    if path == "model.normalization" and wanted in (None, "auto"):
        return "follows from model.weights"
    if path == "train.head" and value == "random" and wanted == "ridge":
        return "random: defences of updates do not cover ridge's sums"
    return "follows from data.source" if path == "preset" and wanted is None else source
