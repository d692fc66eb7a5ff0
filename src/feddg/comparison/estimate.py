"""Estimates what a run needs."""

from collections.abc import Sequence
from dataclasses import dataclass

from feddg.data.inspection import about_clients, about_labels
from feddg.diagnostics import Diagnostic, emit
from feddg.experiment import Experiment
from feddg.federation.federation import build, defences_for
from feddg.records import ClientsTable
from feddg.runs.prepare import cache_folder, clients_table, deal, load_undecoded, split_diagnostics


@dataclass(frozen=True)
class Forecast:
    """The resources and data of a planned run.

    Attributes:
        splits: number of images by role (``train``, ``id_val``, ``id_test``, ``val``, ``test``).
        clients: number of training images per client, domain and class.
        pixel_bytes: size of all decoded images.
        weights: number of the network's parameters and buffers.
        weight_bytes: bytes of the network, its gradients and optimizer state.
        diagnostics: notes on what the defences guarantee.
    """

    splits: dict[str, int]
    clients: ClientsTable
    pixel_bytes: int
    weights: int
    weight_bytes: int
    diagnostics: Sequence[Diagnostic] = ()


def forecast(experiment: Experiment) -> Forecast:
    """Partitions the experiment's images over clients; nothing is decoded or trained.

    Unusable files are counted too, because they are found only on decoding.

    Raises:
        FeddgError: the experiment cannot be run.
    """
    loaded = load_undecoded(experiment, cache_folder())
    table, size = loaded.table, experiment.data.image_size
    images = deal(experiment, loaded)
    found = [*about_labels(table), *split_diagnostics(experiment, loaded, images.splits)]
    found += about_clients(images.partition.sizes.tolist())
    emit(*(one for one in found if one.severity == "error"))
    method, network = build(experiment, len(table.class_names))
    method.read_files()
    defences = defences_for(images.trained_by(experiment), method, network)
    weights = sum(parameter.numel() for parameter in network.parameters())
    train = experiment.train
    remembered = 2 if train.optimizer == "adam" else 1 if train.momentum else 0
    copies = 2 + remembered  # the weights, their gradients, what the optimizer remembers
    roles = ("train", "id_val", "id_test", "val", "test")
    return Forecast(
        {role: len(getattr(images.splits, role)) for role in roles},
        clients_table(images),
        len(table) * size * size * 3,
        weights,
        weights * 4 * copies,
        (*found, *defences.diagnostics),
    )
