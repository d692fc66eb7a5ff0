"""Shared by commands: flags made from an experiment's settings, and the parsing of values."""

import ast
import functools
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import click
import typer
from typer.core import TyperCommand, TyperOption

from feddg.errors import ExperimentError
from feddg.readers import find

if TYPE_CHECKING:
    from feddg.diagnostics import Diagnostic

T = TypeVar("T")
PANELS = {
    "Data": "method data root hold_out split_file group_by subgroups image_size",
    "Clients": "clients clients_per_round heterogeneity alpha partition shards quantity_alpha",
    "Model and training": "rounds local_epochs local_steps batch_size optimizer lr schedule "
    "augmentation backbone weights embedding normalization",
    "Decision": "decision specificity sensitivity prevalence",
    "Run": "averaging privacy eval_every seed precision device name preset",
}
PRESET_PARTS = ("data", "clients", "model", "train", "server")
"""Parts of an experiment that presets fill in."""
NOT_PRESET = ("data.source", "data.root", "data.split_file")
SET_KEY = "settings"


def held_out(text: str) -> dict[str, list[str]]:
    """Reads ``sketch``, ``art,sketch`` or ``val=art_painting,test=photo``.

    Raises:
        ExperimentError: a role is neither val nor test.
    """
    domains: dict[str, list[str]] = {"test": [], "val": []}
    role = "test"
    for part in filter(None, text.split(",")):
        before, equals, after = part.strip().partition("=")
        if equals and before not in domains:
            raise ExperimentError(f"--hold-out {text}: {before!r} is neither val nor test")
        role = before if equals else role
        domains[role].append(after if equals else before)
    return domains


def hold_outs(text: str) -> Any:
    """Reads a protocol's name, or hold-outs separated by semicolons.

    Raises:
        ExperimentError: see :func:`held_out`.
    """
    if text in ("lodo", "ltdo", "ltdo-all"):
        return text
    return [held_out(part) for part in text.split(";")]


def client_counts(text: str) -> list[tuple[int, int | None]]:
    """Reads ``50`` or ``50:5`` (5 of 50 per round), separated by commas.

    Raises:
        ExperimentError: it is written in another way.
    """

    def pair(part: str) -> tuple[int, int | None]:
        number, _, per_round = part.partition(":")
        return int(number), int(per_round) if per_round else None

    return _values(text, pair, f"--clients {text}: write N clients, or N:K for K of them per round")


def _values(text: str, read: Callable[[str], T], wrong: str) -> list[T]:
    try:
        return [read(part) for part in text.split(",")]
    except ValueError:
        raise ExperimentError(wrong) from None


def data_sets(text: str) -> str | list[str]:
    """Parses the name of a data set, or of several."""
    names = comma_separated(text)
    return names if len(names) > 1 else text


def comma_separated(text: str) -> list[str]:
    """Reads words separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def whole_numbers(flag: str, text: str) -> list[int]:
    """Reads whole numbers separated by commas.

    Raises:
        ExperimentError: one is not a whole number; names the flag.
    """
    return _values(text, int, f"{flag} {text}: write whole numbers separated by commas, as 7,8,9")


def seeds(text: str) -> int | list[int]:
    """Reads how many seeds (``3``), or which (``7,8,9``; ``7,`` is seed 7 alone).

    Raises:
        ExperimentError: it is written in another way.
    """
    numbers, comma, rest = text.rpartition(",")
    one_alone = bool(comma) and not rest.strip() and "," not in numbers
    values = whole_numbers("--seeds", numbers if one_alone else text)
    return values if len(values) > 1 or one_alone else values[0]


def assigned(pairs: Iterable[str], flag: str = "--set") -> dict[str, Any]:
    """Reads ``a.b=value`` pairs into nested fields, shorthands expanded; values are YAML.

    Raises:
        ExperimentError: a pair has another format.
    """
    from feddg.experiment import expand
    from feddg.settings import merge, nested

    fields: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ExperimentError(f"{flag} {pair}: write FIELD=VALUE, for example train.lr=0.001")
        fields = merge(fields, expand(nested(key, _value(f"{flag} {pair}", value))))
    return fields


def _value(pair: str, text: str) -> Any:
    import yaml

    with suppress(ValueError):
        if "e" in text.lower():
            return float(text)  # YAML reads 1e-4 as a word
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ExperimentError(f"{pair}: the value cannot be read as YAML") from None


def launcher_options(options: Iterable[str]) -> dict[str, str]:
    """Reads ``NAME=VALUE`` pairs.

    Raises:
        ExperimentError: the name or the value is missing.
    """
    pairs = [option.partition("=") for option in options]
    for name, equals, value in pairs:
        if not name or not value:
            raise ExperimentError(
                f"--launcher-option {name}{equals}{value}: write it as NAME=VALUE"
            )
    return {name: value for name, _, value in pairs}


def privacy(text: str) -> dict[str, Any]:
    """Reads ``epsilon=8,delta=1e-5``: fields of ``privacy``.

    Raises:
        ExperimentError: it is written in another way.
    """
    return assigned(comma_separated(text), "--privacy")


def type_of(field: Any) -> click.ParamType:
    """Returns the click type for a field's type and bounds."""
    from pydantic import TypeAdapter

    schema = TypeAdapter(Annotated[field.annotation, field]).json_schema()
    schema = schema.get("anyOf", [schema])[0]  # the other one is null
    if "enum" in schema:
        return click.Choice(schema["enum"])
    if schema["type"] not in ("integer", "number"):
        return click.Path(path_type=Path) if schema.get("format") == "path" else click.STRING
    whole = schema["type"] == "integer"
    limits: dict[str, Any] = {}
    for side in ("min", "max"):
        for bound, is_open in ((f"{side}imum", False), (f"exclusive{side.capitalize()}imum", True)):
            if bound in schema:
                limits |= {side: schema[bound], f"{side}_open": is_open}
    if not limits:
        return click.INT if whole else click.FLOAT
    return click.IntRange(**limits) if whole else click.FloatRange(**limits)


TrackOption = Annotated[
    str | None,
    typer.Option(
        "--track",
        help="also log runs to tensorboard, wandb (each needs the extra of its name)",
        envvar="FEDDG_TRACK",
    ),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="show no progress")]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="show progress as lines instead of bars")
]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON")]
ModelArgument = Annotated[
    Path,
    typer.Argument(
        help="a run folder, what `feddg export` wrote (ONNX, a folder), or hf:owner/name@revision"
    ),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="show what would be run, and run nothing")
]


def track(names: str | None) -> None:
    """Turns on tracking of runs; the environment also passes it to runs in other processes."""
    if names is not None:
        os.environ["FEDDG_TRACK"] = names


def print_json(content: Any) -> None:
    """Prints content as JSON, which has no NaN: null in its place."""
    plain = json.loads(json.dumps(content), parse_constant=lambda word: None)
    typer.echo(json.dumps(plain, indent=1, ensure_ascii=False))


@contextmanager
def resumable() -> Iterator[None]:
    """Prints how to continue when Ctrl-C ends a command."""
    try:
        yield
    except KeyboardInterrupt as error:
        how = str(error) or "the same command goes on from here"
        typer.echo(f"interrupted; {how}", err=True)
        raise typer.Exit(130) from None


def show(name: str, done: Any) -> None:
    """Prints what has ended by a function of another package, or else its folder alone."""
    printed = find(name)
    if printed is None:
        typer.echo(f"folder: {done.folder}")
    else:
        printed(done)


def show_warnings(found: "Sequence[Diagnostic]") -> None:
    """Prints the warnings about a model conspicuously."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    if found:
        text = Text("\n".join(map(str, found)))
        panel = Panel(text, title="DO NOT RELY ON THIS MODEL", border_style="bold red")
        Console(stderr=True).print(panel)


# Options that a function or a dataclass has already: name, type and default are its parameter's,
# the help is what its docstring says of it. All that is read from the source, for importing it
# takes seconds.


HELP = {
    "which": "which model: final, swa, ema, best_in_domain, best_held_out, wise_ft; by default the "
    "one that the run reports",
    "adapt": "a test-time adaptation; `feddg adaptations` lists them",
    "device": "auto, cpu, cuda, cuda:1, ...",
    "predictions": "keep the prediction for every image, in a private Parquet file",
    "workers": "number of processes that share the clients; with --device all, one for each GPU",
}
"""Help of options that several commands have."""
Bounds = tuple[Any, Any]


def options_of(
    target: str, names: str, into: str = "options", **bounds: Bounds
) -> Callable[[Any], Any]:
    """Gives a command options for parameters of a function, or fields of a dataclass.

    Args:
        target: the function or class: ``feddg.package.module:name``.
        names: the parameters; ``sizes=size`` calls the option of ``sizes`` ``--size``.
        into: the command's parameter that receives those that were given, by name.
        bounds: smallest and largest value, by parameter.
    """
    listed = {name: flag or name for name, _, flag in (n.partition("=") for n in names.split())}

    def flags() -> list[click.Parameter]:
        declared = _declared(target)
        return [
            _parameter_option(name, flag, *declared[name], bounds.get(name, (None, None)))
            for name, flag in listed.items()
        ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def called(**given: Any) -> None:
            options = {name: given.pop(f"option_{name}") for name in listed}
            options = {name: value for name, value in options.items() if value not in (None, ())}
            command(**given, **{into: options})

        return _with_flags(called, command, flags, into)

    return decorate


def _with_flags(
    called: Any, command: Any, flags: Callable[[], list[click.Parameter]], *instead_of: str
) -> Callable[..., None]:
    """Returns a wrapped command with more flags in place of some of its own parameters."""
    signature = inspect.signature(command)
    parameters = {k: p for k, p in signature.parameters.items() if k not in instead_of}
    called.__signature__ = signature.replace(parameters=[*parameters.values()])
    called.__annotations__ = {name: command.__annotations__[name] for name in parameters}
    before = getattr(command, "flags", list)
    called.flags = lambda: [*flags(), *before()]
    return called  # type: ignore[no-any-return]


def _declared(target: str) -> dict[str, tuple[str, Any, str]]:
    """The type, default and meaning of each parameter or field, as the source has them."""
    module, _, name = target.partition(":")
    file = Path(__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    body = ast.parse(file.read_text(encoding="utf-8")).body
    node: Any = next(node for node in body if getattr(node, "name", "") == name)
    if isinstance(node, ast.ClassDef):
        fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
        entries = [(ast.unparse(field.target), field.annotation, field.value) for field in fields]
    else:
        listed = [*node.args.args, *node.args.kwonlyargs]
        defaults = [*node.args.defaults, *node.args.kw_defaults]
        defaults = [None] * (len(listed) - len(defaults)) + defaults
        entries = [(arg.arg, arg.annotation, value) for arg, value in zip(listed, defaults)]
    doc = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", ast.get_docstring(node) or "", re.M)
    meaning = {name: re.sub(r":\w+:`([^`]+)`|``", r"\1", text) for name, text in doc}
    declared = {}
    for name, kind, value in entries:
        text = " ".join(meaning.get(name, "").split()).rstrip(".").removeprefix("whether to ")
        if isinstance(value, ast.Call):  # pydantic's Field
            described = [key.value for key in value.keywords if key.arg == "description"]
            text = ast.literal_eval(described[0]) if described else text
            value = value.args[0] if value.args else None
        default = None
        with suppress(ValueError, TypeError):  # no plain value, or none
            default = ast.literal_eval(value or "None")
        declared[name] = ast.unparse(kind), default, text
    return declared


def _parameter_option(
    name: str, flag: str, kind: str, default: Any, text: str, bounds: Bounds
) -> TyperOption:
    any_bound = bounds != (None, None)
    types = {
        "bool": click.BOOL,
        "Path": click.Path(path_type=Path),
        "int": click.IntRange(*bounds) if any_bound else click.INT,
        "float": click.FloatRange(*bounds) if any_bound else click.FLOAT,
        "str": click.STRING,
    }
    return TyperOption(
        param_decls=[f"option_{name}", f"--{flag.replace('_', '-')}"],
        type=next(click_type for word, click_type in types.items() if word in kind),
        is_flag=kind == "bool",
        multiple="Sequence" in kind or kind.startswith("tuple"),
        default=default,
        help=HELP.get(name, text),
        show_default=default not in (False, None, "", ()),
    )


class OptionsCommand(TyperCommand):
    """A command with generated flags, which follow its own arguments."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Returns the command's own parameters and the generated ones."""
        params = super().get_params(ctx)
        arguments = [parameter for parameter in params if isinstance(parameter, click.Argument)]
        options = [parameter for parameter in params if not isinstance(parameter, click.Argument)]
        return [*arguments, *self._generated, *options]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the options under their headings."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            heading = "Arguments" if isinstance(parameter, click.Argument) else "Options"
            heading = getattr(parameter, "rich_help_panel", None) or heading
            panels.setdefault(heading, []).extend(filter(None, [parameter.get_help_record(ctx)]))
        for heading, rows in panels.items():
            with formatter.section(heading):
                formatter.write_dl(rows)

    @functools.cached_property
    def _generated(self) -> list[click.Parameter]:
        return self.callback.flags()  # type: ignore[union-attr, no-any-return]


# The flags that set an experiment's fields, each declared once; its name says which field.
#
# Type, help text, allowed values and default come from the field itself. Reading the fields takes
# pydantic, which takes longer to import than all the rest of ``feddg --help``; so flags are made
# when a command is called or asked for its help, not before.


Read = Callable[[str], Any]


@dataclass(frozen=True)
class Several:
    """How a comparing command takes several values for a flag's field.

    Attributes:
        key: the plan's field that receives them.
        read: parses them.
        example: example input.
        flag: the flag's name in such a command; the usual one if None.
    """

    key: str
    read: Read
    example: str
    flag: str | None = None


READERS: dict[str, Read] = {
    "hold_out": held_out,
    "privacy": privacy,
    "subgroups": comma_separated,
}
"""How a flag's text is read, unless it is the field's value itself."""
SEVERAL = {
    "data": Several("data", data_sets, "emoji,digits"),
    "method": Several("methods", comma_separated, "fedavg,ccst,pardon", "--methods"),
    "hold_out": Several(
        "hold_out", hold_outs, "lodo, ltdo, ltdo-all, or sketch;val=ink,test=photo"
    ),
    "clients": Several("clients", client_counts, "5:5,50:5 (N:K, K per round)"),
    "heterogeneity": Several("heterogeneity", comma_separated, "0,0.1,1"),
}
"""How comparing commands read flags that take several values there."""
FLAGS = {field: panel for panel, fields in PANELS.items() for field in fields.split()}
"""The heading that lists each flag, by its field's short name, as in Python."""


def path_of(field: str) -> str:
    """Returns the dotted path of a flag's field."""
    from feddg.settings import SHORTHANDS

    return SHORTHANDS.get(field, field)


def takes(paths: str = "", *, several: bool = False) -> Callable[[Any], Any]:
    """Gives a command the flags of some fields, and ``--set`` for all others.

    The command's parameter ``overrides`` receives the experiment's fields that were set; with
    ``several``, its parameter ``axes`` receives the plan's fields.

    Args:
        paths: fields or parts of the experiment, dotted, in a line; all flags if there are none.
        several: whether flags take several values where they can.
    """

    @functools.cache
    def flags() -> list[str]:
        parts = tuple(f"{part}." for part in paths.split())
        return [f for f in FLAGS if not parts or f"{path_of(f)}.".startswith(parts)]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def called(**given: Any) -> None:
            from feddg.settings import merge, nested

            texts = {field: given.pop(f"field_{field}", None) for field in flags()}
            texts = {field: text for field, text in texts.items() if text is not None}
            if several:
                axes = [(SEVERAL[name], texts.pop(name)) for name in [*texts] if name in SEVERAL]
                given["axes"] = {axis.key: axis.read(text) for axis, text in axes}
            settings = assigned(given.pop(SET_KEY, None) or ())
            for field, text in texts.items():
                value = READERS[field](text) if field in READERS else text
                settings = merge(nested(path_of(field), value), settings)
            command(overrides=settings, **given)

        def options() -> list[click.Parameter]:
            any_field = TyperOption(
                param_decls=[SET_KEY, "--set"],
                multiple=True,
                help="set any field: --set method.gamma1=0.5 --set train.momentum=0.9",
                metavar="FIELD=VALUE",
            )
            return [*(_option(field, several) for field in flags()), any_field]

        return _with_flags(called, command, options, "overrides", "axes")

    return decorate


class ExperimentCommand(OptionsCommand):
    """A command with flags from :func:`takes`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the command line; if a field has no flag of its own, says how to set it."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            fields = _fields_called(error.option_name.lstrip("-").replace("-", "_"))
            if not fields:
                raise
            ways = " or ".join(f"--set {field}=VALUE" for field in fields)
            message = f"No such option '{error.option_name}'. The field is set by {ways}."
            raise click.UsageError(message, ctx) from None


def field_of(path: str) -> Any:
    """Returns the declaration of an experiment's field: a pydantic ``FieldInfo``.

    Raises:
        KeyError: there is no such field.
    """
    from feddg.settings import ExperimentSettings

    model: Any = ExperimentSettings
    *parts, last = path.split(".")
    for part in parts:
        model = model.model_fields[part].annotation
    return model.model_fields[last]


def _fields_called(name: str) -> list[str]:
    """The experiment's fields with a name, dotted: fields of its parts, or a method's settings."""
    from feddg.methods.base import METHODS
    from feddg.settings import ExperimentSettings, leaves

    fields = leaves(ExperimentSettings().model_dump())
    paths = [path for path in fields if path.rpartition(".")[2] == name]
    if any(name in method.Settings.model_fields for method in METHODS.values()):
        paths.append(f"method.{name}")
    return paths


def _option(name: str, several: bool) -> TyperOption:
    field = field_of(path_of(name))
    many = SEVERAL.get(name) if several else None
    flag = many.flag if many and many.flag else f"--{name.replace('_', '-')}"
    return TyperOption(
        param_decls=[f"field_{name}", flag, *(["-m"] if name == "method" else [])],
        type=click.STRING if many or name in READERS else type_of(field),
        help=f"{field.description}; one or several: {many.example}" if many else field.description,
        show_default=_default_text(path_of(name), field),
        rich_help_panel=FLAGS[name],
    )


def _default_text(path: str, field: Any) -> str | bool:
    default = field.get_default(call_default_factory=True, validated_data={})
    text = "" if default is None or not isinstance(default, str | int | float) else str(default)
    if path.partition(".")[0] in PRESET_PARTS and path not in NOT_PRESET:
        of_folders = _folder_preset().get(path) or text
        return f"the preset's; for folders {of_folders}" if of_folders else "the preset's"
    return text or False


@functools.cache
def _folder_preset() -> dict[str, Any]:
    """The values for a data set without its own preset, by dotted path.

    Read from the file, because the module that loads it imports PyTorch, too slow for help texts.
    """
    import yaml

    from feddg.settings import leaves

    file = Path(__file__).parent / "data" / "sets" / "definitions.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return leaves(yaml.load(file.read_text(encoding="utf-8"), loader)["folder"]["preset"])
