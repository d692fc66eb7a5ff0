"""Plans: many experiments that answer one question, written down once.

A plan is a base experiment and axes: methods, hold-outs, heterogeneity, clients, hyper-parameters,
seeds. It expands to cells, one per combination; cells that are the same experiment share a run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from feddg.comparing.fixing import fix_fields
from feddg.errors import ExperimentError, RunError, nearest
from feddg.experiment import expand
from feddg.records import ID_VAL
from feddg.runs.reading import FINAL, SELECTION_RULES
from feddg.settings import OneLine, Settings, merge
from feddg.storage import read_fields_of


class Variant(Settings):
    """A method as a plan lists it.

    Attributes:
        method: registry name.
        label: what tables call it; the method's own spelling by default.
        settings: its hyper-parameters.
        experiment: experiment fields for this method alone (for example an optimizer).
        tuned: experiment fields by what a column holds out, as a ``tune`` section picked them.
    """

    method: str
    label: OneLine | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    experiment: dict[str, Any] = Field(default_factory=dict)
    tuned: dict[str, dict[str, Any]] = Field(default_factory=dict)

    @property
    def name(self) -> str:
        """The label, or the method's name."""
        return self.label or self.method


def _rule_name(value: str) -> str:
    try:
        return SELECTION_RULES.find(value).name
    except RunError as error:
        raise ValueError(str(error)) from None


class Published(Settings):
    """Numbers of a paper, to stand beside ours.

    Attributes:
        source: which paper and table.
        rule: the selection rule behind the numbers, one of ``feddg.runs.reading``.
        values: accuracy in percent by split (``test``, ``val``), method label and column.
        average: the averages as printed, by split and method label.
        notes: what to know about these numbers.
    """

    source: str
    rule: str = FINAL.name
    values: dict[str, dict[str, dict[str, float | None]]] = Field(default_factory=dict)
    average: dict[str, dict[str, float]] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @field_validator("rule")
    @classmethod
    def _known_rule(cls, value: str) -> str:
        return _rule_name(value)


class Tune(Settings):
    """What is tried for each method before the table is run, on in-domain validation alone.

    Attributes:
        settings: dotted experiment fields and the values to try; every combination is tried. A
            ``method.FIELD`` is tried for the methods that have it; a field that a method's own
            entry fixes is not tried for it.
        rounds: rounds of a trial; as many as the table's runs by default.
        seeds: a number of seeds or the seeds of the trials, which need not be the table's.
        rule: which round of a trial counts.
    """

    settings: dict[str, tuple[Any, ...]]
    rounds: int | None = Field(None, ge=1)
    seeds: tuple[int, ...] = (0,)
    rule: str = FINAL.name

    @field_validator("seeds", mode="before")
    @classmethod
    def _counted(cls, value: Any) -> Any:
        return list(range(value)) if isinstance(value, int) else value

    @field_validator("rule")
    @classmethod
    def _known_rule(cls, value: str) -> str:
        return _rule_name(value)

    @model_validator(mode="after")
    def _something_to_try(self) -> "Tune":
        if not self.settings or not all(self.settings.values()) or not self.seeds:
            raise ValueError("needs settings with a value each, and a seed")
        if SELECTION_RULES.find(self.rule).split not in (None, ID_VAL):
            raise ValueError(
                f"rule {self.rule!r} looks at held-out images, which trials never open"
            )
        return self


class Plan(Settings):
    """Experiments to compare.

    Attributes:
        name: short, also the default folder's name.
        title: what the report's heading says.
        question: what the comparison is to answer, one or two sentences.
        base: experiment fields that all cells share.
        methods: names, or names with label, settings and experiment fields.
        hold_out: ``lodo``, ``ltdo``, ``ltdo-all``, or a list of hold-outs as in an experiment;
            none for what ``base`` says.
        domains: the data set's domains, where a protocol must be read without its images.
        heterogeneity: values of lambda; none for what ``base`` says.
        clients: pairs (N, K), or N alone; none for what ``base`` says.
        settings: further axes: a dotted experiment field and its values. ``method.FIELD`` applies
            to the methods that have the field; the others run once and stand in every column.
        seeds: a number of seeds (0, 1, ...) or the seeds.
        tune: what is tried for each method first.
        differences: how the setting differs from the paper's, for the report.
        paper: the paper's numbers.
    """

    name: str = "comparison"
    title: str | None = None
    question: str = ""
    base: dict[str, Any] = Field(default_factory=dict)
    methods: tuple[Variant, ...] = (Variant(method="fedavg"), Variant(method="pardon"))
    hold_out: Literal["lodo", "ltdo", "ltdo-all"] | tuple[Any, ...] | None = None
    domains: tuple[str, ...] = ()
    heterogeneity: tuple[float, ...] = ()
    clients: tuple[tuple[int, int | None], ...] = ()
    settings: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    tune: Tune | None = None
    differences: tuple[str, ...] = ()
    paper: Published | None = None

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ExperimentError(_explain(error)) from None

    @field_validator("methods", mode="before")
    @classmethod
    def _variants(cls, value: Any) -> Any:
        entries = [value] if isinstance(value, str | dict) else value
        return (
            [_variant(entry) for entry in entries] if isinstance(entries, list | tuple) else value
        )

    @field_validator("hold_out", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return [value] if isinstance(value, dict) else value

    @field_validator("heterogeneity", mode="before")
    @classmethod
    def _values(cls, value: Any) -> Any:
        return [value] if isinstance(value, int | float) else value or ()

    @field_validator("clients", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        return [_client_pair(entry) for entry in ([value] if isinstance(value, int) else value)]

    @field_validator("seeds", mode="before")
    @classmethod
    def _counted(cls, value: Any) -> Any:
        return list(range(value)) if isinstance(value, int) else value

    @field_validator("methods", "seeds")
    @classmethod
    def _some_and_distinct(cls, value: tuple[Any, ...]) -> tuple[Any, ...]:
        names = [entry.name if isinstance(entry, Variant) else entry for entry in value]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"must be one or more, each once, got {names}; label what is alike")
        return value

    def fixed(self, overrides: Mapping[str, Any]) -> "Plan":
        """Returns the plan in which experiment fields win over everything it says."""
        return Plan(**fix_fields(self.model_dump(), overrides))

    def to_yaml(self) -> str:
        """Returns the plan as YAML."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def load_plan(source: "Plan | Path | str | Mapping[str, Any]") -> Plan:
    """Returns a plan from a YAML file or from its fields.

    A file's ``extends`` names another plan file, from its own folder on. What the file says counts
    over it: fields of ``base`` one by one, anything else whole; ``differences`` are added.

    Raises:
        ExperimentError: the file is missing, is not YAML, or describes no plan.
    """
    if isinstance(source, Plan):
        return source
    if isinstance(source, Mapping):
        return Plan(**source)
    path = Path(source)
    return Plan(**({"name": path.stem} | _read_plan(path)))


def _read_plan(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The fields of a plan file, over those of the plan that it extends."""
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
    if all(isinstance(part.get("base", {}), Mapping) for part in (base, fields)):
        fields["base"] = merge(expand(base.get("base", {})), expand(fields.get("base", {})))
    if all(isinstance(part.get("differences", []), list) for part in (base, fields)):
        fields["differences"] = [*base.get("differences", []), *fields.get("differences", [])]
    return base | fields


def _variant(entry: Any) -> Any:
    if isinstance(entry, Variant) or not isinstance(entry, str | Mapping):
        return entry
    if isinstance(entry, str):
        return {"method": entry}
    own = set(Variant.model_fields)
    fields = {"method" if key == "name" else key: value for key, value in entry.items()}
    beside = {key: value for key, value in fields.items() if key not in own}
    kept = {key: value for key, value in fields.items() if key in own}
    return merge(kept, {"settings": beside}) if beside else kept


def _client_pair(entry: Any) -> Any:
    if isinstance(entry, Mapping):
        return (entry.get("number"), entry.get("per_round"))
    return (entry, None) if isinstance(entry, int) else entry


def _explain(error: ValidationError) -> str:
    fault = error.errors()[0]
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        fields = list(Plan.model_fields)
        near = nearest(where, fields)
        return f"a plan has no field {where!r}{near}; there are: {', '.join(fields)}"
    return f"plan, {where}: {fault['msg'].removeprefix('Value error, ')} (got {fault['input']!r})"
