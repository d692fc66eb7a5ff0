"""What a site may reply: the declared form of every kind of reply, checked before it is used."""

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from feddg.errors import DataError
from feddg.flower.parcels import Parcel
from feddg.messages import Message, Scalar, Update, names_fault, plain_text

MOST_CLASSES, MOST_DOMAINS, MOST_IMAGES = 2_000, 2_000, 100_000_000
"""Limits of what sites hold: a table of true against predicted classes has the classes' square."""
MOST_TERMS = 64

MOST_FILES = 16

SettingName = Annotated[str, Field(max_length=100, pattern=r"^[a-z0-9_.]+$")]
ContentHash = Annotated[str, Field(max_length=40, pattern=r"^[A-Za-z0-9_-]+$")]
Count = Annotated[int, Field(ge=0, le=MOST_IMAGES)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class _Declared(BaseModel):
    """A form that takes nothing it does not know, and converts nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ReplyFields(_Declared):
    """What the transport itself reads in every reply.

    Attributes:
        busy: seconds that the site's code worked on the message.
        refusal: why the site has nothing usable to say.
        missing: what the site was not told, or has lost.
    """

    busy: Seconds = 0.0
    refusal: str | None = None
    missing: Literal["agreed"] | None = None

    @field_validator("refusal")
    @classmethod
    def _harmless(cls, text: str | None) -> str | None:
        return None if text is None else plain_text(text)


class UpdateFields(ReplyFields):
    """The fields of an update; see :class:`feddg.messages.Update`."""

    examples: Annotated[int, Field(ge=1, le=MOST_IMAGES)] | None = None
    seconds: Seconds = 0.0
    images: Count = 0


class IntroductionFields(ReplyFields):
    """The field of an introduction: which site it is."""

    site: Annotated[str, Field(max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")] | None = (
        None
    )
    missing: None = None


class Introduction(_Declared):
    """What a site says about itself before anything is trained.

    Attributes:
        classes: images by class name.
        domains: images by domain name.
        files: hashes of the files that the method reads there, by the setting that names them.
    """

    classes: dict[str, Count]
    domains: dict[str, Count]
    files: dict[SettingName, ContentHash] = Field(default_factory=dict, max_length=MOST_FILES)

    @model_validator(mode="before")
    @classmethod
    def _as_json(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        return {key: json.loads(v) if isinstance(v, str) else v for key, v in content.items()}

    @model_validator(mode="after")
    def _plausible(self) -> "Introduction":
        parts = (("class", self.classes, MOST_CLASSES), ("domain", self.domains, MOST_DOMAINS))
        for what, counts, most in parts:
            fault = names_fault(list(counts), what, most)
            if fault is not None:
                raise ValueError(fault)
        images = self.images
        if not 1 <= images <= MOST_IMAGES or sum(self.domains.values()) != images:
            raise ValueError("its counts by class and by domain are not those of the same images")
        return self

    @classmethod
    def of(
        cls,
        classes: Mapping[str, int],
        domains: Mapping[str, int],
        files: Mapping[str, str] | None = None,
    ) -> "Introduction":
        """Returns the introduction of a site that holds these images, and reads these files.

        Raises:
            DataError: its folders have names that cannot cross.
        """
        try:
            return cls(classes=dict(classes), domains=dict(domains), files=dict(files or {}))
        except ValidationError as error:
            raise DataError(
                f"This site's folder of images {explained(error)}; rename or empty it, "
                "as the coordinator would refuse it."
            ) from None

    @property
    def images(self) -> int:
        """How many images the site holds."""
        return sum(self.classes.values())

    @property
    def message(self) -> Message:
        """The introduction as it crosses."""
        parts: dict[str, Mapping[str, Any]] = {"classes": self.classes, "domains": self.domains}
        parts |= {"files": self.files} if self.files else {}
        return Message({}, {name: json.dumps(counts) for name, counts in parts.items()})


FORMS: dict[str, tuple[type[ReplyFields], frozenset[str]]] = {
    "query.introduce": (IntroductionFields, frozenset({"introduction"})),
    "query.describe": (ReplyFields, frozenset({"reply"})),
    "train": (UpdateFields, frozenset({"weights", "extras", "terms"})),
    "query.ask": (ReplyFields, frozenset({"reply"})),
    "evaluate": (ReplyFields, frozenset({"scores"})),
}
"""The fields and the parts of a reply, by the kind of the message that it answers."""


def read_fields(kind: str, parcel: Parcel) -> dict[str, Scalar]:
    """Returns the checked fields of a reply; those that were left out or are empty are not there.

    Raises:
        ValueError: the reply has not the form of its kind; says why in one harmless line.
    """
    form, parts = FORMS[kind]
    strange = sorted(parcel.parts.keys() - parts)
    if strange:
        raise ValueError(f"it has an unknown part {plain_text(strange[0], 40)!r}")
    try:
        return form.model_validate(parcel.fields).model_dump(exclude_none=True)
    except ValidationError as error:
        raise ValueError(explained(error)) from None


def read_update(client: int, parcel: Parcel) -> Update:
    """Returns the update in a reply whose fields were checked.

    Raises:
        ValueError: the reply holds none, or its loss terms are not a few numbers.
    """
    fields = parcel.fields
    if "examples" not in fields or "weights" not in parcel.parts:
        raise ValueError("it sent no update")
    return Update(
        client,
        int(fields["examples"]),
        parcel.part("weights").tensors,
        parcel.part("extras"),
        _terms(parcel),
        float(fields.get("seconds", 0.0)),
        int(fields.get("images", 0)),
    )


def read_introduction(parcel: Parcel) -> Introduction:
    """Returns a site's checked introduction.

    Raises:
        ValueError: it has not the form of one.
    """
    message = parcel.part("introduction")
    if message.tensors:
        raise ValueError("its introduction holds a tensor")
    try:
        return Introduction.model_validate(message.scalars)
    except ValidationError as error:
        raise ValueError(f"its introduction: {explained(error)}") from None
    except (ValueError, RecursionError):
        raise ValueError("its introduction is not JSON") from None


def _terms(parcel: Parcel) -> dict[str, float]:
    message = parcel.part("terms")
    if message.tensors or len(message.scalars) > MOST_TERMS:
        raise ValueError(f"its loss terms are not {MOST_TERMS} or fewer numbers")
    terms: dict[str, float] = {}
    for name, value in message.scalars.items():
        known = isinstance(value, int | float) and not isinstance(value, bool)
        terms[name] = float(value) if known else math.nan
        if not math.isfinite(terms[name]) or plain_text(name, 100) != name:
            raise ValueError(f"its loss term {plain_text(name, 40)!r} is not a finite number")
    return terms


def explained(error: ValidationError) -> str:
    """Returns the first fault as one harmless line."""
    fault = error.errors(include_url=False)[0]
    where = plain_text(".".join(str(part) for part in fault["loc"]), 60)
    said = plain_text(fault["msg"].removeprefix("Value error, "), 200)
    return f"{where}: {said}" if where else said
