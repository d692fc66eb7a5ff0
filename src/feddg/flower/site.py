"""A site: its own folder of images, its device and its cache, as its SuperNode's config says."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, ValidationError

from feddg.clients.client import Client, Examples, Worker
from feddg.errors import ExperimentError, FeddgError
from feddg.evaluation.accuracy import Score
from feddg.experiment import Experiment
from feddg.federation.local_training import load_weights
from feddg.flower.memory import SiteMemory
from feddg.flower.orders import Order
from feddg.flower.parcels import Parcel
from feddg.flower.replies import Introduction
from feddg.flower.site_images import load_pixels, positions, require_same_images, test_images
from feddg.messages import Message, on_device
from feddg.methods.base import Method
from feddg.privacy.building import Guards
from feddg.runs.prepare import build, build_worker, cache_folder, guards_for
from feddg.runs.provenance import methods_files
from feddg.settings import Settings
from feddg.storage import parse_fields

NAME = r"[A-Za-z0-9][A-Za-z0-9_-]*"


class SiteConfig(Settings):
    """What a SuperNode's ``--node-config`` may hold."""

    site: str = Field(description="the site's name, one of the deployment's `sites`")
    images: str = Field(
        description="folder root/domain/class/*, or root/class/* with `domain`; or digits:DOMAIN"
    )
    domain: str | None = Field(None, description="what the images of root/class/* are called")
    cache: Path | None = Field(None, description="folder for pixels, twins and memory")
    device: str = Field("auto", description="auto, cpu, cuda, ...")

    @classmethod
    def read(cls, node_config: Mapping[str, Any]) -> "SiteConfig":
        """Reads the node config; keys that Flower adds are left alone.

        Raises:
            FeddgError: a key is missing or wrong.
        """
        known = {key: value for key, value in node_config.items() if key in cls.model_fields}
        try:
            return cls(**known)
        except ValidationError as error:
            fault = error.errors()[0]
            key = ".".join(str(part) for part in fault["loc"])
            raise FeddgError(
                f"--node-config of this SuperNode, key {key!r}: {fault['msg']}"
            ) from None

    @property
    def cache_folder(self) -> Path:
        """The site's cache folder, the user's cache by default."""
        return (self.cache or cache_folder()).expanduser()


def read_experiment(run_config: Mapping[str, Any]) -> Experiment:
    """Returns the experiment that every part of a deployment finds in its run config.

    Raises:
        ExperimentError: it is missing, invalid, or cannot run across a network.
    """
    text = run_config.get("experiment")
    try:
        fields = parse_fields(text) if isinstance(text, str) else {}
    except ValueError as error:
        raise ExperimentError(f"the Flower app's 'experiment' {error}") from None
    if not fields:
        raise ExperimentError(
            "the Flower app's config has no 'experiment'; write the app with `feddg deploy init`"
        )
    experiment = Experiment(**fields)
    if experiment.data.id_val or experiment.data.id_test:
        raise ExperimentError(
            "sites train on all their images: set data.id_val and data.id_test to 0"
        )
    return experiment


def _extras(parcel: Parcel, device: torch.device) -> Message:
    extras = parcel.part("extras")
    return Message(on_device(extras.tensors, device), extras.scalars)


@dataclass
class Turn:
    """One message's worth of work at a site: the client as it stands, and what it keeps."""

    client: Client
    method: Method
    guards: Guards
    memory: SiteMemory

    def keep(self) -> None:
        """Files what the client remembers under its round."""
        if self.client.memory:
            self.memory.keep(self.client.round, self.client.memory)
        self.memory.keep_secrets(self.client.round, self.client.secrets)


class MissingAgreement(FeddgError):
    """The site was not told, or has lost, what was agreed."""


class Site:
    """The site whose SuperNode has a config, in the deployment with an experiment.

    Raises:
        FeddgError: the config, the experiment or the images cannot be used.
    """

    def __init__(self, node_config: Mapping[str, Any], run_config: Mapping[str, Any]) -> None:
        self.config = SiteConfig.read(node_config)
        if not re.fullmatch(NAME, self.config.site):
            raise FeddgError(f"site {self.config.site!r}: use letters, digits, - and _ only")
        self.experiment = read_experiment(run_config).model_copy(
            update={"device": self.config.device}
        )
        self.table, self.pixels = load_pixels(
            self.config.images, self.config.domain, self.experiment, self.config.cache_folder
        )

    def introduce(self, parcel: Parcel) -> Parcel:
        """Says who it is: name, class and domain names, how many images of each, its codec."""
        self.memory(Order.read(parcel))
        table = self.table
        counts = table.counts()
        introduction = Introduction.of(
            dict(zip(table.class_names, counts.sum(0).tolist())),
            dict(zip(table.domain_names, counts.sum(1).tolist())),
            methods_files(self.experiment),
        )
        return Parcel({"site": self.config.site}, {"introduction": introduction.message})

    def memory(self, order: Order) -> SiteMemory:
        """Returns what the site keeps of an order's run; its images must be those it joined with.

        Raises:
            ClientError: they are not.
        """
        memory = SiteMemory(self.config.cache_folder, order.run, self.config.site, self._record)
        self._compare_images(memory)
        return memory

    @property
    def _record(self) -> str | None:
        """Under what the site keeps which sums it helped to open: the experiment, in any run."""
        return self.experiment.id

    def _compare_images(self, memory: SiteMemory) -> None:
        require_same_images(memory, self.table, self.experiment, self.config.cache_folder)

    def scores(self, parcel: Parcel) -> list[Score]:
        """Measures the weights of a message on the site's images, which need not train."""
        order = Order.read(parcel)
        self.memory(order)
        classes = order.classes
        method, worker = self._build(len(classes))
        load_weights(worker.network, parcel.part("weights").tensors)
        table = positions(self.table, classes, list(self.table.domain_names))
        evaluation = test_images(table, self.pixels, self.experiment, worker)
        return evaluation.scores(method.predictor(worker.network))

    def turn(self, parcel: Parcel, *, after_training: bool = False) -> Turn:
        """Returns the client that a message addresses, under what the message holds.

        Args:
            parcel: the message.
            after_training: whether what it learnt in this very round counts already.
        """
        order = Order.read(parcel)
        memory = self.memory(order)
        method, worker = self._build(len(order.classes))
        client = Client(
            order.client,
            self._examples(order.classes, order.domains),
            worker,
            name=self.config.site,
            round=order.round,
            memory=on_device(memory.before(order.round + after_training), worker.device),
            agreed=self._agreed(order.agreed, parcel, memory),
            received=parcel.part("weights").tensors,
            extras=_extras(parcel, worker.device),
            secrets=memory.secrets(order.round),
        )
        guards = guards_for(self.experiment, method, worker.network)
        return Turn(client, method, guards, memory)

    def _build(self, classes: int) -> tuple[Method, Worker]:
        # All weights come with the message: a site needs no pretrained ones.
        model = self.experiment.model.model_copy(update={"weights": None})
        bare = self.experiment.model_copy(update={"model": model})
        method, network = build(bare, classes)
        return method, build_worker(self.experiment, network, self.config.cache_folder)

    def _agreed(self, digest: str, parcel: Parcel, memory: SiteMemory) -> Message | None:
        if not digest:
            return None
        if "agreed" in parcel.parts:
            memory.keep_agreed(digest, parcel.parts["agreed"])
            return parcel.parts["agreed"]
        agreed = memory.agreed(digest)
        if agreed is None:
            raise MissingAgreement("it was not told what was agreed before round 1")
        return agreed

    def _examples(self, classes: list[str], domains: list[str]) -> Examples:
        table = positions(self.table, classes, domains)
        rows = torch.arange(len(table))
        digest = hashlib.blake2b(self.pixels.fingerprint.encode(), digest_size=12)
        digest.update(rows.numpy().tobytes())
        return Examples(
            self.pixels,
            rows,
            torch.from_numpy(table.labels),
            torch.from_numpy(table.domains),
            len(classes),
            digest.hexdigest(),
        )
