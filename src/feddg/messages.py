"""Messages: named tensors and scalars, the only thing that crosses between client and server."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

Scalar = int | float | str | bool
Weights = dict[str, Tensor]

SCALAR_BYTES = 8
"""What a number or flag counts for in the ledger; a text counts its UTF-8 length."""


def on_device(tensors: Weights, device: torch.device) -> Weights:
    """Returns named tensors on ``device``, in a dictionary of their own."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


@dataclass
class Message:
    """Named tensors and scalars.

    Attributes:
        tensors: tensors by name.
        scalars: numbers, flags and short texts by name.
    """

    tensors: Weights = field(default_factory=dict)
    scalars: dict[str, Scalar] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.tensors or self.scalars)

    @property
    def size(self) -> int:
        """Bytes of the content: tensor bytes, 8 per number or flag, UTF-8 length per text."""
        tensors = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())
        return tensors + sum(scalar_bytes(scalar) for scalar in self.scalars.values())

    def to_bytes(self) -> bytes:
        """Serialises to safetensors, with the scalars as JSON in its metadata."""
        tensors = {
            name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()
        }
        return save_tensors(tensors, metadata={"scalars": json.dumps(self.scalars)})

    @classmethod
    def from_bytes(cls, content: bytes) -> "Message":
        """Reads what :meth:`to_bytes` wrote."""
        header_length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + header_length])
        scalars = json.loads(header.get("__metadata__", {}).get("scalars", "{}"))
        return cls(load_tensors(content), scalars)

    def keep(self) -> "Message":
        """Returns a copy that stays valid after the sender goes on working."""
        return Message(
            {name: t.detach().clone() for name, t in self.tensors.items()}, dict(self.scalars)
        )


def joined(*messages: Message | None) -> Message:
    """Returns one message with the contents of several.

    Raises:
        ValueError: two of them use the same name.
    """
    whole = Message()
    for message in filter(None, messages):
        for mine, other in ((whole.tensors, message.tensors), (whole.scalars, message.scalars)):
            taken = mine.keys() & other.keys()
            if taken:
                raise ValueError(f"two messages to be joined both hold {sorted(taken)[0]!r}")
            mine.update(other)  # type: ignore[arg-type]
    return whole


def scalar_bytes(scalar: Scalar) -> int:
    """Returns what ``scalar`` counts for in the ledger, in bytes."""
    return len(scalar.encode()) if isinstance(scalar, str) else SCALAR_BYTES


@dataclass
class Broadcast:
    """What a client is sent to train with, or to be asked something.

    Attributes:
        round: the round it belongs to, from 1; 0 is the setup before training.
        weights: entries of the network's state.
        extras: whatever else the method sends (control variates, prototypes, ...).
    """

    round: int
    weights: Weights = field(default_factory=dict)
    extras: Message = field(default_factory=Message)


@dataclass
class Update:
    """What a client sends back after training.

    Its tensors may be the client's live weights: they are valid until the next update is drawn.
    A method that collects updates calls :meth:`keep`.

    Attributes:
        client: the client's id.
        examples: how many images it trained on, at least 1.
        weights: entries of the network's state after local training.
        extras: what the method reports beside the weights.
        terms: mean of each named loss term over the client's steps; a log, not a message.
        seconds: time the client spent training; a log, not a message.
        images: images of its training steps, each once a step; a log, not a message.
        members: the clients whose updates it is the mean of; empty for one client's own.
        passes: images through the client's network, each as often as it passed; 0 where nobody
            counted. It stays in the process.
    """

    client: int
    examples: int
    weights: Weights
    extras: Message = field(default_factory=Message)
    terms: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    images: int = 0
    members: tuple[int, ...] = ()
    passes: int = 0

    @property
    def clients(self) -> tuple[int, ...]:
        """Whose it is."""
        return self.members or (self.client,)

    def keep(self) -> "Update":
        """Returns a copy whose tensors stay valid after the next update is drawn."""
        weights = {name: tensor.detach().clone() for name, tensor in self.weights.items()}
        return Update(
            self.client,
            self.examples,
            weights,
            self.extras.keep(),
            self.terms,
            self.seconds,
            self.images,
            self.members,
            self.passes,
        )


@dataclass(frozen=True)
class Refusal:
    """A client that has nothing usable to say this time, and why."""

    client: int
    reason: str


def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Returns the first name whose float tensor holds a NaN or infinity, or None."""
    named = list(_floats(tensors))
    if not named:
        return None
    norm = torch.nn.utils.get_total_norm([tensor for _, tensor in named])
    if torch.isfinite(norm):
        return None
    # The norm of finite float32 entries can overflow, so a bad one is confirmed entry by entry.
    return next((name for name, tensor in named if not torch.isfinite(tensor).all()), None)


def _floats(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    return (
        (name, tensor) for name, tensor in tensors if tensor.is_floating_point() and tensor.numel()
    )
