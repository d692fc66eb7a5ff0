"""Prepares a run from its experiment: images, splits, clients, network, method."""

import ctypes
import hashlib
import inspect
import math
import os
import platform
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy
import torch

from feddg.clients.client import Examples, Worker, batches_of_pass, steps_of_round
from feddg.data.data_set import DATA_SETS, find_augmentation, load_images_of, load_source
from feddg.data.decoding import Reading, cut, quiet_pillow, whole_images
from feddg.data.fingerprint import (
    ImagesFile,
    contents_of_rows,
    file_of,
    hash_file,
    images_file,
)
from feddg.data.groups import (
    about_groups,
    further_units,
    partitioned_units,
    roles_of_units,
    units_of,
)
from feddg.data.images import ImageTable, composed
from feddg.data.inspection import (
    WEAKENS,
    Survey,
    about_clients,
    about_columns,
    about_copies,
    about_ignored,
    about_labels,
    about_splits,
    about_survey,
    groups_of_copies,
    ignored_files,
    is_readable,
    open_images,
)
from feddg.data.near_copies import about_near_copies
from feddg.data.partition import (
    Dealing,
    Partition,
    counts_clients,
    held_alike,
    partition,
    partitioned_alike,
    rules_of,
)
from feddg.data.pixels import ArrayPixels, PixelStore, Vectors
from feddg.data.protocols import from_csv
from feddg.data.splits import (
    ROLES,
    Splits,
    check_shares,
    from_roles,
    hold_out,
    in_domain_roles,
)
from feddg.diagnostics import Diagnostic, Progress, emit, logged_once, note, silent, warn, warning
from feddg.errors import ExperimentError, FeddgError, first_names, nearest
from feddg.evaluation.accuracy import Evaluation
from feddg.evaluation.decision import Decision
from feddg.experiment import Experiment
from feddg.federation.federation import Clients, Federation, build
from feddg.federation.inprocess import InProcess
from feddg.methods.base import Method
from feddg.methods.composition import build_method, method_class
from feddg.models.backbones import require_weights, weights_digest
from feddg.models.network import Network
from feddg.privacy.accounting import about_delta
from feddg.records import BadImageRow, ClientRow, ClientsTable
from feddg.runs.idle import about_normalization, idle_clients, unreached_weight
from feddg.settings import (
    IMAGENET,
    DataSettings,
    EvaluateSettings,
    Fields,
    TrainSettings,
    without_effect,
)
from feddg.storage import Stamp, stamp
from feddg.storage import cache_folder as cache_folder
from feddg.text import counted


class Loaded(NamedTuple):
    """The experiment's images: usable rows, their pixels, and the skipped files.

    ``ignored`` lists other files in their folder by kind; ``surveyed`` tells how images are stored.
    """

    table: ImageTable
    pixels: PixelStore
    bad: list[BadImageRow]
    contents: ImagesFile
    ignored: dict[str, list[str]]
    surveyed: Survey


def _hashes(table: ImageTable, images: ImagesFile, data: DataSettings) -> list[str]:
    """Returns a hash of each row's file, or of the row itself; empty if unknown.

    What a published data set draws is as it is.
    """
    if table.images is not None and DATA_SETS.find(data.source).publication is None:
        return contents_of_rows(table)
    contents = images.contents()
    files = (file_of(path) for path in table.paths)
    return [contents[file][1] if file in contents else "" for file in files]


def named_files(experiment: Experiment) -> dict[str, str]:
    """Returns the hashes of the files that an experiment names, by dotted field.

    Missing or unreadable files are left out; the code that needs them reports them. A method that
    is not of this package has its code among them.
    """
    weights = experiment.model.weights
    named = {"data.split_file": experiment.data.split_file}
    named["model.weights"] = None if weights in (None, IMAGENET) else Path(str(weights))
    method = method_class(experiment.method.name)
    code = _code_of((*method.__mro__, *method.Settings.__mro__))
    own = {"method code": code} if code else {}
    return methods_files(experiment) | _of_files(named) | own


@lru_cache(maxsize=64)  # as it was first seen: an edit during a run is not what runs
def _code_of(classes: tuple[type, ...]) -> str:
    """Returns a hash of the code of classes outside this package; empty if there are none.

    Of a module all counts. Of a script or a notebook, which changes for other reasons, too, only
    the classes.
    """
    texts = dict[str, None]()
    for one in classes:
        name = one.__module__
        if name.partition(".")[0] not in {"feddg", "pydantic", *sys.stdlib_module_names}:
            with suppress(OSError, TypeError, KeyError):  # typed into an interpreter
                source = inspect.getsource(one if name == "__main__" else sys.modules[name])
                texts[source] = None
    content = hashlib.blake2b("".join(texts).encode(), digest_size=8)
    return content.hexdigest() if texts else ""


def methods_files(experiment: Experiment) -> dict[str, str]:
    """Returns the hashes of the files in the method's settings, which every client reads."""
    settings = build_method(experiment.method.name, experiment.method.settings).settings
    return _of_files({f"method.{name}": value for name, value in settings})


def _of_files(values: Mapping[str, object]) -> dict[str, str]:
    hashes: dict[str, str] = {}
    for field, path in values.items():
        if isinstance(path, Path) and (now := stamp(path)) is not None:
            with suppress(OSError):
                hashes[field] = _hash(path, now)
    return hashes


@lru_cache(maxsize=64)
def _hash(path: Path, now: Stamp) -> str:
    return hash_file(path)


def load_undecoded(experiment: Experiment, cache: Path | None) -> Loaded:
    """Loads the experiment's images without decoding them.

    Unusable files are included, except copies in several classes or domains. Content hashes are
    computed if the split depends on them.

    Raises:
        DataError: the images cannot be used with these settings.
    """
    data, bad = experiment.data, list[BadImageRow]()
    table = load_images_of(data)
    _check_names(experiment, table)
    root = table.root if _keeps_copies_together(data) else None
    contents = images_file(table, cache, with_contents=root is not None)
    if root is not None:
        cells = list(zip(table.labels.tolist(), table.domains.tolist()))
        unusable = {
            row
            for rows in groups_of_copies(table.paths, _hashes(table, contents, data))
            if len({cells[row] for row in rows}) > 1
            and not is_readable(root / table.paths[rows[0]])
            for row in rows
        }
        paths = [table.paths[row] for row in sorted(unusable)]
        bad = [BadImageRow(path=path, reason="cannot be read") for path in paths]
        table = table.take([row for row in range(len(table)) if row not in unusable])
    if data.tile is not None and table.root is not None:
        with quiet_pillow(tiled=True):
            table = cut(table, data.tile)  # a row for every tile
    pixels = ArrayPixels(numpy.empty((0, data.image_size, data.image_size, 3), numpy.uint8))
    return Loaded(table, pixels, bad, contents, {}, Survey({}, {}))


def load_table(experiment: Experiment, cache: Path | None, progress: Progress) -> Loaded:
    """Loads the experiment's images.

    Raises:
        DataError: the images cannot be used with these settings.
    """
    data = experiment.data
    table = load_images_of(data)
    _check_names(experiment, table)
    opened, surveyed = open_images(table, data, cache, progress=progress)
    contents = images_file(table, cache).model_copy(
        update={"depths": dict(surveyed.depths), "files": named_files(experiment)}
    )
    ignored = ignored_files(table, data.leave_out)
    return Loaded(*opened, contents, ignored, surveyed)


def _check_names(experiment: Experiment, table: ImageTable) -> None:
    """Refuses what a list of the images shows to be wrong, before hours of decoding.

    Raises:
        DataError: there is no such domain.
        ExperimentError: there is no such class, or two things say what is held out.
    """
    unseen, split_file = experiment.hold_out, experiment.data.split_file
    held_out = [*unseen.test, *unseen.val]
    if split_file is not None and held_out:
        raise ExperimentError(
            f"the split file {split_file} already says what is held out; do not set hold_out"
        )
    for name in held_out:
        table.domain_id(name)
    decision_of(experiment.evaluate, table.class_names)


def table_diagnostics(data: DataSettings, loaded: Loaded) -> list[Diagnostic]:
    """Returns warnings about an experiment's images, for any partition."""
    return [
        *about_ignored(loaded.ignored),
        *about_survey(loaded.surveyed, Reading.of(data)),
        *about_labels(loaded.table, DATA_SETS.find(data.source).classes),
    ]


def split_diagnostics(
    experiment: Experiment, loaded: Loaded, images: "Images | None"
) -> list[Diagnostic]:
    """Returns warnings about copies and, of images that are dealt, about the split and clients.

    Those are about clients that dominate, and groups on both sides of the split or at several
    sites.
    """
    data, roles, table = experiment.data, experiment.hold_out, loaded.table
    diagnostics: list[Diagnostic] = []
    splits = None if images is None else images.splits
    if splits is not None:
        rounds, evaluate = experiment.train.rounds, experiment.evaluate
        evaluated = sum(evaluate.after(round, rounds) for round in range(1, rounds + 1))
        picks = evaluated > 1 or experiment.server.wise_ft == "auto"
        chosen = bool(roles.test or roles.val)
        diagnostics += about_splits(table, splits, chosen=chosen, picks=picks)
        diagnostics += about_columns(table, splits)
    ignored, hides_images = data.duplicates == "ignore", experiment.privacy.hides_images
    if hides_images or not ignored:
        hashes, refuse = _hashes(table, loaded.contents, data), _refuses_copies(data)
        found = about_copies(table, hashes, splits, refuse, hides_images)
        diagnostics += (one for one in found if not ignored or one.code.endswith(WEAKENS))
    if images is not None:
        diagnostics += about_clients(images.partition.sizes.tolist())
        diagnostics += about_groups(images.table, images.splits, images.partition.owners)
    return diagnostics


def near_copy_diagnostics(experiment: Experiment, images: "Images") -> Iterator[Diagnostic]:
    """Reports near copies of training images in validation or test sets; reads all pixels once."""
    table, data = images.table, experiment.data
    alike = DATA_SETS.find(data.source).alike
    searched = table.root is not None or alike or isinstance(images.pixels, Vectors)
    if data.duplicates != "ignore" and searched:
        hashes = _hashes(table, images.contents, data)
        yield from about_near_copies(images.pixels, table.paths, hashes, images.splits, alike)


def _refuses_copies(data: DataSettings) -> bool:
    """Whether copies across the split end a run; not for published splits."""
    published = data.split_file is not None or DATA_SETS.find(data.source).publication is not None
    return data.duplicates == "refuse" or (data.duplicates == "auto" and not published)


def _keeps_copies_together(data: DataSettings) -> bool:
    """Whether copies in one class and domain share a role; not in published data sets."""
    published = DATA_SETS.find(data.source).publication is not None
    return data.duplicates == "refuse" or (data.duplicates != "ignore" and not published)


@dataclass(frozen=True)
class Images(Clients):
    """The experiment's images and their partition over clients.

    Attributes:
        table: usable images.
        pixels: their decoded pixels, row by row.
        bad: files that could not be used.
        splits: rows by role.
        partition: training rows by client.
        seed: the experiment's seed.
        steps: a client's optimizer steps per round, if the partition determines them; None if the
            experiment does.
        natural: whether clients are the real holders of images, so that each has its own in-domain
            validation images.
        by_class: whether a rule decides which classes clients hold, so that their own validation
            images are of these, too.
        units: ``(n,)`` the group of each row in its domain, which is never split; None without.
        contents: the record of these images, for the run's folder.
    """

    table: ImageTable
    pixels: PixelStore
    bad: list[BadImageRow]
    splits: Splits
    partition: Partition
    seed: int
    steps: int | None
    natural: bool
    by_class: bool
    units: numpy.ndarray | None
    contents: ImagesFile

    def __len__(self) -> int:
        """The number of clients."""
        return len(self.partition)

    @cached_property
    def held(self) -> ClientsTable:
        """Counts of the clients' training images by domain and class, for ``clients.json``."""
        table = self.table
        domains, classes = len(table.domain_names), len(table.class_names)
        held = [self.splits.train[positions] for positions in self.partition.rows]
        return ClientsTable(
            domains=list(table.domain_names),
            classes=list(table.class_names),
            clients=[
                ClientRow(
                    id=id,
                    domains=numpy.bincount(table.domains[rows], minlength=domains).tolist(),
                    classes=numpy.bincount(table.labels[rows], minlength=classes).tolist(),
                )
                for id, rows in enumerate(held)
            ],
            bad_images=self.bad,
            features=list(table.feature_names),
        )

    def trained_by(self, experiment: Experiment) -> Experiment:
        """Returns the experiment with the actual number of clients and steps.

        ``train.local_epochs`` is the largest number of batches of a round with the same image, even
        if the partition determines the steps.
        """
        clients, train = experiment.clients, experiment.train
        if self.natural:
            number = len(self.partition)
            per_round = clients.per_round and min(clients.per_round, number)
            clients = clients.model_copy(update={"number": number, "per_round": per_round})
        if self.steps is not None:
            batches, _ = batches_of_pass(train, int(self.partition.sizes.max()))
            epochs = math.ceil(self.steps / batches)
            train = train.model_copy(update={"local_steps": self.steps, "local_epochs": epochs})
        return experiment.model_copy(update={"clients": clients, "train": train})

    def __getitem__(self, client: int) -> Examples:
        """Returns the images of a client."""
        train = self._held(self.splits.train[self.partition.rows[client]])
        return replace(train, validation=self._held(self.splits.id_val[self._validation[client]]))

    def _held(self, rows: numpy.ndarray) -> Examples:
        return Examples.of(
            self.pixels,
            torch.from_numpy(rows),
            torch.from_numpy(self.table.labels[rows]),
            torch.from_numpy(self.table.domains[rows]),
            len(self.table.class_names),
        )

    def owners(self, role: str) -> numpy.ndarray:
        """Returns the client of each image of an in-domain role; -1 if it is nobody's."""
        if role == "train":
            return self.partition.owners
        rows = getattr(self.splits, role)
        owners = numpy.full(len(rows), -1)
        for client, places in enumerate(self._dealt(rows)):
            owners[places] = client
        return owners

    @cached_property
    def _validation(self) -> list[numpy.ndarray]:
        """Each client's own in-domain validation images."""
        return self._dealt(self.splits.id_val)

    def _dealt(self, rows: numpy.ndarray) -> list[numpy.ndarray]:
        """Returns each client's places among further in-domain rows."""
        holders = self.table.clients
        if self.natural and holders is not None and len(self.partition) > 1:
            names = holders[self.splits.train]
            _, owners = numpy.unique(names, return_inverse=True)
            if numpy.array_equal(owners, self.partition.owners):  # other rules deal otherwise
                return held_alike(names, holders[rows])
        held, cells = self.partition, self.table.domains
        if self.by_class:  # then an image counts as one of its class in its domain
            cells = cells * len(self.table.class_names) + self.table.labels
            held = replace(held, domains=cells[self.splits.train])
        if self.units is not None:
            return further_units(held, self.units[rows], cells[rows], self.seed)
        return partitioned_alike(held, cells[rows], self.seed)


def images_of(federation: Federation) -> Images:
    """Returns the images of an experiment's federation, whose clients are in this process."""
    assert isinstance(federation.clients, Images)
    return federation.clients


@logged_once()  # a split may list the images again
def load_images(experiment: Experiment, cache: Path | None, progress: Progress) -> Images:
    """Loads, splits and partitions the experiment's images.

    Raises:
        DataError: the images cannot be used with these settings.
    """
    loaded = load_table(experiment, cache, progress)
    emit(*table_diagnostics(experiment.data, loaded))
    images = deal(experiment, loaded)
    emit(*split_diagnostics(experiment, loaded, images))
    return images


def deal(experiment: Experiment, loaded: Loaded) -> Images:
    """Splits the images and partitions the training rows over the clients.

    Raises:
        DataError: the images cannot be split or partitioned with these settings.
    """
    clients, data, table = experiment.clients, experiment.data, loaded.table
    images, image_of = whole_images(table)  # tiles of one image stay together
    splits = _splits(experiment, images, loaded)
    if len(images) < len(table):
        splits = splits.spread(image_of)
    if not any(len(getattr(splits, role)) for role in ROLES if role != "train"):
        warn(
            "nothing-evaluated",
            "Every image trains, so no accuracy is measured.",
            "To measure one, hold a domain out (--hold-out), or raise data.id_val.",
        )
    natural = counts_clients(clients.partition)
    units = units_of(table, _copies(table, loaded, data))
    dealing = Dealing(
        domains=table.domains[splits.train],
        labels=table.labels[splits.train],
        clients=clients.number,
        heterogeneity=clients.heterogeneity,
        alpha=clients.alpha,
        shards=clients.shards,
        quantity_alpha=clients.quantity_alpha,
        holders=None if table.clients is None else table.clients[splits.train],
        seed=experiment.seed,
    )
    if units is None or natural:
        share = partition(clients.partition, dealing)
    else:
        share = partitioned_units(units[splits.train], clients.partition, dealing)
    if experiment.train.select_every and not len(splits.id_val):
        raise ExperimentError(
            "train.select_every tries a client's models on its own validation images, and there "
            "are none; set data.id_val above 0 (FedIG: 0.2)"
        )
    steps = None
    method = method_class(experiment.method.name)
    if method.gathers_images:
        # A method of one round passes over its images once, however many steps that takes.
        steps = None if method.one_round else _steps_of_a_round(experiment, share)
        share = Partition(numpy.zeros_like(share.owners), share.domains, 1)
    by_class = "labels" in rules_of(clients.partition, clients.model_dump())
    return Images(
        *loaded[:3],
        splits,
        share,
        experiment.seed,
        steps,
        natural,
        by_class,
        units,
        loaded.contents,
    )


def _steps_of_a_round(experiment: Experiment, share: Partition) -> int:
    """Returns the total optimizer steps of a round's clients, on average over sampling."""
    train, number = experiment.train, len(share)
    steps = [steps_of_round(train, size) for size in share.sizes.tolist()]
    taking_part = min(number, experiment.clients.per_round or number)
    return max(1, round(sum(steps) * taking_part / number))


_NOT_NEW = (
    "No domain is held out: all train, and accuracies are of domains that trained. They say "
    "nothing about a new one."
)


def _splits(experiment: Experiment, table: ImageTable, loaded: Loaded) -> Splits:
    data, unseen = experiment.data, experiment.hold_out
    held_out = [*unseen.test, *unseen.val]
    if data.split_file is not None:
        _unused_shares(data, "the split file")
        skipped = [image.path for image in loaded.bad]
        if data.leave_out:  # a benchmark's file lists them, too
            everything = data.model_copy(update={"leave_out": (), "group_by": None})
            skipped += load_images_of(everything).paths
        splits = from_csv(table, data.split_file, skipped)
        if not len(splits.test) and not len(splits.val):
            warn("nothing-held-out", _NOT_NEW, "To know that, leave a domain without train rows.")
        return splits
    if not held_out and table.split is not None and is_split(experiment, table):
        _unused_shares(data, "the data set's own split")
        return from_roles(table.split)
    if not held_out and not data.leave_out:
        ask = f"--hold-out DOMAIN, one of {first_names(table.domain_names, 12)}"
        if DATA_SETS.find(data.source).domains:
            raise ExperimentError(f"name the domain that nobody trains on: {ask}")
        warn("nothing-held-out", _NOT_NEW, f"To know that: {ask}.")
    in_domain = _in_domain(table)
    if table.split is not None and data.own_split and not in_domain:
        warn(
            "own-split-unused",
            "The data set's own split holds domains out; it is not used, as hold_out names "
            f"{first_names(held_out)}.",
        )
    if in_domain and data.own_split:
        _unused_shares(data, "the data set's own split")
        roles = table.split
    else:
        check_shares(data.id_val, data.id_test)
        roles = _drawn_roles(experiment, table, loaded)
    return hold_out(table, list(unseen.test), list(unseen.val), seed=experiment.seed, own=roles)


def _drawn_roles(experiment: Experiment, table: ImageTable, loaded: Loaded) -> numpy.ndarray:
    """Returns the in-domain role of each row, by groups if there are any."""
    data, copies = experiment.data, _copies(table, loaded, experiment.data)
    whole, here = table, numpy.ones(len(table), bool)
    if data.left_out_late and data.tile is None:  # tiles are known of opened images alone
        kept = [name for name in data.leave_out if name not in data.left_out_late]
        listed = load_images_of(data.model_copy(update={"leave_out": tuple(kept)}))
        bad = {image.path for image in loaded.bad}
        whole = listed.take([row for row, path in enumerate(listed.paths) if path not in bad])
        late = {*data.leave_out} - {*kept}
        here = ~numpy.isin(whole.domains, [whole.domain_id(name) for name in sorted(late)])
        known = iter(copies)
        copies = [next(known) if mine else "" for mine in here] if copies else ()
    shares = data.id_val, data.id_test, experiment.seed
    if (units := units_of(whole, copies)) is not None:
        return roles_of_units(whole, units, *shares)[here]
    return in_domain_roles(whole, *shares, copies)[here]


def _unused_shares(data: DataSettings, by: str) -> None:
    """Warns of shares for in-domain validation and test that a split does not use."""
    fields = type(data).model_fields
    shares = {name: getattr(data, name) for name in ("id_val", "id_test")}
    unused = [f"data.{n} {share:g}" for n, share in shares.items() if share != fields[n].default]
    if unused:
        text = f"{' and '.join(unused)}: not used, since {by} says which images measure."
        warn("shares-unused", text)


def _copies(table: ImageTable, loaded: Loaded, data: DataSettings) -> Sequence[str]:
    """Returns a hash of each row's file, if copies share a role; else none."""
    return _hashes(table, loaded.contents, data) if _keeps_copies_together(data) else ()


def is_split(experiment: Experiment, table: ImageTable) -> bool:
    """Whether the experiment or an official split determines the split.

    If the domains of a data set are known by name, one of them should be held out, and a split
    within domains is not enough.
    """
    data, roles = experiment.data, experiment.hold_out
    if roles.test or roles.val or data.split_file is not None:
        return True
    if table.split is None:
        return False
    named = DATA_SETS.find(data.source).domains
    return data.own_split and not (named and _in_domain(table))


def roles_of_own_split(data: DataSettings) -> set[str]:
    """Returns the roles in the data set's own split; none if it has none or is not here."""
    with suppress(FeddgError, OSError):
        table = load_source(data.source, data.root, **data.all_options).without(data.leave_out)
        return set() if table.split is None else {*table.split.tolist()}
    return set()


OF_TRAINING = {"train", "id_val", "id_test"}
"""Roles in a split that holds no domain out."""


def _in_domain(table: ImageTable) -> bool:
    """Whether there is an official split that holds no domain out."""
    return table.split is not None and OF_TRAINING.issuperset(table.split)


Prepare = Callable[[Experiment, Path, Progress], Federation]
"""Puts a run's federation together, from the experiment and the cache folder."""


def in_process(
    experiment: Experiment,
    cache: Path,
    progress: Progress = silent,
    *,
    transport: Callable[..., InProcess] = InProcess,
) -> Federation:
    """Returns an experiment's federation, whose clients are in this process.

    Args:
        experiment: the experiment.
        cache: folder for decoded pixels and methods' results.
        progress: called with the progress.
        transport: makes the transport to the clients.

    Raises:
        FeddgError: it cannot be run; what is missing is said before images are decoded.
    """
    method = build_method(experiment.method.name, experiment.method.settings)
    method.check(experiment)
    method.read_files()
    require_weights(experiment.model.backbone, experiment.model.weights)
    images = load_images(experiment, cache, progress)
    if isinstance(images.pixels, ArrayPixels | Vectors):  # others would be decoded once more
        emit(*near_copy_diagnostics(experiment, images))
    elif experiment.data.duplicates != "ignore" and images.table.root is not None:
        text = (
            "Images alike on both sides of the split were not looked for, since not all pixels fit "
            "into data.pixel_budget_gb: feddg data inspect looks for them, given the hold-out."
        )
        emit(note("near-copies-not-looked-for", text))
    return federation_of(experiment, images, cache, transport)


def federation_of(
    experiment: Experiment,
    images: Images,
    cache: Path,
    transport: Callable[..., InProcess] = InProcess,
) -> Federation:
    """Returns an experiment's federation, of its images; see :func:`in_process`."""
    method, network = build(experiment, len(images.table.class_names))
    domains, sizes = images.table.domains[images.splits.train], images.partition.sizes.tolist()
    counts = (len(set(domains[rows])) for rows in images.partition.rows)
    # A complete experiment, such as a stored one, does not tell what its user said.
    whole = experiment.given.keys() >= type(experiment).model_fields.keys() - {"name"}
    given = {} if whole else experiment.given
    emit(*about_settings(experiment, given, method, network, zip(counts, sizes)))
    settings = images.trained_by(experiment)
    chosen = find_augmentation(settings.train.augmentation)
    parts = (images, network, method, settings)
    federation = Federation(*parts, augmentation=chosen, cache=cache, in_process=transport)
    federation.evaluation = build_evaluation(settings, images, federation.worker)
    return federation


def about_settings(
    experiment: Experiment,
    given: Fields,
    method: Method,
    network: Network,
    clients: Iterable[tuple[int, int]],
) -> list[Diagnostic]:
    """Returns what to say of an experiment's settings before it trains.

    Args:
        experiment: the experiment.
        given: what its user said of it.
        method: its method.
        network: what it trains.
        clients: the number of domains and of images of each client that trains.
    """
    counts, train = [*clients], experiment.train
    sizes, said = [images for _, images in counts], without_effect(experiment, given)
    return [
        *(warning("without-effect", text) for text in said),
        *method.diagnostics(experiment),
        *about_normalization(network, experiment),
        *about_delta(experiment.privacy, sizes),
        *_chooses_nothing(method, train, sizes),
        *idle_clients(method, (domains for domains, _ in counts)),
        *unreached_weight(method, train, train.rounds, counts),
    ]


def _chooses_nothing(
    method: Method, train: TrainSettings, sizes: Iterable[int]
) -> Iterator[Diagnostic]:
    """Warns where no client takes more steps than those after which it tries its model."""
    if train.select_every is None or method.gathers_images:
        return
    most = max(steps_of_round(train, images) for images in sizes)
    if most <= train.select_every:
        yield warning(
            "selects-nothing",
            f"train.select_every is {train.select_every}, and no client takes more than "
            f"{counted(most, 'step')} in a round: each tries its last model alone, and sends it.",
            "Lower train.select_every.",
        )


def build_evaluation(
    experiment: Experiment, images: Images, worker: Worker, forgotten: Collection[int] = ()
) -> Evaluation:
    """Returns the evaluation of the global model after a round.

    Args:
        experiment: the experiment.
        images: its images.
        worker: computes.
        forgotten: clients that withdrew; none of their images measures anything.

    Raises:
        ExperimentError: the class to decide about is unknown, or nothing can choose its threshold.
    """
    rows = {name: getattr(images.splits, name) for name in ("test", "val", "id_test", "id_val")}
    if forgotten:
        for role in ("id_val", "id_test"):
            rows[role] = rows[role][~numpy.isin(images.owners(role), [*forgotten])]
    decision = decision_of(experiment.evaluate, images.table.class_names)
    if decision is not None and not len(images.splits.id_val):
        raise ExperimentError(
            "evaluate.decision chooses its threshold on in-domain validation images, and there are "
            "none here; set data.id_val above 0, and so high that a whole group of images fits (a "
            "data set's own split needs val rows, or data.own_split: false)"
        )
    splits = {name: part for name, part in rows.items() if len(part)}
    return evaluation_of(images.table, images.pixels, splits, experiment, worker, decision)


def evaluation_of(
    table: ImageTable,
    pixels: PixelStore,
    splits: Mapping[str, numpy.ndarray],
    experiment: Experiment,
    worker: Worker,
    decision: Decision | None = None,
) -> Evaluation:
    """Returns the evaluation of a model on rows of a table, by split."""
    groups = None
    if table.groups is not None:
        groups = numpy.unique(table.groups, return_inverse=True)[1]
    else:  # tiles of an image belong together, also those that a table of features names
        whole, image_of = whole_images(table)
        groups = image_of if len(whole) < len(table) else None
    return Evaluation(
        pixels,
        splits,
        table.labels,
        table.domains,
        table.domain_names,
        len(table.class_names),
        experiment.evaluate.batch_size,
        worker.device,
        worker.autocast,
        table.paths,
        groups=groups,
        subgroups=table.subgroups,
        decision=decision,
    )


def decision_of(evaluate: EvaluateSettings, class_names: Sequence[str]) -> Decision | None:
    """Returns the decision that an experiment asks for, if any.

    Raises:
        ExperimentError: there is no such class.
    """
    if evaluate.decision is None:
        return None
    name = composed(evaluate.decision)
    if name not in class_names:
        raise ExperimentError(
            f"evaluate.decision: no class is called {name!r}{nearest(name, class_names)}; "
            f"there are: {first_names(class_names, 12)}"
        )
    target = "specificity" if evaluate.sensitivity is None else "sensitivity"
    reached = evaluate.specificity if evaluate.sensitivity is None else evaluate.sensitivity
    return Decision(class_names.index(name), name, target, reached, evaluate.prevalence)


def environment(experiment: Experiment, federation: Federation) -> dict[str, object]:
    """Returns the versions, hardware and settings on which the run's numbers may depend."""
    worker = federation.worker
    autocast = worker.autocast()
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "feddg": version("feddg"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": version("torchvision"),
        "timm": version("timm"),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(worker.device),
        "precision": "bfloat16" if isinstance(autocast, torch.autocast) else "float32",
        "weights": {
            "name": experiment.model.weights,
            "sha256": weights_digest(experiment.model.weights),
        },
        "normalization": {"mean": worker.network.mean, "std": worker.network.std},
        "workers": federation.transport.processes,
    }


def give_memory_back() -> bool:
    """Returns freed memory to the system if the C library can; returns whether it did.

    After a setup with thousands of clients glibc keeps unused memory: 390 MB for 10,000 clients.
    """
    with suppress(OSError, AttributeError, TypeError):  # another C library
        return bool(ctypes.CDLL(None).malloc_trim(0))
    return False


def peak_memory() -> int:
    """Returns the largest resident memory of this process so far, in bytes."""
    try:
        import resource
    except ImportError:  # Windows has no such module
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
