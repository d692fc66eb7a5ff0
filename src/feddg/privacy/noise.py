"""Differential privacy of updates, of single images (DP-SGD) and of styles."""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import torch

from feddg.clients.client import RecordNoise
from feddg.clients.sampling import Schedule
from feddg.diagnostics import Diagnostic, note
from feddg.errors import BudgetSpent, ClientError, ExperimentError
from feddg.messages import Broadcast, EntrySchema, Message, Refusal, Update, Weights
from feddg.methods.base import Method, Round, State
from feddg.privacy.accounting import (
    MOST_NOISE,
    Account,
    Release,
    gaussian_epsilon,
    gaussian_noise,
    open_account,
    require_afforded,
    require_bearable,
    require_meaning,
    rounded_up,
    sampled_epsilon,
    sampled_noise,
)
from feddg.privacy.defence import (
    AGGREGATION,
    CLIENT_STATISTICS,
    EXTRAS,
    LOCAL,
    STATISTICS,
    TRAINING,
    Defence,
    RowsFolder,
    WeightNames,
    register,
    sent_by,
)
from feddg.privacy.robust import distance, length, shrunk
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
    """A defence that charges what it releases to the account of its run."""

    Settings = PrivacySettings

    def __init__(self, settings: PrivacySettings | None = None) -> None:
        super().__init__(settings)
        self.account = Account()

    def keep_in(self, folder: RowsFolder, rounds: int) -> None:
        """Goes on with the account in the run's folder."""
        self.account = open_account(folder, rounds, every_round=self.noised)


@register
class Clipping(_Charged):
    """Clips the norm of updates' changes, and may add noise to their mean."""

    name = "clipping"
    summary = "clipped updates, noise on their mean (McMahan et al. 2018, Andrew et al. 2021)"
    clips = True
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
        self._schedule = schedule or Schedule(1, 1)
        self._require_met()

    @classmethod
    def asked_for(
        cls, privacy: PrivacySettings, method: Method, schedule: Schedule, epochs: int
    ) -> Sequence[Defence]:
        """Returns the noise of images, of styles, and clipping, in the order of a message's way."""
        require_meaning(privacy, schedule.clients)
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
        """The features of methods it does not work with; none if noise is added at clients."""
        return {
            t: why for t, why in self._BREAKS.items() if t != AGGREGATION or not self.at_clients
        }

    @property
    def plain_mean(self) -> str | None:
        """Server-side noise is calibrated for the plain mean of all updates."""
        central = self.noised and not self.at_clients
        return "its noise is made for a plain mean" if central else None

    @property
    def noised(self) -> bool:
        """Whether noise is added."""
        return bool(self.settings.noised)

    @property
    def at_clients(self) -> bool:
        """Whether clients add the noise."""
        return bool(self.noised and self.settings.noised_at == "client")

    @property
    def secret_rate(self) -> float | None:
        """The sampling rate, if noised rounds use secretly drawn clients."""
        rate, secret = self._schedule.rate, self.settings.sampling == "secret"
        return rate if self.noised and secret and rate < 1 else None

    @cached_property
    def multiplier(self) -> float:
        """The noise multiplier z: given, or the smallest that meets epsilon; 0 for no noise."""
        chosen = self.settings
        if chosen.noise_multiplier or not chosen.epsilon:
            return float(chosen.noise_multiplier)
        if self.secret_rate is not None:
            rounds = self._schedule.rounds
            return sampled_noise(chosen.epsilon, chosen.delta, self.secret_rate, rounds)
        needed = gaussian_noise(chosen.epsilon, chosen.delta) * math.sqrt(self._schedule.most)
        return rounded_up(needed * self._sensitivity)

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
        chosen = self.settings
        if not chosen.epsilon:
            return
        given = chosen.noise_multiplier / self._sensitivity
        if not given and self.secret_rate is None:
            least = gaussian_epsilon(MOST_NOISE / self._schedule.most**0.5, chosen.delta)
            require_bearable("epsilon", chosen.epsilon, self.multiplier, least)
        if given:
            rate = self.secret_rate
            once = gaussian_epsilon(given, chosen.delta)
            once = once if rate is None else sampled_epsilon(((given, rate),), chosen.delta)
            require_afforded(chosen, once)

    def _release(self, round: int, clients: Sequence[int]) -> Release:
        where, rate = self.settings.noised_at, self.secret_rate or 1.0
        noise = self.multiplier / self._sensitivity
        return Release("update", round, clients, noise, noised_at=where, rate=rate)

    def affords(self, round: int, clients: Sequence[int]) -> bool:
        """See :class:`Defence`."""
        chosen = self.settings
        if not chosen.epsilon:
            return True
        return self.account.affords(self._release(round, clients), chosen.delta, chosen.epsilon)

    def _charge(self, round: int, clients: Sequence[int]) -> None:
        if self.noised:
            release = self._release(round, clients)
            self.account.charge(release, self.settings.delta, self.settings.epsilon)

    @property
    def adaptive(self) -> bool:
        """Whether the clipping norm adapts."""
        return bool(self.settings.clipping == "adaptive")

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
        clipped = shrunk(update.weights, received, self.facts.aggregated, norm)
        update = replace(update, weights=clipped or update.weights, terms={})
        if self.at_clients:
            update.weights = _noised(update.weights, received, self.facts, self.multiplier * norm)
        return self.add(update, NORM_BIT, int(clipped is not None)) if self.adaptive else update

    # At the server

    def broadcast(self, broadcast: Broadcast, round: Round) -> Broadcast:
        """Sends the norm. Charges the account if clients add the noise, because they may send it.

        Raises:
            BudgetSpent: the clients must not be asked.
        """
        if self.at_clients:
            self._charge(round.number, round.clients)
        return self.tell(broadcast, **{NORM: self._norm(round)})

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
        secret = self.secret_rate
        expected = updates if secret is None else secret * self._schedule.clients
        noise, count_noise = self.noise(expected)
        weights = dict(state.weights)
        for name, tensor in weights.items():
            if name not in self.facts.trained:
                weights[name] = sent[name]
            elif noise and not self.at_clients:
                before = sent[name].double()
                change = (tensor.double() - before) * (updates / expected)
                change = add_noise(change, noise * norm / expected)
                weights[name] = (before + change).to(tensor.dtype)
        state.weights = weights
        if self.adaptive:
            # A robust rule makes one update of all; each client's own says whether it was clipped.
            bits = [*round.scratch[self].get(_CLIPPED, {}).values()]
            beyond_half = torch.tensor(len(bits) / 2 - sum(bits), dtype=torch.float64)
            counted = add_noise(beyond_half, count_noise) if count_noise else beyond_half
            told = len(bits) if secret is None else expected
            chosen, share = self.settings, 0.5 + float(counted) / told
            norm *= math.exp(-chosen.clipping_rate * (share - chosen.clipping_quantile))
            self.remember(state, {NORM: torch.tensor(norm, dtype=torch.float64)})
        log.info("updates clipped to %.4g", norm)
        return state

    def noise(self, updates: float) -> tuple[float, float]:
        """Returns the noise multiplier of the mean, and the deviation of the count's noise."""
        noise = self.multiplier
        if not noise or not self.adaptive:
            return noise, 0.0
        count_noise = max(updates / 20, noise)
        return (noise**-2 - (2 * count_noise) ** -2) ** -0.5, count_noise


def _noised(trained: Weights, sent: Weights, facts: WeightNames, deviation: float) -> Weights:
    """Returns weights with noise on their change; entries not trained are those that were sent."""
    weights = {name: sent[name] for name in trained}
    for name in facts.trained:
        before = sent[name].double()
        change = add_noise(trained[name].double() - before.to(trained[name].device), deviation)
        weights[name] = (before + change.to(before)).to(trained[name].dtype)
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

    name = "noised_records"
    summary = "gradients clipped image by image and noised; asked for as privacy.record_epsilon"
    breaks: ClassVar[dict[str, str]] = {
        CLIENT_STATISTICS: _OPEN_RECORDS,
        EXTRAS: _OPEN_RECORDS,
        TRAINING: "and gradients are clipped image by image for plain training alone",
        STATISTICS: "which mix the images of a batch; choose model.backbone cnn_gn or another "
        "without, or set model.normalization to frozen",
    }
    noised = True
    record_noise: RecordNoise

    def __init__(self, settings: PrivacySettings, schedule: Schedule, epochs: int) -> None:
        super().__init__(settings)
        self._epochs = epochs
        assert settings.record_epsilon is not None
        once = gaussian_noise(settings.record_epsilon, settings.delta)
        needed = rounded_up(once * math.sqrt(schedule.most * epochs))
        least = gaussian_epsilon(MOST_NOISE / math.sqrt(schedule.most * epochs), settings.delta)
        require_bearable("record_epsilon", settings.record_epsilon, needed, least)
        self.record_noise = RecordNoise(needed, settings.record_norm)

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

    def affords(self, round: int, clients: Sequence[int]) -> bool:
        """See :class:`Defence`."""
        chosen, release = self.settings, self._release(round, clients)
        return self.account.affords(release, chosen.delta, chosen.record_epsilon)

    def broadcast(self, broadcast: Broadcast, round: Round) -> Broadcast:
        """Charges the account for the epochs that these clients will train.

        Raises:
            BudgetSpent: the clients must not be asked.
        """
        chosen, release = self.settings, self._release(round.number, round.clients)
        self.account.charge(release, chosen.delta, chosen.record_epsilon)
        return broadcast

    def protect(self, update: Update, received: Weights, message: Message) -> Update:
        """Removes the mean loss terms from the update."""
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
    summary = "styles from clipped and noised moments; asked for as privacy.style_epsilon"
    style_noise: StyleNoise

    def __init__(self, settings: PrivacySettings) -> None:
        super().__init__(settings)
        assert settings.style_epsilon is not None
        multiplier = rounded_up(gaussian_noise(settings.style_epsilon, settings.delta))
        self.style_noise = StyleNoise(multiplier, settings.style_unit, settings.style_norm)

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

    def describing(self, clients: Sequence[int]) -> None:
        """Charges the account for the styles that these clients will send.

        Raises:
            BudgetSpent: they have already sent them.
        """
        chosen, noise = self.settings, self.style_noise.multiplier
        where, unit = "client", chosen.style_unit
        release = Release("statistics", 0, clients, noise, unit, where)  # type: ignore[arg-type]
        try:
            self.account.charge(release, chosen.delta, chosen.style_epsilon)
        except BudgetSpent as error:
            raise BudgetSpent(
                f"{error}: an earlier try sent its noised styles and ended before round 1 was "
                "saved. Begin a run with another seed; both have cost, and epsilons add up"
            ) from None
