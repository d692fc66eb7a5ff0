"""A client of a simulated federation: its share of the experiment's images, as in-process."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from feddg.clients.client import Examples
from feddg.experiment import Experiment
from feddg.flower.memory import SiteMemory
from feddg.flower.parcels import Parcel
from feddg.flower.replies import Introduction
from feddg.flower.site import Site, SiteConfig
from feddg.records import client_name
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
        images = _images(text, cache)
        self._own, self._names = images.examples(id), images.table

    def introduce(self, parcel: Parcel) -> Parcel:
        """Says who it is, and how many images of each class and domain it holds."""
        introduction = Introduction.of(
            _counts(self._own.labels, self._names.class_names),
            _counts(self._own.domains, self._names.domain_names),
        )
        return Parcel({"site": self.config.site}, {"introduction": introduction.message})

    def _compare_images(self, memory: SiteMemory) -> None:
        """Leaves that to the run: all clients' images are the experiment's own."""

    @property
    def _record(self) -> str | None:
        """Nothing beyond the run: who simulates a federation has all its images."""
        return None

    def _examples(self, classes: list[str], domains: list[str]) -> Examples:
        return self._own


def _counts(ids: Tensor, names: Sequence[str]) -> dict[str, int]:
    counts = torch.bincount(ids, minlength=len(names)).tolist()
    return {name: count for name, count in zip(names, counts) if count}
