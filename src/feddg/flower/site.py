"""A site: its own folder of images, its device and its cache, as its SuperNode's config says."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
import yaml
from pydantic import Field, ValidationError

from feddg.clients.client import Client
from feddg.clients.examples import Examples
from feddg.clients.worker import Worker
from feddg.data.bands import Reading
from feddg.data.images import ImageTable, from_class_folders
from feddg.data.pixels import PixelStore, open_pixels
from feddg.data.sources import load_source
from feddg.errors import DataError, ExperimentError, FeddgError
from feddg.evaluation.accuracy import Evaluation, Score
from feddg.experiment import Experiment
from feddg.federation.turns import load_weights
from feddg.flower.memory import SiteMemory
from feddg.flower.parcels import Parcel
from feddg.flower.replies import Introduction
from feddg.guards.chain import Guards
from feddg.messages import Message, Weights
from feddg.methods.base import Method
from feddg.runs.prepare import build, build_worker, cache_folder, guards_for
from feddg.settings import Settings

DIGITS = "digits:"
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
    fields = yaml.safe_load(text) if isinstance(text, str) else None
    if not isinstance(fields, dict):
        raise ExperimentError(
            "the Flower app's config has no 'experiment'; write the app with `feddg deploy init`"
        )
    experiment = Experiment(**fields)
    if experiment.data.id_val or experiment.data.id_test:
        raise ExperimentError(
            "sites train on all their images: set data.id_val and data.id_test to 0"
        )
    return experiment


def load_pixels(
    images: str, domain: str | None, experiment: Experiment, cache: Path
) -> tuple[ImageTable, PixelStore]:
    """Returns the usable images of a folder, or of the built-in digits, with their pixels.

    Args:
        images: ``digits:DOMAIN``, a folder ``root/domain/class/*``, or with ``domain`` a folder
            ``root/class/*``.
        domain: what the images of ``root/class/*`` are called.
        experiment: how images are resized.
        cache: folder of the decoded pixels.

    Raises:
        DataError: the images cannot be used.
    """
    if images.startswith(DIGITS):
        whole = load_source("digits")
        rows = numpy.flatnonzero(whole.domains == whole.domain_id(images.removeprefix(DIGITS)))
        table = _own_domains(whole.take(rows))
    elif domain is not None:
        table = from_class_folders(images, domain)
    else:
        table = load_source("folder", images)
    data = experiment.data
    usable, pixels, _ = open_pixels(
        table,
        data.image_size,
        cache=cache,
        resize=data.resize,
        reading=Reading.of(data),
        budget_bytes=int(data.pixel_budget_gb * 2**30),
        on_bad_image=data.on_bad_image,
    )
    return usable, pixels


def _own_domains(table: ImageTable) -> ImageTable:
    """Leaves out the names of domains without images."""
    present, domains = numpy.unique(table.domains, return_inverse=True)
    names = tuple(table.domain_names[domain] for domain in present)
    return replace(table, domains=domains.astype(numpy.int64), domain_names=names)


def positions(table: ImageTable, classes: list[str], domains: list[str]) -> ImageTable:
    """Returns the table with its labels and domains numbered as the whole federation does.

    Raises:
        DataError: a class or domain that the federation does not have.
    """
    for what, mine, all_ in (
        ("class", table.class_names, classes),
        ("domain", table.domain_names, domains),
    ):
        unknown = sorted(set(mine) - set(all_))
        if unknown:
            raise DataError(
                f"its {what} {unknown[0]!r} is not among the federation's: {', '.join(all_)}"
            )
    label_of = numpy.array([classes.index(name) for name in table.class_names])
    domain_of = numpy.array([domains.index(name) for name in table.domain_names])
    return replace(
        table,
        labels=label_of[table.labels],
        domains=domain_of[table.domains],
        class_names=tuple(classes),
        domain_names=tuple(domains),
    )


def test_images(
    table: ImageTable, pixels: PixelStore, experiment: Experiment, worker: Worker
) -> Evaluation:
    """Returns all images of a table as a test split."""
    return Evaluation(
        pixels,
        {"test": numpy.arange(len(table))},
        table.labels,
        table.domains,
        table.domain_names,
        len(table.class_names),
        experiment.evaluate.batch_size,
        worker.device,
        worker.autocast,
    )


def on_device(tensors: Weights, device: torch.device) -> Weights:
    """Returns named tensors on ``device``."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


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

    def introduce(self) -> Parcel:
        """Says who it is: name, class and domain names, and how many images of each."""
        table = self.table
        counts = table.counts()
        introduction = Introduction.of(
            dict(zip(table.class_names, counts.sum(0).tolist())),
            dict(zip(table.domain_names, counts.sum(1).tolist())),
        )
        return Parcel({"site": self.config.site}, {"introduction": introduction.message})

    def scores(self, parcel: Parcel) -> list[Score]:
        """Measures the weights of a message on the site's images, which need not train."""
        classes = json.loads(str(parcel.fields["classes"]))
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
        fields = parcel.fields
        classes, domains = (json.loads(str(fields[key])) for key in ("classes", "domains"))
        memory = SiteMemory(self.config.cache_folder, str(fields["run"]), self.config.site)
        method, worker = self._build(len(classes))
        round = int(fields["round"])
        client = Client(
            int(fields["client"]),
            self._examples(classes, domains),
            worker,
            name=self.config.site,
            round=round,
            memory=on_device(memory.before(round + after_training), worker.device),
            agreed=self._agreed(parcel, memory),
            received=parcel.part("weights").tensors,
            extras=_extras(parcel, worker.device),
            secrets=memory.secrets(round),
        )
        guards = guards_for(self.experiment, method, worker.network)
        return Turn(client, method, guards, memory)

    def _build(self, classes: int) -> tuple[Method, Worker]:
        # All weights come with the message: a site needs no pretrained ones.
        model = self.experiment.model.model_copy(update={"weights": None})
        bare = self.experiment.model_copy(update={"model": model})
        method, network = build(bare, classes)
        return method, build_worker(self.experiment, network, self.config.cache_folder)

    def _agreed(self, parcel: Parcel, memory: SiteMemory) -> Message | None:
        digest = str(parcel.fields.get("agreed", ""))
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
