"""Training that starts from a classifier in closed form (``train.head: ridge``).

Before round 1 every client sends the sums that the classifier is solved from
(:mod:`feddg.models.closed_form`; :mod:`feddg.methods.ridge` has the equations), beside what its
method sends. Then every client evaluates classifiers solved without its own sums; the answers
choose the penalty and the scale of the logits.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from feddg.clients.client import Client
from feddg.errors import ClientError, ExperimentError
from feddg.messages import EntrySchema, Message, Weights
from feddg.methods.base import Method
from feddg.models.closed_form import (
    EXAMPLES,
    PENALTIES,
    USUAL_SCALE,
    Choice,
    chosen_by,
    left_out_answer,
    left_out_schemas,
    means,
    outliers,
    own_images,
    packed,
    solved,
    sums_fault,
    unpacked,
)
from feddg.models.network import Network

GRAM, CROSS, IMAGES = "head/gram", "head/cross", "head/images"
USUAL_PENALTY = 1.0
"""The penalty if there is only one client."""


SENDS = {
    f"statistics/{GRAM}": EntrySchema(
        "the mean product of its features with each other",
        lambda method, context: ((context.features + 1) * (context.features + 2) // 2,),
        dtype=torch.float64,
    ),
    f"statistics/{CROSS}": EntrySchema(
        "the mean product of its features with its classes",
        lambda method, context: (context.features + 1, context.classes),
        dtype=torch.float64,
    ),
    f"statistics/{IMAGES}": EntrySchema(
        "how many images that is of", integer=True, within=own_images
    ),
    **left_out_schemas(lambda method: len(PENALTIES)),
}
"""The entries that a client sends."""


def check_head(network: Network, name: str, *, shared: bool) -> None:
    """Raises ExperimentError if the classifier of a network cannot be solved for.

    Args:
        network: the network that the method trains.
        name: the method's name.
        shared: whether its clients share a model.
    """
    if not isinstance(network.classifier, nn.Linear) or not shared:
        reason = "has no linear classifier of its own" if shared else "shares no classifier"
        raise ExperimentError(f"train.head: ridge does not go with {name}, which {reason}")


def head_sums(client: Client, method: Method) -> Message:
    """Returns the means to solve the classifier from, over all versions of the client's images."""
    gram, cross = means(*_features(client, method), client.examples.classes)
    return Message({GRAM: packed(gram), CROSS: cross}, {IMAGES: len(client.examples)})


def left_out(client: Client, method: Method, question: Message) -> Message:
    """Returns how well classifiers solved without the client do at it.

    Raises:
        ClientError: the question holds no sums, or none but the client's own.
    """
    if {GRAM, CROSS} - question.tensors.keys():
        raise ClientError("was asked about sums that it was not sent")
    features, labels = _features(client, method)
    gram, cross = means(features, labels, client.examples.classes)
    total = question.tensors[GRAM], question.tensors[CROSS]
    own = packed(gram), cross
    plain = slice(len(client.examples))
    return left_out_answer(question, total, own, features[plain], labels[plain], PENALTIES)


def _features(client: Client, method: Method) -> tuple[Tensor, Tensor]:
    """Returns features ``(n, d)`` float64 of the client's images, and labels.

    First all images unchanged, then the next version of all of them.
    """
    network = client.network

    def seen(images: Tensor) -> list[Tensor]:
        return [network.features(version) for version in method.head_images(images)]

    names = [n for n in network.state_dict() if n.startswith(("featurizer.", "embedding."))]
    features = client.kept_features(seen, client.features_digest(names, seen))
    labels = client.examples.labels.to(client.device)
    return features.to(client.device).double(), labels.repeat(len(features) // len(labels))


class HeadStart:
    """Adds up the clients' sums as they arrive, and solves for the classifier.

    Attributes:
        features: mean squared features by client.
    """

    def __init__(self) -> None:
        self._means: list[Tensor] = []
        self._images = 0
        self.features: dict[int, float] = {}

    def taken(
        self, messages: Iterable[tuple[int, Message]], refuse: Callable[[int, str], None]
    ) -> Iterator[tuple[int, Message]]:
        """Yields clients' statistics without their sums, which it adds up in that order.

        Args:
            messages: statistics by client.
            refuse: called with each client whose sums are impossible, and why; it is left out.
        """
        for id, message in messages:
            sums = [message.tensors.pop(name) for name in (GRAM, CROSS)]
            images = int(message.scalars.pop(IMAGES))
            gram = unpacked(sums[0])
            fault = sums_fault(gram, sums[1], images)
            if fault is not None:
                refuse(id, fault)
                continue
            self.features[id] = float(gram.diagonal()[:-1].sum())
            self._images += images
            self._means = self._means or [torch.zeros_like(each) for each in sums]
            for mean, own in zip(self._means, sums):
                mean.lerp_(own.to(mean), images / self._images)
            yield id, message

    def outliers(self) -> dict[int, str]:
        """Returns the clients with outlying features, and why; their sums cannot be subtracted."""
        return outliers(self.features)

    @property
    def question(self) -> Message:
        """The question to every client: the means, and their number of images."""
        return Message(dict(zip((GRAM, CROSS), self._means)), {EXAMPLES: self._images})

    def solved(self, answers: list[tuple[int, Message]]) -> tuple[Weights, dict[int, float]]:
        """Returns the classifier's entries, and the accuracy at each client without it.

        Args:
            answers: of :func:`left_out`; with none the usual penalty and scale are taken.
        """
        choice = Choice(USUAL_PENALTY, USUAL_SCALE, [], [])
        if answers:
            choice = chosen_by([answer for _, answer in answers], PENALTIES)
        gram, cross = self._means
        weight, bias = next(solved(unpacked(gram), cross, [choice.penalty]))
        found = {"classifier.weight": weight, "classifier.bias": bias}
        accuracies = dict(zip([id for id, _ in answers], choice.accuracies))
        return {name: (choice.scale * each).float() for name, each in found.items()}, accuracies
