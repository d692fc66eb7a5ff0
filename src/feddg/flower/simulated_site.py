"""A client of a simulated federation: its share of the experiment's images, as in-process."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from feddg.clients.examples import Examples
from feddg.experiment import Experiment
from feddg.flower.parcels import Parcel
from feddg.flower.site import Site, SiteConfig
from feddg.messages import Message
from feddg.rows import client_name
from feddg.runs.prepare import Images, load_images

SIMULATED = "simulated"
"""Key of a run config whose nodes are simulated; they differ by ``partition-id`` alone."""


@functools.lru_cache(maxsize=1)
def _images(experiment: str, cache: Path) -> Images:
    # All clients draw on the same images: an actor loads them once.
    return load_images(Experiment(**yaml.safe_load(experiment)), cache, lambda *_: None)


class SimulatedSite(Site):
    """The client whose id is the node's ``partition-id``."""

    def __init__(self, node_config: Mapping[str, Any], run_config: Mapping[str, Any]) -> None:
        id, text = int(node_config["partition-id"]), str(run_config["experiment"])
        cache = Path(str(run_config["cache"]))
        self.experiment = Experiment(**yaml.safe_load(text))
        self.config = SiteConfig(
            site=client_name(id), images="", cache=cache, device=self.experiment.device
        )
        self._own = _images(text, cache).examples(id)

    def introduce(self) -> Parcel:
        """Says who it is; who holds what is known where the simulation runs."""
        introduction = Message({}, {"images": len(self._own)})
        return Parcel({"site": self.config.site}, {"introduction": introduction})

    def _examples(self, classes: list[str], domains: list[str]) -> Examples:
        return self._own
