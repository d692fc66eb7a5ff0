"""Small federations on generated images, for tests of methods, server and transports."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from sklearn.linear_model import Ridge
from torch import Tensor, nn

from feddg.clients.client import Client, Examples, Worker
from feddg.data.augment import NONE, AugmentSettings
from feddg.data.pixels import ArrayPixels
from feddg.experiment import checked_settings
from feddg.federation import federation as parts
from feddg.federation.server import Hooks
from feddg.federation.transport import Ledger
from feddg.messages import Refusal, Update
from feddg.methods.base import Method, Round, RoundHook, State
from feddg.methods.composition import build_method
from feddg.models.backbones import build_network
from feddg.models.normalization import batch_norms
from feddg.models.trained import trained_by
from feddg.privacy.building import Defences, build_defences
from feddg.rng import numpy_stream
from feddg.settings import ExperimentSettings, ServerSettings, TrainSettings
from feddg.simple import Federation

CLASSES, SIZE = 3, 16


def colored_images(
    count: int, seed: int = 0, size: int = SIZE
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Noise whose brightest channel is its class: ``(n, size, size, 3)`` uint8 and labels."""
    rng = numpy_stream(seed, "test images")
    labels = numpy.arange(count) % CLASSES
    images = rng.integers(0, 120, (count, size, size, 3))
    images[numpy.arange(count), :, :, labels] += 100
    return images.astype(numpy.uint8), labels.astype(numpy.int64)


class Replies(RoundHook):
    """Notes what came of the setup, and of each client's turn.

    Attributes:
        setup: round 0.
    """

    setup: Round

    def __init__(self, replies: list[Any]) -> None:
        self._replies = replies

    def begun(self, state: State, round: Round) -> None:
        self.setup = round

    def received(self, update: Update, round: Round) -> Update:
        self._replies.append(update)
        return update

    def refused(self, refusal: Refusal, round: Round) -> None:
        self._replies.append(refusal)


class NoisedStyles(Defences):
    """Defences under which styles are noised, too."""

    style_noise = None


class Held(Sequence[Examples]):
    """What the clients of a small federation hold, as it is when they are asked."""

    def __init__(self, small: "SmallFederation") -> None:
        self._small = small

    def __len__(self) -> int:
        return len(self._small.sizes)

    def __getitem__(self, client: Any) -> Any:
        return self._small.examples(client)


@dataclass
class SmallFederation(Federation):
    """A federation of generated images, with all that a test may want to be otherwise.

    Attributes:
        sizes: images per client.
        size: side of the images, pixels.
        classes: that the network tells apart.
        ledger: rows entered so far.
        at_once: clients that train side by side.
        threads: of each; None where they share the process's, as a large network's do.
        privacy: how updates are clipped and noised.
        device: where clients train.
        defences: names and settings of others.
    """

    method: Method
    sizes: tuple[int, ...] = (7, 5, 6)
    train: TrainSettings = field(default_factory=lambda: TrainSettings(rounds=2, batch_size=4))
    per_round: int | None = None
    seed: int = 0
    size: int = SIZE
    classes: int = CLASSES
    backbone: str = "cnn"
    embedding: Any = "none"
    augmentation: AugmentSettings = NONE
    server_settings: ServerSettings = field(default_factory=ServerSettings)
    ledger: list[dict[str, Any]] = field(default_factory=list)
    replies: list[Any] = field(default_factory=list)
    freeze: bool = False
    cache: Any = None
    at_once: int = 1
    threads: int | None = 1
    privacy: dict[str, Any] = field(default_factory=dict)
    style_noise: Any = None
    device: str = "cpu"
    defences: tuple[tuple[str, dict[str, Any]], ...] = ()

    def __post_init__(self) -> None:
        images, labels = colored_images(sum(self.sizes), size=self.size)
        self.pixels = ArrayPixels(images)
        self.labels = torch.from_numpy(labels)
        self.starts = numpy.cumsum([0, *self.sizes])
        settings = checked_settings(
            {
                "data": {"image_size": self.size},
                "clients": {"number": len(self.sizes), "per_round": self.per_round},
                "train": self.train,
                "server": self.server_settings,
                "evaluate": {"averages": "never"},
                "model": {"normalization": "frozen" if self.freeze else "train"},
                "privacy": self.privacy,
                "defences": [
                    {"name": name, "settings": settings} for name, settings in self.defences
                ],
                "seed": self.seed,
            }
        )
        workers = [self.new_worker() for _ in range(self.at_once)]
        self.network = workers[0].network
        rows, noted = self.ledger, Replies(self.replies)
        parts.Federation.__init__(
            self,
            Held(self),
            self.network,
            self.method,
            settings,
            workers=workers,
            another=lambda: self.new_worker().network,
            defences=self.built_defences(settings),
            hooks=[noted],
            ledger=Ledger(lambda row: rows.append(row.model_dump())),
        )
        assert self.server.state.round == 0  # put together now, with that ledger
        self.ledger = rows

    def built_defences(self, settings: ExperimentSettings) -> Defences:
        """What happens to updates on their way, as an experiment would have it."""
        built = build_defences(settings, self.method, self.network)
        if not self.style_noise:
            return built
        noised = NoisedStyles(built.defences, built.facts)
        noised.style_noise = self.style_noise
        return noised

    def new_worker(self) -> Worker:
        """A network and the settings for clients to take turns on."""
        network = build_network(
            self.backbone,
            self.classes,
            weights=None,
            embedding=self.embedding,
            seed=self.seed,
            image_size=self.size,
        )
        device = torch.device(self.device)
        return Worker(
            trained_by(network, self.method.network, self.train, statistics=not self.freeze).to(
                device=device, memory_format=torch.channels_last
            ),
            self.train,
            self.augmentation,
            device,
            self.seed,
            freeze=self.freeze,
            cache=self.cache,
            threads=self.threads,
            style_noise=self.style_noise,
        )

    def examples(self, client: int) -> Examples:
        """The images of a client; its domain is its id."""
        rows = torch.arange(self.starts[client], self.starts[client + 1])
        domains = torch.full_like(rows, client)
        labels = self.labels[rows]
        return Examples(self.pixels, rows, labels, domains, self.classes, f"test-{client}")

    def client(self, id: int = 0, **state: Any) -> Client:
        """A client outside any round, in training mode, with an optimizer."""
        client = Client(id, self.examples(id), self.worker, **{"round": 1, **state})
        client.set_training()
        client.optimizer = self.method.optimizer(client)
        return client

    @property
    def setup(self) -> Round:
        """Round 0: what came of the setup."""
        return next(hook for hook in self.server.hooks.all if isinstance(hook, Replies)).setup

    def add_hook(self, hook: RoundHook) -> None:
        """Has something more happen in its rounds."""
        self.server.hooks = Hooks([*self.server.hooks.all, hook])

    def run(self, rounds: int | None = None) -> dict[str, torch.Tensor]:
        """Sets up, runs the rounds, and returns the global weights."""
        self.server.setup()
        for _ in range(rounds or self.train.rounds):
            self.server.round()
        return self.server.state.weights

    def resume(self, state: State, memories: dict[int, dict[str, torch.Tensor]]) -> None:
        """Goes on from a checkpoint."""
        self.server.state, self.transport.memories = state, memories
        self.transport.hand_out(state.context)

    def accuracy(self) -> float:
        """Share of all clients' images that the global model's predictor classifies correctly."""
        images = self.pixels.gather(torch.arange(len(self.labels))).float() / 255
        with torch.no_grad():
            predicted = self.model(images).argmax(1)
        return float((predicted == self.labels).float().mean())


def features_of(chosen, clients=None):
    """Features ``(n, d)`` and labels of some clients' images, in double precision."""
    clients = range(len(chosen.sizes)) if clients is None else clients
    rows = torch.cat([chosen.examples(id).rows for id in clients])
    images = chosen.pixels.gather(rows).float() / 255
    network = chosen.network.eval()
    with torch.no_grad():
        features = network.featurizer(network.normalize(images)).double().numpy()
    return features, chosen.labels[rows].numpy()


def ridge_of(features, labels, penalty, classes=CLASSES):
    """scikit-learn's ridge, its penalty as feddg's: weights ``(classes, d)`` and bias."""
    spread = ((features - features.mean(0)) ** 2).mean(0).mean()
    model = Ridge(alpha=len(features) * penalty * spread, solver="svd", tol=1e-12)
    model.fit(features, numpy.eye(classes)[labels])
    return model


def trained_alone(
    id: int, weights: dict[str, torch.Tensor], round: int = 1, **options: Any
) -> dict[str, torch.Tensor]:
    """Returns client ``id``'s weights after training from ``weights`` in a round, as in FedAvg."""
    lone = federation(**options)
    lone.server.state = State({name: t.clone() for name, t in weights.items()}, round=round - 1)
    lone.server.sample = lambda round, attempt=0: [id]
    lone.server.round()
    return lone.server.state.weights


def federation(method: str | Method = "fedavg", /, **options: Any) -> SmallFederation:
    """Returns a small federation; ``settings`` are the method's."""
    settings = options.pop("settings", {})
    built = build_method(method, settings) if isinstance(method, str) else method
    return SmallFederation(built, **options)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of weights are bit-identical."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


Make = Callable[..., SmallFederation]


def affine_names(module: nn.Module) -> set[str]:
    """Returns the state-dict names of the scales and shifts of batch normalisation."""
    return {
        f"{name}.{parameter}" if name else parameter
        for name, layer in batch_norms(module).items()
        for parameter, _ in layer.named_parameters()
    }


def snapshot(module: nn.Module, names: set[str]) -> dict[str, Tensor]:
    """Returns copies of the named entries of a module's state."""
    return {name: t.detach().clone() for name, t in module.state_dict().items() if name in names}
