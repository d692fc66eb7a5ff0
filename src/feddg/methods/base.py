"""The base of every method: its hooks, each with what federated averaging does as its default."""

import inspect
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeVar, get_type_hints, runtime_checkable

import torch
from pydantic import ConfigDict, ValidationError
from torch import Tensor, nn

from feddg.clients.client import Batch, Client
from feddg.diagnostics import Diagnostic
from feddg.errors import (
    ExperimentError,
    FeddgError,
    NotEnoughUpdates,
    RunError,
    field_fault,
    first_names,
)
from feddg.messages import Broadcast, EntrySchema, Message, Refusal, Update, Weights, on_device
from feddg.models.network import Network
from feddg.records import Direction, EstimateRow, EvaluationRow, Groups, RefusedUpdate, RoundRow
from feddg.registry import Registry
from feddg.settings import ExperimentSettings, Settings


def description_of(method: type) -> str:
    """Returns a method's text: its class's where that has the equations, else its module's."""
    own = inspect.getdoc(method) or ""
    return own if "\nEquations:" in own else inspect.getdoc(sys.modules[method.__module__]) or ""


def idea_of(method: type) -> str:
    """Returns a method's idea: the first paragraph of its text, below its title."""
    paragraphs = description_of(method).split("\n\n")
    return " ".join(paragraphs[1].split()).replace("``", "") if len(paragraphs) > 1 else ""


Ask = Callable[[str, Message], Iterator[tuple[int, Message]]]
"""``ask(name, question)`` sends the current weights and a question to this round's clients."""


class MethodSettings(Settings):
    """A method's hyper-parameters: paper's values as defaults, their source in the description."""

    model_config = ConfigDict(validate_default=False)


@dataclass
class State:
    """What the server knows between rounds; a checkpoint holds exactly this.

    Attributes:
        weights: the global network's state.
        extras: further tensors the method keeps at the server.
        context: what the server made of the clients' statistics and every client was sent, or None.
        round: rounds completed.
        rounds: rounds that the run has in all, for schedules; 0 if nobody said.
    """

    weights: Weights
    extras: Weights = field(default_factory=dict)
    context: Message | None = None
    round: int = 0
    rounds: int = 0

    def to(self, device: torch.device) -> "State":
        """Moves weights and extras to ``device``; returns itself."""
        self.weights = on_device(self.weights, device)
        self.extras = on_device(self.extras, device)
        return self

    def next(self) -> "State":
        """Returns what becomes the next round's state: the same tensors, extras to be replaced."""
        return replace(self, extras=dict(self.extras), round=self.round + 1)


class Method:
    """The hooks that every method is made of; as they stand here they are federated averaging.

    Attributes:
        name: what it is found by; a composition's name joins its parts with ``+``.
        title: its name as its paper spells it, for people; the name by default.
        aliases: other names it is found by.
        summary: one line for ``feddg methods``.
        settings: the hyper-parameters. A subclass annotates them with its own class
            (``settings: FedProxSettings``), so that a type checker knows their names.
        Settings: that class; taken from the annotation.
        presets: experiment values by preset name (a data set), ``"*"`` for all; what the user
            writes wins over them. The key ``method`` holds hyper-parameters.
        sends: what leaves a client under the default settings, as ``purpose/name`` of the ledger
            (``*`` stands for any name) with what it is. Its page and its test both read this.
        noises: entries of ``sends`` before round 1 that are styles, and that it noises if asked to.
        excludes: methods this one cannot be combined with, and why.
        gathers_images: whether all training images are put in one place first, as no federation
            does: one client then takes as many steps as a round's clients together.
        sums: whether its updates are sums of which the server uses nothing but the plain mean, and
            which its clients bound and noise themselves, image by image.
        one_round: whether it is done after a single pass over the images in one round, which is all
            it takes, whatever ``train`` says of rounds, epochs and steps.
        in_process_only: why it cannot run over a network; empty where it can.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    summary: ClassVar[str] = ""
    settings: MethodSettings
    Settings: ClassVar[type[MethodSettings]] = MethodSettings
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
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
    gathers_images: ClassVar[bool] = False
    sums: ClassVar[bool] = False
    one_round: ClassVar[bool] = False
    in_process_only: ClassVar[str] = ""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Fills in what the class says elsewhere: ``Settings`` and, without one, ``title``."""
        super().__init_subclass__(**keywords)
        if "settings" in inspect.get_annotations(cls):
            cls.Settings = get_type_hints(cls)["settings"]
        if "name" in vars(cls) and "title" not in vars(cls):
            cls.title = cls.name

    def __init__(self, settings: MethodSettings | None = None, **fields: Any) -> None:
        """Takes the hyper-parameters, by name or as an object.

        Raises:
            ExperimentError: one is unknown or out of range.
        """
        try:
            self.settings = self.Settings(**fields) if settings is None else settings
        except ValidationError as error:
            fault = field_fault(error, list(self.Settings.model_fields))
            raise ExperimentError(f"method {self.name}: {fault}") from None

    # What is trained

    def network(self, network: Network) -> Network:
        """Returns the network this method trains; may add heads or swap layers in place."""
        return network

    def check(self, experiment: ExperimentSettings) -> None:
        """Raises ExperimentError, before round 1, if the method cannot run this experiment."""

    def read_files(self) -> None:
        """Reads the files that the settings name, where a run begins: before hours of decoding.

        Raises:
            FeddgError: one is missing, damaged or does not fit.
        """

    def diagnostics(self, experiment: ExperimentSettings) -> Sequence[Diagnostic]:
        """Returns what speaks against a result of this experiment, before round 1."""
        return ()

    # Once, before round 1

    def client_statistics(self, client: Client) -> Message | None:
        """At a client: what it tells the server before training."""
        return None

    def aggregate_statistics(
        self, client_statistics: Iterable[tuple[int, Message]]
    ) -> Message | None:
        """At the server: the answer every client is sent, from all statistics in client order."""
        return None

    def groups(self, client_statistics: Sequence[tuple[int, Message]]) -> Groups:
        """At the server: how their statistics group the clients, by what; kept with the run."""
        return {}

    @property
    def has_setup(self) -> bool:
        """Whether clients send statistics before round 1."""
        return type(self).client_statistics is not Method.client_statistics

    def head_images(self, images: Tensor) -> tuple[Tensor, ...]:
        """At a client: the versions ``(B, 3, H, W)`` of images that ``train.head: ridge`` sums."""
        return (images,)

    # At a client, every round

    def begin(self, client: Client) -> None:
        """Prepares the client's round: ``client.network`` holds the weights it starts from."""

    def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        """Returns named, already weighted loss terms; their sum is minimised.

        A method that changes or adds images overrides this; one that works on embeddings overrides
        :meth:`head_loss`. So the two kinds compose, and share one forward pass.
        """
        return self.head_loss(client, batch, client.embeddings(batch))

    def head_loss(self, client: Client, batch: Batch, embeddings: Tensor) -> dict[str, Tensor]:
        """Returns the loss terms of a batch whose embeddings ``(B, d)`` are known."""
        logits = client.network.classifier(embeddings)
        return {"cross_entropy": client.class_loss(logits, batch.labels)}

    def trains_on_features(self, client: Client) -> bool:
        """Whether its batches may be of features that are computed once, instead of images."""
        own = type(self).loss, type(self).head_loss, type(self).step
        plain = own == (Method.loss, Method.head_loss, Method.step)
        return plain and client.has_fixed_features and client.worker.record_noise is None

    def optimizer(self, client: Client) -> torch.optim.Optimizer:
        """Returns the client's optimizer, new each round, over the network's trained parameters."""
        return client.worker.optimization.optimizer(client.network, client.train)

    def step(self, client: Client, batch: Batch) -> None:
        """Takes one optimizer step on a batch; override for methods with several."""
        client.descend(self.loss(client, batch))

    def report(self, client: Client) -> Message:
        """Returns what goes back to the server beside the weights."""
        return Message()

    # At the server, every round

    def initial_extras(self, network: Network, clients: int) -> Weights:
        """Returns the server's further tensors before round 1."""
        return {}

    def broadcast(self, state: State) -> Broadcast:
        """Returns what this round's clients are sent."""
        return Broadcast(state.round + 1, state.weights)

    def share(self, state: State, update: Update) -> float:
        """How much an update counts in the mean, above 0: its number of examples."""
        return update.examples

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """Aggregates the round's updates, which arrive in client order, as a stream.

        Puts new tensors into ``state``, which is to be that of the round, and leaves the old ones
        as they are: a round that fails half-way must not have changed them. To learn more from the
        updates than their mean, hand ``super()`` a generator that looks at each one before it
        yields it.
        """
        items = ((update.weights, self.share(state, update)) for update in updates)
        state.weights = weighted_mean(items, state.weights)
        return state

    def after_round(self, state: State, ask: Ask) -> State:
        """Runs after aggregation; may ask this round's clients a question."""
        return state

    def left_out(self, state: State) -> dict[int, float]:
        """Returns the accuracy at each client, by id, of a model that never saw it, if measured."""
        return {}

    def left_out_confidence(self, state: State) -> dict[int, float]:
        """Returns the mean largest probability of that model there, where it was measured."""
        return {}

    def answer(self, client: Client, name: str, question: Message) -> Message:
        """At a client: answers the server's question ``name``."""
        raise NotImplementedError(f"{self.name} asks nothing, so it cannot answer {name!r}")

    # What stays home, and how the result predicts

    def is_local(self, name: str, module: nn.Module) -> bool:
        """Whether an entry of ``module``'s state is the client's own, kept between its rounds.

        Args:
            name: the entry's last name (``weight``, ``running_mean``, ...).
            module: the layer that holds it.
        """
        return False

    def predictor(self, network: Network) -> nn.Module:
        """Returns the module that maps RGB images in [0, 1] to logits (or log-probabilities)."""
        return network


# What happens in a round beside the method: hooks at the server.


log = logging.getLogger("feddg")


@dataclass
class Round:
    """A round under way, as its hooks see it; one that is tried again is another object.

    Attributes:
        number: from 1.
        clients: who is asked to train, ascending.
        state: the server's before it; its weights are what the clients are sent. Left as it is.
        fewest: good updates below which nothing is aggregated.
        bytes: sent so far in the run, both ways; moves on.
        refused: whose updates are not used, and why.
        update: the one that is being worked with, to whose client an error would be due.
        replies: the accepted updates, as they come.
        failure: why the round does not count: too few updates, or clients known to have broken it.
        scratch: what hooks keep until the round ends, by hook.
        evaluations: how its model did, once it was measured.
        estimates: how good it is thought to be where nothing is labelled.
        evaluating: seconds that took.
        left_out: accuracy at clients of a model that never saw them, if the method measured it.
        terms: mean of each loss term over the used updates, weighted by examples; with
            ``examples``, ``images``, ``forwards`` and ``training`` (seconds) what the row is
            made of.
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
    evaluations: Sequence[EvaluationRow] = ()
    estimates: Sequence[EstimateRow] = ()
    evaluating: float = 0.0
    left_out: Mapping[int, float] = field(default_factory=dict)
    terms: dict[str, float] = field(default_factory=dict)
    examples: int = 0
    images: int = 0
    forwards: int = 0
    training: float = 0.0

    def __post_init__(self) -> None:
        self._began, self._before = time.perf_counter(), dict(self.bytes)

    def add(self, update: Update) -> None:
        """Adds one used update to the means and counts."""
        self.examples += update.examples
        self.images += update.images
        self.forwards += update.forwards
        self.training += update.seconds
        share = update.examples / self.examples
        for name, value in update.terms.items():
            before = self.terms.get(name, value)
            self.terms[name] = before + (value - before) * share

    @cached_property
    def row(self) -> RoundRow:
        """Who took part, and what it cost: until it is first asked for, when the round is over."""
        seconds = time.perf_counter() - self._began
        return RoundRow(
            round=self.number,
            clients=self.clients,
            refused=[RefusedUpdate(client=r.client, reason=r.reason) for r in self.refused],
            terms=self.terms,
            examples=self.examples,
            images=self.images,
            forwards=self.forwards,
            # Sites train side by side: their seconds may add up to more than the round took.
            seconds={"train": self.training, "aggregate": max(0.0, seconds - self.training)},
            bytes_up=self.bytes["up"] - self._before["up"],
            bytes_down=self.bytes["down"] - self._before["down"],
            left_out=self.left_out,
        )

    def too_few(self, good: int) -> NotEnoughUpdates:
        """Returns what to raise where only so many updates are good."""
        why = "; client {0.client}: {0.reason}".format(self.refused[0]) if self.refused else ""
        return NotEnoughUpdates(
            f"round {self.number}: {good} good updates of {len(self.clients)}, but "
            f"server.min_updates is {self.fewest}{why}"
        )

    @contextmanager
    def attempted(self) -> Iterator[None]:
        """Notes as ``failure`` why its block failed, if the round can be tried again.

        It can where too few good updates came, where an error came up while the update of a certain
        client was worked with, and where a hook names clients that were found out when all updates
        were in. Errors a user can act on go through as they are.
        """
        try:
            yield
        except NotEnoughUpdates as error:
            self.failure = error
        except FoundOut as error:
            self.failure = error.refusals
        except FeddgError:
            raise
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
    """Clients whose updates cannot be used, which was known only when they were in.

    Attributes:
        refusals: who, and why.
    """

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        super().__init__("; ".join(f"client {r.client}: {r.reason}" for r in refusals))
        self.refusals = refusals


def name_clients(ids: Sequence[int]) -> str:
    """Returns clients as a line names them; of many the first."""
    return f"clients {first_names([str(id) for id in ids], 20)}"


class RoundHook:
    """One concern of a round at the server: a check, a defence, a mean over rounds, a checkpoint.

    It overrides the events at which it has something to do, in the order of a round; at the others
    it costs nothing. It keeps no state: what lasts is among the state's extras, which checkpoints
    keep, what a round needs in ``round.scratch``. So a round that fails leaves nothing behind.
    """

    def broadcast(self, broadcast: Broadcast, round: Round) -> Broadcast:
        """Clients are about to be asked to train: returns what they are sent."""
        return broadcast

    def received(self, update: Update, round: Round) -> Update:
        """An update came: returns it as it may be used.

        Raises:
            ClientError: it is refused, by its client's name.
        """
        return update

    def refused(self, refusal: Refusal, round: Round) -> None:
        """A client has no update that can be used."""

    def collected(self, updates: Iterator[Update], round: Round) -> Iterator[Update]:
        """Yields what the method's ``aggregate`` is given for the updates that are good.

        An update's tensors are valid until the next is drawn: ``update.keep()`` where all are
        needed.

        Raises:
            NotEnoughUpdates: there are fewer than it needs.
            FoundOut: the round is to be done again without some.
        """
        return updates

    def completed(self, state: State, round: Round) -> State:
        """The updates are aggregated: returns the state as it becomes that of the round."""
        return state


def local_names(method: Method, network: nn.Module) -> set[str]:
    """Returns the state-dict names that stay with each client under ``method``."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in network.named_modules()
        for name, entry in (*module._parameters.items(), *module._buffers.items())
        if entry is not None  # such as the bias of a layer without one
        and name not in module._non_persistent_buffers_set
        and method.is_local(name, module)
    }


def has_global_model(method: Method, network: nn.Module) -> bool:
    """Whether the clients share anything of the network; else each has a model of its own."""
    return not network.state_dict().keys() <= local_names(method, network)


def require_network_fit(method: type[Method]) -> None:
    """Raises ExperimentError if a method can only run where all images are."""
    if method.in_process_only:
        raise ExperimentError(
            f"{method.name} cannot run over a network: {method.in_process_only}; "
            "`feddg run` runs it in one process"
        )


def shared_parameters(method: Method, network: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the trained parameters that all clients share, by name: no buffer, nothing local."""
    local = local_names(method, network)
    return {
        name: parameter
        for name, parameter in network.named_parameters()
        if parameter.requires_grad and name not in local
    }


def weighted_mean(items: Iterable[tuple[Weights, float]], before: Weights | None = None) -> Weights:
    """Returns the weighted mean of named tensors, as a stream: memory is one running mean.

    Float entries are averaged in float32 or their own wider type; others are copied from the first
    item. Each new item moves the mean by its share of the total so far, so equal items give their
    own value exactly, and the mean never leaves the items' range.

    Args:
        items: pairs of named tensors and a positive weight, in a fixed order.
        before: an entry that is this very tensor in every item, since it is not trained, stays.

    Raises:
        ValueError: there is no item.
    """
    mean: Weights = {}
    still: set[str] = set()
    total = 0.0
    for tensors, weight in items:
        total += weight
        same = {n for n, old in (before or {}).items() if tensors.get(n) is old}
        if not mean:
            mean, still = {n: tensor.detach().clone() for n, tensor in tensors.items()}, same
            continue
        still &= same
        names = [n for n, t in tensors.items() if t.is_floating_point() and n not in still]
        entries = [tensors[name].detach().to(mean[name]) for name in names]
        if names:
            torch._foreach_lerp_([mean[name] for name in names], entries, weight / total)
    if not mean:
        raise ValueError("the mean of no updates is not defined")
    return mean


# All methods by name: ours, and third parties' through entry points.


M = TypeVar("M", bound=type[Method])


def _names(method: type[Method]) -> tuple[str, ...]:
    if not hasattr(method, "name"):
        raise ExperimentError(f'{method.__qualname__} has no name; give the class a name = "..."')
    return (method.name, *method.aliases)


METHODS: Registry[type[Method]] = Registry(
    "method",
    "feddg.methods",
    group="feddg.methods",
    error=ExperimentError,
    where="feddg methods",
    named=_names,
)
"""Every method by its name."""


def register(method: M) -> M:
    """Class decorator that adds a method under its name and aliases.

    Raises:
        ExperimentError: the class has no name, or another method already has one of its names.
    """
    name, *aliases = _names(method)
    METHODS.add(name, method, tuple(aliases))
    return method


def methods() -> dict[str, type[Method]]:
    """Returns all methods by name, aliases left out, in alphabetical order."""
    return dict(sorted(METHODS.items()))


def title_of(name: str) -> str:
    """Returns a method's title, a composition's joined by ``+``; what is unknown stays as it is.

    Args:
        name: of a method or composition (aliases are left as they are written), or any text.
    """
    titles = {_plain(listed): method.title for listed, method in METHODS.items()}
    parts = [part.strip() for part in name.split("+")]
    if not any(_plain(part) in titles for part in parts):
        return name
    return " + ".join(titles.get(_plain(part), part) for part in parts)


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


# What a method may show of itself in reports, beside its hooks; training never asks for it.
#
# A method that has something to show defines the function; whoever draws the report asks with
# ``isinstance``. In a composition the first part that shows something is the one that is shown.


@runtime_checkable
class Stylizes(Protocol):
    """A method whose clients train on stylized images."""

    def preview(self, images: Tensor, context: Message | None) -> Tensor | None:
        """Returns what the method makes of images.

        Args:
            images: uint8 ``(N, 3, H, W)``.
            context: what the server made of the clients' statistics, if there was one.

        Returns:
            Images of the same form, or None if nothing is stylized under these settings.
        """
        ...


@runtime_checkable
class Adapts(Protocol):
    """A method whose layers adapt to each image they see."""

    def layer_shares(self, network: Network, images: Tensor) -> dict[str, Tensor]:
        """Returns how much each layer adapts to each image, in [0, 1].

        Args:
            network: holds the global weights, in eval mode.
            images: RGB in [0, 1], ``(B, 3, H, W)``.

        Returns:
            ``(B,)`` by layer, in the network's order; nothing if no layer adapts.
        """
        ...
