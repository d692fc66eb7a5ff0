"""The flags that set an experiment's fields, each declared once: its name and its field.

Type, help text, allowed values and default come from the field itself. Reading the fields takes
pydantic, which takes longer to import than all the rest of ``feddg --help``; so flags are made when
a command is called or asked for its help, not before.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
from typer.core import TyperCommand, TyperOption

from feddg.cli.field_types import type_of
from feddg.cli.parsing import (
    assigned,
    client_counts,
    comma_separated,
    held_out,
    hold_outs,
    numbers,
    privacy,
    without_none,
)

DATA, CLIENTS, TRAINING, RUN = "Data", "Clients", "Model and training", "Run"
Read = Callable[[str], Any]


@dataclass(frozen=True)
class Several:
    """How a command that compares takes several values of a flag's field.

    Attributes:
        key: the plan's field that they go to.
        read: reads them.
        example: what one may write.
        flag: the flag's name there; the usual one if None.
    """

    key: str
    read: Read
    example: str
    flag: str | None = None


@dataclass(frozen=True)
class Flag:
    """A flag that sets a field of the experiment.

    Attributes:
        name: as it is written, with its dashes.
        path: the field, dotted.
        panel: under which heading the help lists it.
        read: reads its text, where it is not simply the field's value.
        short: one letter with a dash.
        several: see :class:`Several`; None where a comparison takes one value only.
    """

    name: str
    path: str
    panel: str
    read: Read | None = None
    short: str | None = None
    several: Several | None = None


FLAGS = (
    Flag(
        "--method",
        "method.name",
        DATA,
        short="-m",
        several=Several("methods", comma_separated, "fedavg,ccst,pardon", "--methods"),
    ),
    Flag("--data", "data.source", DATA),
    Flag("--root", "data.root", DATA),
    Flag(
        "--hold-out",
        "hold_out",
        DATA,
        read=held_out,
        several=Several(
            "hold_out", hold_outs, "lodo, ltdo, ltdo-all, or sketch;val=ink,test=photo"
        ),
    ),
    Flag("--split-file", "data.split_file", DATA),
    Flag("--image-size", "data.image_size", DATA),
    Flag(
        "--clients",
        "clients.number",
        CLIENTS,
        several=Several("clients", client_counts, "5:5,50:5 (N:K, K per round)"),
    ),
    Flag("--clients-per-round", "clients.per_round", CLIENTS),
    Flag(
        "--heterogeneity",
        "clients.heterogeneity",
        CLIENTS,
        several=Several("heterogeneity", numbers("--heterogeneity"), "0,0.1,1"),
    ),
    Flag("--alpha", "clients.alpha", CLIENTS),
    Flag("--partition", "clients.partition", CLIENTS),
    Flag("--shards", "clients.shards", CLIENTS),
    Flag("--quantity-alpha", "clients.quantity_alpha", CLIENTS),
    Flag("--rounds", "train.rounds", TRAINING),
    Flag("--local-epochs", "train.local_epochs", TRAINING),
    Flag("--local-steps", "train.local_steps", TRAINING),
    Flag("--batch-size", "train.batch_size", TRAINING),
    Flag("--optimizer", "train.optimizer", TRAINING),
    Flag("--lr", "train.lr", TRAINING),
    Flag("--schedule", "train.schedule", TRAINING),
    Flag("--augmentation", "train.augmentation", TRAINING),
    Flag("--backbone", "model.backbone", TRAINING),
    Flag("--weights", "model.weights", TRAINING),
    Flag("--embedding", "model.embedding", TRAINING),
    Flag("--normalization", "model.normalization", TRAINING),
    Flag("--serve", "server.serve", RUN),
    Flag("--privacy", "privacy", RUN, read=privacy),
    Flag("--eval-every", "evaluate.every", RUN),
    Flag("--seed", "seed", RUN),
    Flag("--precision", "precision", RUN),
    Flag("--device", "device", RUN),
    Flag("--name", "name", RUN),
    Flag("--preset", "preset", RUN),
)
PRESET_PARTS = ("data", "clients", "model", "train", "server")
"""Parts of an experiment that presets fill in."""
NOT_PRESET = ("data.source", "data.root", "data.split_file")


def takes(*paths: str, several: bool = False, **defaults: str) -> Callable[[Any], Any]:
    """Gives a command the flags of some fields, and ``--set`` for all others.

    The command's parameter ``said`` receives the experiment's fields that were set, nested; with
    ``several``, its parameter ``axes`` receives the plan's fields.

    Args:
        paths: fields or parts of the experiment, dotted; all flags if there are none.
        several: whether flags take several values where they can.
        **defaults: what is said for a field at the top when nothing is, as on the command line.
    """
    chosen = [flag for flag in FLAGS if not paths or _within(flag.path, paths)]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def called(**given: Any) -> None:
            texts = {flag: given.pop(_key(flag), None) for flag in chosen}
            said = _fields(texts, several)
            settings = assigned(given.pop(SET_KEY, None) or ())
            from feddg.settings import merge

            axes = {"axes": _axes(texts)} if several else {}
            command(said=merge(said, settings), **axes, **given)

        known = inspect.signature(command)
        own = [p for name, p in known.parameters.items() if name not in ("said", "axes")]
        called.__signature__ = known.replace(parameters=own)  # type: ignore[attr-defined]
        called.__annotations__ = {
            name: kind
            for name, kind in command.__annotations__.items()
            if name not in ("said", "axes")
        }
        called.flags = lambda: [_option(flag, several, defaults) for flag in chosen]  # type: ignore[attr-defined]
        return called

    return decorate


class ExperimentCommand(TyperCommand):
    """A command that :func:`takes` gave flags: they stand after its arguments."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Returns the command's own parameters and the generated ones."""
        own = super().get_params(ctx)
        arguments = [parameter for parameter in own if isinstance(parameter, click.Argument)]
        options = [parameter for parameter in own if not isinstance(parameter, click.Argument)]
        return [*arguments, *self._generated, *options]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the command line; where a field has no flag of its own, says how to set it."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            fields = _fields_called(error.option_name.lstrip("-").replace("-", "_"))
            if not fields:
                raise
            ways = " or ".join(f"--set {field}=VALUE" for field in fields)
            message = f"No such option '{error.option_name}'. The field is set by {ways}."
            raise click.UsageError(message, ctx) from None

    @functools.cached_property
    def _generated(self) -> list[click.Parameter]:
        return [*self.callback.flags(), _set_option()]  # type: ignore[union-attr]


SET_KEY = "settings"


def _set_option() -> TyperOption:
    return TyperOption(
        param_decls=[SET_KEY, "--set"],
        multiple=True,
        help="any field: --set method.gamma1=0.5 --set train.momentum=0.9",
        metavar="FIELD=VALUE",
    )


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
    """The experiment's fields of a name, dotted: fields of its parts, or settings of a method."""
    from feddg.methods.base import METHODS
    from feddg.settings import ExperimentSettings, Settings

    parts = {
        part: type(field.default)
        for part, field in ExperimentSettings.model_fields.items()
        if isinstance(field.default, Settings)
    }
    found = [f"{part}.{name}" for part, known in parts.items() if name in known.model_fields]
    if any(name in method.Settings.model_fields for method in METHODS.values()):
        found.append(f"method.{name}")
    return found


def _option(flag: Flag, several: bool, defaults: dict[str, str]) -> TyperOption:
    field = field_of(flag.path)
    many = flag.several if several else None
    text = str(field.description)
    if many:
        text = f"{text}; one or several: {many.example}"
    name = many.flag if many and many.flag else flag.name
    names = [_key(flag), name, *([flag.short] if flag.short else [])]
    as_text = many or flag.read
    return TyperOption(
        param_decls=names,
        type=click.STRING if as_text else type_of(field),
        default=defaults.get(flag.path),
        help=text,
        show_default=True if flag.path in defaults else _default_text(flag.path, field),
        rich_help_panel=flag.panel,
    )


def _default_text(path: str, field: Any) -> str | bool:
    own = field.get_default(call_default_factory=True, validated_data={})
    text = "" if own is None or not isinstance(own, str | int | float) else str(own)
    if path.partition(".")[0] in PRESET_PARTS and path not in NOT_PRESET:
        return f"the preset's, else {text}" if text else "the preset's"
    return text or False


def _within(path: str, parts: tuple[str, ...]) -> bool:
    return any(path == part or path.startswith(f"{part}.") for part in parts)


def _key(flag: Flag) -> str:
    return f"field_{flag.path.replace('.', '_')}"


def _fields(texts: dict[Flag, Any], several: bool) -> dict[str, Any]:
    """The experiment's fields that flags say."""
    from feddg.settings import merge, nested

    said: dict[str, Any] = {}
    for flag, value in texts.items():
        if value is None or (several and flag.several):
            continue
        said = merge(said, nested(flag.path, flag.read(value) if flag.read else value))
    return said


def _axes(texts: dict[Flag, Any]) -> dict[str, Any]:
    """The plan's fields that flags say."""
    return without_none(
        {
            flag.several.key: flag.several.read(value)
            for flag, value in texts.items()
            if flag.several and value is not None
        }
    )
