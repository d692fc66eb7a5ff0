"""What a deployment knows of its sites from one start to the next: ``deployment.json``."""

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field, NonNegativeInt

from feddg.errors import RunError
from feddg.records import JsonFile

RunKey = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,100}$")]


class RunFile(JsonFile):
    """A run over Flower.

    Attributes:
        run: key under which sites keep their memory of it.
    """

    run: RunKey


class DeploymentFile(RunFile):
    """A deployment, and who joined it with what.

    Attributes:
        sites: names of the sites that train; a site's place is its number.
        classes: the federation's classes, in the order of their numbers.
        domains: domains that sites train on, in the order of their numbers.
        keys: fingerprint of the key that each site's name belongs to.
        images: how many images sites introduced themselves with, by their names.
    """

    sites: list[str]
    classes: list[str]
    domains: list[str]
    keys: dict[str, str] = Field(default_factory=dict)
    images: dict[str, NonNegativeInt] = Field(default_factory=dict)

    def require_sites(self, names: Sequence[str]) -> None:
        """Makes sure that the sites are those that the run was begun with.

        Raises:
            RunError: they are others, or in another order, which would exchange their numbers.
        """
        if list(names) != self.sites:
            raise RunError(
                f"this run was begun with the sites {', '.join(self.sites)}, in this order; the "
                f"app's config names {', '.join(names)}: put them back, or start a new run"
            )

    def joined(
        self, domains: Mapping[str, int], keys: Mapping[str, str], images: Mapping[str, int]
    ) -> "DeploymentFile":
        """Returns the deployment after a site joined.

        Args:
            domains: those that it trains on; new ones are numbered as they come.
            keys: of all names known by now.
            images: of all sites that joined by now.
        """
        numbered = list(dict.fromkeys([*self.domains, *domains]))
        new = {"domains": numbered, "keys": dict(keys), "images": dict(images)}
        return self.model_copy(update=new)
