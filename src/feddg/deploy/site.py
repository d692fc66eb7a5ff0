"""A site: its image folder, device, cache and memory."""

import logging
import pkgutil
import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy
import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load, save

from feddg.clients.client import Client, Examples, Worker
from feddg.data.class_names import renumbered
from feddg.data.data_set import find_augmentation, load_source
from feddg.data.fingerprint import (
    ImagesFile,
    content_hashes,
    contents_of_rows,
    difference,
    file_of,
    images_file,
)
from feddg.data.groups import with_groups
from feddg.data.images import ImageTable, check_folder, from_class_folders, plain_name
from feddg.data.images import positions as places
from feddg.data.inspection import WEAKENS, about_copies, open_images
from feddg.data.pixels import PixelStore
from feddg.data.sets.features import columns_fault
from feddg.data.splits import Splits
from feddg.deploy.wire import (
    CONTEXT,
    SITE_NAME,
    TARGETS,
    Payload,
    Registration,
    Request,
)
from feddg.diagnostics import Diagnostic, Progress, silent
from feddg.errors import (
    ClientError,
    DataError,
    ExperimentError,
    FeddgError,
    RunError,
    first_names,
    schema_faults,
)
from feddg.evaluation.accuracy import Evaluation
from feddg.experiment import Experiment
from feddg.federation.federation import Federation, build, build_worker
from feddg.federation.local_training import answer, client_statistics, load_weights, train
from feddg.federation.transport import without_frozen
from feddg.messages import Message, Scalar, Weights, on_device
from feddg.methods.base import Method
from feddg.methods.composition import method_class
from feddg.models.backbones import FEATURES
from feddg.prediction.classifier import image_files
from feddg.privacy.building import Defences, build_defences
from feddg.privacy.secure_aggregation import KNOWN
from feddg.records import DOMAIN_SCORES, TEST, UNLABELLED, VAL, DomainScore
from feddg.runs.prepare import cache_folder, evaluation_of, methods_files
from feddg.settings import DataSettings, Settings
from feddg.storage import entries, file_faults, open_file, parse_fields, replace_bytes, replace_text

log = logging.getLogger("feddg")

DIGITS = "digits:"
IMAGES = "images.json"
_MEMORY = re.compile(r"memory-(\d{1,9})\.bin")


class SiteMemory:
    """A site's memory of a run, in ``cache/deployments/run/site``, kept between processes.

    Memory is stored by the round that wrote it, and a round reads only that of earlier rounds. So a
    failed round is repeated with the same memory. ``*.bin`` files begin with the CRC-32 of the
    rest.

    Args:
        cache: the site's cache folder.
        run: the run's key, created by the server, as :class:`Request` admits it.
        site: the site's name, as :class:`SiteConfig` admits it.
        seed: the experiment's seed, under which the site stores which sums it helped to open. This
            holds for all runs and experiments, because one that starts again, be it with other
            settings for its report, trains the same updates again.
        closed: whether the method solves in closed form. Its sums are the same under every seed,
            and so stored for all.
    """

    def __init__(
        self, cache: Path, run: str, site: str, seed: int = 0, *, closed: bool = False
    ) -> None:
        self.folder = cache / "deployments" / run / site
        self._secrets = self.folder / "secrets.safetensors"
        kind = "any-seed" if closed else f"seed-{seed}"
        self._opened_sums = cache / "opened_sums" / kind / site / "opened_sums.safetensors"

    def before(self, round: int, counted: int | None = None) -> Weights:
        """Returns the memory before ``round``; empty if there is none.

        Args:
            round: the round.
            counted: the last round in which an update of this site counted; None if unknown. What
                a later one left is of an attempt that did not, and is deleted.

        Raises:
            ClientError: the coordinator goes on from a round that is no longer remembered.
            RunError: it is damaged; names the file.
        """
        rounds, last = self._rounds(), round if counted is None else counted
        later = [number for number in rounds if number > last]
        if counted and len(later) > 1 and later == rounds:  # a lost attempt is one
            raise ClientError(
                f"remembers round {max(rounds)} of this run, and not round {counted}, from which "
                "the coordinator goes on: put its newest run folder back, or start a new run"
            )
        for number in later:
            if number < round:
                self._memory(number).unlink(missing_ok=True)
        earlier = [number for number in rounds if number < round and number <= last]
        return load(_read_checked(self._memory(max(earlier)))) if earlier else {}

    def keep(self, round: int, memory: Weights) -> None:
        """Stores ``memory`` for ``round``; only the newest of the older ones is kept."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in memory.items()}
        _write_checked(self._memory(round), save(tensors))
        earlier = sorted(number for number in self._rounds() if number < round)
        for number in earlier[:-1]:
            self._memory(number).unlink(missing_ok=True)

    def _memory(self, round: int) -> Path:
        return self.folder / f"memory-{round}.bin"

    def _rounds(self) -> list[int]:
        files = entries(self.folder, RunError) if self.folder.is_dir() else []
        return [int(match[1]) for entry in files if (match := _MEMORY.fullmatch(entry.name))]

    def secrets(self, round: int) -> Weights:
        """Returns the defences' secrets at the site: of this round, and lasting ones.

        Raises:
            RunError: it is damaged; names the file.
        """
        of_round = _loaded(self._secrets, "delete it")
        opened_sums = _loaded(
            self._opened_sums,
            "it says which sums of updates this site helped to open: put a copy in its place, or "
            "ask for a run with another seed and delete it",
        )
        current = "round" in of_round and int(of_round["round"]) == round
        return opened_sums | (of_round if current else {})

    def keep_secrets(self, secrets: Weights) -> None:
        """Stores the defences' secrets: lasting ones first, so that they exist when needed."""
        tensors = {name: tensor.cpu().contiguous() for name, tensor in secrets.items()}
        opened_sums = {name: tensors.pop(name) for name in list(tensors) if name.startswith(KNOWN)}
        if opened_sums:
            replace_bytes(self._opened_sums, save(opened_sums))
        if tensors:
            replace_bytes(self._secrets, save(tensors))
        else:
            self._secrets.unlink(missing_ok=True)

    def context(self, digest: str) -> Message | None:
        """Returns the shared context, or None if this site has none or its copy is damaged."""
        try:
            return Message.from_bytes(_read_checked(self.folder / f"context-{digest}.bin"))
        except RunError:
            return None  # it is asked for again

    def keep_context(self, digest: str, context: Message) -> None:
        """Stores the shared context."""
        _write_checked(self.folder / f"context-{digest}.bin", context.to_bytes())


def _loaded(file: Path, remedy: str) -> Weights:
    with file_faults(RunError, f"{file} is damaged ({remedy})", SafetensorError):
        return load(file.read_bytes()) if file.is_file() else {}


def _write_checked(file: Path, content: bytes) -> None:
    replace_bytes(file, zlib.crc32(content).to_bytes(4, "big") + content)


def _read_checked(file: Path) -> bytes:
    """Reads and checks a file of :func:`_write_checked`.

    Raises:
        RunError: it cannot be read, or is damaged.
    """
    with file_faults(RunError, f"Cannot read {file}"), open_file(file) as opened:
        checksum, content = opened.read(4), opened.read()
    if zlib.crc32(content).to_bytes(4, "big") != checksum:
        raise RunError(
            f"{file} is damaged: its checksum is another one. Put a copy in its place, or delete "
            "it: the site then goes on from what it remembered before."
        )
    return content


def list_images(
    images: str, domain: str | None, data: DataSettings, unlabelled: str = ""
) -> ImageTable:
    """Returns the list of a site's images, not decoded, or its table of features.

    Args:
        images: ``digits:DOMAIN``, a folder ``root/domain/class/*``, or with ``domain`` a folder
            ``root/class/*``; a file where the federation's data are features.
        domain: name of the domain for images in ``root/class/*``.
        data: the federation's settings.
        unlabelled: the site's name, where folders are no classes: all images below ``images`` are
            then one domain of one class.

    Raises:
        DataError: they cannot be listed.
        ClientError: a row has another number of features than the federation's.
    """
    if unlabelled:
        return _unlabelled_images(Path(images).expanduser(), unlabelled)
    if data.source == FEATURES:
        table = load_source(FEATURES, images, **data.all_options)
        if table.images is not None and table.images.shape[1] != data.features:
            raise ClientError(
                f"a row of its table has {table.images.shape[1]} features, and {data.features} in "
                "the federation (data.features)"
            )
    elif images.startswith(DIGITS):
        whole = load_source("digits")
        name = images.removeprefix(DIGITS)
        table = whole.take(numpy.flatnonzero(whole.domains == whole.domain_id(name)))
        table = replace(table, domains=numpy.zeros_like(table.domains), domain_names=(name,))
    elif domain is None:
        table = load_source("folder", images)
    else:
        table = from_class_folders(images, domain)
    return table.without(held_out_among(table.domain_names, data.leave_out))


def held_out_among(domains: Iterable[str], held_out: Collection[str]) -> list[str]:
    """Returns a site's domains that an experiment holds out, whatever their spelling."""
    excluded = set(map(plain_name, held_out))
    return [name for name in domains if plain_name(name) in excluded]


def _unlabelled_images(root: Path, site: str) -> ImageTable:
    check_folder(root)
    paths = tuple(file.relative_to(root).as_posix() for file in image_files([root]))
    if not paths:
        raise DataError(f"no images were found below {root}")
    nothing = numpy.zeros(len(paths), numpy.int64)
    return ImageTable(paths, nothing, nothing, (UNLABELLED,), (site,), root)


def load_pixels(
    images: str,
    domain: str | None,
    experiment: Experiment,
    cache: Path,
    unlabelled: str = "",
    progress: Progress = silent,
) -> tuple[ImageTable, PixelStore]:
    """Returns the usable images of :func:`list_images`, with their pixels.

    Args:
        images: see :func:`list_images`.
        domain: see :func:`list_images`.
        experiment: tells how images are resized.
        cache: folder of the decoded pixels.
        unlabelled: see :func:`list_images`.
        progress: called while files are decoded.

    Raises:
        DataError: the images cannot be used.
    """
    table = list_images(images, domain, experiment.data, unlabelled)
    usable, pixels, _ = open_images(table, experiment.data, cache, progress)[0]
    return usable, pixels


def registration_of(table: ImageTable, experiment: Experiment) -> Registration:
    """Returns what a site tells the coordinator of its images when it joins.

    Raises:
        DataError: the coordinator would refuse it.
    """
    counts = table.counts()
    return Registration.of(
        classes=dict(zip(table.class_names, counts.sum(0).tolist())),
        domains=dict(zip(table.domain_names, counts.sum(1).tolist())),
        files=methods_files(experiment),
        features=list(table.feature_names),
    )


def objection_to(
    new: Registration,
    classes: Sequence[str],
    features: Sequence[str],
    held_out: Collection[str] | None,
) -> str | None:
    """Returns why a site may not take part in a run with its images, or None.

    Args:
        new: what the site says of them.
        classes: the run's classes; empty if they are not known yet.
        features: the run's columns of features; empty if they are not known yet.
        held_out: domains that must not be trained on; None if the site only evaluates.
    """
    unlabelled = new.classes.keys() == {UNLABELLED}
    if barred := held_out_among(new.domains, held_out or ()):
        return (
            f"would train on {first_names([repr(name) for name in barred], 3)}, which this run "
            "holds out; give it images of other domains, name it in evaluation-sites, or take the "
            "domain out of hold_out and the test folder"
        )
    if held_out is not None and unlabelled:
        return "has no labels (labels=false), and only evaluates: name it in evaluation-sites"
    if features and (fault := columns_fault(new.features, features)):
        return f"{fault} of this run; rename them, or take them out"
    strange = sorted(new.classes.keys() - set(classes))
    if strange and classes and not unlabelled:
        return (
            f"has the class {strange[0]!r}, and this run has {first_names(classes, 8)}; rename its "
            "folder, or start a new run"
        )
    return None


def copies_in(table: ImageTable, experiment: Experiment, cache: Path) -> Diagnostic | None:
    """Says which files of a site that trains are one image, where an epsilon is for one file.

    A warning where ``data.duplicates`` is ``warn`` or ``ignore``, else an error.
    """
    hides = experiment.privacy.hides_images
    if not hides:
        return None
    if table.root is not None:
        files = [file_of(path) for path in table.paths]
        hashes = content_hashes(table.root, files, cache)
        contents = [hashes[file][1] for file in files]
    elif table.feature_names:
        contents = contents_of_rows(table)
    else:
        return None
    splits = Splits(numpy.arange(len(table)), *[numpy.arange(0)] * 4)
    refuse = experiment.data.duplicates not in ("warn", "ignore")
    faults = about_copies(table, contents, splits, refuse, hides)
    return next((fault for fault in faults if fault.code.endswith(WEAKENS)), None)


def positions(table: ImageTable, classes: list[str], domains: list[str]) -> ImageTable:
    """Returns the table with the federation's numbers for classes and domains.

    Raises:
        DataError: the federation does not have a class or domain.
    """
    try:
        label_of = places(table.class_names, classes)
        domain_of = places(table.domain_names, domains)
    except KeyError as name:
        known = ", ".join([*classes, *domains])
        raise DataError(f"class or domain {name} is not among the federation's: {known}") from None
    return replace(
        table,
        labels=label_of[table.labels],
        domains=domain_of[table.domains],
        class_names=tuple(classes),
        domain_names=tuple(domains),
    )


def on_all_images(
    table: ImageTable, pixels: PixelStore, experiment: Experiment, worker: Worker
) -> Evaluation:
    """Returns an evaluation of all images: domains in ``hold_out.val`` are val, others test."""
    table = with_groups(table, experiment.data.group_by)
    choose = held_out_among(table.domain_names, experiment.hold_out.val)
    val = numpy.isin(table.domains, [table.domain_id(name) for name in choose])
    splits = {TEST: numpy.flatnonzero(~val), VAL: numpy.flatnonzero(val)}
    splits = {split: rows for split, rows in splits.items() if len(rows)}
    return evaluation_of(table, pixels, splits, experiment, worker)


class SiteConfig(Settings):
    """The fields of a SuperNode's ``--node-config``."""

    site: str = Field(
        pattern=f"^{SITE_NAME}$", description="the site's name, one of the deployment's `sites`"
    )
    images: str = Field(
        "",
        description="folder root/domain/class/*, or root/class/* with `domain`; a table of "
        "features; or digits:DOMAIN",
    )
    program: str = Field(
        "", description="instead of images: `module:function`, which returns a feddg.Federation"
    )
    domain: str | None = Field(None, description="what the images of root/class/* are called")
    cache: Path | None = Field(None, description="folder for pixels, stylized copies and memory")
    device: str = Field("auto", description="auto, cpu, cuda, ...")
    labels: bool = Field(
        True, description="false where nobody labelled them; the site then only evaluates"
    )

    @classmethod
    def read(cls, node_config: Mapping[str, object]) -> "SiteConfig":
        """Reads the node config; keys that Flower adds are ignored.

        Raises:
            FeddgError: a key is missing or wrong.
        """
        settings = {key: value for key, value in node_config.items() if key in cls.model_fields}
        with schema_faults(FeddgError, "--node-config of this SuperNode: ", cls.model_fields):
            config = cls(**settings)
        if bool(config.images) == bool(config.program):
            raise FeddgError("--node-config of this SuperNode: give either images or program")
        return config

    @property
    def cache_folder(self) -> Path:
        """The site's cache folder, the user's cache by default."""
        return cache_folder(self.cache).expanduser()


def require_fit_for_sites(experiment: Experiment) -> None:
    """Checks that sites, which train on all their images, can do what an experiment says.

    Raises:
        ExperimentError: they cannot, or tables of features are of nobody knows how many.
    """
    method = method_class(experiment.method.name)
    if method.in_process_only:
        raise ExperimentError(
            f"{method.name} cannot run over a network: {method.in_process_only}; "
            "`feddg run` runs it in one process"
        )
    data, decision = experiment.data, experiment.evaluate.decision is not None
    if data.id_val or data.id_test or data.split_file is not None:
        raise ExperimentError(
            "sites train on all their images: set data.id_val and data.id_test to 0, and leave "
            "data.split_file out"
        )
    if decision or experiment.train.select_every or experiment.server.wise_ft == "auto":
        raise ExperimentError(
            "sites have no validation images, by which evaluate.decision, train.select_every and "
            "server.wise_ft: auto choose: leave these out"
        )
    if experiment.data.source == FEATURES and experiment.data.features is None:
        raise ExperimentError(
            "sites have tables of features, but the experiment does not say how many features: "
            "set data.features to their number in a row"
        )


def read_experiment(run_config: Mapping[str, object]) -> Experiment:
    """Returns the experiment in a deployment's run config.

    Raises:
        ExperimentError: it is missing, invalid, or cannot run across a network.
    """
    if not (text := str(run_config.get("experiment", ""))):
        raise ExperimentError(
            "the Flower app's config has no 'experiment'; write the app with `feddg deploy init`"
        )
    experiment = Experiment(**parse_fields(text))
    require_fit_for_sites(experiment)
    return experiment


class MissingContext(FeddgError):
    """Raised if the site has no shared context, or has lost it."""


class Site:
    """A site, from its SuperNode's config and the deployment's experiment.

    Args:
        config: the SuperNode's.
        run_config: the deployment's, with the experiment.
        progress: called while images are decoded.

    Raises:
        FeddgError: the config, the experiment or the images cannot be used.
    """

    def __init__(
        self,
        config: SiteConfig,
        run_config: Mapping[str, object],
        progress: Progress = silent,
    ) -> None:
        self.config = config
        experiment = read_experiment(run_config)
        self.experiment = experiment.model_copy(update={"device": self.config.device})
        self.table, self.pixels = load_pixels(
            self.config.images,
            self.config.domain,
            self.experiment,
            self.config.cache_folder,
            "" if self.config.labels else self.config.site,
            progress,
        )

    def register(self, payload: Payload) -> Payload:
        """Returns the site's name, classes, domains, numbers of images, and codec."""
        self._memory(Request.read(payload))
        registration = self._registration().message
        return Payload({"site": self.config.site}, {"registration": registration})

    def client_statistics(self, payload: Payload) -> Payload:
        """Returns the site's statistics for the method's setup."""
        with self._client(payload) as (client, method, _):
            return Payload(parts={"reply": client_statistics(client, method)})

    def train(self, payload: Payload) -> Payload:
        """Trains one round."""
        with self._client(payload) as (client, method, defences):
            return Payload.of_update(train(client, method, defences))

    def answer(self, payload: Payload) -> Payload:
        """Answers a method's question about the weights that came with it."""
        question = Request.read(payload).question
        with self._client(payload, after_training=True) as (client, method, defences):
            reply = answer(client, method, question, defences)
            return Payload(parts={"reply": reply})

    def evaluate(self, payload: Payload) -> Payload:
        """Evaluates the weights on the site's images, without training."""
        request, table = Request.read(payload), self.table
        self._memory(request)
        method, worker, _ = self._build(len(request.classes))
        load_weights(worker.network, payload.part("weights").tensors)
        if self.config.labels:
            table = positions(table, request.classes, list(table.domain_names))
        else:
            # Their class is none of the federation's: the first stands for it, and counts nowhere.
            table = replace(table, class_names=tuple(request.classes))
        evaluation = on_all_images(table, self.pixels, self.experiment, worker)
        scores = evaluation.scores(method.predictor(worker.network))
        if not self.config.labels:
            (score,) = scores
            inputs: dict[str, Scalar] = {"images": score.examples, "confidence": score.confidence}
            return Payload(parts={"scores": Message({}, inputs)})
        rows = [
            DomainScore(
                domain=score.domain,
                loss=score.loss,
                confusion=score.confusion.tolist(),
                groups=score.counted[0],
                independent=score.counted[1],
            )
            for score in scores
        ]
        return Payload(parts={"scores": Message({}, {"scores": DOMAIN_SCORES.to_text(rows)})})

    @contextmanager
    def _client(
        self, payload: Payload, *, after_training: bool = False
    ) -> Iterator[tuple[Client, Method, Defences]]:
        """Yields the client that a message addresses; stores its memory if nothing fails.

        Args:
            payload: the message.
            after_training: whether the memory of this very round is already used.
        """
        request = Request.read(payload)
        memory = self._memory(request)
        self._require_single()
        method, worker, defences = self._build(len(request.classes))
        context, frozen = without_frozen(self._context(request.context, payload, memory))
        load_weights(worker.network, frozen)
        extras = payload.part("extras")
        client = Client(
            request.client,
            self._examples(request.classes, request.domains),
            worker,
            round=request.round,
            memory=on_device(
                memory.before(request.round + after_training, request.counted), worker.device
            ),
            context=context,
            received=payload.part("weights").tensors,
            extras=Message(on_device(extras.tensors, worker.device), extras.scalars),
            secrets=memory.secrets(request.round),
        )
        yield client, method, defences
        if client.memory:
            memory.keep(client.round, client.memory)
        memory.keep_secrets(client.secrets)

    def _build(self, classes: int) -> tuple[Method, Worker, Defences]:
        # All weights come with the message: a site needs no pretrained ones.
        method, network = build(self.experiment.without_weights, classes)
        defences = build_defences(self.experiment, method, network)
        chosen = find_augmentation(self.experiment.train.augmentation)
        cache = self.config.cache_folder
        worker = build_worker(network, self.experiment, chosen, cache, defences)
        return method, worker, defences

    def _context(self, digest: str, payload: Payload, memory: SiteMemory) -> Message | None:
        if not digest:
            return None
        if CONTEXT in payload.parts:
            memory.keep_context(digest, payload.parts[CONTEXT])
            return payload.parts[CONTEXT]
        context = memory.context(digest)
        if context is None:
            raise MissingContext("it was not sent the shared context of before round 1")
        return context

    # What a site with a program of its own has otherwise.

    def _require_single(self) -> None:
        """Refuses to train where an epsilon is for one file, and some are copies.

        Raises:
            ClientError: some are; the site's log names them.
        """
        fault = copies_in(self.table, self.experiment, self.config.cache_folder)
        if fault is not None and fault.severity == "error":
            log.error("%s", fault.text)
            raise ClientError(
                "holds an image more than once, and epsilon protects one file; its log says more"
            )

    def _registration(self) -> Registration:
        return registration_of(self.table, self.experiment)

    def _memory(self, request: Request) -> SiteMemory:
        """Returns the site's memory of a run, after checking that its images have not changed.

        Files that the method reads, such as a codec's weights, must not change either. The
        coordinator only learns that something changed; the details are in the site's log.

        Raises:
            ClientError: they changed.
            FeddgError: the memory cannot be read or written; names the file.
        """
        cache, table = self.config.cache_folder, self.table
        closed = method_class(self.experiment.method.name).one_round
        seed = self.experiment.seed
        memory = SiteMemory(cache, request.run, self.config.site, seed, closed=closed)
        now = images_file(table, cache)
        now = now.model_copy(update={"files": methods_files(self.experiment)})
        before = ImagesFile.read(memory.folder / IMAGES)
        if before is None:
            replace_text(memory.folder / IMAGES, now.to_text())
        elif changes := difference(before, now):
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
        return memory

    def _examples(self, classes: list[str], domains: list[str]) -> Examples:
        table = positions(self.table, classes, domains)
        return Examples.of(
            self.pixels,
            torch.arange(len(table)),
            torch.from_numpy(table.labels),
            torch.from_numpy(table.domains),
            len(classes),
        )


class ProgramSite(Site):
    """A site whose own program says what is trained: images, network, method, loss and score.

    Args:
        config: the site's.
        federation: what the program made; its only client is the site.
    """

    def __init__(self, config: SiteConfig, federation: Federation) -> None:
        self.config, self.federation = config, federation
        self.names = federation.class_names if federation.names else ()

    def evaluate(self, payload: Payload) -> Payload:
        """Refuses: scores of another task than classification stay where they were measured."""
        raise ClientError(f"{self.config.site} only trains; evaluate where its program runs")

    def _build(self, classes: int) -> tuple[Method, Worker, Defences]:
        return self.federation.method, self.federation.worker, self.federation.defences

    def _require_single(self) -> None:
        """Nothing is known of a program's files."""

    def _registration(self) -> Registration:
        labels, domains = self.federation.clients[0].labels, Counter(self._domain_names())
        counts = {TARGETS: len(labels)}
        if self.names:
            counted = zip(self.names, labels.bincount(minlength=len(self.names)).tolist())
            counts = {name: n for name, n in counted if n or name in self.federation.names}
        return Registration.of(classes=counts, domains=dict(domains))

    def _memory(self, request: Request) -> SiteMemory:
        """Returns the site's memory of the run; nothing is known of its program's files."""
        seed, closed = self.federation.settings.seed, self.federation.method.one_round
        cache = self.config.cache_folder
        return SiteMemory(cache, request.run, self.config.site, seed, closed=closed)

    def _examples(self, classes: list[str], domains: list[str]) -> Examples:
        examples = self.federation.clients[0]
        labels = examples.labels
        if self.names and classes != [TARGETS]:
            tables = [dict(enumerate(self.names))] * len(labels)
            labels = torch.from_numpy(renumbered(labels.numpy(), tables, classes, "its program"))
        places = {name: place for place, name in enumerate(domains)}
        numbers = [places[name] for name in self._domain_names()]
        return replace(examples, labels=labels, domains=torch.tensor(numbers))

    def _domain_names(self) -> list[str]:
        """Returns the domain of each image: as its data set says, or the site."""
        names = dict(enumerate(self.federation.domain_names))
        numbers = self.federation.clients[0].domains.tolist()
        return [names.get(number) or self.config.site for number in numbers]


def site_of(node_config: Mapping[str, object], run_config: Mapping[str, object]) -> Site:
    """Returns the site that a node is, by its config.

    Raises:
        FeddgError: the config, the experiment, the images or the program cannot be used.
    """
    config = SiteConfig.read(node_config)
    if not config.program:
        return Site(config, run_config)
    try:
        made = pkgutil.resolve_name(config.program)()
    except (ImportError, AttributeError, ValueError) as error:
        raise FeddgError(f"program {config.program!r} cannot be used: {error}") from None
    if not isinstance(made, Federation):
        kind = type(made).__name__
        raise FeddgError(f"program {config.program!r} must return a feddg.Federation, not {kind}")
    if len(made.clients) != 1:
        raise FeddgError(
            f"program {config.program!r} has {len(made.clients)} data sets, and a site is one "
            "client: join them (torch.utils.data.ConcatDataset)"
        )
    return ProgramSite(config, made)
