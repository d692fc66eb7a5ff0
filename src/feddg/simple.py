"""A federation in memory: a program's own data sets and network, without files.

>>> fed = feddg.Federation(clients=[site_a, site_b], model=net, method="pardon")
>>> fed.fit(rounds=20).evaluate(site_c).accuracy

It uses the same server, methods, defences and optimizers as an experiment.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from threading import Thread, current_thread
from typing import Any, Protocol, Self
from weakref import WeakKeyDictionary

import numpy
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from feddg.clients.client import Examples
from feddg.data.augment import can_move, cannot_move, shows_pixels
from feddg.data.class_names import (
    REMEDY,
    Numbered,
    domains_of,
    joined,
    own_domains,
    renumbered,
    tables_of,
)
from feddg.data.data_set import find_augmentation
from feddg.data.decoding import UnusableImageError, as_rgb, make_square
from feddg.data.pixels import ArrayPixels
from feddg.diagnostics import Progress, emit, silent, warn, warning
from feddg.errors import ExperimentError, FeddgError, RunError, first_names, nearest
from feddg.evaluation.accuracy import Evaluation, Score
from feddg.experiment import ONE_ROUND, checked_settings, expand
from feddg.federation import federation
from feddg.federation.federation import prepared_network
from feddg.federation.local_training import load_weights
from feddg.federation.transport import Transport
from feddg.messages import Weights
from feddg.methods.base import Method, RoundHook, has_global_model, title_of
from feddg.methods.composition import check_task, method_class, works_on_embeddings
from feddg.models.backbones import split_network
from feddg.models.convolutions import check_convolutions
from feddg.models.dropout import draw_dropout_from
from feddg.models.network import Network
from feddg.models.task import CLASSIFICATION, Task
from feddg.privacy.accounting import about_delta
from feddg.readers import function
from feddg.runs.idle import about_normalization, idle_clients, unreached_weight
from feddg.settings import (
    SHORTHANDS,
    ExperimentSettings,
    Fields,
    TrainSettings,
    leaves,
    merge,
    without_effect,
)
from feddg.storage import hash_of
from feddg.text import counted

PARTS = ("train", "server", "privacy", "defences", "seed", "device", "precision")
FIELDS = {
    "clients.per_round": "clients_per_round",
    "model.normalization": "normalization",
    "evaluate.batch_size": "evaluate={'batch_size': ...}",
}
"""What a federation in memory takes of an experiment: parts, and fields with how they are given."""


class Labelled(Protocol):
    """A data set of pairs (image, class id), as ``torch.utils.data.Dataset``.

    Images are PIL's of 8 bits a colour (what is transparent becomes white), or tensors
    ``(3, H, W)`` or ``(1, H, W)`` of uint8, or of floats in [0, 1]. If a client's images are of
    several domains, an attribute ``domains`` names the domain of each; otherwise the client is one.
    It may be that of a data set inside, as of a ``Subset`` or ``ConcatDataset``; inside another
    one, only if all labels are those inside.
    """

    def __len__(self) -> int:
        """Returns the number of images."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Returns an image and its class id, or another task's target."""
        ...


class Federation(federation.Federation):
    """Clients with images, a network, and a method; trained in this process.

    Every image is read once, with 8 bits per colour, and kept in memory. So random changes belong
    in ``augmentation``, not in the data set.

    Args:
        clients: one data set per client.
        model: maps RGB images in [0, 1], ``(B, 3, H, W)``, to logits ``(B, classes)``, or to what
            the task's loss takes; a copy of it is trained. Methods that work on embeddings need
            one whose last layer is ``nn.Linear``, as torchvision's have, or a
            :class:`feddg.models.network.Network`.
        method: a name, class or object: ``feddg.methods.Pardon(gamma1=0.5)``.
        image_size: side in pixels that images are resized to; by default all must be square and
            equal.
        normalize: mean and standard deviation of the colours that the model expects; by default its
            images are in [0, 1].
        class_names: the classes in the order of the logits. By default those that data sets name
            in ``class_to_idx`` or ``classes``, as torchvision's do; else numbers. Data sets with
            names are joined by them: :mod:`feddg.data.class_names`. To go on with another
            federation's :attr:`model`, give them where clients say another order.
        task: what is trained, if not one class an image: a loss and a score. The data sets then
            give targets instead of class ids, tensors of one shape. Augmentation moves targets
            ``(..., H, W)`` and ``(H, W, C)`` with their images, by the nearest pixel, and refuses
            others of two or more sides or H x W numbers.
        cache: folder for methods' cached results; no cache by default.
        transport: carries messages to the clients; by default they are in this process. With one,
            ``clients`` is one data set like theirs, which shows shapes.
        number: how many clients there are, if some are elsewhere.
        hooks: what happens in every round besides: objects of :class:`feddg.RoundHook`.
        **fields: fields of an experiment: ``lr``, ``batch_size``, ``local_epochs``, ``rounds``,
            ``seed``, ``device``, ``clients_per_round``, ``augmentation``, ``privacy``,
            ``defences``, ...

    Raises:
        ExperimentError: a field is unknown or out of range, an image or label cannot be used, or
            the method cannot run with these settings.

    Attributes:
        server: runs the rounds; ``server.state`` holds the global weights.
        transport: the transport to the clients.
        network: the network that clients take turns on.
        class_names: the classes in the order of the logits.
        names: those of them that have a name.
    """

    _sources: Sequence[tuple[str, Numbered | None]] = ()

    def __init__(
        self,
        clients: Iterable[Labelled],
        model: nn.Module,
        method: str | type[Method] | Method = "fedavg",
        *,
        image_size: int | None = None,
        normalize: tuple[Sequence[float], Sequence[float]] | None = None,
        class_names: Sequence[str] | None = None,
        task: Task = CLASSIFICATION,
        cache: Path | None = None,
        transport: Transport | None = None,
        number: int | None = None,
        hooks: Sequence[RoundHook] = (),
        **fields: Any,
    ) -> None:
        method = method_class(method) if isinstance(method, str) else method
        method = method if isinstance(method, Method) else method()
        if method.gathers_images:
            raise ExperimentError(f"{method.name} trains where all images are: it has no clients")
        clients = [*clients]
        if not clients:
            raise ExperimentError("a federation needs clients: a data set each")
        arrays = []
        for id, dataset in enumerate(clients):
            arrays.append(read_images(dataset, f"client {id}", image_size, task))
            side, here = arrays[0][0].shape[1], arrays[id][0].shape[1]
            if here != side:
                raise ExperimentError(
                    f"client {id} has images of {here} pixels, and client 0 of {side}: resize "
                    "them in the data sets, or give image_size="
                )
        number = number or len(clients if transport is None else transport.clients)
        settings, shape = _settings(method, fields, number, side), arrays[0][1].shape[1:]
        if not task.has_classes and settings.precision == "auto":
            settings = settings.model_copy(update={"precision": "float32"})  # 8 bits are no number
        check_task(type(method), task, shows_pixels(shape, side))
        if transport is None and (hides := settings.privacy.hides_images):
            _refuse_copies((images for images, _ in arrays), hides)
        augmentation = find_augmentation(settings.train.augmentation)
        if augmentation.moves and shows_pixels(shape, side) and not can_move(shape, side):
            raise ExperimentError(f"client 0 {cannot_move(shape, side)}")
        start = _network_of(model, method, arrays[0][0], settings.seed, normalize, task)
        _check_head(type(model).__name__, start, settings.train, task)
        if class_names and task.has_classes and len(class_names) != start.classes:
            raise ExperimentError(
                f"class_names has {counted(len(class_names), 'name')}, but the model gives "
                f"{start.classes} logits: name each of them"
            )
        self.names = tuple(map(str, class_names or ()))
        if len({*self.names}) < len(self.names) or not all(map(str.strip, self.names)):
            raise ExperimentError("class_names: a class has no name, or two have the same")
        numbers, self.domain_names = _domains(clients, [targets for _, targets in arrays])
        if task.has_classes:
            tables = [tables_of(dataset, labels) for dataset, (_, labels) in zip(clients, arrays)]
            if not self.names:
                named = enumerate(tables)
                self._sources = [s for id, of in named for s in _distinct(f"client {id}", of)]
                self.names = _all_names(self._sources, transport, start.classes)
                _check_order(getattr(model, "logit_names", ()), self.names, start.classes)
            for id, (images, labels) in enumerate(arrays):
                arrays[id] = images, renumbered(labels, tables[id], self.names, f"client {id}")
        for id, (_, targets) in enumerate(arrays):
            _check_targets(targets, f"client {id}", task, start.classes, arrays[0][1])
        _try_task(task, start, *arrays[0])
        _draws_by_itself(start, arrays[0][0])
        method.check(settings)
        said = (
            warning("without-effect", text) for text in without_effect(settings, expand(fields))
        )
        emit(*said, *method.diagnostics(settings))
        method.read_files()

        def another() -> Network:
            network = prepared_network(copy.deepcopy(start), method, settings)
            check_convolutions(network, _look(arrays[0][0]))
            return network

        super().__init__(
            _examples(arrays, numbers, start.classes),
            another(),
            method,
            settings,
            augmentation=augmentation,
            task=task,
            transport=transport,
            hooks=hooks,
            cache=cache,
            another=another,
        )
        emit(*about_normalization(self.network, settings))
        known = self.transport.domains if self.remote else self.clients
        if len(known) == settings.clients.number:
            emit(*idle_clients(method, (domains for domains, _ in self._counts())))
            emit(*about_delta(settings.privacy, [images for _, images in self._counts()]))
        rest = [str(number) for number in range(len(self.names), start.classes)]
        self.class_names = (*self.names, *(f"unnamed {n}" if self.names else n for n in rest))
        if self.names and self.remote:
            if strange := sorted(set(self.transport.class_names) - set(self.class_names)):
                raise ExperimentError(
                    f"sites have the class {strange[0]!r}, which is none of the federation's: "
                    f"{first_names(self.class_names)}; {REMEDY}"
                )
            self.transport.class_names = self.class_names

    def fit(self, rounds: int | None = None, progress: Progress = silent) -> Self:
        """Trains for some rounds; a further call continues.

        Args:
            rounds: number of rounds; by default the field ``rounds``.
            progress: called with what is done before round 1.

        Raises:
            NotEnoughUpdates: too few clients' updates could be used.
            ExperimentError: it is no whole number of rounds, or other clients are elsewhere and no
                transport reaches them.
        """
        here, number = len(self.transport.clients), self.settings.clients.number
        if here != number:
            raise ExperimentError(f"{here} of {number} clients are here: give a transport to all")
        train = self.settings.train
        rounds = train.rounds if rounds is None else rounds
        if not isinstance(rounds, Integral) or rounds < 0:
            raise ExperimentError(f"rounds is {rounds!r}; it must be a whole number from 0")
        planned = self.server.state.round + rounds
        emit(*unreached_weight(self.method, train, planned, self._counts()))
        return super().fit(rounds, progress)

    @property
    def model(self) -> nn.Module:
        """The global model in eval mode: RGB in [0, 1] to logits; looks at later ones change it."""
        if not has_global_model(self.method, self.network):
            raise FeddgError(f"under {self.method.name} every client has a model of its own")
        model = self.predictor(self.weights)
        if self.names:
            vars(model)["logit_names"] = self.class_names  # copies and torch.save keep it
        return model

    def evaluate(
        self, dataset: Labelled, name: str = "test", groups: Sequence[Any] | None = None
    ) -> Score:
        """Evaluates the global model on a data set: ``accuracy``, ``loss``, ``metrics``, ...

        Under another task ``mean`` is its mean score, with an ``interval`` over images, or over
        groups of them (patients); ``minus`` compares two models. If clients share no model, returns
        the mean over their models. Where the data set names its classes, they are found by name,
        whatever their numbers.

        Args:
            dataset: a data set like the clients'.
            name: name of its domain.
            groups: what each image belongs to, numbers or texts; None if images are independent.

        Raises:
            ExperimentError: an image or target cannot be used, or groups are not one an image.
        """
        task = self.worker.task
        images, targets = read_images(dataset, name, self.image_size, task)
        if task.has_classes:
            targets = self._renumbered(dataset, targets, name)
        example = self.clients[0].labels[:1].numpy()
        _check_targets(targets, name, task, self.classes, example)
        rows = numpy.arange(len(targets))
        evaluation = self._evaluation(images, targets, {"test": rows}, name)
        if groups is not None:
            if len(groups) != len(targets):
                raise ExperimentError(
                    f"{name} has {len(targets)} images and {len(groups)} groups: give one for each"
                )
            evaluation = replace(evaluation, groups=_numbered(groups, name))
        (score,) = self.scores(evaluation, self.weights)
        return score

    def predict(self, images: Labelled | Tensor | Sequence[Any]) -> Tensor:
        """Returns the probabilities ``(n, classes)`` for images: a data set, tensor or list.

        Columns are in the order of :attr:`class_names`, which need not be the data set's own.
        Under another task than classification, returns the network's outputs ``(n, ...)``.
        """
        pixels, _ = read_images(images, "images", self.image_size, None)
        none = numpy.zeros(len(pixels), dtype=numpy.int64)
        evaluation = self._evaluation(pixels, none, {}, "images").in_float32()
        outputs = evaluation.predict(self.model, numpy.arange(len(pixels)))
        return outputs.softmax(1) if self.worker.task.has_classes else outputs

    def save(self, path: Path | str) -> Path:
        """Writes the global model to a file that works without this package.

        Args:
            path: ends in ``.onnx`` (predictions are checked; `feddg predict` accepts it), ``.pt2``
                (a ``torch.export`` program), or ``.safetensors`` (weights only, for ``model``'s
                ``load_state_dict``; with more names if the method adds layers).

        A graph gives probabilities of classes: under another task only weights are written.

        Raises:
            RunError: the suffix is another, the file cannot be written, or it predicts differently;
                or a graph is asked for under a task without classes.
        """
        if not self.worker.task.has_classes and Path(path).suffix.lower() != ".safetensors":
            raise RunError(
                f"{path}: a graph gives probabilities of classes, and this task has none: save the "
                "weights (.safetensors), or give fed.model to torch.export yourself"
            )
        about = {
            "class_names": list(self.class_names),
            "image_size": self.image_size,
            **self.settings.data.model_dump(include={"resize", "range", "bands", "tile"}),
            "method": self.method.name,
            "round": self.server.state.round,
        }
        return function("write_model")(self.model, Path(path), about)

    @cached_property
    def _looked_at(self) -> MutableMapping[Thread, Network]:
        return WeakKeyDictionary()

    def with_weights(self, weights: Weights) -> Network:
        """Returns this thread's network, which no client uses, in eval mode, with these weights."""
        networks, thread = self._looked_at, current_thread()
        if thread not in networks:
            made = networks[thread] = self.another()
            made.to(device=self.worker.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        load_weights(networks[thread], weights)
        return networks[thread].eval()

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.network.classes

    @property
    def image_size(self) -> int:
        """Side of the images in pixels."""
        return self.settings.data.image_size

    def __repr__(self) -> str:
        """Returns one sentence: the method, its clients, and the rounds done."""
        clients, done = self.settings.clients.number, self.server.state.round
        title = title_of(self.method.name)
        return f"{title} over {counted(clients, 'client')}, {counted(done, 'round')} done."

    def _counts(self) -> Iterator[tuple[int, int]]:
        """Number of domains and of images of each client, of those elsewhere as registered."""
        if self.remote:
            images = self.transport.registered
            yield from ((domains, images[id]) for id, domains in self.transport.domains.items())
        else:
            yield from ((len(client.domains.unique()), len(client)) for client in self.clients)

    def _renumbered(self, dataset: Labelled, labels: numpy.ndarray, name: str) -> numpy.ndarray:
        tables = tables_of(dataset, labels)
        if self._sources and self.names and None in tables:
            # Refuses what may be another order.
            joined([*self._sources, (name, None)], self.classes)
        named = [table for _, table in _distinct(name, tables) if table is not None]
        if not self.names and any([*table] != [*range(self.classes)] for table in named):
            raise ExperimentError(
                f"{name} names its classes, other than all {self.classes}, and the clients' have "
                f"no names to compare: {REMEDY}"
            )
        return renumbered(labels, tables, self.names, name) if self.names else labels

    def _evaluation(
        self,
        images: numpy.ndarray,
        targets: numpy.ndarray,
        splits: dict[str, numpy.ndarray],
        name: str,
    ) -> Evaluation:
        return Evaluation(
            ArrayPixels(images),
            splits,
            targets,
            numpy.zeros(len(targets), dtype=numpy.int64),
            (name,),
            self.classes,
            self.settings.evaluate.batch_size,
            self.worker.device,
            self.worker.autocast,
            task=self.worker.task,
        )


def _refuse_copies(arrays: Iterable[numpy.ndarray], hides: str) -> None:
    """Raises ExperimentError if an image is there twice: of it more is revealed than is said."""
    known: dict[str, str] = {}
    copies: list[str] = []
    for id, images in enumerate(arrays):
        for place, image in enumerate(images):
            digest = hash_of(None, image)
            name = f"item {place} of client {id}"
            if known.setdefault(digest, name) != name:
                copies.append(f"{name} is {known[digest]}")
    if copies:
        raise ExperimentError(
            f"{hides} protects one image, but more is revealed of an image with copies: "
            f"{first_names(copies)}. Remove copies."
        )


def _settings(method: Method, fields: Fields, clients: int, image_size: int) -> ExperimentSettings:
    given = expand(fields)
    strange = [
        path for path in leaves(given) if path.partition(".")[0] not in PARTS and path not in FIELDS
    ]
    if strange:
        known = {name for name, path in SHORTHANDS.items() if path.startswith((*PARTS, *FIELDS))}
        parts = ExperimentSettings().model_dump(include={"train", "server", "privacy"})
        part = next((part for part, inside in parts.items() if strange[0] in inside), None)
        whole = f" (did you mean {part}={{{strange[0]!r}: ...}}?)"
        near = whole if part else nearest(strange[0], known)
        raise ExperimentError(
            f"a Federation has no field {strange[0]!r}{near}: its images and network are those it "
            f"is given; there are: {', '.join((*PARTS, *FIELDS.values()))}"
        )
    defaults = {
        "clients": {"number": clients},
        "data": {"image_size": image_size},
        "model": {"normalization": "train"},
        "evaluate": {"averages": "never"},  # one that is asked for is the result
    }
    preset = {name: part for name, part in method.presets.get("*", {}).items() if name != "method"}
    one_round = ONE_ROUND if method.one_round else {}
    settings = checked_settings(merge(merge(merge(defaults, expand(preset)), given), one_round))
    if settings.server.wise_ft != "none":
        raise ExperimentError(
            "server.wise_ft mixes a run's last model with its first, and a Federation does not: "
            "run the experiment (feddg.run), or leave it out"
        )
    return settings


def _distinct(name: str, tables: Sequence[Numbered | None]) -> list[tuple[str, Numbered | None]]:
    """Returns how a client's data sets number their classes, each once, with the client's name."""
    return [(name, table) for table in {id(table): table for table in tables}.values()]


def _check_head(model: str, network: Network, train: TrainSettings, task: Task) -> None:
    """Refuses settings of training that need classes, or a linear layer at the end."""
    usual = TrainSettings()
    for name in () if task.has_classes else ("head", "label_smoothing", "class_weights"):
        if getattr(train, name) != getattr(usual, name):
            raise ExperimentError(
                f"train.{name} is for one class per image, not for a loss of your own: leave it out"
            )
    if isinstance(network.classifier, nn.Identity) and (
        train.trainable == "head" or train.head_rounds
    ):
        raise ExperimentError(
            f"{model} does not end in nn.Linear, so it has no head to train alone: leave "
            "train.trainable and train.head_rounds out"
        )


def _draws_by_itself(network: Network, images: numpy.ndarray) -> None:
    """Warns if the network draws in training what no seed decides, or keeps what is not sent."""
    probe = copy.deepcopy(network).train()
    saved = probe.state_dict()
    unsaved = {n: (b, b.clone()) for n, b in probe.named_buffers() if n not in saved}
    draw_dropout_from(probe, torch.Generator())
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.get_rng_state()
        look = _look(images)  # twice: one image has no variance
        probe(torch.cat([look, look]).to(next(probe.parameters()).device))
        if not torch.equal(before, torch.get_rng_state()):
            warn(
                "draws-of-its-own",
                "The network draws from PyTorch's own generator in training, which the seed does "
                "not reach: no two runs are alike.",
                "Use layers (nn.Dropout) in place of functions.",
            )
    for name, (now, before) in unsaved.items():
        if not torch.equal(now, before):
            warn(
                "state-of-its-own",
                f"Buffer {name!r} of the network changes in training and is not in its state_dict: "
                "all clients of a worker share it, so results depend on the number of workers.",
                "Register it with persistent=True.",
            )


def _all_names(
    sources: Sequence[tuple[str, Numbered | None]], transport: Transport | None, classes: int
) -> tuple[str, ...]:
    """Returns the classes that clients' data sets name, and those of sites elsewhere.

    Raises:
        ExperimentError: they cannot be joined, or are more than the model's logits.
    """
    elsewhere = transport.class_names if transport is not None else ()
    more = [("a site", dict(enumerate(elsewhere)))] if elsewhere else []
    names = joined([*sources, *more], classes)
    if len(names) > classes:
        raise ExperimentError(
            f"the data sets name {counted(len(names), 'class', 'classes')} "
            f"({first_names(names)}), but the model gives {classes} logits: it needs one for each. "
            "If the labels are others than these, give the data set an attribute classes"
        )
    return names


def _check_order(before: Sequence[str], names: Sequence[str], classes: int) -> None:
    """Refuses clients by whose names a trained model's logits would mean other classes."""
    for logit, (old, new) in enumerate(zip(before, names) if len(before) == classes else ()):
        if old not in (new, f"unnamed {logit}"):
            raise ExperimentError(
                f"logit {logit} of the model was trained to mean {old!r}, and would mean {new!r} "
                f"by these clients' names: {REMEDY}, which was {first_names(before)}"
            )


def read_images(
    dataset: Any,
    name: str,
    size: int | None = None,
    task: Task | None = CLASSIFICATION,
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Reads a data set: pixels ``(n, size, size, 3)`` uint8, and class ids ``(n,)`` int64.

    Args:
        dataset: pairs of image and class id, or of image and target.
        name: its name in messages.
        size: side in pixels that images are resized to; by default that of the first image, which
            must be square.
        task: what the targets are for, ``(n, ...)`` of any type; None if only images are read.

    Raises:
        ExperimentError: the data set is empty, or an image or target cannot be used; the message
            names it.
    """
    numbered = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not numbered or isinstance(dataset, str | Mapping):  # as the names of a dict of clients
        raise ExperimentError(
            f"{name} is a {type(dataset).__name__}: give a data set or list, which finds an image "
            "by its number; a DataLoader's is loader.dataset"
        )
    pixels: list[numpy.ndarray] = []
    targets: list[numpy.ndarray] = []
    asked = size is not None
    for index in range(len(dataset)):
        item, where = dataset[index], f"{name}, image {index}"
        several = isinstance(item, tuple | list)
        if task is not None and not (several and len(item) == 2):
            raise ExperimentError(f"{where} is no pair of image and label")
        image, target = item if task is not None else (item[0] if several else item, 0)
        array = _pixels(image, where)
        size = size or array.shape[0]
        target = _target(target, where, task)
        if array.shape[:2] != (size, size):
            if not asked:
                raise ExperimentError(
                    f"{where} has {array.shape[0]} x {array.shape[1]} pixels, and not all images "
                    "are square and of one size: give image_size="
                )
            if array.shape[:2] in (target.shape[-2:], target.shape[:2]):
                raise ExperimentError(
                    f"{where} has {array.shape[0]} x {array.shape[1]} pixels, as its target has, "
                    f"and must be {size} x {size}: resize both in the data set"
                )
            array = make_square(Image.fromarray(array), size, "squash")
        if targets and target.shape != targets[0].shape:
            raise ExperimentError(
                f"{where} has a target {target.shape}, but the first is {targets[0].shape}; all "
                "targets must have one shape"
            )
        pixels.append(array)
        targets.append(target)
    if not pixels:
        raise ExperimentError(f"{name} has no images")
    return numpy.stack(pixels), numpy.stack(targets)


def _target(target: Any, where: str, task: Task | None) -> numpy.ndarray:
    """Returns a class id, or another task's target, as an array."""
    if task is None:
        return numpy.zeros((), dtype=numpy.int64)
    try:
        tensor = torch.as_tensor(numpy.array(target) if isinstance(target, Image.Image) else target)
    except (TypeError, ValueError, RuntimeError):
        kind = type(target).__name__
        raise ExperimentError(
            f"{where} has a {kind} for a target; give a number or tensor"
        ) from None
    if not task.has_classes:
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ExperimentError(f"{where} has a target with NaN or infinite values")
        return tensor.cpu().numpy()
    if tensor.numel() != 1 or tensor.item() % 1:
        label = f"{tensor.item():g}" if tensor.numel() == 1 else f"of shape {tuple(tensor.shape)}"
        raise ExperimentError(
            f"{where} has a label {label}; a label is the number of a class. For masks, several "
            "labels per image, or numbers, give task=feddg.Task(loss=..., score=...)"
        )
    return numpy.array(int(tensor), dtype=numpy.int64)


def _check_targets(
    targets: numpy.ndarray, name: str, task: Task, classes: int, like: numpy.ndarray
) -> None:
    if targets.shape[1:] != like.shape[1:] or targets.dtype != like.dtype:
        raise ExperimentError(
            f"{name} has targets {targets.shape[1:]} {targets.dtype}, but client 0 has "
            f"{like.shape[1:]} {like.dtype}; they must be alike"
        )
    if not task.has_classes:
        return
    wrong = numpy.flatnonzero((targets < 0) | (targets >= classes))
    if len(wrong):
        raise ExperimentError(
            f"{name}, image {wrong[0]} has label {targets[wrong[0]]}; the model gives {classes} "
            f"logits, so that labels are 0 to {classes - 1}"
        )


def _try_task(task: Task, network: Network, images: numpy.ndarray, targets: numpy.ndarray) -> None:
    """Tries the task on two images, before anything is trained."""
    look = _look(images).to(next(network.parameters()).device)
    with torch.inference_mode():
        outputs = network.eval()(look).float().cpu()
    task.check(outputs, torch.from_numpy(targets[:2]))


def _look(images: numpy.ndarray) -> Tensor:
    """Returns the first two images as a network takes them."""
    return torch.from_numpy(images[:2]).permute(0, 3, 1, 2).float() / 255


def _pixels(image: Any, where: str) -> numpy.ndarray:
    """Returns an image as ``(H, W, 3)`` uint8."""
    if isinstance(image, Image.Image):
        try:
            return numpy.asarray(as_rgb(ImageOps.exif_transpose(image)))
        except UnusableImageError as error:
            raise ExperimentError(f"{where} {error.reason}; give floats in [0, 1]") from None
    if not isinstance(image, Tensor) or image.dim() != 3 or image.shape[0] not in (1, 3):
        shape = tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
        raise ExperimentError(f"{where} is no PIL image and no tensor (3, H, W): {shape}")
    if image.is_floating_point():
        if not bool((image >= 0).all() and (image <= 1).all()):
            raise ExperimentError(
                f"{where} has values outside [0, 1]; leave Normalize out of the data set, and give "
                "normalize=(mean, std) instead"
            )
        image = (image * 255).round()
    elif image.dtype != torch.uint8:
        raise ExperimentError(f"{where} has values of {image.dtype}; give uint8, or [0, 1]")
    return image.to(torch.uint8).expand(3, -1, -1).permute(1, 2, 0).cpu().numpy()


def _numbered(groups: Sequence[Any], name: str) -> numpy.ndarray:
    """Returns a number for each image's group, ``(n,)`` int64.

    Raises:
        ExperimentError: an image has none; names the first.
    """
    numbers: dict[Any, int] = {}
    listed = groups.tolist() if hasattr(groups, "tolist") else [*groups]
    for index, group in enumerate(listed):
        if not isinstance(group, Real | str) or group == "" or group != group:
            raise ExperimentError(
                f"{name}, image {index} has the group {group!r}: give each image a number or text"
            )
        numbers.setdefault(group, len(numbers))
    return numpy.array([numbers[group] for group in listed])


def _domains(
    datasets: Sequence[Labelled], targets: Sequence[numpy.ndarray]
) -> tuple[list[Tensor], tuple[str, ...]]:
    """Returns the domain of each client's images, ``(n,)`` int64, and the domains' names.

    The domain of a data set that names none has an empty name.

    Raises:
        ExperimentError: a data set has another number of domains than of images.
    """
    known: dict[str | int, int] = {}
    domains = []
    for id, (dataset, labels) in enumerate(zip(datasets, targets)):
        given = getattr(dataset, "domains", None)
        if given is not None and own_domains(dataset) is None:
            named = len(given) if hasattr(given, "__len__") else "no list of"
            raise ExperimentError(
                f"client {id} names {named} domains for {len(labels)} images: give one an image"
            )
        found = domains_of(dataset, labels, f"client {id}")
        names = [id if name is None else name for name in found]
        domains.append(torch.tensor([known.setdefault(name, len(known)) for name in names]))
    return domains, tuple(name if isinstance(name, str) else "" for name in known)


def _examples(
    arrays: Sequence[tuple[numpy.ndarray, numpy.ndarray]], domains: Sequence[Tensor], classes: int
) -> list[Examples]:
    examples = []
    for (images, labels), numbers in zip(arrays, domains):
        store = ArrayPixels(images, fingerprint=hash_of(images.shape, images))
        rows, targets = torch.arange(len(labels)), torch.from_numpy(labels)
        examples.append(Examples.of(store, rows, targets, numbers, classes))
    return examples


def _network_of(
    model: nn.Module,
    method: Method,
    images: numpy.ndarray,
    seed: int,
    normalize: tuple[Sequence[float], Sequence[float]] | None,
    task: Task,
) -> Network:
    """Returns a model as featurizer and linear classifier.

    Raises:
        ExperimentError: the method needs the input of a last linear layer, and there is none; or
            model or colours cannot be used.
    """
    if torch.float32 not in {parameter.dtype for parameter in model.parameters()}:
        raise ExperimentError(
            f"{type(model).__name__} has no weights in float32, in which they are trained: give "
            "model.float()"
        )
    if normalize is not None and (
        [tuple(numpy.shape(part)) for part in normalize] != [(3,), (3,)] or min(normalize[1]) <= 0
    ):
        raise ExperimentError(
            "normalize is three means and three standard deviations above 0, of red, green and blue"
        )
    if isinstance(model, Network):
        if method.one_round and not isinstance(model.embedding, nn.Identity):
            raise ExperimentError(
                f"{method.name} solves for a classifier of what the featurizer gives, and this "
                'Network has an embedding after it: build it with embedding="none"'
            )
        network = copy.deepcopy(model)
        if normalize is not None:
            network.normalize_by(*normalize)
        return network
    network = split_network(
        copy.deepcopy(model), _look(images), seed, normalize, classifies=task.has_classes
    )
    no_head = task.has_classes and isinstance(network.classifier, nn.Identity)
    if no_head and works_on_embeddings(type(method)):
        raise ExperimentError(
            f"{method.title} works on what goes into a network's last linear layer, and "
            f"{type(model).__name__} does not end in one: let it end in nn.Linear, or give a "
            "feddg.models.network.Network"
        )
    return network
