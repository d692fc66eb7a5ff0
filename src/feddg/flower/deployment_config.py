"""What the Flower app's config may say beside the experiment; ``feddg deploy init`` writes it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from feddg.errors import ExperimentError
from feddg.flower.exchange import Policy
from feddg.settings import Positive, Settings


class Deployment(Settings):
    """The run config beside the experiment; ``feddg deploy init`` writes it."""

    sites: str = Field(description="names of all sites, comma-separated; the order is part of it")
    evaluation_sites: str = Field("", description="names of sites that only evaluate")
    out: Path = Field(Path("runs"), description="the run folder's parent, at the coordinator")
    test: str = Field("", description="the coordinator's test folder, or digits:DOMAIN; may be ''")
    test_domain: str = Field("", description="what the images of a test folder class/* are called")
    cache: str = Field("", description="the coordinator's cache folder; '' for the user's")
    min_sites: int = Field(0, ge=0, description="sites that must be connected; 0 for all")
    wait_seconds: Positive = Field(
        300.0, description="how long to wait for them, until they have introduced themselves"
    )
    round_deadline: Positive = Field(3600.0, description="seconds a site has for one message")
    poll_seconds: Positive = Field(0.5, description="between two looks at the mailbox")
    unnamed_sites: bool = Field(
        False, description="take nodes whose key has no name, or who have none: to try things out"
    )

    @classmethod
    def read(cls, run_config: Mapping[str, Any]) -> "Deployment":
        """Reads the run config, whose keys may be spelt with ``-``.

        Raises:
            ExperimentError: a key is unknown or wrong.
        """
        known = {k.replace("-", "_"): v for k, v in run_config.items() if k != "experiment"}
        try:
            return cls(**known)
        except ValidationError as error:
            fault = error.errors()[0]
            key = ".".join(str(part) for part in fault["loc"])
            raise ExperimentError(f"the app's config, key {key!r}: {fault['msg']}") from None

    @property
    def site_names(self) -> list[str]:
        """Names of all sites; a site's position is its client id."""
        return _names(self.sites)

    @property
    def judge_names(self) -> list[str]:
        """Names of the sites that only evaluate."""
        return _names(self.evaluation_sites)

    @property
    def minimum(self) -> int:
        """How many sites must be connected."""
        return self.min_sites or len(self.site_names)

    @property
    def policy(self) -> Policy:
        """The transport's patience."""
        return Policy(self.minimum, self.wait_seconds, self.round_deadline, self.poll_seconds)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
