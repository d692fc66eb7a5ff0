"""What a run would take, before it begins: who trains on how much, and memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from feddg.data.data_set import load_images_of
from feddg.data.pixels import ArrayPixels
from feddg.experiment import Experiment
from feddg.records import ClientsTable
from feddg.runs.prepare import build, clients_table, deal, guards_for


@dataclass(frozen=True)
class Forecast:
    """What a run would take.

    Attributes:
        splits: images by role (``train``, ``id_val``, ``id_test``, ``val``, ``test``).
        clients: who holds how many training images of which domain and class.
        pixel_bytes: the decoded images of the whole data set.
        weights: how many numbers the network has.
        weight_bytes: bytes of the network, its gradients and its optimizer's memory.
        promises: what the guards promise, a sentence each.
    """

    splits: dict[str, int]
    clients: ClientsTable
    pixel_bytes: int
    weights: int
    weight_bytes: int
    promises: Sequence[str] = ()


def forecast(experiment: Experiment) -> Forecast:
    """Deals out the experiment's images; nothing is decoded or trained.

    Files that cannot be used are counted: they are found when they are decoded.

    Raises:
        FeddgError: the experiment cannot be carried out as asked.
    """
    data = experiment.data
    table = load_images_of(data)
    size = data.image_size
    images = deal(experiment, table, ArrayPixels(numpy.empty((0, size, size, 3), numpy.uint8)), [])
    method, network = build(experiment, len(table.class_names))
    method.read_files()
    promises = guards_for(images.trained_by(experiment), method, network).promises
    weights = sum(parameter.numel() for parameter in network.parameters())
    copies = 2 + _optimizer_copies(experiment)  # the weights, their gradients, what it remembers
    roles = ("train", "id_val", "id_test", "val", "test")
    return Forecast(
        {role: len(getattr(images.splits, role)) for role in roles},
        clients_table(images),
        len(table) * size * size * 3,
        weights,
        weights * 4 * copies,
        promises,
    )


def _optimizer_copies(experiment: Experiment) -> int:
    if experiment.train.optimizer == "adam":
        return 2
    return 1 if experiment.train.momentum else 0
