"""Plans: many experiments that answer one question, their cells, and trials for tuning."""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from feddg.clients.client import batches_of_pass, steps_of_round
from feddg.clients.sampling import drawn_clients
from feddg.clients.threads import available_cores
from feddg.data.data_set import DATA_SETS, load_source, preset_of
from feddg.data.partition import counts_clients
from feddg.data.protocols import known_domains, scenarios
from feddg.errors import DataError, ExperimentError, nearest, schema_faults
from feddg.experiment import NOT_IDENTITY, Experiment, chosen_preset, expand
from feddg.methods.composition import build_method, method_class
from feddg.records import ID_VAL
from feddg.runs.beforehand import with_weights_at_hand
from feddg.runs.prepare import OF_TRAINING, cache_folder, deal, load_undecoded, roles_of_own_split
from feddg.runs.table import FINAL, SELECTION_RULES
from feddg.settings import (
    Fields,
    HoldOut,
    MethodChoice,
    Names,
    OneLine,
    Settings,
    TrainSettings,
    grouped,
    leaves,
    merge,
    nested,
)
from feddg.storage import read_fields_of

PAPERS = Path(__file__).parent / "papers"
"""Plans of papers' tables and figures, a folder for each paper."""
VALIDATED_ON = " (validated on "
"""What follows the test domains in the heading of a hold-out, where it also names validation."""
MOST_JOBS = 16
"""Most processes at once, half a gigabyte each; more would hardly be faster."""


class Variant(Settings):
    """A method in a plan.

    Attributes:
        method: registry name.
        label: its name in tables; the method's own name by default.
        settings: its hyper-parameters.
        experiment: experiment fields for this method only (for example an optimizer).
        tuned: experiment fields chosen by a ``tune`` section, for each set of held-out domains.
    """

    method: str
    label: OneLine | None = None
    settings: Fields = Field(default_factory=dict)
    experiment: Fields = Field(default_factory=dict)
    tuned: dict[str, Fields] = Field(default_factory=dict)

    @property
    def name(self) -> str:
        """The label, or the method's name."""
        return self.label or self.method

    @property
    def said(self) -> Fields:
        """The fields that its entry fixes, by dotted path."""
        settings = {f"method.settings.{name}": value for name, value in self.settings.items()}
        return leaves(expand(self.experiment)) | settings

    @model_validator(mode="before")
    @classmethod
    def _entry(cls, entry: Any) -> Any:
        """Converts an entry of a plan: a name, or fields that may include the method's settings."""
        entry = {"method": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, Mapping):
            return entry
        fields = {"method" if key == "name" else key: value for key, value in entry.items()}
        names = [key for key in fields if key not in cls.model_fields]
        settings = {key: fields.pop(key) for key in names}
        return merge(fields, {"settings": settings}) if settings else fields


class Collection(Settings):
    """A data set in a plan over several.

    Attributes:
        name: its name in tables; that of its source by default.
        hold_out: as in :class:`Plan`; the plan's, or each domain in turn (``lodo``), by default.
        domains: as in :class:`Plan`.
        experiment: experiment fields for this data set only. In a plan, fields of ``data`` may
            stand beside the name.
    """

    name: OneLine = Field(min_length=1)
    hold_out: "HoldOuts" = None
    domains: Names = ()
    experiment: Fields = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _entry(cls, entry: Any) -> Any:
        """Converts an entry of a plan: a source, or fields that may include those of ``data``."""
        entry = {"source": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, Mapping):
            return entry
        data = {key: value for key, value in entry.items() if key not in cls.model_fields}
        fields = {"name": data.get("source")} | {k: v for k, v in entry.items() if k not in data}
        experiment = merge(expand(fields.get("experiment") or {}), {"data": data} if data else {})
        if fields["name"] in DATA_SETS and "data.source" not in leaves(experiment):
            experiment = merge(experiment, {"data": {"source": fields["name"]}})
        if held_out := experiment.pop("hold_out", None):
            fields["hold_out"] = fields.get("hold_out") or [held_out]
        return fields | {"experiment": experiment}

    def within(self, root: str | None, around: str | None = None) -> Fields:
        """Returns its fields, its folder inside ``root`` or in place of what the plan says for all.

        Args:
            root: said beside the plan; None if nothing is.
            around: the folder in the plan's ``base``.
        """
        data = self.experiment.get(DATA, {})
        folder, definition = data.get("root"), DATA_SETS.get(str(data.get("source")))
        reads = data.get("source") == "folder" or bool(definition and definition.layouts)
        if root is None or (folder is None and around is None and not reads):
            return self.experiment
        inside = str(root if folder is None else Path(root) / folder)
        return merge(self.experiment, {DATA: {"root": inside}})


def _counted(value: object) -> Any:
    return list(range(value)) if isinstance(value, int) else value


def _alone(*kinds: type) -> BeforeValidator:
    """Accepts a single value of these kinds as a list of one."""
    return BeforeValidator(lambda value: [value] if isinstance(value, kinds) else value)


def _pair(entry: Any) -> Any:
    return (entry, None) if isinstance(entry, int) else entry


def _images(value: object) -> Any:
    """Parses a number of images; ``15k`` and ``1.5M`` are 15,000 and 1,500,000."""
    text = str(value).strip().lower()
    scale = {"k": 1000, "m": 10**6}.get(text[-1:])
    try:
        return value if scale is None else float(text[:-1]) * scale
    except ValueError:
        return value  # which is no number


RuleName = Annotated[str, AfterValidator(lambda name: SELECTION_RULES.find(name).title)]
Values = Annotated[tuple[object, ...], Field(min_length=1)]
Seeds = Annotated[tuple[int, ...], BeforeValidator(_counted)]
Budget = Annotated[int, BeforeValidator(_images), Field(ge=1)]


class Tune(Settings):
    """Values to try for each method before the table is run, chosen by in-domain validation.

    Attributes:
        settings: dotted experiment fields and the values to try, in all combinations.
            ``method.FIELD`` is tried for methods that have it; a field fixed in a method's own
            entry is not tried for it.
        rounds: rounds of a trial; as many as the table's runs by default.
        seeds: number of seeds, or the seeds, of the trials; may differ from the table's.
        rule: the selection rule for the round of a trial.
    """

    settings: dict[str, Values] = Field(min_length=1)
    rounds: int | None = Field(None, ge=1)
    seeds: Annotated[Seeds, Field(min_length=1)] = (0,)
    rule: RuleName = FINAL.title

    @model_validator(mode="after")
    def _opens_no_held_out_images(self) -> "Tune":
        if SELECTION_RULES.find(self.rule).split not in (None, ID_VAL):
            raise ValueError(
                f"rule {self.rule!r} looks at held-out images, which trials never open"
            )
        return self


Protocol = Literal["lodo", "ltdo", "ltdo-all"]
PROTOCOLS = get_args(Protocol)
HoldOuts = Annotated[Protocol | tuple[object, ...] | None, _alone(dict, int)]
DATA = "data"
"""The axis of a plan over several data sets."""


class Plan(Settings):
    """A plan of experiments to compare.

    Attributes:
        name: short name, and default name of the folder.
        title: heading of the report.
        question: the question to answer, in one or two sentences.
        base: experiment fields of all cells; ``method.FIELD`` is for the methods that have it.
        methods: names, or names with label, settings and experiment fields.
        data: several data sets: names, or fields of ``data`` (``source``, ``root``, ...) with a
            name, ``hold_out`` and experiment fields of their own. Each domain is held out in turn
            if nothing else is said. ``--root`` is the folder that their own roots are in. One data
            set alone belongs to ``base``.
        hold_out: ``lodo``, ``ltdo``, ``ltdo-all``, or a list of hold-outs as in an experiment;
            empty for the value in ``base``.
        domains: the data set's domains, needed for a protocol if the images are not available.
        heterogeneity: values of lambda; empty for the value in ``base``.
        clients: pairs (N, K), or N only; empty for the value in ``base``.
        settings: further axes: a dotted experiment field and its values. ``method.FIELD`` applies
            to the methods that have the field; the others run once and appear in every column.
        seeds: a number of seeds (0, 1, ...) or the seeds.
        budgets: numbers of images used in training, by all clients together, at which methods are
            compared: 15000, ``15k`` or ``1.5M``. Runs have the rounds that the largest budget
            needs, and are evaluated where each budget is reached; ``train.rounds`` and
            ``evaluate.every`` are ignored. A method of one round counts at all budgets from its own
            number of images on.
        tune: values to try for each method first.
        notes: whatever else is to be kept with the plan.
    """

    name: str = "comparison"
    title: str | None = None
    question: str = ""
    base: Fields = Field(default_factory=dict)
    methods: Annotated[tuple[Variant, ...], _alone(str, dict)] = (
        Variant(method="fedavg"),
        Variant(method="pardon"),
    )
    data: tuple[Collection, ...] = ()
    hold_out: HoldOuts = None
    domains: Names = ()
    heterogeneity: Annotated[
        tuple[float, ...], BeforeValidator(lambda value: value or ()), _alone(int, float)
    ] = ()
    clients: Annotated[
        tuple[Annotated[tuple[int, int | None], BeforeValidator(_pair)], ...], _alone(int)
    ] = ()
    settings: dict[str, Values] = Field(default_factory=dict)
    seeds: Seeds = (0,)
    budgets: Annotated[
        tuple[Budget, ...],
        _alone(str, int),
        AfterValidator(lambda values: tuple(sorted(set(values)))),
    ] = ()
    tune: Tune | None = None
    notes: Fields = Field(default_factory=dict)

    def __init__(self, **fields: Any) -> None:
        with schema_faults(ExperimentError, "plan: ", Plan.model_fields):
            super().__init__(**fields)

    @model_validator(mode="before")
    @classmethod
    def _one_data_set(cls, fields: Any) -> Any:
        data = fields.get(DATA) if isinstance(fields, Mapping) else None
        if data is None or isinstance(data, list | tuple):
            return fields
        base = merge(expand(fields.get("base") or {}), expand({DATA: data}))
        return {**fields, "base": base, DATA: ()}

    @field_validator("methods", "seeds", DATA)
    @classmethod
    def _distinct(cls, value: tuple[object, ...], field: ValidationInfo) -> tuple[object, ...]:
        names = [getattr(entry, "name", entry) for entry in value]
        if len(set(names)) < len(names) or not (names or field.field_name == DATA):
            alike = "name" if field.field_name == DATA else "label"
            raise ValueError(f"must be one or more, each once, got {names}; {alike} what is alike")
        return value

    def fixed(self, overrides: Mapping[str, object]) -> "Plan":
        """Returns the plan with experiment fields that override everything else in it.

        They are set in ``base``; the same fields of single methods, and axes over them, go.
        """
        over = expand(dict(overrides))
        collections: list[Fields] = []
        if self.data and "data.source" not in leaves(over):
            own, around = dict(over.pop(DATA, {})), expand(self.base).get(DATA, {}).get("root")
            root = own.pop("root", None)
            over |= {DATA: own} if own else {}
            collections = [
                dict(entry)
                | {"experiment": _without(entry.within(root, around), leaves(over))}
                | ({"hold_out": None} if "hold_out" in over else {})
                for entry in self.data
            ]
        hold_out = self.hold_out
        if self.data and not collections:  # one data set in place of several
            hold_out = hold_out or _each_in_turn(expand(self.base))
        name = over.pop("name", None) or self.name
        paths, clients = leaves(over), over.get("clients", {})
        settings = over.get("method", {}).get("settings", {})
        variants = [
            variant.model_dump()
            | {
                "settings": _without(variant.settings, leaves(settings)),
                "experiment": _without(expand(variant.experiment), paths),
            }
            for variant in self.methods
        ]
        pairs = [
            (clients.get("number", number), clients.get("per_round", per_round))
            for number, per_round in self.clients
        ]
        tried = _unsaid(self.tune.settings, paths) if self.tune else {}
        changes = {
            "name": name,
            DATA: collections,
            "base": merge(expand(self.base), {k: v for k, v in over.items() if k != "seed"}),
            "methods": variants,
            "heterogeneity": () if "clients.heterogeneity" in paths else self.heterogeneity,
            "hold_out": None if "hold_out" in over else hold_out,
            "budgets": () if "train.rounds" in paths else self.budgets,
            "settings": _unsaid(self.settings, paths),
            "clients": list(dict.fromkeys(pairs)),
            "seeds": (over["seed"],) if "seed" in over else self.seeds,
            "tune": self.tune.model_dump() | {"settings": tried} if self.tune and tried else None,
        }
        unchanged = not over and not collections and name == self.name
        return self if unchanged else Plan(**self.model_dump() | changes)

    def saying(self, axes: Mapping[str, object]) -> "Plan":
        """Returns the plan with other values of its fields; a hold-out holds on all data sets."""
        fields = self.model_dump() | dict(axes)
        if "hold_out" in axes and DATA not in axes:
            fields[DATA] = [entry | {"hold_out": None} for entry in fields[DATA]]
        return Plan(**fields) if axes else self

    def to_yaml(self) -> str:
        """Returns the plan as YAML."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def load_plan(source: "Plan | Path | str | Mapping[str, object]") -> Plan:
    """Returns a plan from a YAML file, its fields, or the name of a paper's: ``ccst/table1_pacs``.

    A file's ``extends`` names another plan file, relative to its own folder. The file's values
    override those of the other: ``base`` field by field, anything else as a whole; lists in
    ``notes`` are added.

    Raises:
        ExperimentError: the file is missing, is not YAML, or is not a plan.
    """
    if isinstance(source, Plan):
        return source
    if isinstance(source, Mapping):
        return Plan(**source)
    path, name = Path(source), Path(source).as_posix()
    paper = PAPERS / f"{name}.yaml"
    if name in papers() and not path.exists():
        return Plan(**({"name": name.replace("/", "_")} | _read_plan(paper)))
    if not path.suffix and not path.exists():
        raise ExperimentError(
            f"plan {name} is neither a file nor a paper's{nearest(name, papers())}; papers' are "
            f"{', '.join(papers())}"
        )
    return Plan(**({"name": path.stem} | _read_plan(path)))


def papers() -> list[str]:
    """Returns the names of the plans of papers' tables and figures."""
    return sorted(file.relative_to(PAPERS).as_posix()[:-5] for file in PAPERS.glob("*/*.yaml"))


def _read_plan(path: Path, above: tuple[Path, ...] = ()) -> Fields:
    """Returns the fields of a plan file, merged over those of the plan it extends."""
    fields = read_fields_of(path, "plan file", ExperimentError)
    if "extends" not in fields:
        return fields
    extended = fields.pop("extends")
    if not isinstance(extended, str) or not extended:
        raise ExperimentError(f"{path}: extends names a plan file beside it, got {extended!r}")
    below = (path.parent / extended).resolve()
    if below in (*above, path.resolve()):
        raise ExperimentError(f"{path}: extends {extended}, which extends this file again")
    base = _read_plan(below, (*above, path.resolve()))
    base.pop("name", None)  # or both would share a folder
    fields["base"] = merge(expand(base.get("base", {})), expand(fields.get("base", {})))
    notes = dict(base.get("notes", {}))
    for name, note in fields.get("notes", {}).items():
        both = isinstance(note, list) and isinstance(notes.get(name), list)
        notes[name] = [*notes[name], *note] if both else note
    fields["notes"] = notes
    return base | fields


def _meet(path: str, other: str) -> bool:
    """Whether one of two dotted fields is the other, or within it."""
    return f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")


def _without(fields: Fields, said: Mapping[str, object]) -> Fields:
    """Returns nested fields without those that ``said`` has by dotted path, or parts of them."""
    left: Fields = {}
    for path, value in leaves(fields).items():
        if not any(_meet(path, other) for other in said):
            left = merge(left, nested(path, value))
    return left


def _unsaid(axes: Mapping[str, tuple[object, ...]], said: Mapping[str, object]) -> Fields:
    """Returns the axes that set no field that ``said`` has by dotted path."""
    return {
        name: values
        for name, values in axes.items()
        if not any(_meet(path, other) for path in _set_by(name, values) for other in said)
    }


def _set_by(field: str, values: Iterable[object]) -> set[str]:
    """Returns the dotted fields that an axis sets."""
    return {path for value in values for path in leaves(setting_point(field, value)[1])}


def plan_with_weights_at_hand(plan: "Plan") -> "Plan":
    """Returns the plan, without weights that cannot be had; see :func:`with_weights_at_hand`.

    Weights set for single methods are kept, and so is a plan that compares weights or networks, or
    whose notes have a paper's numbers: with another network it would be another experiment.
    """
    if {"model.weights", "model.backbone", "preset"} & {*plan.settings}:
        return plan
    if not plan.data:
        learnt = _at_hand(plan)
        base = {"base": merge(expand(plan.base), learnt)}
        return plan.model_copy(update=base) if learnt else plan
    entries = [
        entry.model_copy(
            update={"experiment": merge(entry.experiment, _at_hand(plan_on(plan, entry)))}
        )
        for entry in plan.data
    ]
    return plan.model_copy(update={DATA: tuple(entries)})


def _at_hand(plan: "Plan") -> Fields:
    """Returns what a plan on one data set has to say of weights and features; nothing as a rule."""
    try:
        base = expand(plan.base)
        name = base.get("method", {}).get("name", "fedavg")  # its settings may be some methods' own
        chosen = Experiment(**{**base, "method": name})
    except ExperimentError:
        return {}  # an axis may complete it; else its runs say what is wrong
    if "paper" in plan.notes and "weights" not in base.get("model", {}):
        return {}
    experiment = with_weights_at_hand(chosen)
    if experiment is chosen:
        return {}
    features = experiment.data.features
    of_data = {} if features is None else {"data": {"features": features}}
    return {"model": {"weights": None}} | of_data


HeldOut = Mapping[str, Sequence[str]]
"""The domains that test, and those that validate."""
Point = tuple[str, Fields, str]
"""A value of an axis: the axis's name, the experiment fields it sets, its text in tables."""


@dataclass(eq=False)
class Cell:
    """One cell of a plan: a method, held-out domains, conditions and a seed.

    Attributes:
        method: label of its method.
        held_out: the held-out test domains, as a column heading.
        conditions: values of the other axes by axis name, in order.
        seed: the experiment's seed.
        experiment: the experiment to run.
        budgets: budgets with one result each; empty for a single result, after the last round.
        tried: for a trial of a ``tune`` section: the values it tries.
        folder: folder of its run, once assigned; cells of the same experiment share one.
    """

    method: str
    held_out: str
    conditions: Mapping[str, str]
    seed: int
    experiment: Experiment
    budgets: Sequence[int] = ()
    tried: Sequence[Point] = ()
    folder: Path = Path()

    @cached_property
    def id(self) -> str:
        """The experiment's id, computed once."""
        return self.experiment.id

    @cached_property
    def portable_id(self) -> str:
        """The experiment's portable id, computed once."""
        return self.experiment.portable_id

    @property
    def column(self) -> str:
        """The held-out test domains, behind the data set's name in a plan over several."""
        of_data = f"{self.conditions[DATA]}, " if DATA in self.conditions else ""
        return f"{of_data}{self.held_out}"

    @property
    def has_one_round(self) -> bool:
        """Whether its method takes a single round."""
        return method_class(self.experiment.method.name).one_round


def expand_plan(plan: Plan) -> list[Cell]:
    """Returns the plan's cells, seed by seed, so that a table is complete after the first seed.

    Raises:
        ExperimentError: a cell is not a valid experiment, or its method cannot run it.
    """
    _check_axes(plan)
    on_each = [(plan_on(plan, entry), {DATA: entry.name}) for entry in plan.data] or [(plan, {})]
    parts = []
    for own, of_data in on_each:
        _check_fields(own)
        points = itertools.product(*_axes(own).values())
        places = itertools.product(_scenarios(own), points, own.methods)
        parts += [(own, of_data, *place) for place in places]
    known: dict[str, Sequence[int] | None] = {}
    cells = [_cell(*part, seed, known) for seed in plan.seeds for part in parts]
    headings = [
        ", ".join([cell.column, *(v for axis, v in cell.conditions.items() if axis != DATA)])
        for cell in cells
    ]
    taken = Counter((cell.method, head, cell.seed) for cell, head in zip(cells, headings))
    for (_, heading, _), count in taken.items():
        if count > 1:
            raise ExperimentError(
                f"plan: two columns are called {heading!r}: list each once, give data sets "
                "different names, and let numbers differ within six digits"
            )
    return cells


def _check_axes(plan: Plan) -> None:
    """Refuses a field that several parts of a plan say, of which all but one would be lost."""
    parts = {"budgets": {"train.rounds", "evaluate.budgets"}} if plan.budgets else {}
    parts |= {
        part: {path for _, fields, _ in points for path in leaves(fields)}
        for part, points in _axes(plan).items()
    }
    of_data = {f"data {entry.name}": {*leaves(expand(entry.experiment))} for entry in plan.data}
    own = {variant.name: {*variant.said} for variant in plan.methods}
    tried = plan.tune.settings if plan.tune else {}
    own["tune"] = {path for field, values in tried.items() for path in _set_by(field, values)}
    for name, fields in (parts | of_data | own).items():
        for field in NOT_IDENTITY & fields:
            raise ExperimentError(
                f"plan: {field} is set in {name}, but runs that differ only in it are the same "
                "run: leave it out there, or set it in base for all"
            )
        if name in own and "method.name" in fields:
            raise ExperimentError(
                f"plan: {name} names another method; add that one to the plan's methods"
            )
    if plan.budgets:  # all else in base is for what says nothing of it
        own["base"] = {*leaves(expand(plan.base))} & {"evaluate.budgets"}
    kept = {("budgets", "train.rounds")}
    for entry in plan.data:  # methods' own weights are kept where a data set's are not at hand
        if leaves(expand(entry.experiment)).get("model.weights", "") is None:
            kept.add((f"data {entry.name}", "model.weights"))
    groups = [*({part: fields} for part, fields in parts.items()), of_data, own]
    for first, second in itertools.combinations(groups, 2):
        for part, name in itertools.product(first, second):
            for field, other in itertools.product(first[part], second[name]):
                if _meet(field, other) and ((part, field) not in kept or name in parts):
                    raise ExperimentError(
                        f"plan: {field} is set both by {part} and by {name}, and one value would "
                        "be lost: leave it out there"
                    )


def plan_on(plan: Plan, entry: Collection) -> Plan:
    """Returns the plan on one of its data sets alone."""
    base = merge(expand(plan.base), entry.experiment)
    if entry.hold_out:
        base.pop("hold_out", None)
    changes = {
        DATA: (),
        "base": base,
        "hold_out": entry.hold_out or plan.hold_out or _each_in_turn(base),
        "domains": entry.domains or plan.domains,
    }
    return plan.model_copy(update=changes)


def _each_in_turn(base: Fields) -> Protocol | None:
    """What a plan over several data sets holds out if it says nothing: each domain in turn."""
    return None if base.get("hold_out") else "lodo"


def _axes(plan: Plan) -> dict[str, list[Point]]:
    """Returns the values of the axes between hold-outs and methods, by what the plan calls each."""
    clients: list[Point] = [
        (
            "clients",
            {"clients": {"number": number, "per_round": per_round}},
            f"{number}" if per_round is None else f"{per_round} of {number}",
        )
        for number, per_round in plan.clients
    ]
    shares = [setting_point("heterogeneity", value) for value in plan.heterogeneity]
    axes = {"heterogeneity": shares, "clients": clients}
    for field, values in plan.settings.items():
        axes[f"settings {field}"] = [setting_point(field, value) for value in values]
    return {name: points for name, points in axes.items() if points}


def _cell(
    plan: Plan,
    of_data: Mapping[str, str],
    scenario: tuple[HeldOut | None, str],
    points: Sequence[Point],
    variant: Variant,
    seed: int,
    known: dict[str, Sequence[int] | None],
) -> Cell:
    declared = method_class(variant.method).Settings.model_fields
    fields = expand(plan.base)
    shared = fields.get("method", {}).get("settings", {})
    settings = {name: value for name, value in shared.items() if name in declared}
    fields["method"] = {"name": variant.method, "settings": merge(settings, variant.settings)}
    held_out, heading = scenario
    if held_out is not None:
        fields["hold_out"] = held_out
    for _, change, _ in points:
        settings = change.get("method", {}).get("settings", {})
        if all(name in declared for name in settings):
            fields = merge(fields, change)
    fields = merge(fields, expand(variant.experiment))
    fields = merge(fields, variant.tuned.get(", ".join([*of_data.values(), heading]), {}))
    conditions = {**of_data, **{name: text for name, _, text in points}}
    fields = {**fields, "seed": seed, "name": None}
    experiment = Experiment(**fields)
    if plan.budgets and not method_class(variant.method).one_round:
        rounds = _rounds_for(plan.budgets[-1], experiment, known)
        budgets = {"train": {"rounds": rounds}, "evaluate": {"budgets": plan.budgets}}
        experiment = Experiment(**merge(fields, budgets))
    build_method(experiment.method.name, experiment.method.settings).check(experiment)
    return Cell(variant.name, heading, conditions, seed, experiment, plan.budgets)


def _rounds_for(images: int, experiment: Experiment, known: dict[str, Sequence[int] | None]) -> int:
    """Returns the round by which a run has used so many images in training.

    Computed from each client's number of images, if the images are available; otherwise from
    ``train.local_steps`` with full batches.

    Args:
        images: number of images.
        experiment: the run's experiment.
        known: cache of images per client, by the settings they depend on; None if images are not
            available.

    Raises:
        ExperimentError: the round cannot be determined.
    """
    train, clients = experiment.train, experiment.clients
    if experiment.privacy.sampling == "secret":
        raise ExperimentError(
            "budgets: how many images a round sees cannot be known where privacy.sampling draws "
            "its clients in secret; leave budgets out and set train.rounds"
        )
    dealt = experiment.model_dump_json(include={"data", "hold_out", "clients", "seed"})
    if dealt not in known:
        alone = experiment.model_copy(update={"method": MethodChoice()})  # no images gathered
        try:
            share = deal(alone, load_undecoded(experiment, cache_folder())).partition
            known[dealt] = share.sizes.tolist()
        except DataError as error:
            if not train.local_steps or counts_clients(clients.partition):
                raise ExperimentError(
                    "budgets: how many images a round sees is not known without the images "
                    f"({error}); set train.local_steps, with which it is known beforehand"
                ) from None
            known[dealt] = None
    sizes = known[dealt]
    if sizes is None:
        taking_part = min(clients.number, clients.per_round or clients.number)
        return math.ceil(images / (taking_part * (train.local_steps or 1) * train.batch_size))
    method, rounds = build_method(experiment.method.name, experiment.method.settings), 0
    holders = sum(size > 0 for size in sizes)
    passes = [method.images_of_pass(size, holders) for size in sizes]
    seen = [_images_of_a_round(size, train) for size in passes]
    while images > 0:
        rounds += 1
        drawn = drawn_clients(range(len(seen)), clients.per_round, experiment.seed, rounds)
        images -= sum(seen[client] for client in drawn)
    return rounds


def _images_of_a_round(size: int, train: TrainSettings) -> int:
    """Returns how many images a client uses in a round whose passes have ``size`` each."""
    batches, last = batches_of_pass(train, size)
    passes, more = divmod(steps_of_round(train, size), batches)
    return (passes * (batches - 1) + more) * train.batch_size + passes * last


def setting_point(field: str, value: object) -> Point:
    """Returns the axis point for a dotted experiment field, or ``method.SETTING``, and a value."""
    name = field.removeprefix("method.")
    path = field if name == field else f"method.settings.{name}"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return name, expand(nested(path, value)), text


def _check_fields(plan: Plan) -> None:
    """Refuses a method setting that no method of the plan has, and fields that say a column's."""
    base, variants = expand(plan.base), [expand(variant.experiment) for variant in plan.methods]
    named = base.get("method", {}).get("name")
    unused = [("seed", [fields["seed"]]) for fields in (base, *variants) if "seed" in fields]
    unused += [(n, [*plan.settings[n]]) for n in ("seed", "method") if n in plan.settings]
    if any(
        name.split(".")[0] == "hold_out" for fields in (*variants, plan.settings) for name in fields
    ):
        raise ExperimentError(
            "plan: what is held out is a column of the table, the same for all methods: set "
            "hold_out in the plan itself"
        )
    if named and any(variant.method != named for variant in plan.methods):
        unused.append(("method", [named]))
    for name, values in unused:
        asked = ", ".join(map(str, values))
        raise ExperimentError(f"plan: {name} has no effect here; write {name}s: [{asked}]")
    fields = [f for v in plan.methods for f in method_class(v.method).Settings.model_fields]
    axes = [s.removeprefix("method.") for s in plan.settings if s.startswith("method.")]
    for name in [*axes, *base.get("method", {}).get("settings", {})]:
        if name not in fields:
            raise ExperimentError(
                f"none of the plan's methods has a setting {name!r}{nearest(name, fields)}"
            )


def _scenarios(plan: Plan) -> list[tuple[HeldOut | None, str]]:
    """Returns the hold-outs with their column headings, which name the test domains."""
    base = expand(plan.base)
    data = base.get("data", {})
    source = str(data.get("source", "folder"))
    if plan.hold_out and base.get("hold_out"):
        raise ExperimentError(
            "plan: hold_out is set both in the plan and in its base; leave it out of the base"
        )
    if not plan.hold_out:
        hold_out = _complete(base.get("hold_out") or {})
        return [(hold_out if any(hold_out.values()) else None, _heading(hold_out))]
    if isinstance(plan.hold_out, str):
        preset = chosen_preset(base) or preset_of(source)
        root, options = data.get("root"), data.get("options") or {}
        domains = plan.domains or known_domains(source, preset)
        domains = domains or load_source(source, root, **options).domain_names
        left_out = data.get("leave_out") or ()
        domains = tuple(name for name in domains if name not in left_out)
        listed: list[HeldOut] = list(scenarios(plan.hold_out, domains, preset, source))
    elif None in plan.hold_out:
        raise ExperimentError("plan: hold_out has an empty item; name a domain, or remove it")
    else:
        entries = (expand({"hold_out": entry})["hold_out"] for entry in plan.hold_out)
        listed = [_complete(entry) for entry in entries]
    headings = [_heading(entry) for entry in listed]
    if len(set(headings)) < len(headings):
        headings = [_heading(entry, with_val=True) for entry in listed]
    return list(zip(listed, headings))


def _complete(fields: Fields) -> HeldOut:
    """Returns a hold-out with both of its roles."""
    with schema_faults(ExperimentError, "plan: hold_out: ", HoldOut.model_fields):
        return dict(HoldOut(**fields))


def _heading(hold_out: HeldOut, with_val: bool = False) -> str:
    text, val = "+".join(hold_out["test"]) or "as split", "+".join(hold_out["val"])
    return f"{text}{VALIDATED_ON}{val})" if with_val and val else text


def distinct(cells: Iterable[Cell]) -> list[Cell]:
    """Returns the first cell of each experiment, in order."""
    first: dict[str, Cell] = {}
    for cell in cells:
        first.setdefault(cell.id, cell)
    return list(first.values())


def trials_of(plan: Plan) -> list[Cell]:
    """Returns the trials of a plan's ``tune`` section, one combination after the other.

    Raises:
        ExperimentError: a field is unknown, or a trial is not a valid experiment.
    """
    tune = plan.tune
    if tune is None:
        return []
    _check_axes(plan)
    axes = {variant.name: _axes_of(tune, variant) for variant in plan.methods}
    used = {name for of_method in axes.values() for axis in of_method for name, *_ in axis}
    for name in tune.settings:
        if name.removeprefix("method.") not in used:
            raise ExperimentError(
                f"tune: {name} is tried for no method: none has it, or each entry fixes it"
            )
    cells = expand_plan(plan.model_copy(update={"seeds": tune.seeds, "tune": None}))
    known: dict[str, Sequence[int] | None] = {}
    roles: dict[str, set[str]] = {}
    trials = [
        _trial(cell, points, tune, known, roles)
        for cell in cells
        for points in itertools.product(*axes[cell.method])
        if points
    ]
    return [cell for alike in combinations(trials) for cell in alike]


def combinations(trials: Iterable[Cell]) -> list[list[Cell]]:
    """Returns trials grouped by method, held-out domains and tried values."""
    tried = ((cell, tuple((name, text) for name, _, text in cell.tried)) for cell in trials)
    groups = grouped(((cell.method, cell.column, values), cell) for cell, values in tried)
    return list(groups.values())


def with_values(plan: Plan, chosen: Iterable[Cell]) -> Plan:
    """Returns a plan without ``tune`` section, with the chosen values for its methods.

    Args:
        plan: the plan.
        chosen: at most one trial per method and held-out domains, with the chosen values.
    """
    tuned: dict[str, dict[str, Fields]] = {}
    for cell in chosen:
        fields = functools.reduce(merge, (change for _, change, _ in cell.tried))
        tuned.setdefault(cell.method, {})[cell.column] = fields
    methods = [v.model_copy(update={"tuned": tuned.get(v.name, {})}) for v in plan.methods]
    return plan.model_copy(update={"methods": tuple(methods), "tune": None})


def table_cells(plan: Plan) -> list[Cell]:
    """Returns all cells that a plan's table may have, for any outcome of its ``tune`` section.

    Raises:
        ExperimentError: see :func:`trials_of`.
    """
    firsts = (cell for cell, *_ in combinations(trials_of(plan)))
    of = grouped(((cell.method, cell.column), cell) for cell in firsts)
    most = max(map(len, of.values()), default=0)
    choices = [[tried[i % len(tried)] for tried in of.values()] for i in range(most)]
    return [cell for chosen in choices for cell in expand_plan(with_values(plan, chosen))]


def _axes_of(tune: Tune, variant: Variant) -> list[list[Point]]:
    """Returns the values to try for a method: fields it has, and that its entry does not fix."""
    method = method_class(variant.method)
    settings = method.Settings.model_fields
    return [
        [setting_point(name, value) for value in values]
        for name, values in _unsaid(tune.settings, variant.said).items()
        if not name.startswith("method.") or name.removeprefix("method.") in settings
        if name != "train.lr" or not method.one_round
    ]


def _trial(
    cell: Cell,
    points: Sequence[Point],
    tune: Tune,
    known: dict[str, Sequence[int] | None],
    roles: dict[str, set[str]],
) -> Cell:
    """Returns a cell with the tried values and without its held-out domains.

    The values are put where the table's runs would have them: presets follow them.
    """
    hold_out = cell.experiment.hold_out
    if not hold_out.test and not hold_out.val:
        raise ExperimentError(
            "tune: name the domains that are held out (hold_out), so that no trial opens them; a "
            "split file or a data set's own split does not say which domains they are"
        )
    given = cell.experiment.given
    if cell.budgets:  # a trial is not measured where the table's runs are
        given = merge(given, {"evaluate": {"budgets": ()}})
    changes = (change for _, change, _ in points)
    fields, rounds = functools.reduce(merge, changes, given), tune.rounds
    if rounds is None and cell.budgets and not cell.has_one_round:
        rounds = _rounds_for(cell.budgets[-1], Experiment(**fields), known)
    data = cell.experiment.data
    held_out = [*hold_out.test, *hold_out.val]
    late = {"leave_out": [*data.leave_out, *held_out], "left_out_late": held_out}
    own: Fields = {"hold_out": {"test": [], "val": []}, "data": late}
    own |= {} if rounds is None else {"train": {"rounds": rounds}}
    read = repr((data.source, data.root, data.options, data.leave_out))
    if read not in roles:
        roles[read] = roles_of_own_split(data)
    if roles[read] - OF_TRAINING:  # nor does the table's run use it, as hold_out is said
        own = merge(own, {"data": {"own_split": False}})
    elif roles[read] and "id_val" not in roles[read] and data.own_split:
        raise ExperimentError(
            "tune: the data set's own split has no images for in-domain validation; mark some in "
            "training domains as val, or let it be drawn (--set data.own_split=false)"
        )
    experiment = Experiment(**merge(fields, own))
    if not experiment.data.id_val:
        raise ExperimentError("tune: there is no in-domain validation; set data.id_val above 0")
    conditions = {**cell.conditions, **{name: text for name, _, text in points}}
    return replace(
        cell, experiment=experiment, conditions=conditions, budgets=(), tried=tuple(points)
    )


# What ``feddg demo`` compares: sites that train alone and together, on emoji in four styles, each
# unseen once.


def demo_plan(axes: Mapping[str, object], fields: Mapping[str, object]) -> Plan:
    """Returns the demo's plan, with the user's values over it.

    Args:
        axes: fields of the plan.
        fields: fields of the experiment.

    Raises:
        ExperimentError: together they are not a valid plan.
    """
    file = Path(__file__).with_name("demo.yaml")
    plan = merge(read_fields_of(file, "the demo's plan", ExperimentError), axes)
    return Plan(**{**plan, "base": merge(plan["base"], fields)})


def jobs_of_demo(plan: Plan, asked: int | None = None) -> int:
    """Returns the number of processes for the demo; 0 if this process alone is fastest.

    Args:
        plan: the demo's plan.
        asked: number requested by the user; None for one per core.
    """
    jobs = min(asked or available_cores(), MOST_JOBS, len(distinct(expand_plan(plan))))
    return jobs if jobs > 1 else 0
