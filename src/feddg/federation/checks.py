"""What the server makes sure of before it uses a client's message, whatever carried it.

Every method declares what it sends (:attr:`feddg.methods.base.Method.sends`); a message is
compared with that here, for every engine: names, shapes, types, finite numbers, ranges and sizes.
Updates are compared with the weights that were sent and with the client's own introduction, and the
length of their change with what the round's other clients and earlier rounds changed.
"""

import logging
import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from feddg.errors import FeddgError, RunError
from feddg.forms import Known, Sent, plain_text
from feddg.guards.distances import distance, length
from feddg.messages import Message, Refusal, Scalar, Update, Weights, first_not_finite
from feddg.methods.base import Method, has_global_model
from feddg.models.network import Network

log = logging.getLogger("feddg")

LARGEST_SCALE = 1e4
"""Where nothing is known of other changes: the longest change, as a multiple of the weights."""
CHANGES = "server/changes"
"""Name of the remembered medians among the state's extras."""
REMEMBERED = 20
"""Rounds whose median change is remembered."""


class MessageChecks:
    """Compares clients' messages with what was declared.

    Args:
        method: whose messages they are.
        network: what it trains.
        clients: how many clients there are.
        image_size: side of the training images, pixels; 0 where nobody said.
        also: further declared entries, for example of guards.
        introduced: how many images clients introduced themselves with, where they did.
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
    ) -> None:
        self._method = method
        state = network.state_dict() if has_global_model(method, network) else {}
        # Shapes and dtypes never change, and cost no memory on the meta device.
        self._weights = {name: tensor.to("meta") for name, tensor in state.items()}
        shapes = {name: tensor.shape for name, tensor in self._weights.items()}
        dimensions = (network.classes, clients, network.features_dimension)
        self._known = Known(*dimensions, image_size, shapes)
        own = {key: form for key, form in method.sends.items() if key not in Method.sends}
        declared = {**own, **(also or {})}
        self._sent = {k: form for k, form in declared.items() if not form.when or form.when(method)}
        self._introduced = introduced if introduced is not None else {}

    def update_fault(self, update: Update) -> str | None:
        """Says what is wrong with an update, or None if it may be used.

        Whether its weights are finite shows in how far it moved them: see :class:`ChangeSizes`.
        """
        if update.members:  # made by the server itself, of what it could not read singly
            return layout_fault(update.weights, self._weights)
        return (
            self._examples_fault(update)
            or layout_fault(update.weights, self._weights)
            or self.message_fault("update", update.extras)
        )

    def message_fault(self, purpose: str, message: Message) -> str | None:
        """Says what is wrong with a message, or with an update's extras, or None.

        Args:
            purpose: as in the ledger: ``describe``, ``update``, ``answer:...``.
            message: its content.
        """
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
            fault = self._entry_fault(declared[key], name, value, bound)
            if fault is not None:
                return f"its {plain_text(name, 60)!r} {fault}"
        missing = sorted(declared.keys() - met)
        if missing:
            return f"lacks {missing[0]!r}"
        bad = first_not_finite(message.tensors.items())
        return None if bad is None else f"{bad!r} is not finite (NaN or infinite)"

    def _entry_fault(
        self, form: Sent, name: str, value: Tensor | Scalar, bound: dict[str, int]
    ) -> str | None:
        if isinstance(value, Tensor):
            return form.tensor_fault(self._method, self._known, name, value, bound)
        return form.number_fault(self._known, value)

    def _examples_fault(self, update: Update) -> str | None:
        count = update.examples
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            said = plain_text(count, 40)
            return f"reports {said} examples; an update needs a whole number of at least 1"
        introduced = self._introduced.get(update.client)
        if introduced is not None and count != introduced:
            return f"reports {count} examples, but introduced itself with {introduced}"
        return None


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


class RoundSpoiled(RunError):
    """A round cannot count, because of clients that were found out too late to leave them out.

    Attributes:
        refusals: who, and why.
    """

    def __init__(self, round: int, refusals: Sequence[Refusal]) -> None:
        self.refusals = refusals
        said = "; ".join(f"client {refusal.client}: {refusal.reason}" for refusal in refusals)
        super().__init__(f"round {round}: {said}")


class Attributed:
    """A round's updates, and who is to blame when one of them cannot be worked with.

    Args:
        updates: the good updates.
        round: the round.
    """

    def __init__(self, updates: Iterator[Update], round: int) -> None:
        self._updates, self._round = updates, round
        self._last: int | None = None

    def __iter__(self) -> Iterator[Update]:
        return self

    def __next__(self) -> Update:
        self._last = None
        update = next(self._updates)
        self._last = update.client
        return update

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
            log.exception("client %d's update cannot be worked with", self._last)
            reason = f"update refused: it cannot be worked with ({type(error).__name__})"
            raise RoundSpoiled(self._round, [Refusal(self._last, reason)]) from error


def state_fault(weights: Weights, extras: Weights) -> str | None:
    """Says what is not finite in a fused state, or None."""
    for what, tensors in (("weight", weights), ("extra", extras)):
        bad = first_not_finite(tensors.items())
        if bad is not None:
            return f"the fused {what} {bad!r} is not finite (NaN or infinite)"
    return None


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

    def begin(self, received: Weights) -> None:
        """Starts a round from the weights that its clients are sent."""
        self._received = _floats(received)
        self._norm = length(self._received, self._received)
        self.lengths = {}

    def fault(self, update: Update) -> str | None:
        """Says that an update's change is too long to be believed, or None; takes note of it."""
        moved = _length(update.weights, self._received)
        bad = None if math.isfinite(moved) else first_not_finite(update.weights.items())
        if bad is not None:
            return f"weight {bad!r} is not finite (NaN or infinite)"
        if self._medians:
            limit = self._times * statistics.median(self._medians)
            beside = f"{self._times:g} times the median change of the last rounds"
        else:
            limit = LARGEST_SCALE * (self._norm + 1) if math.isfinite(self._times) else math.inf
            beside = "training can"
        if not moved <= limit:
            return f"it moved the weights by {moved:.3g}, more than {beside} ({limit:.3g})"
        self.lengths[update.client] = moved
        return None

    def forget(self, client: int) -> None:
        """Leaves out of account what a client sent: it was refused for another reason."""
        self.lengths.pop(client, None)

    def outliers(self) -> list[Refusal]:
        """Returns the clients of this round that moved the weights too far beside the others."""
        if len(self.lengths) < 3:
            return []
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

    def spoiled(self, round: int, fault: str) -> "RoundSpoiled | RunError":
        """Returns what to raise when the fused model is unfit: names who moved it farthest."""
        if not self.lengths:
            return RunError(f"round {round}: {fault}")
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
