"""Differential privacy of updates, of single images (DP-SGD) and of styles."""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch

from feddg.clients.client import RecordNoise
from feddg.clients.sampling import Schedule
from feddg.diagnostics import Diagnostic, note
from feddg.errors import BudgetSpent, ClientError, ExperimentError
from feddg.messages import Broadcast, EntrySchema, Message, Refusal, Update, Weights
from feddg.methods.base import Method, Round, State
from feddg.privacy.accounting import (
    MOST_STYLE_NOISE,
    Account,
    Release,
    bearable_noise,
    gaussian_epsilon,
    open_account,
    require_meaning,
    sampled_epsilon,
    sampled_noise,
)
from feddg.privacy.defence import (
    AGGREGATION,
    CLIENT_STATISTICS,
    EXTRAS,
    LOCAL,
    NOISED_RECORDS,
    STATISTICS,
    TRAINING,
    Defence,
    WeightNames,
    register,
    sent_by,
)
from feddg.privacy.robust import distance, length, shrunk
from feddg.records import PRIVACY
from feddg.rng import add_noise
from feddg.settings import PrivacySettings
from feddg.styles.statistics import StyleNoise

log = logging.getLogger("feddg")

NORM, NORM_BIT = "norm", "norm_bit"
_OPEN_UPDATES = "neither clipped nor noised"
_UPDATES, _CLIPPED, _ROUNDING = "updates", "clipped", "rounding"
_NOBODY = -1
_COUNTS = frozenset({"statistics/domains", "statistics/images"})
"""Of images by domain: no styles."""
_OPEN_RECORDS = "which is taken from images without noise"


class _Charged(Defence):
    """A defence that charges what it releases to the account of its run.

    Attributes:
        budget: the field of its settings with the largest epsilon of all that it releases.
    """

    Settings = PrivacySettings
    budget: ClassVar[str]

    def __init__(self, settings: PrivacySettings | None = None) -> None:
        super().__init__(settings)
        self.account = Account()

    def keep_in(self, folder: Any) -> None:
        """Goes on with the account in the run's folder."""
        self.account = open_account(folder)

    def _release(self, round: int, clients: Sequence[int]) -> Release | None:
        """Returns what a round with these clients releases, or None; before round 1 it is 0."""
        raise NotImplementedError

    def _agree(self, message: Message, **own: float) -> None:
        """Raises ClientError if the server accounts for other noise than this client adds."""
        told = {name: message.scalars.get(name) for name in own}
        if told != own:
            raise ClientError(
                f"its noise is not what the coordinator accounts for (here {own}, there {told}): "
                "say the same privacy, rounds, number, clients_per_round, seed and local_epochs in "
                "both programs"
            )

    def affords(self, round: int, clients: Sequence[int]) -> bool:
        """See :class:`Defence`."""
        release, chosen = self._release(round, clients), self.settings
        budget = getattr(chosen, self.budget)
        return release is None or self.account.affords(release, chosen.delta, budget)

    def _charge(self, round: int, clients: Sequence[int]) -> None:
        """Charges a round's release.

        Raises:
            BudgetSpent: it must not be made.
            ExperimentError: what earlier rounds have cost is not known.
        """
        release, chosen = self._release(round, clients), self.settings
        # Nobody's data costs nothing, unless who took part is secret: an attack asks nobody.
        if release is not None and (clients or release.rate < 1):
            if self.noised and self.account.lacks(round - 1):
                raise ExperimentError(
                    "what earlier rounds have cost of privacy is not known here, so nothing more "
                    "can be promised: go on in the object that trained them, or in their run "
                    f"folder with its file {PRIVACY}"
                )
            self.account.charge(release, chosen.delta, getattr(chosen, self.budget))


@register
class Clipping(_Charged):
    """Clips the norm of updates' changes, and may add noise to their mean.

    Attributes:
        adaptive: whether the clipping norm adapts.
        at_clients: whether clients add the noise.
    """

    name = "clipping"
    clips = True
    budget = "epsilon"
    _BREAKS: ClassVar[dict[str, str]] = {
        CLIENT_STATISTICS: _OPEN_UPDATES,
        EXTRAS: _OPEN_UPDATES,
        LOCAL: "so that what it sends of them is no change of what it was sent",
        AGGREGATION: "and the noise is made for a plain mean",
        STATISTICS: "which are taken from images, and noise would make variances negative; set "
        "model.normalization to frozen (--set model.normalization=frozen), or choose another "
        "backbone",
    }

    def __init__(
        self, settings: PrivacySettings | None = None, schedule: Schedule | None = None
    ) -> None:
        super().__init__(settings)
        chosen, self._schedule = self.settings, schedule or Schedule(1, 1)
        self.noised, self.adaptive = chosen.noised, chosen.clipping == "adaptive"
        self.at_clients = self.noised and chosen.noised_at == "client"
        if self.noised and not self.at_clients:
            self.plain_mean = "its noise is made for a plain mean"
        if self.noised and chosen.sampling == "secret" and self._schedule.rate < 1:
            self.secret_rate = self._schedule.rate
        self._require_met()

    @classmethod
    def asked_for(
        cls, privacy: PrivacySettings, method: Method, schedule: Schedule, epochs: int
    ) -> Sequence[Defence]:
        """Returns the noise of images, of styles, and clipping, in the order of a message's way."""
        require_meaning(privacy)
        defences: list[Defence] = []
        if privacy.clipping != "none":
            defences.append(cls(privacy, schedule))
        if privacy.style_epsilon is not None:
            require_styles(privacy, method)
            defences.insert(0, NoisedStyles(privacy))
        if privacy.record_epsilon is not None:
            defences.insert(0, NoisedRecords(privacy, schedule, epochs))
        return defences

    @property
    def breaks(self) -> dict[str, str]:  # type: ignore[override]
        """Features of methods it does not work with; an own mean only if noise is added to it."""
        at_server = self.noised and not self.at_clients
        return {t: why for t, why in self._BREAKS.items() if t != AGGREGATION or at_server}

    @cached_property
    def multiplier(self) -> float:
        """The noise multiplier z: given, or the smallest that meets epsilon; 0 for no noise."""
        chosen = self.settings
        if chosen.noise_multiplier or not chosen.epsilon:
            return float(chosen.noise_multiplier)
        if self.secret_rate is not None:
            rounds = self._schedule.rounds
            return sampled_noise(chosen.epsilon, chosen.delta, self.secret_rate, rounds)
        return bearable_noise(chosen, "epsilon", self._schedule.most, self._sensitivity)

    @property
    def _sensitivity(self) -> int:
        """The distance between neighbouring data sets, in clipping norms."""
        return 2 if self.settings.noised_at == "client" else 1

    @property
    def diagnostic(self) -> Diagnostic | None:
        """A note with epsilon, unit, noise and number of rounds."""
        if not self.noised:
            return None
        chosen, plan, in_public = self.settings, self._schedule, self.secret_rate is None
        epsilon = f"epsilon {chosen.epsilon:g}" if chosen.epsilon else "no epsilon"
        who = f"at most {plan.most} with the same client" if in_public else "drawn in secret"
        text = (
            f"Updates: {epsilon} at delta {chosen.delta:g} for a client, by noise of "
            f"{self.multiplier:g} times the norm at the {chosen.noised_at}; {plan.rounds} rounds "
            f"planned, {who}."
        )
        return note("update-privacy", text)

    def _require_met(self) -> None:
        """Raises ExperimentError if epsilon cannot be met; names a value that can."""
        chosen, rate = self.settings, self.secret_rate
        if not chosen.epsilon:
            return
        noise = (self.multiplier if rate is None else chosen.noise_multiplier) / self._sensitivity
        once = 0.0  # for secret draws the noise is chosen later, so that it meets epsilon
        if rate is None:
            once = gaussian_epsilon(noise, chosen.delta)
        elif noise:
            once = sampled_epsilon(((noise, rate),), chosen.delta)
        if once > chosen.epsilon:
            raise ExperimentError(
                f"privacy.epsilon {chosen.epsilon:g} cannot be met with noise_multiplier "
                f"{chosen.noise_multiplier:g}: one round costs {once:.4g}. Set epsilon to at "
                f"least {once * 1.0005:.4g}, or leave out noise_multiplier: it is chosen then"
            )

    def _release(self, round: int, clients: Sequence[int]) -> Release | None:
        if not self.noised:
            return None
        where, rate = self.settings.noised_at, self.secret_rate or 1.0
        noise = self.multiplier / self._sensitivity
        return Release("update", round, clients, noise, noised_at=where, rate=rate)

    @property
    def sends(self) -> dict[str, EntrySchema]:
        """With adaptive clipping: whether the update was clipped."""
        bit = EntrySchema("whether its update was clipped", integer=True, low=0, high=1)
        return {f"update/{NORM_BIT}": bit} if self.adaptive else {}

    def initial_memory(self) -> Weights:
        """The clipping norm, if it adapts."""
        return {NORM: torch.tensor(self.settings.clipping_norm, dtype=torch.float64)}

    # At a client

    def protect(self, update: Update, received: Weights, message: Message) -> Update:
        """Clips the change, and may add noise; mean loss terms are not sent."""
        if NORM not in message.scalars:
            raise ClientError("was not told the norm to clip its update to")
        norm = float(message.scalars[NORM])
        if self.at_clients:
            self._agree(message, noise=self.multiplier)
        clipped = shrunk(update.weights, received, self.facts.aggregated, norm)
        update = replace(update, weights=clipped or update.weights, terms={})
        if self.at_clients:
            # Weights sent may be so large that, rounded to their digits, a change is longer again.
            again = norm / max(norm, distance(update.weights, received, self.facts.aggregated))
            deviation = self.multiplier * norm
            update.weights = _noised(update.weights, received, self.facts, deviation, again)
        return self.add(update, NORM_BIT, int(clipped is not None)) if self.adaptive else update

    # At the server

    def broadcast(self, broadcast: Broadcast, round: Round) -> Broadcast:
        """Sends the norm. Charges the account if clients add the noise, because they may send it.

        Raises:
            BudgetSpent: the clients must not be asked.
        """
        told = {NORM: self._norm(round)}
        if self.at_clients:
            self._charge(round.number, round.clients)
            told["noise"] = self.multiplier
        return self.tell(broadcast, **told)

    def _norm(self, round: Round) -> float:
        return float(self.memory(round.state)[NORM])

    def received(self, update: Update, round: Round) -> Update:
        """Refuses a change longer than the norm, and an invalid clipping bit."""
        bit = update.extras.scalars.get(f"{self.name}/{NORM_BIT}")
        if self.adaptive and not (type(bit) is int and bit in (0, 1)):
            raise ClientError(f"{NORM_BIT} is {bit!r:.40}; it must be 0 or 1")
        round.scratch[self].setdefault(_CLIPPED, {})[update.client] = int(bit or 0)
        if self.at_clients:
            return update
        norm, sent, scratch = self._norm(round), round.state.weights, round.scratch[self]
        moved = distance(update.weights, sent, self.facts.aggregated)
        # x + D is rounded once more at the client: by half a unit in the last place of each entry.
        if _ROUNDING not in scratch:
            scratch[_ROUNDING] = 2**-23 * length(sent, self.facts.aggregated)
        if not moved <= norm * (1 + 1e-6) + scratch[_ROUNDING]:
            raise ClientError(f"its change is {moved:.6g} long; the norm is {norm:.6g}")
        return update

    def collected(self, updates: Iterator[Update], round: Round) -> Iterator[Update]:
        """Counts updates, and gives every client the same weight."""
        scratch = round.scratch[self]
        scratch[_UPDATES] = []
        for update in updates:
            scratch[_UPDATES] += update.clients
            yield replace(update, examples=1)
        if not scratch[_UPDATES]:  # a secret draw of nobody: what is released is noise
            yield Update(_NOBODY, 1, round.state.weights)

    def refused(self, refusal: Refusal, round: Round) -> None:
        """Forgets whether a refused update was clipped."""
        round.scratch[self].get(_CLIPPED, {}).pop(refusal.client, None)

    def completed(self, state: State, round: Round) -> State:
        """Adds noise to all trained entries, and adapts the norm by all good updates.

        Raises:
            BudgetSpent: the result must not be released.
        """
        clients = round.scratch[self][_UPDATES]
        norm, sent, updates = self._norm(round), round.state.weights, len(clients)
        if not self.at_clients:
            self._charge(round.number, clients)
        # A number that is public: how many updates came would show in the noise's scale.
        expected = self._schedule.per_round if self.noised else updates
        noise, count_noise = self.noise(expected)
        if noise and not self.at_clients:
            deviation, part = noise * norm / expected, updates / expected
            state.weights = _noised(state.weights, sent, self.facts, deviation, part)
        else:
            trained = {name: state.weights[name] for name in self.facts.trained}
            state.weights = {name: trained.get(name, sent[name]) for name in state.weights}
        if self.adaptive:
            # A robust rule makes one update of all; each client's own says whether it was clipped.
            bits = [*round.scratch[self].get(_CLIPPED, {}).values()]
            beyond_half = torch.tensor(len(bits) / 2 - sum(bits), dtype=torch.float64)
            counted = add_noise(beyond_half, count_noise) if count_noise else beyond_half
            chosen, whole = self.settings, expected if self.noised else len(bits)
            share = 0.5 + float(counted) / whole
            norm *= math.exp(-chosen.clipping_rate * (share - chosen.clipping_quantile))
            self.remember(state, {NORM: torch.tensor(norm, dtype=torch.float64)})
        log.info("updates clipped to %.4g", norm)
        return state

    def noise(self, updates: int) -> tuple[float, float]:
        """Returns the noise multiplier of the mean, and the deviation of the count's noise."""
        noise = self.multiplier
        if not noise or not self.adaptive:
            return noise, 0.0
        count_noise = max(updates / 20, noise)
        return (noise**-2 - (2 * count_noise) ** -2) ** -0.5, count_noise


def _noised(
    trained: Weights, sent: Weights, facts: WeightNames, deviation: float, share: float = 1.0
) -> Weights:
    """Returns weights with noise on a share of their change; what is not trained is as sent."""
    weights = {name: sent[name] for name in trained}
    for name in facts.trained:
        before = sent[name].double()
        change = (trained[name].double() - before.to(trained[name].device)) * share
        noised = add_noise(change, deviation).to(before)
        weights[name] = (before + noised).to(trained[name].dtype)
    return weights


# Image privacy: a client's steps are noised, so that no image shows in what it trains (DP-SGD).
#
# The client does it (:mod:`feddg.federation.local_training`), whoever the server is; this defence
# says what it guarantees, counts what it costs, and refuses what would go around it.
#
# An image is in one batch of every epoch of every round its client takes part in: so many
# releases.


class NoisedRecords(_Charged):
    """Differential privacy of single images, by DP-SGD at the clients.

    Args:
        settings: epsilon, delta and the norm.
        schedule: how often clients take part.
        epochs: passes over a client's images per round.
    """

    name = NOISED_RECORDS
    breaks: ClassVar[dict[str, str]] = {
        CLIENT_STATISTICS: _OPEN_RECORDS,
        EXTRAS: _OPEN_RECORDS,
        TRAINING: "and gradients are clipped image by image for plain training alone",
        STATISTICS: "which mix the images of a batch; choose model.backbone cnn_gn or another "
        "without, or set model.normalization to frozen",
    }
    clips = True
    noised = True
    budget = "record_epsilon"
    record_noise: RecordNoise

    def __init__(self, settings: PrivacySettings, schedule: Schedule, epochs: int) -> None:
        super().__init__(settings)
        self._epochs = epochs
        noise = bearable_noise(settings, "record_epsilon", schedule.most * epochs)
        self.record_noise = RecordNoise(noise, settings.record_norm)

    @property
    def diagnostic(self) -> Diagnostic:
        """A note with the epsilon of a single image and the noise."""
        chosen = self.settings
        text = (
            f"Updates: epsilon {chosen.record_epsilon:g} at delta {chosen.delta:g} for an image, "
            f"by noise of {self.record_noise.multiplier:g} times the norm in every step at the "
            "client."
        )
        return note("image-privacy", text)

    def _release(self, round: int, clients: Sequence[int]) -> Release:
        noise, times = self.record_noise.multiplier, self._epochs
        return Release("update", round, clients, noise, "image", "client", times=times)

    def broadcast(self, broadcast: Broadcast, round: Round) -> Broadcast:
        """Charges the account for the epochs that these clients will train.

        Raises:
            BudgetSpent: the clients must not be asked.
        """
        self._charge(round.number, round.clients)
        return self.tell(broadcast, noise=self.record_noise.multiplier, epochs=self._epochs)

    def protect(self, update: Update, received: Weights, message: Message) -> Update:
        """Removes the mean loss terms from the update.

        Raises:
            ClientError: the server accounts for other noise.
        """
        self._agree(message, noise=self.record_noise.multiplier, epochs=self._epochs)
        return replace(update, terms={})


# Style privacy: the moments that a client sends before round 1 are noised before they leave.
#
# The client's method does it (:mod:`feddg.styles.statistics`); this defence says what it
# guarantees, counts what it costs, and is why other defences let the description pass. Styles leave
# once, before round 1.


def require_styles(privacy: PrivacySettings, method: Method) -> None:
    """Raises ExperimentError if a method sends no styles that can be noised, or others beside."""
    sends, covered = sent_by(method), type(method).noises
    more = [e for e in sends if e.startswith("statistics/") and e not in covered | _COUNTS]
    if covered and method.has_setup and not more:
        return
    sent = f"{more[0]} ({sends[more[0]]}) cannot be noised" if more else "sends none"
    raise ExperimentError(
        f"privacy.style_epsilon is for methods whose styles can be noised, such as pardon and "
        f"ccst; {method.name}: {sent}"
    )


class NoisedStyles(_Charged):
    """Differential privacy of styles, for an image or a client."""

    name = "noised_styles"
    budget = "style_epsilon"
    style_noise: StyleNoise

    def __init__(self, settings: PrivacySettings) -> None:
        super().__init__(settings)
        noise = bearable_noise(settings, "style_epsilon", most=MOST_STYLE_NOISE)
        self.style_noise = StyleNoise(noise, settings.style_unit, settings.style_norm)

    @property
    def diagnostic(self) -> Diagnostic:
        """A note with epsilon and unit."""
        chosen = self.settings
        whom = "an image" if chosen.style_unit == "image" else "a client"
        text = (
            f"Styles: epsilon {chosen.style_epsilon:g} at delta {chosen.delta:g} for {whom}, by "
            f"noise of {self.style_noise.multiplier:g} times the sensitivity at the client."
        )
        return note("style-privacy", text)

    def _release(self, round: int, clients: Sequence[int]) -> Release | None:
        noise, unit = self.style_noise.multiplier, self.settings.style_unit
        return None if round else Release("statistics", 0, clients, noise, unit, "client")

    def describing(self, clients: Sequence[int]) -> None:
        """Charges the account for the styles that these clients will send.

        Raises:
            BudgetSpent: they have already sent them.
        """
        try:
            self._charge(0, clients)
        except BudgetSpent as error:
            raise BudgetSpent(
                f"{error}: an earlier try sent its noised styles and ended before round 1 was "
                "saved. Begin a run with another seed; both have cost, and epsilons add up"
            ) from None
