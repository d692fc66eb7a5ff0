"""The base class of every method: its hooks, whose defaults are federated averaging."""

import inspect
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, ClassVar, get_type_hints

import torch
from pydantic import ConfigDict
from torch import Tensor, nn

from feddg.clients.client import Batch, Client
from feddg.clients.optim import make_optimizer
from feddg.diagnostics import Diagnostic, warning
from feddg.errors import (
    ExperimentError,
    FeddgError,
    NotEnoughUpdates,
    RunError,
    TrainingDiverged,
    first_names,
    schema_faults,
)
from feddg.messages import (
    Broadcast,
    EntrySchema,
    Message,
    Refusal,
    Update,
    Weights,
    copied,
    on_device,
)
from feddg.models.network import Network
from feddg.records import Direction, EstimateRow, Groups, MetricRow, RefusedUpdate, RoundRow
from feddg.registry import Registry
from feddg.settings import ExperimentSettings, Fields, Settings

log = logging.getLogger("feddg")


Ask = Callable[[str, Message], Iterator[tuple[int, Message]]]
"""``ask(name, question)`` sends the current weights and a question to this round's clients, and
yields client ids with answers.
"""


Statistics = Sequence[tuple[int, Message]]
"""Ids of clients, ascending, with what they sent before training."""
Presets = dict[str, Fields]
"""An experiment's fields by preset, which is a data set's name, or ``*`` for all."""


class MethodSettings(Settings):
    """A method's hyper-parameters: the paper's defaults, with their source in the description."""

    model_config = ConfigDict(validate_default=False, populate_by_name=True)


@dataclass
class State:
    """What the server keeps between rounds; a checkpoint holds exactly this.

    Attributes:
        weights: the global network's state.
        extras: further tensors that the method keeps at the server.
        context: what the server computed from the clients' statistics and sent to every client, or
            None.
        round: number of completed rounds.
        rounds: number of rounds in the run, for schedules; 0 if unknown.
    """

    weights: Weights
    extras: Weights = field(default_factory=dict)
    context: Message | None = None
    round: int = 0
    rounds: int = 0

    def to(self, device: torch.device) -> "State":
        """Moves weights and extras to ``device``; returns the state itself."""
        self.weights = on_device(self.weights, device)
        self.extras = on_device(self.extras, device)
        return self

    def next(self) -> "State":
        """Returns a copy for the next round: the same tensors, extras that may be replaced."""
        return replace(self, extras=dict(self.extras), round=self.round + 1)


class Method:
    """The hooks of a method; as they stand here they are federated averaging.

    Attributes:
        name: the name in settings; a composition joins its parts' names with ``+``.
        title: the name as the paper spells it; the class's by default.
        aliases: other names in settings.
        summary: one line for ``feddg methods``.
        settings: the hyper-parameters. A subclass annotates them with its own class
            (``settings: FedProxSettings``), so that a type checker knows their names.
        Settings: that class; taken from the annotation.
        presets: experiment values by preset name (a data set), ``"*"`` for all; the user's values
            override them. The key ``method`` holds hyper-parameters.
        sends: what leaves a client: ``purpose/name`` as in the ledger (``*`` stands for any name),
            with its schema, which says under which settings. The method's page and test read this.
        noises: entries of ``sends`` before round 1 that are styles, and that the method noises on
            request.
        excludes: methods it cannot be combined with, and why.
        outermost: whether it comes before all other parts of a composition.
        gathers_images: whether all training images are put in one place first, unlike in a
            federation: one client then takes as many steps as a round's clients together.
        one_round: whether the method needs a single pass over the images in one round only,
            whatever ``train`` says of rounds, epochs and steps: its updates are sums that the
            server only averages, and that clients clip and noise themselves, image by image.
        in_process_only: why it cannot run over a network; empty if it can.
        any_task: whether it can run a task other than classification; by default, if it works
            neither on embeddings nor on the network (:func:`feddg.methods.composition.check_task`).
        moves_pixels: whether it moves pixels by itself, so that targets that are images lose them.
        needs_images: whether it changes images, so that features alone are not enough.
        shapes_embeddings: whether it adds terms of the embeddings alone, which no classifier sees.
        by_last_round: what it does by the number of the last round, as a clause; empty if nothing.
        sums: entries of the network that are sums over images, as large as these are: no step
            moves them, and the method checks them itself.
        waits: why a step of it waits for a device, which :func:`feddg.testing.check_method` then
            takes as known; empty if none does.
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""
    aliases: ClassVar[tuple[str, ...]] = ()
    summary: ClassVar[str] = ""
    settings: MethodSettings
    Settings: ClassVar[type[MethodSettings]] = MethodSettings
    presets: ClassVar[Presets] = {}
    sends: ClassVar[dict[str, EntrySchema]] = {
        "update/weights/*": EntrySchema("the network after local training", entry_of=""),
        "update/examples": EntrySchema("how many images it trained on", integer=True, low=1),
        "update/images": EntrySchema(
            "how many images its training steps had, each once a step", integer=True, low=0
        ),
        "update/seconds": EntrySchema("how long it trained", low=0),
        "update/terms/*": EntrySchema("the mean of each term of its loss"),
    }
    noises: ClassVar[frozenset[str]] = frozenset()
    excludes: ClassVar[dict[str, str]] = {}
    outermost: ClassVar[bool] = False
    gathers_images: ClassVar[bool] = False
    one_round: ClassVar[bool] = False
    in_process_only: ClassVar[str] = ""
    any_task: ClassVar[bool | None] = None
    moves_pixels: ClassVar[bool] = False
    needs_images: ClassVar[bool] = False
    shapes_embeddings: ClassVar[bool] = False
    by_last_round: ClassVar[str] = ""
    sums: tuple[str, ...] = ()
    waits: ClassVar[str] = ""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Sets ``Settings`` from the annotation and, if there is none, ``title`` from the class."""
        super().__init_subclass__(**keywords)
        if "settings" in inspect.get_annotations(cls):
            cls.Settings = get_type_hints(cls)["settings"]
        if "name" in vars(cls) and "title" not in vars(cls):
            cls.title = cls.__name__

    def __init__(self, settings: MethodSettings | None = None, **fields: object) -> None:
        """Takes the hyper-parameters, as keywords or as an object.

        Raises:
            ExperimentError: one is unknown or out of range.
        """
        name, known = self.name or type(self).__name__, self.Settings.model_fields
        with schema_faults(ExperimentError, f"method {name}: ", known):
            self.settings = self.Settings(**fields) if settings is None else settings

    # What is trained

    def network(self, network: Network) -> Network:
        """Returns the network to train; may add heads or replace layers in place."""
        return network

    def check(self, experiment: ExperimentSettings) -> None:
        """Raises ExperimentError, before round 1, if the method cannot run this experiment."""

    def read_files(self) -> None:
        """Reads the files that the settings name, at the start of a run, before images are decoded.

        Raises:
            FeddgError: one is missing, damaged or does not fit.
        """

    def diagnostics(self, experiment: ExperimentSettings) -> Iterable[Diagnostic]:
        """Yields warnings about results of this experiment, before round 1.

        By default, where the method shapes embeddings and nothing before them is trained.
        """
        fixed = experiment.train.trainable == "head" and experiment.model.embedding == "none"
        if self.shapes_embeddings and fixed and not self.one_round:
            yield warning(
                "fixed-embeddings",
                f"train.trainable is head: embeddings stay as they are, and what {self.title} "
                "asks of them trains nothing.",
                "Train more, or add a layer: --set model.embedding=linear.",
            )

    # Once, before round 1

    def client_statistics(self, client: Client) -> Message | None:
        """At a client: returns the statistics it sends to the server before training."""
        return None

    def aggregate_statistics(self, client_statistics: Statistics) -> Message | None:
        """At the server: returns the shared context for all clients, from their statistics."""
        return None

    def groups(self, client_statistics: Statistics) -> Groups:
        """At the server: returns the groups of clients by their statistics, for the records."""
        return {}

    @property
    def has_setup(self) -> bool:
        """Whether clients send statistics before round 1."""
        declared = [each for key, each in self.sends.items() if key.startswith("statistics/")]
        own = type(self).client_statistics is not Method.client_statistics
        return own and (not declared or any(schema.sent_by(self) for schema in declared))

    # At a client, every round

    def images_of_pass(self, images: int, clients: int) -> int:
        """Returns how many images one of several clients, who holds ``images``, has in a pass."""
        return images

    def begin(self, client: Client) -> None:
        """Prepares the client's round; ``client.network`` holds the weights it starts from."""

    def draws(self, client: Client, positions: Tensor, labels: Tensor) -> Weights:
        """Returns what the next step needs from the host, such as random numbers, by name.

        It goes to the device with the batch, in one copy that is under way while the step before
        runs; :meth:`drawn` finds it there. A copy inside a step would make the device wait.

        Args:
            client: the client; ``client.steps`` is the number of the step.
            positions: ``(B,)`` of the batch's images among its training images, on the CPU.
            labels: ``(B,)``, on the CPU.
        """
        return {}

    def drawn(self, client: Client, batch: Batch) -> Weights:
        """Returns what :meth:`draws` gave for a batch, on its device."""
        if not batch.drawn:  # a batch made by hand, or a part of one
            drawn = self.draws(client, batch.positions, batch.labels_here)
            batch.drawn = on_device(drawn, batch.labels.device)
        return batch.drawn

    def is_first_pass(self, client: Client, batch: Batch, name: str) -> bool:
        """Whether a batch comes to a method, by its name, for the first time.

        Other parts of a composition may pass it on several times, with changed images. What a
        method remembers of a step is that of the first pass.
        """
        drawn, mark = self.drawn(client, batch), f"{name}/passed"
        first = mark not in drawn
        drawn[mark] = batch.labels
        return first

    def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        """Returns named, already weighted loss terms; their sum is minimised.

        A method that changes or adds images overrides this; one that works on embeddings overrides
        :meth:`head_loss`. So both kinds can be combined and share one forward pass.
        """
        return self.head_loss(client, batch, client.embeddings(batch))

    def head_loss(self, client: Client, batch: Batch, embeddings: Tensor) -> dict[str, Tensor]:
        """Returns the loss terms of a batch whose embeddings ``(B, d)`` are known.

        A method that replaces the task's loss overrides :meth:`output_loss`: so what others add
        here stays.
        """
        return self.output_loss(client, batch, client.network.classifier(embeddings))

    def output_loss(self, client: Client, batch: Batch, outputs: Tensor) -> dict[str, Tensor]:
        """Returns the loss terms of a batch whose outputs, ``(B, classes)`` logits, are known."""
        return {client.worker.task.term: client.task_loss(outputs, batch.labels)}

    def trains_on_features(self, client: Client) -> bool:
        """Whether batches may consist of cached features instead of images."""
        names = "loss", "head_loss", "output_loss", "step"
        plain = all(getattr(type(self), name) is getattr(Method, name) for name in names)
        return plain and client.has_fixed_features and client.worker.record_noise is None

    def optimizer(self, client: Client) -> torch.optim.Optimizer:
        """Returns the client's optimizer, new each round, for the trained parameters."""
        return make_optimizer(client.network, client.train)

    def step(self, client: Client, batch: Batch) -> None:
        """Takes one optimizer step on a batch; override it for methods with several steps."""
        client.descend(self.loss(client, batch))

    def report(self, client: Client) -> Message:
        """Returns what the client sends to the server besides its weights."""
        return Message()

    # At the server, every round

    def initial_extras(self, network: Network, clients: int) -> Weights:
        """Returns the server's further tensors before round 1."""
        return {}

    def broadcast(self, state: State) -> Broadcast:
        """Returns the message to this round's clients."""
        return Broadcast(state.round + 1, state.weights)

    def share(self, state: State, update: Update) -> float:
        """Returns the weight of an update in the mean, above 0: its number of examples."""
        return update.examples

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """Aggregates the round's updates, a stream in client order.

        Puts new tensors into ``state`` and does not change the old ones, because a round may fail
        half-way. To use more of the updates than their mean, pass ``super()`` a generator that
        reads each update before it yields it (:func:`noting`).
        """

        def item(update: Update) -> tuple[Weights, float]:
            share = self.share(state, update)
            if not 0 < share < math.inf:
                raise RunError(
                    f"method {self.name}: the share of client {update.client} is {share:g}, and "
                    "must be above 0"
                )
            return update.weights, share

        state.weights = weighted_mean(map(item, updates), state.weights)
        return state

    def after_round(self, state: State, ask: Ask) -> State:
        """Runs after aggregation; may ask this round's clients a question."""
        return state

    def answer(self, client: Client, name: str, question: Message) -> Message:
        """At a client: returns the answer to the server's question ``name``."""
        raise NotImplementedError(f"{self.name} asks nothing, so it cannot answer {name!r}")

    # What stays home, and how the result predicts

    def is_local(self, name: str, module: nn.Module) -> bool:
        """Whether an entry of ``module``'s state stays at the client between its rounds.

        Args:
            name: the entry's last name (``weight``, ``running_mean``, ...).
            module: the layer that holds it.
        """
        return False

    def predictor(self, network: Network) -> nn.Module:
        """Returns the module that maps RGB images in [0, 1] to logits (or log-probabilities)."""
        return network

    # What only some methods have

    def head_images(self, images: Tensor) -> tuple[Tensor, ...]:
        """At a client: the versions ``(B, 3, H, W)`` of images that ``train.head: ridge`` sums."""
        return (images,)

    def preview(self, images: Tensor, context: Message | None) -> Tensor | None:
        """Returns stylized examples of images for the report, as clients train on them.

        Args:
            images: uint8 ``(N, 3, H, W)``.
            context: what the server computed from the clients' statistics, if anything.

        Returns:
            Images of the same shape and type, or None if nothing is stylized.
        """
        return None

    def left_out(self, state: State) -> dict[int, tuple[float, float]]:
        """Returns accuracy and mean largest probability at clients of models without their part.

        By client id, of those where this was measured.
        """
        return {}

    def without(self, state: State, update: Update) -> State:
        """Returns the state without a client's update, made again, before ``after_round``."""
        raise NotImplementedError(f"{self.name} cannot take a client's part out of its model")


@dataclass
class Round:
    """A round in progress, as hooks see it; a repeated round is a new object.

    Attributes:
        number: the round, from 1.
        clients: ids of the clients asked to train, ascending.
        state: the server's state before the round, not changed; clients are sent its weights.
        fewest: minimum number of good updates for an aggregate.
        bytes: bytes sent so far in the run, both ways; increases.
        refused: clients whose updates are not used, and why.
        update: the update being processed; an error is attributed to its client.
        replies: the accepted updates, in order of arrival.
        failure: why the round does not count: too few updates, or clients that broke it.
        scratch: what hooks keep until the round ends, by hook.
        evaluations: results of evaluating the round's model, if measured.
        estimates: estimated accuracy where there are no labels.
        evaluating: seconds the evaluation took.
        left_out: accuracy at clients of a model trained without them, if it was measured.
        forgotten: clients whose part is taken out of the model.
        groups: before round 1: how the method grouped the clients, if it did.
        terms: mean of each loss term over the used updates that have it, weighted by examples; with
            ``examples``, ``images`` and ``training`` (seconds) it makes up the row.
    """

    number: int
    clients: list[int]
    state: State
    fewest: int = 1
    bytes: Mapping[Direction, int] = field(default_factory=lambda: {"up": 0, "down": 0})
    refused: list[Refusal] = field(default_factory=list)
    update: Update | None = None
    replies: Generator[Update] | None = None
    failure: NotEnoughUpdates | Sequence[Refusal] | None = None
    scratch: dict[Any, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    evaluations: Sequence[MetricRow] = ()
    estimates: Sequence[EstimateRow] = ()
    evaluating: float = 0.0
    left_out: Mapping[int, float] = field(default_factory=dict)
    forgotten: tuple[int, ...] = ()
    groups: Groups = field(default_factory=dict)
    terms: dict[str, float] = field(default_factory=dict)
    examples: int = 0
    images: int = 0
    training: float = 0.0

    def __post_init__(self) -> None:
        self._began, self._before = time.perf_counter(), dict(self.bytes)
        self._having = Counter[str]()  # the examples of the updates that have a term

    def add(self, update: Update) -> None:
        """Adds one used update to the means and counts."""
        self.examples += update.examples
        self.images += update.images
        self.training += update.seconds
        for name, value in update.terms.items():
            self._having[name] += update.examples
            before, share = self.terms.get(name, value), update.examples / self._having[name]
            self.terms[name] = before + (value - before) * share

    @property
    def seconds(self) -> float:
        """Seconds since the round began."""
        return time.perf_counter() - self._began

    @cached_property
    def row(self) -> RoundRow:
        """The round's row for the records, fixed when first read at the end of the round."""
        seconds = self.seconds
        return RoundRow(
            round=self.number,
            clients=self.clients,
            refused=[RefusedUpdate(client=r.client, reason=r.reason) for r in self.refused],
            terms=self.terms,
            examples=self.examples,
            images=self.images,
            # Sites train side by side: their seconds may add up to more than the round took.
            seconds={"train": self.training, "aggregate": max(0.0, seconds - self.training)},
            bytes_up=self.bytes["up"] - self._before["up"],
            bytes_down=self.bytes["down"] - self._before["down"],
            left_out=self.left_out,
            forgotten=self.forgotten,
        )

    def too_few(self, good: int) -> NotEnoughUpdates:
        """Returns the error to raise if only ``good`` updates are usable."""
        why = "; client {0.client}: {0.reason}".format(self.refused[0]) if self.refused else ""
        kind = TrainingDiverged if self.refused and self.refused[0].diverged else NotEnoughUpdates
        return kind(
            f"round {self.number}: {good} good updates of {len(self.clients)}, but "
            f"server.min_updates is {self.fewest}{why}"
        )

    def mean_refused(self, why: str) -> NotEnoughUpdates:
        """Returns the error to raise if the update, which is the mean of several, is unusable."""
        assert self.update is not None
        return NotEnoughUpdates(
            f"round {self.number}: no update is used; the mean of "
            f"{name_clients(self.update.members)} is refused: {why}; whose update is wrong cannot "
            "be told, since only their sum can be read"
        )

    @contextmanager
    def attempted(self) -> Iterator[None]:
        """Stores as ``failure`` why the block failed, if the round can be tried again.

        A round can be tried again after too few good updates, after an error while one client's
        update was processed, and when a hook names bad clients after all updates arrived. Errors
        that the user can fix are raised unchanged.
        """
        try:
            yield
        except NotEnoughUpdates as error:
            self.failure = error
        except FoundOut as error:
            mean = self.update is not None and self.update.members
            reason = error.refusals[0].reason.removeprefix("update refused: ")
            self.failure = self.mean_refused(reason) if mean else error.refusals
        except (FeddgError, torch.OutOfMemoryError, torch.AcceleratorError, MemoryError):
            raise  # of the last three, no client is the cause
        except Exception as error:
            if self.update is None:
                raise
            reason = f"it cannot be worked with ({type(error).__name__})"
            if self.update.members:
                raise RunError(
                    f"round {self.number}: the mean of {name_clients(self.update.members)}: "
                    f"{reason}"
                ) from error
            log.exception("client %d's update cannot be worked with", self.update.client)
            self.failure = [Refusal(self.update.client, f"update refused: {reason}")]
        finally:
            if self.replies is not None:
                self.replies.close()  # whoever still trains need not


class FoundOut(Exception):
    """Raised for clients whose updates turn out to be unusable only after all have arrived.

    Attributes:
        refusals: the clients, and why.
    """

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        super().__init__("; ".join(f"client {r.client}: {r.reason}" for r in refusals))
        self.refusals = refusals


def name_clients(ids: Sequence[int]) -> str:
    """Returns the names of clients for messages; of many only the first."""
    return f"clients {first_names([str(id) for id in ids], 20)}"


class RoundHook:
    """A server-side hook of a round: a check, defence, weight average or checkpoint.

    A subclass overrides only the events it needs, listed in the order of a round. A hook keeps no
    state: lasting values go to the state's extras, which checkpoints hold, and values of a round to
    ``round.scratch``. So a failed round leaves nothing behind.
    """

    def begun(self, state: State, round: Round) -> None:
        """Before round 1, after the setup, which is ``round`` 0."""

    def broadcast(self, broadcast: Broadcast, round: Round) -> Broadcast:
        """Before clients are asked to train: returns the message they are sent."""
        return broadcast

    def received(self, update: Update, round: Round) -> Update:
        """When an update has arrived: returns it in the form that may be used.

        Raises:
            ClientError: it is refused; names the client.
        """
        return update

    def refused(self, refusal: Refusal, round: Round) -> None:
        """When a client has no usable update."""

    def collected(self, updates: Iterator[Update], round: Round) -> Iterator[Update]:
        """Yields the updates that the method's ``aggregate`` receives, from the good ones.

        An update's tensors are valid until the next one is drawn; call ``update.keep()`` to use
        them later.

        Raises:
            NotEnoughUpdates: there are fewer than the hook needs.
            FoundOut: the round must be repeated without some clients.
        """
        return updates

    def completed(self, state: State, round: Round) -> State:
        """After aggregation: returns the new state of the round.

        The server, and what a federation evaluates, is already at ``state`` as the hooks before
        left it; if one fails, it is at the state before the round again.
        """
        return state


def require(experiment: ExperimentSettings, why: str, fields: Mapping[str, object]) -> None:
    """Raises ExperimentError if a field of an experiment is not as a method needs it.

    Args:
        experiment: the experiment.
        why: it has to be so, as a sentence without its full stop.
        fields: the values that are needed, by the field's name: ``train.optimizer``.
    """
    for name, needed in fields.items():
        if attrgetter(name)(experiment) != needed:
            value = "none" if needed is None else needed
            raise ExperimentError(f"{why}: set {name} to {value}, or leave it out")


def local_names(method: Method, network: nn.Module) -> set[str]:
    """Returns the state-dict names that stay with each client under ``method``."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in network.named_modules(remove_duplicate=False)
        for name, entry in (*module._parameters.items(), *module._buffers.items())
        if entry is not None  # such as the bias of a layer without one
        and name not in module._non_persistent_buffers_set
        and method.is_local(name, module)
    }


def has_global_model(method: Method, network: nn.Module) -> bool:
    """Whether clients share any part of the network; otherwise each has its own model."""
    return not network.state_dict().keys() <= local_names(method, network)


def shared_parameters(method: Method, network: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the trained parameters that all clients share, by name, without buffers."""
    local = local_names(method, network)
    return {
        name: parameter
        for name, parameter in network.named_parameters()
        if parameter.requires_grad and name not in local
    }


def shared_entries(method: Method, network: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the same parameters under all their names in the state: tied ones have several."""
    shared = {id(parameter) for parameter in shared_parameters(method, network).values()}
    named = network.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if id(parameter) in shared}


def bank(client_statistics: Statistics, name: str, owners: str) -> Message:
    """Returns all clients' rows of a tensor, and the client of each under another name."""
    parts = [(id, message.tensors[name]) for id, message in client_statistics]
    ids = torch.cat([torch.full((len(part),), id) for id, part in parts])
    return Message({name: torch.cat([part for _, part in parts]), owners: ids})


def weighted_mean(items: Iterable[tuple[Weights, float]], before: Weights | None = None) -> Weights:
    """Returns the weighted mean of named tensors, as a stream: memory is one running mean.

    Float entries are averaged in float32 or their own wider type, and keep their type; others are
    copied from the first item. Each new item moves the mean by its share of the total so far. So
    equal items give exactly their value, and the mean stays within the items' range.

    Args:
        items: pairs of named tensors and a positive weight, in a fixed order.
        before: entries that are the same tensor here and in every item (not trained) are kept.

    Raises:
        ValueError: there is no item.
    """
    mean: Weights = {}
    half: Weights = {}
    still: set[str] = set()
    total = 0.0
    for tensors, weight in items:
        total += weight
        same = {n for n, old in (before or {}).items() if tensors.get(n) is old}
        if not mean:
            mean, still = copied(tensors), same
            # Sixteen bits would round a small share of a small difference away.
            half = {n: t for n, t in mean.items() if t.dtype in (torch.bfloat16, torch.float16)}
            mean |= {n: t.float() for n, t in half.items()}
            continue
        still &= same
        names = [n for n, t in tensors.items() if t.is_floating_point() and n not in still]
        entries = [tensors[name].detach().to(mean[name]) for name in names]
        if names:
            torch._foreach_lerp_([mean[name] for name in names], entries, weight / total)
    if not mean:
        raise ValueError("the mean of no updates is not defined")
    return mean | {name: mean[name].to(tensor.dtype) for name, tensor in half.items()}


def noting(updates: Iterable[Update], note: Callable[[Update], object]) -> Iterator[Update]:
    """Yields updates, each after it was noted, for an ``aggregate`` of more than the mean."""
    for update in updates:
        note(update)
        yield update


METHODS: Registry[type[Method]] = Registry(
    "method",
    "feddg.methods",
    group="feddg.methods",
    error=ExperimentError,
    where="feddg methods",
)
"""Every method by its name."""
register = METHODS.register
"""Class decorator that adds a method under its name and aliases.

Raises an ExperimentError if the class has no name, or another method already has one of its names.
"""


def methods() -> dict[str, type[Method]]:
    """Returns all methods by name, aliases left out, in alphabetical order."""
    return dict(sorted(METHODS.items()))


def title_of(name: str) -> str:
    """Returns a method's title, of a composition joined by ``+``; unknown names stay as they are.

    Args:
        name: name of a method or composition, or any text; aliases are not resolved.
    """
    titles = {_plain(listed): method.title for listed, method in METHODS.items()}
    parts = [part.strip() for part in name.split("+")]
    return " + ".join(titles.get(_plain(part), part) for part in parts)


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")
