"""A site: its own folder of images, its device, its cache and what it remembers."""

import functools
import hashlib
import logging
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
import yaml
from pydantic import Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from feddg.clients.client import Client, Examples, Worker
from feddg.data.data_set import load_source
from feddg.data.decoding import Reading
from feddg.data.fingerprint import ContentHashes, ImagesFile, difference, images_file
from feddg.data.images import ImageTable, from_class_folders
from feddg.data.pixels import PixelStore, open_pixels
from feddg.deploy.wire import Introduction, Order, Parcel
from feddg.errors import ClientError, DataError, ExperimentError, FeddgError, RunError
from feddg.evaluation.accuracy import Evaluation, Score
from feddg.experiment import Experiment
from feddg.federation.local_training import load_weights
from feddg.messages import Message, Weights, on_device
from feddg.methods.base import Method
from feddg.privacy.building import Defences
from feddg.privacy.secure_aggregation import KNOWN
from feddg.records import client_name
from feddg.runs.prepare import Images, build, build_worker, cache_folder, defences_for, load_images
from feddg.runs.provenance import methods_files
from feddg.settings import Settings
from feddg.storage import entries, open_file, parse_fields, replace_bytes, replace_text, why

# What a site keeps on its own disk between messages, since each one meets a fresh process.


_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
IMAGES = "images.json"
_MEMORY = re.compile(r"memory-(\d{1,9})-([0-9a-f]{8})\.safetensors")
_CONTEXT = re.compile(r"context-([A-Za-z0-9._-]+)-([0-9a-f]{8})\.safetensors")


class SiteMemory:
    """One site's part of one run, in ``cache/deployments/run/site``.

    A memory is filed under the round that wrote it, and a round reads only what earlier rounds
    wrote. So a round that failed, at the site or at the server, is repeated from the same memory.
    Every file's name ends in the CRC-32 of its content, with which it is compared.

    Args:
        cache: the site's cache folder.
        run: the run's key, made up by the server.
        site: the site's name.
        experiment: the experiment's id, under which the site keeps which sums it helped to open: in
            whatever run, since one that begins again trains the same updates again. None for each
            run by itself.

    Raises:
        ClientError: a name that cannot be a folder's.
    """

    def __init__(self, cache: Path, run: str, site: str, experiment: str | None = None) -> None:
        for name in (run, site, experiment or run):
            if not _SAFE.fullmatch(name):
                raise ClientError(f"{name!r} cannot name a folder; use letters, digits, - and _")
        self.folder = cache / "deployments" / run / site
        place = self.folder if experiment is None else cache / "opened_sums" / experiment / site
        self._known = place / "opened_sums.safetensors"

    def before(self, round: int) -> Weights:
        """Returns what rounds before ``round`` left behind; nothing if there were none.

        Raises:
            RunError: it is damaged; names the file.
        """
        earlier = [number for number in self._memories() if number < round]
        if not earlier:
            return {}
        file = self._memories()[max(earlier)]
        try:
            return load(_whole(file))
        except (SafetensorError, ValueError, KeyError) as error:
            raise RunError(_damaged(file, why(error))) from None

    def keep(self, round: int, memory: Weights) -> None:
        """Files ``memory`` under ``round``; of the older ones only the newest stays."""
        own = {name: tensor.detach().cpu().contiguous() for name, tensor in memory.items()}
        content = save(own)
        kept = self.folder / _sealed(f"memory-{round}", content)
        replace_bytes(kept, content)
        files = [path for path in self.folder.iterdir() if _MEMORY.fullmatch(path.name)]
        earlier = sorted({n for n in map(_round_of, files) if n < round})
        for file in files:
            number = _round_of(file)
            if file != kept and (number == round or number in earlier[:-1]):
                file.unlink(missing_ok=True)

    def secrets(self, round: int) -> Weights:
        """Returns what defences keep at the site: of this round, and beyond rounds.

        Raises:
            RunError: it is damaged; names the file.
        """
        found = _loaded(self._secrets, "delete it")
        known = _loaded(
            self._known,
            "it says which sums of updates this site helped to open. Put a copy in its place, or "
            "ask for a run with another seed and delete it",
        )
        return known | (found if "round" in found and int(found["round"]) == round else {})

    def keep_secrets(self, round: int, secrets: Weights) -> None:
        """Files what defences keep: beyond a round first, so that it is there when it is needed."""
        own = {name: tensor.cpu().contiguous() for name, tensor in secrets.items()}
        for file, content in (
            (self._known, {n: t for n, t in own.items() if n.startswith(KNOWN)}),
            (self._secrets, {n: t for n, t in own.items() if not n.startswith(KNOWN)}),
        ):
            if content:
                replace_bytes(file, save(content))
            elif file == self._secrets:
                file.unlink(missing_ok=True)

    @property
    def _secrets(self) -> Path:
        return self.folder / "secrets.safetensors"

    def context(self, digest: str) -> Message | None:
        """Returns what was agreed, or None if this site was not told, or its copy is damaged."""
        file = self._files(_CONTEXT).get(_safe(digest))
        if file is None:
            return None
        try:
            return Message.from_bytes(_whole(file))
        except (RunError, SafetensorError, ValueError, KeyError):
            return None  # it is asked for again

    def keep_context(self, digest: str, context: Message) -> None:
        """Files what was agreed."""
        content = context.to_bytes()
        before = self._files(_CONTEXT).get(_safe(digest))
        kept = self.folder / _sealed(f"context-{digest}", content)
        replace_bytes(kept, content)
        if before not in (None, kept):
            before.unlink(missing_ok=True)

    def images(self) -> ImagesFile | None:
        """Returns the images that the site joined the run with, or None if it joins it now.

        Raises:
            RunError: what is kept of them is damaged.
        """
        return ImagesFile.read(self.folder / IMAGES)

    def keep_images(self, images: ImagesFile) -> None:
        """Keeps which images the site joins the run with."""
        replace_text(self.folder / IMAGES, images.to_text())

    def _memories(self) -> dict[int, Path]:
        return {int(number): file for number, file in self._files(_MEMORY).items()}

    def _files(self, name: re.Pattern[str]) -> dict[str, Path]:
        """Returns files by the first part of their name that tells them apart."""
        if not self.folder.is_dir():
            return {}
        found = [(name.fullmatch(entry.name), entry) for entry in entries(self.folder, RunError)]
        return {match[1]: Path(entry.path) for match, entry in found if match}


def _loaded(file: Path, then: str) -> Weights:
    try:
        return load(file.read_bytes()) if file.is_file() else {}
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise RunError(f"{file} is damaged: {why(error)}; {then}.") from None


def _safe(digest: str) -> str:
    if not _SAFE.fullmatch(digest):
        raise ClientError(f"{digest!r} is no digest")
    return digest


def _round_of(file: Path) -> int:
    found = _MEMORY.fullmatch(file.name)
    assert found is not None
    return int(found[1])


def _sealed(name: str, content: bytes) -> str:
    return f"{name}-{zlib.crc32(content):08x}.safetensors"


def _whole(file: Path) -> bytes:
    """Returns a file's content.

    Raises:
        RunError: it cannot be read, or is not what its name says.
    """
    try:
        with open_file(file) as opened:
            content = opened.read()
    except OSError as error:
        raise RunError(f"Cannot read {file}: {why(error)}.") from None
    if not file.name.endswith(f"-{zlib.crc32(content):08x}.safetensors"):
        raise RunError(_damaged(file, "its checksum is another one"))
    return content


def _damaged(file: Path, reason: str) -> str:
    return (
        f"{file} is damaged: {reason}. Put a copy in its place, or delete it: the site then goes "
        "on from what it remembered before."
    )


# A site's images: read from its own folder, numbered as the federation does, compared over time.
#
# What they were when the site joined a run is kept at the site. Of a change the coordinator is
# told that there is one; which files it is about stands in the site's own log.


log = logging.getLogger("feddg")

DIGITS = "digits:"


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


def require_same_images(
    memory: SiteMemory, table: ImageTable, experiment: Experiment, cache: Path
) -> None:
    """Keeps which images a site joins a run with, or makes sure that they are still the same.

    So it does with the files that the method reads, such as a codec's weights.

    Args:
        memory: the site's part of the run.
        table: its images now.
        experiment: names the files.
        cache: where hashes of files are remembered.

    Raises:
        ClientError: they changed.
        FeddgError: what is kept cannot be read or written; names the file.
    """
    hashes = None if table.root is None else ContentHashes(table.root, cache)
    now, before = images_file(table, hashes), memory.images()
    now = now.model_copy(update={"files": methods_files(experiment)})
    if before is None:
        memory.keep_images(now)
        return
    changes = difference(before, now)
    if changes:
        log.error(
            "%s changed since this site joined the run: %s; put them back, or ask the "
            "coordinator for a new run",
            changes.what,
            changes,
        )
        raise ClientError(
            f"its {changes.what} changed since it joined this run; its own log says which; put "
            "them back, or start a new run"
        )


NAME = r"[A-Za-z0-9][A-Za-z0-9_-]*"


class SiteConfig(Settings):
    """What a SuperNode's ``--node-config`` may hold."""

    site: str = Field(description="the site's name, one of the deployment's `sites`")
    images: str = Field(
        description="folder root/domain/class/*, or root/class/* with `domain`; or digits:DOMAIN"
    )
    domain: str | None = Field(None, description="what the images of root/class/* are called")
    cache: Path | None = Field(None, description="folder for pixels, stylized copies and memory")
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
    defences: Defences
    memory: SiteMemory

    def keep(self) -> None:
        """Files what the client remembers under its round."""
        if self.client.memory:
            self.memory.keep(self.client.round, self.client.memory)
        self.memory.keep_secrets(self.client.round, self.client.secrets)


class MissingContext(FeddgError):
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
            context=self._context(order.context, parcel, memory),
            received=parcel.part("weights").tensors,
            extras=_extras(parcel, worker.device),
            secrets=memory.secrets(order.round),
        )
        defences = defences_for(self.experiment, method, worker.network)
        return Turn(client, method, defences, memory)

    def _build(self, classes: int) -> tuple[Method, Worker]:
        # All weights come with the message: a site needs no pretrained ones.
        model = self.experiment.model.model_copy(update={"weights": None})
        bare = self.experiment.model_copy(update={"model": model})
        method, network = build(bare, classes)
        return method, build_worker(self.experiment, network, self.config.cache_folder)

    def _context(self, digest: str, parcel: Parcel, memory: SiteMemory) -> Message | None:
        if not digest:
            return None
        if "context" in parcel.parts:
            memory.keep_context(digest, parcel.parts["context"])
            return parcel.parts["context"]
        context = memory.context(digest)
        if context is None:
            raise MissingContext("it was not told what was agreed before round 1")
        return context

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


# A client of a simulated federation: its share of the experiment's images, as in-process.


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
