"""What the server makes sure of before it uses a client's message, whatever carried it.

Every method declares what it sends (:attr:`feddg.methods.base.Method.sends`); a message is
compared with that here, for every engine: names, shapes, types, finite numbers, ranges and sizes.
Updates are compared with the weights that were sent and with the client's own introduction; the
length of their change is the affair of :mod:`feddg.federation.change_sizes`.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from feddg.clients.optim import in_round
from feddg.errors import FeddgError, RunError
from feddg.federation.change_sizes import RoundSpoiled
from feddg.guards.secure_aggregation import clients_said
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
from feddg.settings import TrainSettings
from feddg.styles.statistics import StyleNoise

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
