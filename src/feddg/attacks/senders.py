"""What clients send, real ones and pretended ones: the method itself is asked.

A pretended client holds images of the attacker's choice. It runs the method's own code over the
in-process transport, guards and all, so every method can be attacked and none needs code of its
own for it: whoever knows the experiment can do the same.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy
import torch
from torch import Tensor

from feddg.attacks.entries import SentEntry
from feddg.clients.client import Examples, Pixels, Worker
from feddg.data.data_set import find_augmentation
from feddg.data.pixels import as_unit
from feddg.errors import RunError
from feddg.federation.inprocess import InProcess
from feddg.messages import Broadcast, Message, Update, Weights
from feddg.models.network import Network
from feddg.privacy.building import Guards
from feddg.runs.model import Subject
from feddg.runs.prepare import guards_for

Hold = Callable[[int], Examples]
PLAIN = find_augmentation("none")
MOST_STEPS = 16
"""Steps of a pretended client, of which there are hundreds."""


class ImageStack:
    """Images in memory, as clients' examples read them.

    Attributes:
        images: ``(n, 3, H, W)`` uint8.
    """

    def __init__(self, images: Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def gather(self, rows: Tensor) -> Tensor:
        """Returns the images of ``rows``."""
        return self.images[rows].contiguous(memory_format=torch.channels_last)


class Senders:
    """Has clients of a finished run, or pretended ones, say what they would send.

    Args:
        subject: the run.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    @cached_property
    def guards(self) -> Guards:
        """What happens to updates on their way, as in the run."""
        subject = self.subject
        experiment = subject.images.trained_by(subject.experiment)
        return guards_for(experiment, subject.method, subject.worker.network)

    @property
    def only_sums(self) -> bool:
        """Whether the server could read no single update."""
        return self.guards.masking is not None

    @property
    def broadcast(self) -> Broadcast:
        """What the clients of the next round are sent."""
        sent = self.subject.method.broadcast(self.subject.state)
        return self.guards.open(self.subject.state).address(sent)

    def real(self, entry: SentEntry, clients: Sequence[int]) -> dict[int, Tensor]:
        """Returns what clients of the run send under an entry.

        Setup messages are those that were sent, repeated from the same seed; updates are those of
        the round after the last, from the weights the run ended with.

        Args:
            entry: what is read.
            clients: their ids.

        Returns:
            By client ``(rows, length)``.
        """
        transport = self._transport(
            self.subject.worker, self.subject.images.examples, self.subject.memories
        )
        return dict(self._said(transport, entry, clients))

    def pretended(self, entry: SentEntry, holdings: Sequence[Examples]) -> list[Tensor]:
        """Returns what clients that hold some images would send under an entry.

        They train without augmentation for as many steps as the run's clients do, up to
        ``MOST_STEPS``, and keep nothing on disk.

        Args:
            entry: what is read.
            holdings: the images of each.

        Returns:
            For each ``(rows, length)``.

        Raises:
            RunError: one of them sends nothing.
        """
        hold = [_twice(h) if entry.names and len(h) == 1 else h for h in holdings]
        transport = self._transport(self.pretender(), hold.__getitem__, {})
        said = dict(self._said(transport, entry, range(len(hold))))
        if len(said) < len(hold):
            raise RunError(f"a client of some images of its own sends no {entry.key} here")
        return [said[id] for id in range(len(hold))]

    def trained(
        self, holdings: Sequence[Examples], worker: Worker, broadcast: Broadcast | None = None
    ) -> Iterator[Update]:
        """Yields the updates of pretended clients; valid until the next is drawn."""
        transport = self._transport(worker, holdings.__getitem__, {})
        for reply in transport.train(range(len(holdings)), broadcast or self.broadcast):
            if not isinstance(reply, Update):
                raise RunError(f"a pretended client cannot train: {reply.reason}")
            yield reply

    def pretender(self, **changes: object) -> Worker:
        """Returns the worker that pretended clients take turns on.

        Args:
            changes: fields of the training settings.
        """
        alike = {"local_steps": min(MOST_STEPS, self._usual_steps()), "select_every": None}
        train = self.subject.worker.train.model_copy(update=alike | changes)
        return replace(self.subject.worker, train=train, augmentation=PLAIN, cache=None)

    def _usual_steps(self) -> int:
        """How many steps a client of the run takes in a round; the median."""
        train = self.subject.worker.train
        sizes = self.subject.images.partition.sizes
        usual = float(numpy.median(sizes[sizes > 0]))
        return train.local_steps or train.local_epochs * math.ceil(usual / train.batch_size)

    def _transport(self, worker: Worker, hold: Hold, memories: dict[int, Weights]) -> InProcess:
        subject = self.subject
        count = len(subject.images.partition)
        own = dict(memories)
        transport = InProcess(subject.method, [worker], count, hold, own, self.guards)
        transport.hand_out(subject.state.agreed, again=True)
        return transport

    def _said(
        self, transport: InProcess, entry: SentEntry, clients: Sequence[int]
    ) -> Iterator[tuple[int, Tensor]]:
        if entry.purpose == "describe":
            start = Broadcast(0, self.subject.first)
            for id, reply in transport.descriptions(clients, start):
                rows = entry.rows(reply.tensors) if isinstance(reply, Message) else None
                if rows is not None:
                    yield id, rows
            return
        for update in transport.train(clients, self.broadcast):
            rows = entry.of_update(update) if isinstance(update, Update) else None
            if rows is not None:
                yield update.client, rows

    def labels(self, images: Tensor) -> Tensor:
        """Returns what the run's model takes images ``(n, 3, H, W)`` uint8 for, ``(n,)``."""
        network = self.subject.network(self.subject.state.weights)
        assert isinstance(network, Network)
        predictor = self.subject.method.predictor(network).eval()
        device = self.subject.worker.device
        with torch.inference_mode():
            parts = [predictor(as_unit(part, device)).argmax(1).cpu() for part in images.split(64)]
        return torch.cat(parts).clone()


def one_each(images: Tensor, labels: Tensor, classes: int) -> list[Examples]:
    """Returns a holding of one image for each of ``images`` ``(n, 3, H, W)`` uint8."""
    stack = ImageStack(images)
    return [held(stack, torch.tensor([row]), labels, classes) for row in range(len(images))]


def held(pixels: Pixels, rows: Tensor, labels: Tensor, classes: int) -> Examples:
    """Returns some images of a store as a client's; ``labels`` are those of the whole store."""
    return Examples(pixels, rows, labels[rows], torch.zeros_like(rows), classes)


def _twice(examples: Examples) -> Examples:
    """One image has no statistics over a batch: it is held twice."""
    rows, labels, domains = (
        part.repeat(2) for part in (examples.rows, examples.labels, examples.domains)
    )
    return replace(examples, rows=rows, labels=labels, domains=domains)
