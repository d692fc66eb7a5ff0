"""A federation put together: method, network, workers, transport, defences, server, hooks.

Whoever runs a federation puts it together here: an experiment, a program's own data sets, a
deployment, an attack on a finished run.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Self

import torch
from torch import nn

from feddg.clients.client import Examples, Worker
from feddg.clients.sampling import Schedule
from feddg.clients.threads import (
    clients_at_once,
    keep_memory,
    large_clients_at_once,
    threads_for,
    training_memory,
)
from feddg.data.augment import NONE, AugmentSettings
from feddg.diagnostics import Progress, emit, note, silent, warn
from feddg.errors import ExperimentError
from feddg.evaluation.accuracy import Evaluation, Outputs, Score, mean_score
from feddg.federation import averages
from feddg.federation.head_start import Arrivals, HeadStart, check_head, one_round
from feddg.federation.inprocess import InProcess
from feddg.federation.local_training import load_weights
from feddg.federation.server import Phase, Server
from feddg.federation.transport import Ledger, Transport
from feddg.messages import Broadcast, Weights, copied
from feddg.methods.base import Method, Round, RoundHook, State, has_global_model, local_names
from feddg.methods.composition import build_method
from feddg.methods.ridge import of_no_sum
from feddg.models.backbones import FEATURES, build_network, is_own
from feddg.models.convolutions import check_convolutions, use_fast_convolutions
from feddg.models.network import Network
from feddg.models.precision import as_usual, autocast, choose_device, choose_precision
from feddg.models.task import CLASSIFICATION, Task
from feddg.models.trained import trained_by
from feddg.privacy.building import NO_DEFENCES, Defences, build_defences
from feddg.records import SWA, ClientsTable, JsonFile
from feddg.settings import ExperimentSettings
from feddg.text import listed


class Clients:
    """The images of the clients, by id, and what is known of those that are elsewhere.

    Args:
        examples: the images of each; a sequence may find them when it is asked.

    Attributes:
        contents: the record of their images, for the run's folder; None if nobody here knows them.
    """

    contents: JsonFile | None = None

    def __init__(self, examples: Sequence[Examples]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, client: int) -> Examples:
        return self._examples[client]

    def __iter__(self) -> Iterator[Examples]:
        return map(self.__getitem__, range(len(self)))

    @cached_property
    def held(self) -> ClientsTable:
        """Counts of their images by domain and class; of no names if there are none."""
        return ClientsTable(domains=[], classes=[], clients=[])

    def scores_elsewhere(
        self, server: Server, broadcast: Broadcast, scores: Sequence[Score]
    ) -> Sequence[Score]:
        """Returns what is measured where clients are, beside the scores measured here."""
        return ()


class Federation:
    """A run of a method over clients; the server is put together at its first use.

    Args:
        clients: the images of each.
        network: the network that the method trains; on its device from now on.
        method: the method.
        settings: all else that an experiment says.
        augmentation: the random changes of training images that ``train.augmentation`` names.
        task: what is trained: a loss and a score.
        transport: carries messages to the clients; by default they are in this process.
        hooks: what happens in rounds besides; more may be added to :attr:`hooks` before the first.
        evaluation: the images here that measure the global model, if there are any.
        cache: folder for results that are expensive to compute, or None.
        another: builds another network like this one, for clients that train at once; by default
            from the settings.
        in_process: makes the transport to clients in this process.
        workers: the workers of the clients here; by default as many as pay.
        defences: what updates pass through; by default as the settings say.
        ledger: the record of all messages; none by default.

    Raises:
        ExperimentError: they do not go together.

    Attributes:
        state: where the server begins: None for before round 1.
        remote: whether clients are elsewhere, and store their own memory.
        domain_names: the domains of the clients here, by number; empty where they have no name.
        class_names: the classes in the order of the logits; none where clients name none.
        names: those of them that have a name.
    """

    domain_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    def __init__(
        self,
        clients: Clients | Sequence[Examples],
        network: Network,
        method: Method,
        settings: ExperimentSettings,
        *,
        augmentation: AugmentSettings = NONE,
        task: Task = CLASSIFICATION,
        transport: Transport | None = None,
        hooks: Sequence[RoundHook] = (),
        evaluation: Evaluation | None = None,
        cache: Path | None = None,
        another: Callable[[], Network] | None = None,
        in_process: Callable[..., InProcess] = InProcess,
        workers: Sequence[Worker] | None = None,
        defences: Defences | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.clients = clients if isinstance(clients, Clients) else Clients(clients)
        self.network = network
        self.method, self.settings = method, settings
        self.defences = defences or build_defences(settings, method, network)
        self.another = another or partial(untrained_network, settings, method, network.classes)
        self.remote = transport is not None
        if workers is None:
            shared = (settings, augmentation, cache, self.defences)
            first = build_worker(network, *shared)
            count = 1 if self.remote else _clients_at_once(first, settings, method)
            workers = [first, *(build_worker(self.another(), *shared) for _ in range(count - 1))]
            for worker in workers:
                worker.task = task
        self.workers = workers
        self.transport: Transport = transport or in_process(
            method, workers, len(clients), self.clients.__getitem__, defences=self.defences
        )
        self.hooks = [*averages.means_of(settings, method, network), *hooks]
        self.evaluation, self.ledger = evaluation, ledger
        self.state: State | None = None

    @property
    def worker(self) -> Worker:
        """The worker that clients here take turns on, the first one if several train at once."""
        return self.workers[0]

    @cached_property
    def server(self) -> Server:
        """Runs the setup and the rounds; its ``state`` holds the global weights."""
        method, network, settings = self.method, self.network, self.settings
        if settings.train.head == "ridge":
            check_head(method, network)
        classifies = self.worker.task.has_classes
        phase = Phase(method, network, settings, self.defences, self.hooks, classifies)
        ledger = self.ledger or Ledger(lambda row: None)
        return Server(phase, self.transport, self.state or self._before_round_1(), ledger)

    def _before_round_1(self) -> State:
        network, settings = self.network, self.settings
        weights = copied(network.state_dict())
        extras = self.method.initial_extras(network, len(self.transport.clients))
        extras |= averages.initial_extras(settings.server, self.method, network)
        extras |= self.defences.initial_extras()
        state = State(weights, extras, rounds=settings.train.rounds)
        return state.to(self.worker.device)

    def resume(self, state: State, memories: dict[int, Weights]) -> Self:
        """Goes on from a checkpoint, with what the clients here remember; before the first round.

        Args:
            state: the server's, after a round.
            memories: by client, as the transport had them.
        """
        self.state = state.to(self.worker.device)
        self.transport.memories = memories
        vars(self).pop("server", None)  # who looked at the federation before made one of round 0
        return self

    def fit(self, rounds: int | None = None, progress: Progress = silent) -> Self:
        """Trains until the last round, after the setup if this is the first one.

        Args:
            rounds: how many more; by default all that the settings plan.
            progress: called while clients' statistics arrive.

        Raises:
            NotEnoughUpdates: too few clients' updates could be used.
            ExperimentError: sites elsewhere would not know these rounds' learning rates.
        """
        state = self.server.state
        if rounds is not None:
            if rounds == 0:
                return self
            last, plan = state.round + rounds, self.settings.train
            other = plan.schedule != "constant" and last != plan.rounds
            if other and self.remote:
                raise ExperimentError(
                    "sites know by their own settings alone when the learning rate falls: say "
                    f"rounds={last} where each program, and this one, makes its Federation"
                )
            ends = {
                "the learning rate falls": other,
                "SWA begins": self.settings.server.averaging == SWA,
                self.method.by_last_round: True,
            }
            early = [what for what, holds in ends.items() if what and holds]
            if early and last != plan.rounds and (state.round or last < plan.rounds):
                text = f"{listed(early)} as if round {last} were the last, not {plan.rounds}."
                warn(
                    "schedule-of-this-call",
                    text[0].upper() + text[1:],
                    "Call fit once, with a hook that looks after each round.",
                )
            state.rounds = last
            for worker in self.workers:  # schedules of the learning rate know the last round
                worker.train = worker.train.model_copy(update={"rounds": state.rounds})
        with as_usual():
            if self.state is None and state.round == 0:
                self.start(progress)
            self.server.run()
        return self

    def start(self, progress: Progress = silent) -> None:
        """Does what comes before round 1: with ``train.head: ridge`` a round of that, the setup.

        Args:
            progress: called while messages arrive.

        Raises:
            RunError: no client sent statistics.
        """
        server, round = self.server, None
        if self.settings.train.head == "ridge":
            if without := of_no_sum(self.settings):
                text = "train.head: ridge counts every image alike: "
                acts = "act" if len(without) > 1 else "acts"
                emit(note("head-counts-alike", f"{text}{listed(without)} {acts} from round 1 on."))
            head, state, clients = HeadStart(self.method), server.state, [*self.transport.clients]
            round = Round(0, clients, state)
            network, settings = head.network(self.network), one_round(self.settings)
            phase = Phase(head, network, settings, hooks=[Arrivals(progress)])
            begin = head.state(network, state, len(clients))
            first = Server(phase, self.transport, begin, server.ledger)
            first.setup()
            round.left_out = first.round().left_out
            state.weights = state.weights | head.solution(first.state)
        server.setup(progress, round)

    @property
    def weights(self) -> Weights:
        """The global weights, or their average over rounds if ``averaging`` asks for it."""
        return averages.averaged(self.server.state, self.settings.server.averaging)

    def with_weights(self, weights: Weights) -> Network:
        """Returns the network that clients here use, in eval mode, with these weights."""
        load_weights(self.network, weights)
        return self.network.eval()

    def predictor(self, weights: Weights) -> nn.Module:
        """Returns a global model as a predictor, in eval mode, on the network clients also use."""
        return self.method.predictor(self.with_weights(weights)).eval()

    def untrained(self) -> Weights:
        """Returns the weights before training."""
        weights = self.another().to(self.worker.device).state_dict()
        return {name: tensor.detach() for name, tensor in weights.items()}

    def scores(
        self, evaluation: Evaluation, weights: Weights, outputs: list[Outputs] | None = None
    ) -> list[Score]:
        """Returns the scores of the global model, or their mean over clients that share none.

        For a client that has not trained yet, the starting weights count.

        Args:
            evaluation: the images.
            weights: the server's.
            outputs: gets the global model's outputs: see :meth:`Evaluation.scores`.
        """
        if has_global_model(self.method, self.network):
            return evaluation.scores(self.predictor(weights), outputs)
        memories, ids = self.transport.memories, self.transport.clients
        local = local_names(self.method, self.network)
        waiting = sum(id not in memories for id in ids)
        by_client: list[list[Score]] = []
        if waiting:
            by_client += [evaluation.scores(self.predictor(weights))] * waiting
        for id in ids:
            if id in memories:
                personal = {name: tensor for name, tensor in memories[id].items() if name in local}
                by_client.append(evaluation.scores(self.predictor(personal)))
        return [mean_score(scores) for scores in zip(*by_client, strict=True)]

    def others(
        self,
        examples: Callable[[int], Examples],
        count: int,
        worker: Worker,
        memories: dict[int, Weights] | None = None,
        defences: Defences | None = None,
    ) -> InProcess:
        """Returns a transport to other clients, with the same method and shared context.

        Args:
            examples: a client's images, by id.
            count: the number of clients.
            worker: the network, optimizer and device that they share.
            memories: the clients' stored tensors, by id.
            defences: by default the federation's.
        """
        given = (self.method, [worker], count, examples, memories)
        transport = InProcess(*given, defences or self.defences)
        transport.hand_out(self.server.state.context, again=True)
        return transport


def build(settings: ExperimentSettings, classes: int) -> tuple[Method, Network]:
    """Builds the method and the network it trains.

    Raises:
        ExperimentError, WeightsError: they cannot be built with these settings.
    """
    method = build_method(settings.method.name, settings.method.settings)
    method.check(settings)
    model, source = settings.model.backbone, settings.data.source
    if model == FEATURES and method.needs_images:
        raise ExperimentError(
            f"{method.name} changes images, and a table of features has none: choose a method that "
            "needs none, such as fedavg, fedprox or ridge"
        )
    if (model == FEATURES) != (source == FEATURES):
        raise ExperimentError(
            f"model.backbone {FEATURES} goes with data.source {FEATURES}, and no other with it; "
            f"they are {model} and {source}"
        )
    return method, untrained_network(settings, method, classes)


def untrained_network(settings: ExperimentSettings, method: Method, classes: int) -> Network:
    """Builds the network that a method trains.

    Raises:
        ExperimentError, WeightsError: it cannot be built with these settings.
    """
    model = settings.model
    network = build_network(
        model.backbone,
        classes,
        weights=model.weights,
        embedding=model.embedding,
        seed=settings.seed,
        image_size=settings.data.features or settings.data.image_size,
    )
    network = prepared_network(network, method, settings)
    if is_own(model.backbone) and not next(network.parameters()).is_meta:
        side = settings.data.image_size  # its layers may be called by hand
        check_convolutions(network, torch.linspace(0, 1, 6 * side**2).view(2, 3, side, side))
    return network


def prepared_network(network: Network, method: Method, settings: ExperimentSettings) -> Network:
    """Returns a network as a method trains it, with what is not trained frozen."""
    statistics = settings.model.normalization != "frozen"
    network = trained_by(network, method.network, settings.train, statistics=statistics)
    use_fast_convolutions(network)
    return network


def build_worker(
    network: Network,
    settings: ExperimentSettings,
    augmentation: AugmentSettings = NONE,
    cache: Path | None = None,
    defences: Defences = NO_DEFENCES,
) -> Worker:
    """Puts a network on its device and returns a worker for clients; see :class:`Federation`."""
    device = choose_device(settings.device)
    exact = settings.model.backbone == FEATURES
    precision = choose_precision(settings.precision, device, exact=exact)
    network.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    if device.type == "cpu":
        keep_memory()
    return Worker(
        network,
        settings.train,
        augmentation.model_copy(update={"hue": augmentation.own_hue or settings.train.hue}),
        device,
        settings.seed,
        autocast(precision, device),
        settings.model.normalization == "frozen",
        cache,
        threads=threads_for(network, device),
        style_noise=defences.style_noise,
        record_noise=defences.record_noise,
    )


def _clients_at_once(worker: Worker, settings: ExperimentSettings, method: Method) -> int:
    """Returns how many clients train at once in this process."""
    if worker.threads is not None:
        return clients_at_once(worker.threads)
    shape, batch_size = settings.data.shape, settings.train.batch_size
    return large_clients_at_once(
        worker.device,
        Schedule.of(settings, gathered=method.gathers_images).per_round,
        lambda: training_memory(worker.network, shape, batch_size),
    )
