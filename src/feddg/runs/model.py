"""A run's trained model, ready to predict, as it is or under a test-time adaptation."""

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from feddg.errors import RunError
from feddg.evaluation.adaptation import adapt as adapted
from feddg.evaluation.predictors import Parts
from feddg.experiment import Experiment, load_stored
from feddg.federation.turns import load_weights
from feddg.methods.base import Method, has_global_model, local_names
from feddg.models.network import Network
from feddg.models.precision import choose_device
from feddg.runs.folder import EXPERIMENT, checkpoint_memories, checkpoint_weights
from feddg.runs.prepare import build
from feddg.runs.reading import read_run


@dataclass(frozen=True)
class Trained:
    """What a run has learned by its last completed round.

    Attributes:
        experiment: the run's.
        method: what was run.
        network: holds the global weights, in eval mode.
        parts: what is kept beside it.
        class_names: in the order of the logits.
    """

    experiment: Experiment
    method: Method
    network: Network
    parts: Parts
    class_names: tuple[str, ...]

    def predictor(self, adapt: str | None = None) -> nn.Module:
        """Returns the model that predicts: the method's own, or one under an adaptation.

        Raises:
            AdaptationError: the adaptation is unknown, or the model lacks what it needs.
        """
        model = self.method.predictor(self.network).eval()
        return model if adapt is None else adapted(model, adapt, self.parts)


def load_trained(folder: Path | str, device: str = "cpu") -> Trained:
    """Returns what the run in ``folder`` has learned.

    Raises:
        RunError: the folder holds no model.
    """
    path = Path(folder)
    clients = read_run(path).clients
    if clients is None:
        raise RunError(f"{path} stopped before training began: there is no model in it")
    experiment = load_stored(path / EXPERIMENT)
    # The run's own weights replace pretrained ones, so their file need not exist any more.
    bare = experiment.model_copy(
        update={"model": experiment.model.model_copy(update={"weights": None})}
    )
    method, network = build(bare, len(clients.classes))
    load_weights(network, checkpoint_weights(path))
    if not has_global_model(method, network):
        raise RunError(
            f"{path}: under {method.name} every client has a model of its own, and there is none "
            "that all share; the run's tables hold what was measured of them"
        )
    local = local_names(method, network)
    own = {
        id: {name: tensor for name, tensor in memory.items() if name in local}
        for id, memory in checkpoint_memories(path).items()
    }
    parts = Parts({id: part for id, part in own.items() if part}, experiment.seed)
    network.to(choose_device(device)).eval()
    return Trained(experiment, method, network, parts, tuple(clients.classes))


def load_model(folder: Path | str, device: str = "cpu", adapt: str | None = None) -> nn.Module:
    """Returns the global model of a run's last completed round, in eval mode.

    Args:
        folder: the run folder.
        device: where the model goes.
        adapt: a test-time adaptation, such as ``iabn`` or ``fixed:alpha=0.3``; none for the
            method's own way to predict. See :mod:`feddg.evaluation.adaptation`.

    Returns:
        A module that maps RGB images in [0, 1], ``(B, 3, H, W)`` at the run's image size, to
        logits ``(B, classes)``; ``class_names`` holds the classes in order. Under an adaptation
        it has ``reset()``, to be called before images of another domain.

    Raises:
        RunError: the folder holds no model.
        AdaptationError: the adaptation is unknown, or the model lacks what it needs.
    """
    trained = load_trained(folder, device)
    model = trained.predictor(adapt)
    model.class_names = trained.class_names  # type: ignore[assignment]
    return model
