"""What a run would take, and how long runs will take."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from feddg.data.inspection import about_labels
from feddg.diagnostics import Diagnostic, emit
from feddg.experiment import Experiment
from feddg.records import ClientsTable
from feddg.runs.prepare import (
    build,
    cache_folder,
    clients_table,
    deal,
    defences_for,
    load_undecoded,
    split_diagnostics,
)
from feddg.runs.reading import Run


def seconds_left(missing: Sequence[Experiment], finished: Iterable[Run], jobs: int) -> float | None:
    """Returns about how long experiments will take together: a round as long as others took.

    Args:
        missing: what is to run.
        finished: completed runs of the same comparison.
        jobs: how many go at once; their number is taken to share the machine evenly.

    Returns:
        Seconds, by the mean time of a round of a method's runs, and for a method without any by
        that of the others; None where no run is finished.
    """
    rates: dict[str, list[float]] = {}
    for run in finished:
        if run.summary is not None and run.summary.rounds:
            seconds = run.summary.seconds.get("total", 0.0) / run.summary.rounds
            rates.setdefault(run.method, []).append(seconds)
    every = [rate for own in rates.values() for rate in own]
    if not every:
        return None
    means = {method: fmean(own) for method, own in rates.items()}
    rest = fmean(every)
    return sum(means.get(one.method.name, rest) * one.train.rounds for one in missing) / jobs


@dataclass(frozen=True)
class Forecast:
    """What a run would take.

    Attributes:
        splits: images by role (``train``, ``id_val``, ``id_test``, ``val``, ``test``).
        clients: who holds how many training images of which domain and class.
        pixel_bytes: the decoded images of the whole data set.
        weights: how many numbers the network has.
        weight_bytes: bytes of the network, its gradients and its optimizer's memory.
        diagnostics: what the defences guarantee.
    """

    splits: dict[str, int]
    clients: ClientsTable
    pixel_bytes: int
    weights: int
    weight_bytes: int
    diagnostics: Sequence[Diagnostic] = ()


def forecast(experiment: Experiment) -> Forecast:
    """Deals out the experiment's images; nothing is decoded or trained.

    Files that cannot be used are counted: they are found when they are decoded.

    Raises:
        FeddgError: the experiment cannot be carried out as asked.
    """
    loaded = load_undecoded(experiment, cache_folder())
    table, size = loaded.table, experiment.data.image_size
    images = deal(experiment, loaded)
    found = [*about_labels(table), *split_diagnostics(experiment, loaded, images.splits)]
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
        defences.diagnostics,
    )
