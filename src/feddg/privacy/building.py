"""Builds the defences of a run, in order; refuses those that cannot hold."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TypeVar

from torch import nn

from feddg.clients.client import RecordNoise
from feddg.clients.sampling import Schedule
from feddg.diagnostics import Diagnostic
from feddg.errors import ClientError, ExperimentError, need, schema_faults
from feddg.messages import EntrySchema, Message, Update, Weights, under
from feddg.methods.base import Method, local_names, shared_entries
from feddg.privacy.defence import (
    DEFENCES,
    MEMORY,
    NOISED_RECORDS,
    Defence,
    WeightNames,
    require_compatible,
    traits_of,
)
from feddg.settings import DefenceChoice, ExperimentSettings, PrivacySettings
from feddg.styles.statistics import StyleNoise

T = TypeVar("T")

# All defences of a run, as the clients call them; at the server each is a hook of the round.
#
# Defences compose like layers: at the client in the order they are declared, the first nearest to
# the training; at the server the other way round. What a defence says travels among a message's
# extras under its name, so the ledger lists it.


class Defences:
    """The defences of a run, in their order.

    Args:
        defences: the defences; with none, updates pass unchanged.
        facts: names of the weights they apply to.
    """

    def __init__(self, defences: Sequence[Defence] = (), facts: WeightNames | None = None) -> None:
        self.defences, self.facts = tuple(defences), facts or WeightNames()
        for defence in self.defences:
            defence.facts = self.facts

    @property
    def sends(self) -> dict[str, EntrySchema]:
        """The schemas of what the defences add to a client's messages."""
        return {
            entry.replace("/", f"/{defence.name}/", 1): schema
            for defence in self.defences
            for entry, schema in defence.sends.items()
        }

    def initial_extras(self) -> Weights:
        """Returns the defences' tensors before round 1, by their names in the extras."""
        return {
            f"{MEMORY}{defence.name}/{name}": tensor
            for defence in self.defences
            for name, tensor in defence.initial_memory().items()
        }

    def protect(
        self, update: Update, received: Weights, extras: Message, secrets: Weights | None = None
    ) -> Update:
        """At the client: returns the update as it is sent.

        Args:
            update: the trained update.
            received: the weights of the broadcast.
            extras: the extras of the broadcast.
            secrets: what the client keeps secret in this round.

        Raises:
            ClientError: it must not be sent.
        """
        own = {defence.name for defence in self.defences}
        for name in {entry.partition("/")[0] for entry in extras.scalars if "/" in entry} - own:
            if name in {NOISED_RECORDS, *DEFENCES}:
                raise ClientError(
                    f"the coordinator counts on {name}, which this client's program does not have: "
                    "say the same privacy and defences in both programs"
                )
        for defence in self.defences:
            message = under(f"{defence.name}/", extras)
            update = defence.protect(update, received, message)
            if defence.sums:
                secrets = {} if secrets is None else secrets
                update = defence.mask(update, received, message, secrets)
        return update

    @property
    def masking(self) -> Defence | None:
        """The defence that hides single updates from the server, if there is one."""
        return next((defence for defence in self.defences if defence.sums), None)

    @property
    def style_noise(self) -> StyleNoise | None:
        """How clients noise styles before they send them; None for not at all."""
        return next((d.style_noise for d in self.defences if d.style_noise), None)

    @property
    def record_noise(self) -> RecordNoise | None:
        """How clients noise the gradients of single images; None for not at all."""
        return next((d.record_noise for d in self.defences if d.record_noise), None)

    def carrier(self, transport: T, fewest: int) -> T:
        """Returns what trains the clients: the transport, or what a defence puts before it."""
        for defence in self.defences:
            transport = defence.carrier(transport, fewest)
        return transport

    def answer(
        self, id: int, round: int, name: str, question: Message, secrets: Weights
    ) -> Message | None:
        """At a client: returns the answer to a defence's question; None for other questions.

        Raises:
            ClientError: the client does not answer.
        """
        for defence in self.defences:
            if name.startswith(f"{defence.name}:"):
                return defence.answer(id, round, name, question, secrets)
        return None

    @property
    def sees_all(self) -> bool:
        """Whether no update may be dropped for being unlike the others.

        A robust aggregation needs all updates. And where the server adds noise, one client's update
        must not decide whether another's is used; updates that come with noise may be compared.
        """
        return any(d.aggregates or (d.noised and d.plain_mean) for d in self.defences)

    @property
    def secret_rate(self) -> float | None:
        """The probability that a client takes part, if participation is secret."""
        return next((g.secret_rate for g in self.defences if g.secret_rate is not None), None)

    @property
    def diagnostics(self) -> list[Diagnostic]:
        """Returns notes on what the defences guarantee."""
        return [defence.diagnostic for defence in self.defences if defence.diagnostic]


NO_DEFENCES = Defences()


def build_defences(settings: ExperimentSettings, method: Method, network: nn.Module) -> Defences:
    """Returns an experiment's defences: clipping first, if asked for, then those named.

    Args:
        settings: with actual numbers of clients and steps.
        method: the method whose updates are protected.
        network: the network it trains.

    Raises:
        MissingPackage: one needs a package that is not installed.
        ExperimentError: they cannot protect the method's messages; the message says why.
    """
    _require_countable(settings, method)
    privacy, choices = settings.privacy, settings.defences
    require_packages(privacy, choices)
    schedule = Schedule.of(settings, gathered=method.gathers_images)
    # What is masked last can still be changed before.
    defences = sorted(map(defence_of, choices), key=lambda defence: defence.sums)
    if privacy != PrivacySettings():
        epochs = settings.train.local_epochs
        asked = (d.asked_for(privacy, method, schedule, epochs) for d in DEFENCES.values())
        defences = [*chain.from_iterable(asked), *defences]
    for defence in defences:
        defence.fit(privacy, method)
    seen_to = privacy.style_epsilon is not None or privacy.open_styles
    traits = traits_of(
        method,
        network,
        trains_statistics=settings.model.normalization != "frozen",
        covered=type(method).noises if seen_to else frozenset(),
    )
    require_compatible(defences, traits, method, updates=schedule.per_round)
    if defences and settings.train.head != "random" and not method.one_round:
        raise ExperimentError(
            f"train.head is {settings.train.head}: its sums leave the clients before round 1, and "
            f"{defences[0].name} neither hides nor checks them; set it to random"
        )
    summed = any(defence.sums for defence in defences) and not method.one_round
    if summed and settings.server.weighting != "examples" and settings.privacy.clipping == "none":
        raise ExperimentError(
            "server.weighting: uniform needs every update by itself, and secure aggregation shows "
            "a sum by numbers of images: leave one of them out, or clip (privacy.clipping), which "
            "counts clients alike"
        )
    if settings.server.min_updates > 1 and privacy.sampling == "secret":
        raise ExperimentError(
            "server.min_updates and privacy.sampling: secret exclude each other: a round that is "
            "repeated for too few would tell who was drawn; leave one out"
        )
    return Defences(defences, weight_names(method, network))


def _require_countable(settings: ExperimentSettings, method: Method) -> None:
    """Raises ExperimentError where privacy could not count what an image or a client costs."""
    train = settings.train
    hides_images = settings.privacy.hides_images
    if hides_images and settings.data.tile is not None:
        raise ExperimentError(
            f"{hides_images} protects one image, but data.tile makes several of one, which "
            "together reveal more of it: leave out data.tile"
        )
    # Where images are gathered, the steps are counted in epochs: see Images.trained_by.
    uncounted = train.local_steps and not type(method).gathers_images
    if settings.privacy.record_epsilon and (uncounted or train.select_every):
        raise ExperimentError(
            "privacy.record_epsilon counts epochs, and whatever is chosen by images costs "
            "privacy: set train.local_epochs, and neither train.local_steps nor train.select_every"
        )
    if settings.privacy.record_epsilon and train.class_weights != "none":
        raise ExperimentError(
            "privacy.record_epsilon bounds what one image does to a step, and under "
            "train.class_weights it changes how much all others count: set it to none"
        )
    if train.head_rounds and settings.privacy.noised and not method.one_round:
        raise ExperimentError(
            f"train.head_rounds is {train.head_rounds}: in these rounds the featurizer stays as it "
            "is, and noise on updates would move it. Set it to 0, or train the classifier alone "
            "(train.trainable: head)"
        )


def require_packages(privacy: PrivacySettings, choices: Iterable[DefenceChoice]) -> None:
    """Raises MissingPackage if noise or a defence needs a package that is not installed."""
    if privacy.noised or privacy.style_epsilon is not None or privacy.record_epsilon is not None:
        need("privacy", "differential privacy")
    for choice in choices:
        defence = DEFENCES.find(choice.name)
        if defence.extra:
            need(defence.extra, f"the defence {defence.name}")


def defence_of(choice: DefenceChoice) -> Defence:
    """Returns the defence named in an experiment.

    Raises:
        ExperimentError: it is unknown, or a setting is unknown or out of range.
    """
    defence = DEFENCES.find(choice.name)
    fields = defence.Settings.model_fields
    with schema_faults(ExperimentError, f"defence {defence.name}: ", fields):
        return defence(defence.Settings(**choice.settings))


def resolved_choice(written: object) -> dict[str, object]:
    """Returns a defence's name and all settings, from its entry in an experiment.

    Raises:
        ExperimentError: the entry does not name an available defence.
    """
    with schema_faults(ExperimentError, "defences: "):
        choice = DefenceChoice.model_validate(written)
    if DEFENCES.find(choice.name).Settings is PrivacySettings:
        raise ExperimentError(
            "defences: write clipping as `privacy: {clipping: fixed}` (or adaptive)"
        )
    settings = defence_of(choice).settings.model_dump(mode="json")
    return {"name": choice.name, "settings": settings}


def weight_names(method: Method, network: nn.Module) -> WeightNames:
    """Returns the names of a method's aggregated and trained weights, for defences."""
    local = local_names(method, network) | getattr(network, "frozen", frozenset())
    state = network.state_dict()
    floats = {name for name, tensor in state.items() if tensor.is_floating_point()}
    return WeightNames(frozenset(floats - local), frozenset(shared_entries(method, network)))
