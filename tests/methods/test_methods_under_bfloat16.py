"""Every setting of a method that is no number above 0, changed, trains in bfloat16.

The defaults do so in test_base.py.
"""

import dataclasses
from functools import partial
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import torch

from feddg.errors import ExperimentError, WeightsError
from feddg.methods.base import Method, methods
from feddg.methods.composition import build_method, method_class
from feddg.settings import TrainSettings
from feddg.styles.codec import CODECS
from federations import SmallFederation

FILES = {"encoder", "decoder"}
"""Settings that name files, and so change no calculation of their own."""


class InBfloat16(SmallFederation):
    """A small federation at the automatic precision of a machine that is fast at bfloat16."""

    def new_worker(self):
        context = partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False)
        return dataclasses.replace(super().new_worker(), autocast=context)


def others(name: str, annotation: Any, default: Any) -> list[Any]:
    """Returns further values of a setting: all of them, or some numbers to choose from."""
    if name == "codec":
        return [codec for codec in CODECS if codec not in (default, "vgg19")]
    if get_origin(annotation) in (Union, UnionType):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        return [value for part in parts for value in others(name, part, default)]
    if get_origin(annotation) is Literal:
        return [value for value in get_args(annotation) if value != default]
    if annotation is bool:
        return [not default]
    if isinstance(default, tuple):
        return [default[:1]] if isinstance(default[0], str) else [tuple(n / 2 for n in default)]
    return [default / 2, 2 * default, 1, 2] if default else [0.5, 1, 2, 4]


def built(method: str, name: str, value: Any) -> Method | None:
    """Returns the method with a setting, and with one other where they need each other."""
    fields = method_class(method).Settings.model_fields
    companions: list[dict[str, Any]] = [{}]
    companions += [
        {other: choice}
        for other, field in fields.items()
        if other not in (name, *FILES)
        for choice in others(other, field.annotation, field.default)
    ]
    for companion in companions:
        try:
            found = build_method(method, companion | {name: value})
            found.read_files()
            return found
        except (ExperimentError, WeightsError):
            continue
    return None


def trained(method: Method) -> None:
    wanted = type(method).presets.get("*", {}).get("train", {})
    train = TrainSettings(**{"rounds": 1, "batch_size": 4} | wanted | {"local_steps": 1})
    small = InBfloat16(method, sizes=(6, 5), train=train)
    small.run(2)
    refused = [reply for reply in small.replies if not hasattr(reply, "terms")]
    assert not refused, (method.settings, refused)
    for name, tensor in small.server.state.weights.items():
        assert torch.isfinite(tensor).all(), (method.settings, name)


@pytest.mark.parametrize("method", methods())
def test_every_setting_of_a_method_trains_in_bfloat16(method: str) -> None:
    fields = method_class(method).Settings.model_fields
    for name, field in fields.items():
        number = isinstance(field.default, float | int) and not isinstance(field.default, bool)
        if name in FILES or (number and field.default):
            continue  # another number but 0 calculates in the same types
        values = others(name, field.annotation, field.default)
        found = [one for value in values if (one := built(method, name, value)) is not None]
        assert found or not values, (name, values)
        every = name == "codec" or all(isinstance(value, str) for value in values)
        for one in found if every else found[:1]:
            trained(one)
