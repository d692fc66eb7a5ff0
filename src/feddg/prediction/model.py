"""Loads a run's trained model for prediction."""

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from feddg.clients.threads import keep_memory
from feddg.errors import RunError
from feddg.experiment import Experiment
from feddg.federation.federation import build
from feddg.federation.local_training import load_weights
from feddg.methods.base import Method, has_global_model, local_names
from feddg.models.network import Network
from feddg.models.precision import choose_device
from feddg.prediction.adaptation import Parts
from feddg.prediction.adaptation import adapt as adapted
from feddg.prediction.model_file import ModelDescription
from feddg.prediction.shared import at_hand, is_shared, load_shared
from feddg.runs.folder import checkpoint_memories, kept_weights, read_index
from feddg.runs.reading import read_run
from feddg.runs.table import SELECTION_RULES, rules_asked


@dataclass(frozen=True)
class Trained:
    """A trained model of a run.

    Attributes:
        experiment: the run's.
        method: the run's method.
        network: the network with the global weights, in eval mode.
        parts: what the run stores besides the model, for adaptations.
        class_names: the classes in the order of the logits.
        which: the selection rule of the model.
        round: the round it is from; the last one for an average.
        about: description from a shared folder; None for a run.
        feature_names: of features without images: the columns that it takes, in order.
    """

    experiment: Experiment
    method: Method
    network: Network
    parts: Parts
    class_names: tuple[str, ...]
    which: str = "final"
    round: int = 0
    about: ModelDescription | None = None
    feature_names: tuple[str, ...] = ()

    def predictor(self, adapt: str | None = None) -> nn.Module:
        """Returns the predictor: the method's own, or one with an adaptation.

        Raises:
            AdaptationError: the adaptation is unknown, or the model lacks what it needs.
        """
        model = self.method.predictor(self.network).eval()
        return model if adapt is None else adapted(model, adapt, self.parts)


def load_trained(folder: Path | str, device: str = "cpu", which: str | None = None) -> Trained:
    """Returns the trained model of the run in ``folder``; see :func:`load_model`.

    Raises:
        RunError: the folder has no model, or none by that rule.
    """
    path = at_hand(folder)
    if is_shared(path):
        return _load_shared(path, device, which)
    rules, run = [] if which is None else [SELECTION_RULES.find(which)], read_run(path)
    clients = run.clients
    if run.damage:
        raise RunError(f"{path} is damaged: {run.damage}; put the file back from a copy")
    if clients is None:
        raise RunError(f"{path} stopped before training began: there is no model in it")
    experiment = run.experiment
    # The run's own weights replace pretrained ones, so their file need not exist any more.
    method, network = build(experiment.without_weights, len(clients.classes))
    if colours := run.environment.get("normalization"):
        network.normalize_by(**colours)  # today's version of the backbone may expect others
    rule, weights, round = kept_weights(
        path, *(rules or rules_asked(run.settings.get("server") or {}))
    )
    load_weights(network, weights)
    if not has_global_model(method, network):
        raise RunError(
            f"{path}: under {method.name} every client has a model of its own, and there is none "
            "that all share; the run's tables hold what was measured of them"
        )
    local = local_names(method, network)
    of_clients = {
        id: part
        for id, memory in checkpoint_memories(path).items()
        if (part := {name: tensor for name, tensor in memory.items() if name in local})
    }
    _ready(network, device)
    lost = round if of_clients and round != read_index(path).round else None
    parts, names = Parts(of_clients, experiment.seed, lost), tuple(clients.classes)
    columns = tuple(clients.features)
    return Trained(experiment, method, network, parts, names, rule.name, round, None, columns)


def _ready(network: Network, device: str) -> None:
    """Puts a network on its device, to predict; memory is kept as by a run."""
    place = choose_device(device)
    if place.type == "cpu":
        keep_memory()
    network.to(place).eval()


def _load_shared(folder: Path, device: str, which: str | None) -> Trained:
    config, experiment, method, network = load_shared(folder)
    if which is not None:
        raise RunError(f"{folder} holds one model as it is; --which is for run folders")
    _ready(network, device)
    names = config.about.class_names
    parts = Parts(seed=experiment.seed)
    return Trained(experiment, method, network, parts, names, about=config.about)


def load_model(
    folder: Path | str, device: str = "cpu", adapt: str | None = None, which: str | None = None
) -> nn.Module:
    """Returns a run's global model in eval mode.

    Args:
        folder: the run folder; or a shared model: a folder of ``feddg export --hub``, or
            ``hf:owner/name`` (or ``hf:owner/name@revision``) on the Hugging Face hub.
        device: the target device.
        adapt: a test-time adaptation, such as ``iabn`` or ``fixed:alpha=0.3``; None for the
            method's own predictor. See :mod:`feddg.prediction.adaptation`.
        which: the selection rule: ``final``, ``swa``, ``ema``, ``best_in_domain``,
            ``best_held_out`` or ``wise_ft``; by default as in the experiment's ``server.averaging``
            and ``server.wise_ft``.

    Returns:
        A module that maps RGB images in [0, 1], ``(B, 3, H, W)`` at the run's image size, to logits
        ``(B, classes)``; ``class_names`` holds the classes in order. With an adaptation it has
        ``reset()``: call it before images of another domain.

    Raises:
        RunError: the folder has no model, or none by that rule.
        AdaptationError: the adaptation is unknown, or the model lacks what it needs.
    """
    trained = load_trained(folder, device, which)
    model = trained.predictor(adapt)
    model.class_names = trained.class_names  # type: ignore[assignment]
    return model
