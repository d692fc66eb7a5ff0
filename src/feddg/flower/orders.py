"""What a site is told beside weights, and its declared form: checked before it is worked with."""

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from feddg.errors import ClientError
from feddg.flower.deployment_file import RunKey
from feddg.flower.parcels import Parcel
from feddg.flower.replies import MOST_CLASSES, MOST_DOMAINS, explained
from feddg.messages import names_fault


class Order(BaseModel):
    """The fields of a message to a site; one that only introduces itself is told the run alone.

    Attributes:
        run: key under which the site keeps its memory of the run.
        round: the round, 0 before the first.
        client: the site's number.
        classes: the federation's classes, in the order of their numbers.
        domains: domains that sites train on, in the order of their numbers.
        agreed: digest of what was agreed before round 1; empty for nothing.
        question: name of the method's question, where there is one.
    """

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    run: RunKey
    round: Annotated[int, Field(ge=0)] = 0
    client: Annotated[int, Field(ge=0)] = 0
    classes: list[str] = Field(default_factory=list)
    domains: list[str] = Field(default_factory=list)
    agreed: Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}$")] = ""
    question: Annotated[str, Field(max_length=200)] = ""

    @field_validator("classes", "domains", mode="before")
    @classmethod
    def _from_json(cls, text: Any) -> Any:
        return json.loads(text) if isinstance(text, str) else text

    @field_validator("classes", "domains")
    @classmethod
    def _plain(cls, names: list[str], info: Any) -> list[str]:
        what, most = {"classes": ("class", MOST_CLASSES), "domains": ("domain", MOST_DOMAINS)}[
            info.field_name
        ]
        fault = names_fault(names, what, most) if names else None
        if fault is not None:
            raise ValueError(fault)
        return names

    @classmethod
    def read(cls, parcel: Parcel) -> "Order":
        """Reads the fields of a message.

        Raises:
            ClientError: they are not what a coordinator sends.
        """
        try:
            return cls.model_validate(parcel.fields)
        except ValidationError as error:
            raise ClientError(f"the coordinator's message: {explained(error)}") from None
        except RecursionError:
            raise ClientError("the coordinator's message: it is nested too deeply") from None
