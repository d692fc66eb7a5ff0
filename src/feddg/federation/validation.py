"""What the server makes sure of before it uses a client's message, whatever carried it."""

import logging
import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from feddg.clients.optim import in_round
from feddg.errors import FeddgError, RunError
from feddg.messages import (
    Known,
    Message,
    Refusal,
    Scalar,
    Sent,
    Update,
    Weights,
    first_not_finite,
    plain_text,
)
from feddg.methods.base import Method, State, has_global_model
from feddg.models.network import Network
from feddg.models.normalization import never_negative_names
from feddg.privacy.robust import distance, length
from feddg.privacy.secure_aggregation import clients_said
from feddg.settings import TrainSettings
from feddg.styles.statistics import StyleNoise

# How far clients moved the weights, and who moved them too far to be believed.


LARGEST_SCALE = 1e4
"""Where nothing is known of other changes: the longest change, as a multiple of the weights."""
LARGEST_FIRST_MEAN = 100.0
"""The same for a mean of updates that cannot be seen, in which a single one counts for little."""
OF_MEANS = 0.1
"""How many times longer than those before it such a mean may be, as a share of what one may."""


CHANGES = "server/changes"
"""Name of the remembered medians among the state's extras."""


ALIKE = 10.0
"""How many times the median of its round a client's largest number may be, where a method says that
clients' numbers are alike."""


REMEMBERED = 20
"""Rounds whose median change is remembered."""


class RoundSpoiled(RunError):
    """A round cannot count, because of clients that were found out too late to leave them out.

    Attributes:
        refusals: who, and why.
    """

    def __init__(self, round: int, refusals: Sequence[Refusal]) -> None:
        self.refusals = refusals
        said = "; ".join(f"client {refusal.client}: {refusal.reason}" for refusal in refusals)
        super().__init__(f"round {round}: {said}")


class ChangeSizes:
    """How far clients moved the weights: this round's, and the median of each of the last rounds.

    An update whose change is many times longer than the others' is refused. One far too long by
    itself is refused at once; whether one is too long beside this round's others is known when all
    are in, and then the round is fused again without it.

    Args:
        times: how many times the median a change may be long; None for as long as it likes.
        medians: medians of earlier rounds, from a checkpoint.
    """

    def __init__(self, times: float | None, medians: Tensor | None = None) -> None:
        self._times = math.inf if times is None else times
        self._medians: deque[float] = deque(maxlen=REMEMBERED)
        if medians is not None:
            self._medians.extend(medians.tolist())
        self.lengths: dict[int, float] = {}
        self.sizes: dict[int, dict[str, float]] = {}
        self._members: tuple[int, ...] = ()

    def begin(self, received: Weights) -> None:
        """Starts a round from the weights that its clients are sent."""
        self._received = _floats(received)
        self._norm = length(self._received, self._received)
        self.lengths, self.sizes, self._members = {}, {}, ()

    def fault(self, update: Update, sizes: Mapping[str, float] | None = None) -> str | None:
        """Says that an update's change is too long to be believed, or None; takes note of it.

        Args:
            update: its weights are looked at.
            sizes: the largest number of each extra that is like other clients', by name.
        """
        moved = _length(update.weights, self._received)
        bad = None if math.isfinite(moved) else first_not_finite(update.weights.items())
        if bad is not None:
            return f"weight {bad!r} is not finite (NaN or infinite)"
        if self._medians:
            times = self._times * (OF_MEANS if update.members else 1)
            limit = times * statistics.median(self._medians)
            beside = f"{times:g} times the median change of the last rounds"
        else:
            scale = LARGEST_FIRST_MEAN if update.members else LARGEST_SCALE
            limit = scale * (self._norm + 1) if math.isfinite(self._times) else math.inf
            beside = "training can"
        if not moved <= limit:
            return f"it moved the weights by {moved:.3g}, more than {beside} ({limit:.3g})"
        self.lengths[update.client], self._members = moved, update.members
        self.sizes[update.client] = dict(sizes or {})
        return None

    def forget(self, client: int) -> None:
        """Leaves out of account what a client sent: it was refused for another reason."""
        self.lengths.pop(client, None)
        self.sizes.pop(client, None)

    def outliers(self) -> list[Refusal]:
        """Returns the clients of this round that are far beyond the others of it."""
        if len(self.lengths) < 3:
            return []
        return self._too_long() or self._too_large()

    def _too_long(self) -> list[Refusal]:
        limit = self._times * statistics.median(self.lengths.values())
        return [
            Refusal(
                client,
                f"update refused: it moved the weights by {length:.3g}, more than {self._times:g} "
                f"times the median of its round ({limit:.3g})",
            )
            for client, length in self.lengths.items()
            if length > limit > 0
        ]

    def _too_large(self) -> list[Refusal]:
        """Those whose extras are not of the size of the others'."""
        if math.isinf(self._times):
            return []
        found = dict[int, Refusal]()
        for name in sorted({name for sizes in self.sizes.values() for name in sizes}):
            own = {client: s[name] for client, s in self.sizes.items() if name in s}
            limit = ALIKE * statistics.median(own.values())
            for client, size in own.items():
                if len(own) >= 3 and size > limit > 0:
                    found[client] = Refusal(
                        client,
                        f"update refused: its {name!r} is up to {size:.3g}, more than {ALIKE:g} "
                        f"times the median of its round ({limit:.3g})",
                    )
        return list(found.values())

    def spoiled(self, round: int, fault: str) -> "RoundSpoiled | RunError":
        """Returns what to raise when the fused model is unfit: names who moved it farthest."""
        if not self.lengths:
            return RunError(f"round {round}: {fault}")
        if self._members:
            return RunError(
                f"round {round}: {fault}; it is the mean of {clients_said(self._members)}, and "
                "whose update made it so cannot be told"
            )
        farthest = max(self.lengths, key=self.lengths.__getitem__)
        reason = (
            f"update refused: {fault}, and of all clients it moved the weights farthest "
            f"({self.lengths[farthest]:.3g})"
        )
        return RoundSpoiled(round, [Refusal(farthest, reason)])

    def end(self) -> Tensor:
        """Ends a round that counts; returns the medians to remember."""
        moved = [length for length in self.lengths.values() if length > 0]
        if moved:
            self._medians.append(statistics.median(moved))
        return torch.tensor(list(self._medians), dtype=torch.float64)


def _floats(weights: Weights) -> Weights:
    return {name: t.detach() for name, t in weights.items() if t.is_floating_point()}


def _length(weights: Weights, received: Weights) -> float:
    """Returns how far the weights are from those received.

    Nine digits: a float64 sum over another memory order differs in its last bits, and what is
    remembered must not depend on the transport.
    """
    found = distance(weights, received, [name for name in received if name in weights])
    return float(f"{found:.9g}")


LARGEST_COUNTER = 2**53
"""Beyond any number of batches; adding to it stays exact."""

log = logging.getLogger("feddg")


class MessageChecks:
    """Compares clients' messages with what was declared.

    Args:
        method: whose messages they are.
        network: what it trains.
        clients: how many clients there are.
        image_size: side of the training images, pixels; 0 where nobody said.
        also: further declared entries, for example of guards.
        introduced: how many images clients introduced themselves with, where they did.
        train: how clients train, which bounds what gradients they can speak of.
        style_noise: how styles are noised before they leave a client, if they are.
    """

    def __init__(
        self,
        method: Method,
        network: Network,
        clients: int,
        *,
        image_size: int = 0,
        also: Mapping[str, Sent] | None = None,
        introduced: Mapping[int, int] | None = None,
        train: TrainSettings | None = None,
        style_noise: StyleNoise | None = None,
    ) -> None:
        self._method, self._train = method, train
        state = network.state_dict() if has_global_model(method, network) else {}
        # Shapes and dtypes never change, and cost no memory on the meta device.
        self._weights = {name: tensor.to("meta") for name, tensor in state.items()}
        shapes = {name: tensor.shape for name, tensor in self._weights.items()}
        dimensions = (network.classes, clients, network.features_dimension)
        self._known = Known(*dimensions, image_size, shapes, noise=style_noise)
        self._never_negative = sorted(never_negative_names(network) & self._weights.keys())
        own = {key: form for key, form in method.sends.items() if key not in Method.sends}
        declared = {**own, **(also or {})}
        self._sent = {k: form for k, form in declared.items() if not form.when or form.when(method)}
        self._introduced = introduced if introduced is not None else {}

    def update_fault(self, update: Update, state: State | None = None) -> str | None:
        """Says what is wrong with an update, or None if it may be used.

        Whether its weights are finite shows in how far it moved them: see ``change_sizes``.

        Args:
            update: of one client, or the mean of several.
            state: the server's, from which its client started.
        """
        if update.members:  # made by the server itself, of what it could not read singly
            return layout_fault(update.weights, self._weights)
        return (
            self._examples_fault(update)
            or layout_fault(update.weights, self._weights)
            or self._statistics_fault(update.weights)
            or self._message_fault("update", update.extras, self._known_of(update, state))
        )

    def message_fault(
        self, purpose: str, message: Message, client: int | None = None
    ) -> str | None:
        """Says what is wrong with a message, or with an update's extras, or None.

        Args:
            purpose: as in the ledger: ``describe``, ``update``, ``answer:...``.
            message: its content.
            client: whose it is, where that is known.
        """
        images = None if client is None else self._introduced.get(client)
        return self._message_fault(purpose, message, replace(self._known, images=images))

    def sizes(self, update: Update) -> dict[str, float]:
        """Returns the largest number of each extra that all clients send of a like size."""
        if update.members:
            return {}
        return {
            name: float(tensor.detach().abs().max())
            for name, tensor in update.extras.tensors.items()
            for key, form in self._sent.items()
            if form.alike and fnmatchcase(f"update/{name}", key) and tensor.numel()
        }

    def _known_of(self, update: Update, state: State | None) -> Known:
        """What is known of an update's sender and of its round."""
        known = replace(self._known, images=self._introduced.get(update.client))
        if state is None:
            return known
        known = replace(known, kept=state.extras)
        if self._train is None:
            return known
        train = in_round(self._train, state.round + 1)
        walked = train.lr * _fewest_steps(train, update.examples)

        def gradients(name: str) -> Tensor:
            sent = update.weights[name].detach()
            return (sent - state.weights[name].to(sent)).abs() / walked

        return replace(known, gradients=gradients)

    def _statistics_fault(self, weights: Weights) -> str | None:
        """Says which variance or counter is none, or None.

        One of them below 0 would make the mean one on which no network works, and then whoever
        trains honestly would be refused.
        """
        for name in self._never_negative:
            if not weights[name].numel():
                continue
            least, most = (float(value) for value in torch.aminmax(weights[name].detach()))
            if least < 0:
                return f"weight {name!r} holds {least:g}; a variance or a counter is never below 0"
            if not weights[name].is_floating_point() and most > LARGEST_COUNTER:
                return f"weight {name!r} holds {most:g}, more batches than there can have been"
        return None

    def _message_fault(self, purpose: str, message: Message, known: Known) -> str | None:
        declared = {
            key.removeprefix(f"{purpose}/"): form
            for key, form in self._sent.items()
            if key.startswith(f"{purpose}/")
        }
        bound: dict[str, int] = {}
        met: set[str] = set()
        for name, value in _entries(message):
            key = next((key for key in declared if fnmatchcase(name, key)), None)
            if key is None:
                return f"has an undeclared entry {plain_text(name, 60)!r}"
            met.add(key)
            fault = self._entry_fault(declared[key], known, name, value, bound)
            if fault is not None:
                return f"its {plain_text(name, 60)!r} {fault}"
        missing = sorted(declared.keys() - met)
        if missing:
            return f"lacks {missing[0]!r}"
        bad = first_not_finite(message.tensors.items())
        return None if bad is None else f"{bad!r} is not finite (NaN or infinite)"

    def _entry_fault(
        self, form: Sent, known: Known, name: str, value: Tensor | Scalar, bound: dict[str, int]
    ) -> str | None:
        if isinstance(value, Tensor):
            return form.tensor_fault(self._method, known, name, value, bound)
        return form.number_fault(self._method, known, name, value)

    def _examples_fault(self, update: Update) -> str | None:
        count = update.examples
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            said = plain_text(count, 40)
            return f"reports {said} examples; an update needs a whole number of at least 1"
        introduced = self._introduced.get(update.client)
        if introduced is not None and count != introduced:
            return f"reports {count} examples, but introduced itself with {introduced}"
        return None


def _fewest_steps(train: TrainSettings, images: int) -> int:
    """Returns how many steps a client with so many images takes in a round, at least."""
    return train.local_steps or train.local_epochs * max(1, images // train.batch_size)


def layout_fault(weights: Weights, expected: Mapping[str, Tensor]) -> str | None:
    """Says which names, shapes or dtypes of weights are not those of ``expected``, or None."""
    missing, unknown = expected.keys() - weights.keys(), weights.keys() - expected.keys()
    if missing or unknown:
        parts = [f"lack {sorted(missing)[:3]}"] * bool(missing)
        strange = [plain_text(name, 60) for name in sorted(unknown)[:3]]
        parts += [f"have the unknown {strange}"] * bool(unknown)
        return "its weights " + " and ".join(parts)
    for name, tensor in weights.items():
        want = expected[name]
        if tensor.shape != want.shape or tensor.dtype != want.dtype:
            got = f"{tuple(tensor.shape)} {tensor.dtype}"
            return f"weight {name!r} is {got}, expected {tuple(want.shape)} {want.dtype}"
    return None


def _entries(message: Message) -> Iterator[tuple[str, Tensor | Scalar]]:
    yield from message.tensors.items()
    yield from message.scalars.items()


class Attributed:
    """A round's updates, and who is to blame when one of them cannot be worked with.

    Args:
        updates: the good updates.
        round: the round.
    """

    def __init__(self, updates: Iterator[Update], round: int) -> None:
        self._updates, self._round = updates, round
        self._last: Update | None = None

    def __iter__(self) -> Iterator[Update]:
        return self

    def __next__(self) -> Update:
        self._last = None
        self._last = next(self._updates)
        return self._last

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Has an error while an update is worked with end as a refusal of its client.

        Raises:
            RoundSpoiled: names the client. Errors a user can act on go through as they are.
        """
        try:
            yield
        except FeddgError:
            raise
        except Exception as error:
            if self._last is None:
                raise
            reason = f"it cannot be worked with ({type(error).__name__})"
            if self._last.members:
                raise RunError(
                    f"round {self._round}: the mean of {clients_said(self._last.members)}: {reason}"
                ) from error
            log.exception("client %d's update cannot be worked with", self._last.client)
            refusal = Refusal(self._last.client, f"update refused: {reason}")
            raise RoundSpoiled(self._round, [refusal]) from error


def state_fault(weights: Weights, extras: Weights) -> str | None:
    """Says what is not finite in a fused state, or None."""
    for what, tensors in (("weight", weights), ("extra", extras)):
        bad = first_not_finite(tensors.items())
        if bad is not None:
            return f"the fused {what} {bad!r} is not finite (NaN or infinite)"
    return None
