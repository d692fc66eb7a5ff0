"""A client as a method sees it: its images, its network, and its memory between rounds."""

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from feddg.clients.graphs import Graphs, Turn
from feddg.clients.optim import MemoryOrder, in_round, rate_share, take_step
from feddg.clients.together import Parts, Together, whole
from feddg.data.augment import (
    AugmentSettings,
    Draw,
    apply,
    can_move,
    cannot_move,
    draw,
    moved,
    shows_pixels,
)
from feddg.data.pixels import Parcel, Pixels, PixelStore, Vectors, as_unit, fits
from feddg.errors import ClientError, Diverged
from feddg.messages import Message, Read, Weights, on_device, read, sent_together
from feddg.models.network import Network
from feddg.models.normalization import freeze_statistics
from feddg.models.task import CLASSIFICATION, Task, balanced
from feddg.models.trained import digest_of
from feddg.rng import Ahead, numpy_stream, stream
from feddg.settings import TrainSettings
from feddg.storage import kept_array
from feddg.styles.codec import images_at_once
from feddg.styles.statistics import StyleNoise

_NO_OPTIMIZER = "steps are for training; questions have no optimizer"


@dataclass
class Examples:
    """The images one client holds.

    Attributes:
        pixels: the store they are read from.
        rows: ``(n,)`` int64 rows of the store.
        labels: ``(n,)`` int64 class ids, or another task's targets ``(n, ...)``.
        domains: ``(n,)`` int64 domain ids; used for reports, and by methods whose page says that a
            client knows its domain.
        classes: number of classes in the federation.
        cache_key: identifies this set of images, for caches on disk.
        validation: the client's own validation images, not trained on; None if there are none.
    """

    pixels: Pixels
    rows: Tensor
    labels: Tensor
    domains: Tensor
    classes: int
    cache_key: str = ""
    validation: "Examples | None" = None

    @classmethod
    def of(
        cls, pixels: PixelStore, rows: Tensor, labels: Tensor, domains: Tensor, classes: int
    ) -> "Examples":
        """Returns examples whose cache key tells the store's content and the rows."""
        digest = hashlib.blake2b(pixels.fingerprint.encode(), digest_size=12)
        digest.update(rows.numpy().tobytes())
        return cls(pixels, rows, labels, domains, classes, digest.hexdigest())

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def side(self) -> int:
        """Pixels along an image's side; 1 for features."""
        return 1 if isinstance(self.pixels, Vectors) else self.pixels.size

    def images(self, positions: Tensor | None = None, device: torch.device | None = None) -> Tensor:
        """Returns uint8 images ``(B, 3, H, W)`` without augmentation.

        Args:
            positions: which images; all by default.
            device: the target device; the CPU by default.
        """
        rows = self.rows if positions is None else self.rows[positions]
        return self.pixels.gather(rows, device)

    def parcel(self, positions: Tensor, device: torch.device) -> Parcel:
        """Returns what must be sent to a device for some images, see :class:`Pixels`."""
        return self.pixels.parcel(self.rows[positions], device)


@dataclass
class Batch:
    """A mini-batch on the device.

    Attributes:
        images: float RGB in [0, 1], ``(B, 3, H, W)``, augmented.
        labels: ``(B,)`` class ids, or another task's targets ``(B, ...)``, whose pixels move with
            the images'.
        positions: ``(B,)`` positions among the client's images.
        views: other versions of the same images under the same augmentation draw, by name.
        targets: further labels of the same images, ``(B,)`` each, by name.
        drawn: what the method drew for this batch (``Method.draws``), by name.
        host_labels: ``labels`` on the CPU, for decisions on the host; see :attr:`labels_here`.
        features: outputs of the frozen featurizer, ``(B, features)``, if they were computed before;
            then there are no images.
    """

    images: Tensor
    labels: Tensor
    positions: Tensor
    views: dict[str, Tensor] = field(default_factory=dict)
    targets: dict[str, Tensor] = field(default_factory=dict)
    host_labels: Tensor | None = None
    features: Tensor | None = None
    drawn: dict[str, Tensor] = field(default_factory=dict)

    @property
    def labels_here(self) -> Tensor:
        """The labels on the CPU; does not wait for the device if they came from the CPU."""
        return self.labels.cpu() if self.host_labels is None else self.host_labels

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, chosen: Tensor, here: Tensor) -> "Batch":
        """Returns some of the images, by their indices in the batch.

        Args:
            chosen: on the device.
            here: the same on the CPU, so that nobody waits for the device.
        """
        parts = (self.views, self.targets)
        views, targets = ({n: t[chosen] for n, t in part.items()} for part in parts)
        return Batch(
            self.images[chosen],
            self.labels[chosen],
            self.positions[here],
            views,
            targets,
            None if self.host_labels is None else self.host_labels[here],
        )


@dataclass
class Prepared:
    """A batch for which the host has done its part.

    Attributes:
        device: where it is needed.
        groups: the tensors that it is made of, by name; some may be there already.
        arrive: what becomes of them, in place, once they are all there.
        make: returns the batch of them, by what the device does.
        count: its number of images.
    """

    device: torch.device
    groups: list[Weights]
    make: Callable[[list[Weights]], Batch]
    count: int
    arrive: Callable[[list[Weights]], None]

    def batch(self) -> Batch:
        """Returns the batch, for which all goes to the device in one copy."""
        groups = sent_together(self.groups, self.device)
        self.arrive(groups)
        return self.make(groups)


def split_batches(order: Tensor, batch_size: int, drop_last: bool = False) -> list[Tensor]:
    """Cuts ``order`` into batches; a last batch of one joins the one before it.

    Args:
        order: ``(n,)``.
        batch_size: images per batch.
        drop_last: whether a last batch that is not full is left out, unless there is no other.
    """
    batches = list(order.split(batch_size))
    if drop_last and len(batches) > 1 and len(batches[-1]) < batch_size:
        return batches[:-1]
    if len(batches) > 1 and len(batches[-1]) == 1 and batch_size > 1:
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches


def batches_of_pass(train: TrainSettings, images: int) -> tuple[int, int]:
    """Returns how many batches :func:`split_batches` cuts, and the images of the last one."""
    batches = split_batches(torch.arange(images), train.batch_size, train.drop_last)
    return len(batches), len(batches[-1])


def steps_of_round(train: TrainSettings, images: int) -> int:
    """Returns the steps that a client with so many images takes in a round."""
    return train.local_steps or train.local_epochs * batches_of_pass(train, images)[0]


@dataclass(frozen=True)
class RecordNoise:
    """Settings of DP-SGD: how gradients of single images are clipped and noised.

    Attributes:
        multiplier: z, standard deviation of the noise over the clipping norm.
        norm: C, the clipping norm of an image's gradient.
    """

    multiplier: float
    norm: float


@dataclass
class Worker:
    """What clients share by taking turns: one network, one device.

    Attributes:
        network: loaded with the client's starting weights before each local training.
        augmentation: how training images are augmented.
        autocast: opens the mixed-precision context; a null context for float32.
        freeze: whether batch-normalisation statistics stay fixed.
        cache: folder for results that are expensive to compute; None for no cache.
        threads: number of CPU threads; None for PyTorch's own setting.
        style_noise: how styles are noised before they are sent; None for no noise.
        record_noise: how gradients of single images are noised; None for no noise.
        graphs: the recorded steps of its clients.
        task: gives the loss that is trained.
        stopped: set to end local training early, when nobody needs its result any more.
    """

    network: Network
    train: TrainSettings
    augmentation: AugmentSettings
    device: torch.device
    seed: int
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    freeze: bool = False
    cache: Path | None = None
    threads: int | None = None
    style_noise: StyleNoise | None = None
    record_noise: RecordNoise | None = None
    graphs: Graphs = field(default_factory=Graphs)
    task: Task = CLASSIFICATION
    stopped: Event = field(default_factory=Event)


class Client:
    """One client in one round.

    Attributes:
        id: number in the federation, from 0.
        examples: its images.
        training: what it trains on this round: its images, or those plus images that the method
            added.
        worker: the network, optimizer and device it trains with.
        network: the worker's network, with this client's weights.
        device: where it computes.
        train: the settings of this round; ``lr`` is the round's learning rate.
        round: the round it is in, from 1; 0 during setup.
        trains_heads_only: whether the featurizer is fixed in this round.
        memory: tensors the method keeps for this client between rounds.
        secrets: what defences keep for this client within a round; never saved, never sent.
        context: what the server computed from all clients' statistics, or None.
        extras: what this round's broadcast contains besides the weights.
        received: the weights of this round's broadcast.
        scratch: anything the method needs until the round ends.
        views: further versions of all its training images, uint8 ``(n, H, W, 3)``, augmented with
            the same draws as the originals.
        augmentation: how its images are augmented; the worker's setting unless the method changes
            it.
        features: outputs of the frozen featurizer for all its images, ``(n, d)``, if batches
            consist of these instead of images.
        arrange: changes the random order ``(n,)`` that batches are cut from, if the method sets it.
        turn: replays its steps, where steps are recorded.
        together: the clients with the same job, whose images may share a batch with its own.
        alike: whether its network is that of all of them.
        terms: sums of its loss terms so far.
    """

    def __init__(
        self,
        id: int,
        examples: Examples,
        worker: Worker,
        *,
        round: int = 0,
        memory: Weights | None = None,
        context: Message | None = None,
        received: Weights | None = None,
        extras: Message | None = None,
        secrets: Weights | None = None,
    ) -> None:
        self.id, self.round = id, round
        self.examples, self.training, self.worker = examples, examples, worker
        self.network, self.device = worker.network, worker.device
        self.train = in_round(worker.train, round)
        self.trains_heads_only = 0 < round <= worker.train.head_rounds
        self.memory = {} if memory is None else memory
        self.secrets = {} if secrets is None else secrets
        self.context = context
        self.received = received or {}
        self.extras = extras or Message()
        self.augmentation = worker.augmentation
        self.scratch: dict[str, Any] = {}
        self.views: dict[str, Tensor] = {}
        self.features: Tensor | None = None
        self.arrange: Callable[[Tensor], Tensor] | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.steps = 0
        self._balanced: tuple[Tensor, dict[torch.dtype, Tensor]] | None = None
        self.turn: Turn | None = None
        self.together, self.alike = Together(), False
        self.terms: dict[str, Tensor] = {}

    @property
    def records_steps(self) -> bool:
        """Whether its steps are recorded, which pays where their tensors have few shapes."""
        train = self.worker.train
        alike = train.schedule_by == "round" and not train.keep_optimizer  # steps of a round are
        return train.graphs and alike and self.device.type != "cpu"

    @contextmanager
    def held_still(self) -> Iterator[None]:
        """Fixes the featurizer inside the block, in a round that trains only heads."""
        fixed: list[nn.Parameter] = []
        if self.trains_heads_only:
            fixed = [p for p in self.network.featurizer.parameters() if p.requires_grad]
        try:
            for parameter in fixed:
                parameter.requires_grad_(False)
                parameter.grad = None
            yield
        finally:
            for parameter in fixed:
                parameter.requires_grad_(True)

    def task_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the task's loss: cross-entropy, with label smoothing and class weights if set.

        Args:
            outputs: ``(B, classes)`` logits, or what the network gives for another task.
            targets: ``(B,)`` class ids, or another task's targets ``(B, ...)``.
        """
        task, train = self.worker.task, self.worker.train
        return task.loss_at(outputs, targets, self.class_weights(outputs), train)

    def class_weights(self, outputs: Tensor) -> Tensor | None:
        """Returns what classes count, ``(classes,)`` beside ``(B, classes)``; None if alike."""
        if not self.worker.task.has_classes or self.worker.train.class_weights == "none":
            return None
        labels, classes = self.training.labels, outputs.shape[1]
        dtype = torch.promote_types(outputs.dtype, torch.float32)  # bfloat16 cannot count to 257
        if self._balanced is None or self._balanced[0] is not labels:
            self._balanced = labels, {}
        kept = self._balanced[1]
        if dtype not in kept:  # counted and sent once
            counted = {"weights": balanced(labels, classes, dtype)}
            kept[dtype] = on_device(counted, outputs.device)["weights"]
        return kept[dtype]

    def stream(self, *names: str | int) -> torch.Generator:
        """Returns the client's own random stream for a purpose in this round."""
        return stream(self.worker.seed, "client", self.id, self.round, *names)

    def numpy_stream(self, *names: str | int) -> numpy.random.Generator:
        """Returns the same stream as a numpy generator, which has more distributions."""
        return numpy_stream(self.worker.seed, "client", self.id, self.round, *names)

    def lasting_stream(self, *names: str | int) -> torch.Generator:
        """Returns the client's own random stream for a purpose, the same in every round."""
        return stream(self.worker.seed, "client", self.id, *names)

    def set_training(self) -> None:
        """Puts the network in training mode under the experiment's normalisation policy."""
        self.network.train()
        # One example has no variance over examples, and on a 1 x 1 map none at all.
        alone = len(self.training) == 1 or self.worker.train.batch_size == 1
        if self.worker.freeze or alone:
            freeze_statistics(self.network)
        if self.trains_heads_only or self.worker.train.trainable in ("head", "lora"):
            self.network.featurizer.eval()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Has the network in eval mode in its block; afterwards all layers are as they were."""
        modes = [(module, module.training) for module in self.network.modules()]
        self.network.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode

    def batches(self, draws: "Draws | None" = None) -> Iterator[Batch]:
        """Yields this round's mini-batches in the client's own random order, augmented.

        Args:
            draws: what else each batch holds, see :meth:`batch`.
        """
        return (prepared.batch() for prepared in self.prepare(draws))

    def prepare(self, draws: "Draws | None" = None) -> Iterator[Prepared]:
        """Yields the host's part of each of :meth:`batches`, when the one before it is used up.

        A last batch of one joins the batch before it: statistics over one example are undefined.
        """
        order, augmentation = self.stream("order"), self.stream("augment")
        small = {n: view for n, view in self.views.items() if fits(view.nbytes, self.device)}
        self.views |= on_device(small, self.device)
        train, steps = self.worker.train, 0
        for epoch in itertools.count() if train.local_steps else range(train.local_epochs):
            drawn = torch.randperm(len(self.training), generator=order)
            drawn = drawn if self.arrange is None else self.arrange(drawn)
            batches = split_batches(drawn, train.batch_size, train.drop_last)
            for positions in batches:
                if train.schedule_by == "epoch":
                    self._follow_schedule(epoch / train.local_epochs)
                elif train.schedule_by == "step":
                    turn = train.local_steps or train.local_epochs * len(batches)
                    self._follow_schedule(steps / turn)
                yield self.prepared(positions, augmentation, draws)
                steps += 1
                if steps == train.local_steps:
                    return

    def _follow_schedule(self, within: float) -> None:
        """Sets the learning rates of its optimizers at a share of the round.

        Those that a method keeps in ``scratch`` follow, too.
        """
        shares = [rate_share(self.worker.train, self.round, part) for part in (within, 0.0)]
        for optimizer in (self.optimizer, *self.scratch.values()):
            for group in getattr(optimizer, "param_groups", ()):
                first = group.setdefault("initial_lr", group["lr"])
                group["lr"] = first * shares[0] / shares[1]

    def batch(
        self, positions: Tensor, generator: torch.Generator, draws: "Draws | None" = None
    ) -> Batch:
        """Returns the images at ``positions`` on the device, augmented by random draws.

        All that the device does not have yet goes there in one copy for which nobody waits: while
        the device is busy with the step before, the host prepares this one.

        Args:
            positions: ``(B,)`` positions among its training images.
            generator: draws the augmentation.
            draws: returns what the method needs from the host for this batch, by name, from
                ``positions`` and their labels.
        """
        return self.prepared(positions, generator, draws).batch()

    def prepared(
        self, positions: Tensor, generator: torch.Generator, draws: "Draws | None" = None
    ) -> Prepared:
        """Returns the host's part of :meth:`batch`: all draws are made, nothing is sent."""
        device, labels = self.device, self.training.labels[positions]
        drawn = draws(positions, labels) if draws is not None else {}
        if self.features is None:
            needed, images = self.training.parcel(positions, device)
        else:
            needed, images = {"features": self.features[positions]}, None
        choices: Draw | None = None
        if images is not None and not ("images" in needed and needed["images"].dim() == 2):
            size = self.training.pixels.size
            choices = draw(self.augmentation, len(positions), size, generator)
        views = {} if choices is None else self.views  # features are never augmented
        copies = {
            name: view.index_select(0, positions) if view.device.type == "cpu" else positions
            for name, view in views.items()
        }
        ahead = self.ahead if choices is not None and device.type != "cpu" else []
        chosen = {} if choices is None else choices.tensors
        groups = [{"labels": labels}, needed, chosen, copies, drawn]
        groups += [source.prepare(len(positions)) for source in ahead]

        def arrive(groups: list[Weights]) -> None:
            for source, tensors in zip(ahead, groups[5:]):
                source.arrived(tensors)
            for name, view in views.items():
                if view.device.type != "cpu":
                    groups[3][name] = view.index_select(0, groups[3][name])

        def make(groups: list[Weights]) -> Batch:
            arrived, needed, chosen, copies, drawn = groups[:5]
            targets, features = arrived["labels"], needed.get("features")
            batch = Batch(targets, targets, positions, {}, {}, labels, features, drawn)
            batch.images = images(needed) if images is not None else targets.new_empty(0)
            if choices is not None:
                choice = replace(choices, **chosen)
                batch.images = apply(batch.images, choice)
                batch.views = {n: apply(c.permute(0, 3, 1, 2), choice) for n, c in copies.items()}
                shape, size = targets.shape[1:], self.training.pixels.size
                if can_move(shape, size):
                    batch.labels, batch.host_labels = moved(targets, choice), None
                elif choices.places is not None and shows_pixels(shape, size):
                    raise ClientError(cannot_move(shape, size))
            return batch

        return Prepared(device, groups, make, len(positions), arrive)

    @property
    def ahead(self) -> list[Ahead]:
        """What layers of the network draw in every pass, each once."""
        if self.turn is not None:
            return self.turn.ahead
        candidates = (getattr(layer, "ahead", None) for layer in self.network.modules())
        return list(dict.fromkeys(each for each in candidates if isinstance(each, Ahead)))

    def plain_batches(self, examples: Examples | None = None) -> Iterator[Batch]:
        """Yields all its images once, in order and without augmentation, on the device.

        Args:
            examples: other images of the client; its training images by default.
        """
        chosen = self.examples if examples is None else examples
        for positions in torch.arange(len(chosen)).split(64):
            needed, images = chosen.parcel(positions, self.device)
            labels = chosen.labels[positions]
            sent, needed = sent_together([{"labels": labels}, needed], self.device)
            yield Batch(as_unit(images(needed)), sent["labels"], positions, host_labels=labels)

    def embeddings(self, batch: Batch) -> Tensor:
        """Returns a batch's embeddings ``(B, d)``, from cached features if there are any."""
        if batch.features is None:
            return self.network.features(batch.images)
        return self.network.embedding(batch.features)

    @property
    def has_fixed_features(self) -> bool:
        """Whether only the head is trained, on images that are the same in every round."""
        plain = self.training is self.examples and not self.views
        varied = self.augmentation.moves or self.augmentation.recolors
        fixed = self.worker.train.trainable == "head" and plain and not varied
        # What is hooked to a layer, as MixStyle's mixers are, may change features at every pass.
        return fixed and not any(m._forward_hooks for m in self.network.featurizer.modules())

    def frozen_features(self) -> Tensor:
        """Returns the frozen featurizer's outputs for its images, ``(n, d)`` float32.

        Computed once for all rounds, without augmentation.
        """
        network = self.network

        def seen(images: Tensor) -> tuple[Tensor, ...]:
            return (network.featurizer(network.normalize(images)),)

        if not network.frozen_digest:  # of every client of every round it is asked for
            network.frozen_digest = self.features_digest(network.frozen, seen)
        return self.kept_features(seen, network.frozen_digest)

    @torch.no_grad()
    def kept_features(self, seen: Callable[[Tensor], Sequence[Tensor]], digest: str) -> Tensor:
        """Returns features of its images without augmentation, ``(n, d)`` float32, cached.

        Args:
            seen: gives the features of images ``(B, 3, H, W)``, or of several versions of them,
                which follow each other: first those of all images' first version.
            digest: see :meth:`features_digest`.
        """
        key = f"features-{digest}"
        return self.cached(
            key,
            lambda: torch.cat(
                self.of_images(key, seen, lambda other: other.has_cached(key), fixed=True)
            ),
        )

    @torch.no_grad()
    def of_images(
        self,
        name: str,
        function: Callable[[Tensor], Sequence[Tensor]],
        done: Callable[["Client"], bool] = lambda client: False,
        *,
        fixed: bool = False,
    ) -> Parts:
        """Returns what a function gives for all its images without augmentation, in float32.

        On the CPU from batches across clients, if all have the function; else on the device.

        Args:
            name: of the function.
            function: maps images ``(B, 3, H, W)`` to tensors with a row for each, which depends on
                this image alone.
            done: whether another client has its own already.
            fixed: whether all have the function, even if they are no longer :attr:`alike`.
        """
        size = 64 if self.device.type == "cpu" else images_at_once(self.examples.side, self.device)

        def compute(clients: Sequence["Client"]) -> Parts:
            given = [function(images) for images in images_of(clients, size)]
            return tuple(whole([part.float() for part in parts]) for parts in zip(*given))

        if not (fixed or self.alike):
            return compute([self])
        return self.together.by_image(self, lambda client: name, compute, done)

    @torch.no_grad()
    def features_digest(
        self, names: Iterable[str], seen: Callable[[Tensor], Sequence[Tensor]]
    ) -> str:
        """Returns what tells features apart: entries of the network, and what a ramp gives.

        Networks of the same entries may differ in layers without weights, in how they normalise
        images, and in precision.
        """
        shape = self.examples.images(torch.arange(1)).shape
        ramp = torch.linspace(0, 1, shape.numel(), device=self.device).view(shape)
        outputs = [features.float() for features in seen(ramp)]
        return digest_of(self.network, names, *outputs)

    def descend(self, terms: dict[str, Tensor]) -> None:
        """Takes one optimizer step on the sum of ``terms`` alone and logs them.

        To read or change the gradients in between, use :meth:`backward` and :meth:`step`.
        """
        assert self.optimizer is not None, _NO_OPTIMIZER
        self.optimizer.zero_grad(set_to_none=True)
        self.backward(terms)
        self.step()

    def backward(self, terms: dict[str, Tensor]) -> None:
        """Adds the gradient of the sum of ``terms`` to every ``p.grad`` and logs the terms.

        Until :meth:`step`, gradients can be read and changed, and more backward passes can add to
        them.
        """
        with torch.autocast(self.device.type, enabled=False):  # in the types of the forward pass
            total_of(terms).backward()  # type: ignore[no-untyped-call]
        self.note(terms)

    def step(self) -> None:
        """Takes an optimizer step with the present gradients, clears them, and counts the step."""
        assert self.optimizer is not None, _NO_OPTIMIZER
        take_step(self.optimizer, self.worker.train.gradient_clipping)
        if not isinstance(self.optimizer, MemoryOrder):  # one of a method, perhaps of some layers
            self.network.zero_grad()
        self.steps += 1

    def note(self, terms: dict[str, Tensor]) -> None:
        """Adds terms of the present step to the round's means; several calls add up."""
        for name, term in terms.items():
            value = term.detach().float()
            if self.turn is not None:
                self.terms[name] = self.turn.total(name, value)
            else:
                self.terms[name] = self.terms[name] + value if name in self.terms else value

    def mean_terms(self, *also: Read[Any]) -> tuple[dict[str, float], list[Any]]:
        """Returns the mean of each loss term over the steps taken, and what else is to be read.

        Args:
            also: what that is; the host waits for the device once for all.

        Raises:
            ClientError: a term is not finite.
        """
        totals, *others = read([([*self.terms.values()], list), *also])
        means = {n: total / max(self.steps, 1) for n, total in zip(self.terms, totals)}
        for name, mean in means.items():
            if not math.isfinite(mean):
                raise Diverged(
                    f"loss term {name!r} became {mean} in round {self.round}; "
                    f"lower train.lr (now {self.worker.train.lr:g}) or look at the client's images"
                )
        return means, others

    def cached(self, key: str, compute: Callable[[], Tensor]) -> Tensor:
        """Returns ``compute()``, cached on disk under ``key`` and the identity of its images.

        The tensor must depend on the client's images and ``key`` only. A damaged file is computed
        again; if no file can be written, the result is used without one. Both are logged.
        """
        file = self._cache_file(key)
        if file is None:
            return compute()
        return torch.from_numpy(kept_array(file, lambda: compute().cpu().numpy()))

    def has_cached(self, key: str) -> bool:
        """Whether :meth:`cached` finds a file."""
        file = self._cache_file(key)
        return file is not None and file.exists()

    def _cache_file(self, key: str) -> Path | None:
        folder = self.worker.cache
        return None if folder is None else folder / f"{self.examples.cache_key}-{key}.npy"


def images_of(clients: Sequence[Client], size: int) -> Iterator[Tensor]:
    """Yields clients' images without augmentation, on their device, ``(B, 3, H, W)`` in [0, 1].

    Args:
        clients: whose images follow each other; those of several are one batch.
        size: images per batch of a single client.
    """
    stores = itertools.groupby((client.examples for client in clients), lambda x: id(x.pixels))
    parts = [
        (examples[0].pixels, rows)
        for examples in ([*same] for _, same in stores)
        for rows in whole([each.rows for each in examples]).split(size)
    ]
    images = (pixels.gather(rows, clients[0].device) for pixels, rows in parts)
    yield from map(as_unit, [whole([*images])] if len(clients) > 1 else images)


Draws = Callable[[Tensor, Tensor], dict[str, Tensor]]


def total_of(terms: dict[str, Tensor]) -> Tensor:
    """Returns the sum of loss terms, in float32."""
    return torch.stack([term.float() for term in terms.values()]).sum()
