"""Before a run: what its experiment becomes with what is there, and what it will take.

Pretrained weights that are expected and cannot be had: the network then learns from scratch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from feddg.data.data_set import SCRATCH
from feddg.data.sets import features
from feddg.data.splits import ROLES
from feddg.diagnostics import Diagnostic, emit, logged_once, warn
from feddg.errors import WeightsError
from feddg.experiment import (
    Experiment,
    Origin,
    chosen_preset,
    expand,
    explain,
    load_experiment,
    read_fields,
)
from feddg.federation.federation import build
from feddg.models.backbones import require_weights
from feddg.privacy.building import build_defences
from feddg.records import ClientsTable
from feddg.runs.execute import is_complete
from feddg.runs.prepare import deal, load_undecoded, split_diagnostics, table_diagnostics
from feddg.runs.provenance import ImagesNow, find_folder
from feddg.settings import IMAGENET, ModelSettings, merge
from feddg.storage import cache_folder
from feddg.text import counted


def with_weights_at_hand(experiment: Experiment) -> Experiment:
    """Returns the experiment, without pretrained weights if a preset's cannot be downloaded.

    Of a table of features, the number of features is filled in.

    Weights that the user names are kept, and raise an error later if missing. Training from scratch
    for lack of weights is reported in one line.
    """
    data = experiment.data
    if data.source == features.SOURCE and data.features is None:
        width = {"data": {"features": features.count_features(data)}}
        return Experiment(**merge(experiment.given, width))
    if data.root is not None and not data.root.exists():
        return experiment  # which is an error, and the one thing to say
    written = experiment.given
    named = chosen_preset(written) or {"weights", "backbone"} & {*written.get("model", {})}
    if not named and not _can_be_had(experiment.model):
        written = merge(written, {"model": {"weights": None}})
        experiment = Experiment(**written)
    origins = explain(written)
    if any(setting.source.startswith(f"preset {SCRATCH}") for setting in origins.values()):
        train = experiment.train
        warn(
            "learns-from-scratch",
            f"No pretrained weights: {experiment.model.backbone} at {experiment.data.image_size} "
            f"pixels learns from scratch, learning rate {train.lr:g}, "
            f"{counted(train.rounds, 'round')}.",
            "Expect less than with weights from ImageNet (--weights imagenet, or a file).",
        )
    return experiment


def _can_be_had(model: ModelSettings) -> bool:
    try:
        if model.weights == IMAGENET:
            require_weights(model.backbone, IMAGENET)
    except WeightsError as error:
        warn("weights-not-had", f"{error}. Nothing was said of weights, so it is the latter.")
        return False
    return True


@dataclass(frozen=True)
class Forecast:
    """The resources and data of a planned run.

    Attributes:
        splits: number of images by role (``train``, ``id_val``, ``id_test``, ``val``, ``test``).
        clients: number of training images per client, domain and class.
        pixel_bytes: size of all images that are decoded from files.
        weights: number of the network's parameters.
        weight_bytes: bytes of the network, its gradients and optimizer state.
        diagnostics: notes on what the defences guarantee.
    """

    splits: dict[str, int]
    clients: ClientsTable
    pixel_bytes: int
    weights: int
    weight_bytes: int
    diagnostics: Sequence[Diagnostic] = ()


@logged_once()
def forecast(experiment: Experiment, cache: Path | None = None) -> Forecast:
    """Partitions the experiment's images over clients; nothing is decoded or trained.

    Unusable files are counted too, because they are found only on decoding.

    Args:
        experiment: the experiment.
        cache: folder of content hashes; the user's cache by default.

    Raises:
        FeddgError: the experiment cannot be run.
    """
    loaded = load_undecoded(experiment, cache_folder(cache))
    table, size = loaded.table, experiment.data.image_size
    images = deal(experiment, loaded)
    diagnostics = table_diagnostics(experiment.data, loaded)
    diagnostics += split_diagnostics(experiment, loaded, images)
    emit(*(diagnostic for diagnostic in diagnostics if diagnostic.severity == "error"))
    method, network = build(experiment, len(table.class_names))
    method.read_files()
    defences = build_defences(images.trained_by(experiment), method, network)
    weights = sum(parameter.numel() for parameter in network.parameters())
    train = experiment.train
    remembered = 2 if train.optimizer == "adam" else 1 if train.momentum else 0
    copies = 2 + remembered  # the weights, their gradients, what the optimizer remembers
    return Forecast(
        {role: len(getattr(images.splits, role)) for role in ROLES},
        images.held,
        0 if table.root is None else len(table) * size * size * 3,
        weights,
        weights * 4 * copies,
        (*diagnostics, *defences.diagnostics),
    )


@dataclass(frozen=True)
class Preview:
    """A planned run.

    Attributes:
        experiment: the complete experiment.
        settings: every setting by dotted path, with its source.
        folder: the run's folder.
        state: state of the folder: ``new``, ``begun`` or ``complete``.
        forecast: data and resources of the run.
    """

    experiment: Experiment
    settings: Mapping[str, Origin]
    folder: Path
    state: str
    forecast: Forecast


def preview(
    experiment: Experiment | Path | str | None = None,
    out: Path | str = "runs",
    *,
    again: bool = False,
    **fields: object,
) -> Preview:
    """Returns what :func:`feddg.api.run` would do with the same arguments; runs nothing.

    Raises:
        FeddgError: the experiment could not be run.
    """
    given = expand(fields)
    asked = load_experiment(experiment, given)
    chosen = with_weights_at_hand(asked)
    replaced = {}
    if chosen.data.features != asked.data.features:
        replaced["data.features"] = Origin(chosen.data.features, "the columns of the table")
    elif chosen is not asked:
        given = merge(given, {"model": {"weights": None}})
        replaced["model.weights"] = Origin(None, "ImageNet's cannot be had here")
    settings = explain(given, read_fields(experiment, given), str(experiment)) | replaced
    folder = find_folder(chosen, out, ImagesNow(cache_folder()), again=again)
    state = "complete" if is_complete(folder) else "begun" if folder.is_dir() else "new"
    return Preview(chosen, settings, folder, state, forecast(chosen))
