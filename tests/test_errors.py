from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from feddg.errors import field_fault, first_names, nearest


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid")
    rate: float = 1.0
    kind: Literal["sgd", "adam"] = "sgd"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rate": "fast"}, ["rate: ", "number", "(got 'fast')"]),
        ({"kind": "lion"}, ["kind: ", "'sgd' or 'adam'", "(got 'lion')"]),
        ({"rats": 1}, ["unknown field 'rats' (did you mean 'rate'?)", "there are: rate, kind"]),
    ],
)
def test_a_fault_of_a_field_is_one_line(fields: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        Model(**fields)  # type: ignore[arg-type]
    line = field_fault(caught.value, Model.model_fields)
    assert all(word in line for word in words)
    assert "\n" not in line


def test_of_many_names_the_first_are_shown() -> None:
    assert first_names(["a", "b"]) == "a, b"
    assert first_names(["a", "b", "c", "d"], 2) == "a, b and 2 more"


def test_the_nearest_name_may_be_an_abbreviation() -> None:
    assert nearest("learning_rate", ["rounds", "lr"]) == " (did you mean 'lr'?)"
    assert nearest("r", ["rounds", "r"]) == " (did you mean 'r'?)"


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    inner: Model = Model()
    several: tuple[Model, ...] = ()


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"inner": {"rats": 1}},
            "unknown field 'inner.rats' (did you mean 'rate'?); there are: rate, kind",
        ),
        ({"several": [{"rats": 1}]}, "unknown field 'several.0.rats'"),
    ],
)
def test_an_unknown_field_inside_is_among_those_beside_it(
    fields: dict[str, object], line: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        Outer(**fields)  # type: ignore[arg-type]
    assert field_fault(caught.value, Outer.model_fields) == line
