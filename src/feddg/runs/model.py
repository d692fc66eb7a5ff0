"""A run's trained model, ready to predict."""

from pathlib import Path

from torch import nn

from feddg.errors import RunError
from feddg.experiment import load_experiment
from feddg.federation.training import load_weights
from feddg.models.precision import choose_device
from feddg.runs.folder import EXPERIMENT, checkpoint_weights
from feddg.runs.prepare import build
from feddg.runs.records import read_run


def load_model(folder: Path | str, device: str = "cpu") -> nn.Module:
    """Returns the global model of a run's last completed round, in eval mode.

    Args:
        folder: the run folder.
        device: where the model goes.

    Returns:
        A module that maps RGB images in [0, 1], ``(B, 3, H, W)`` at the run's image size, to
        logits ``(B, classes)``; ``class_names`` holds the classes in order.

    Raises:
        RunError: the folder holds no model.
    """
    path = Path(folder)
    clients = read_run(path).clients
    if clients is None:
        raise RunError(f"{path} stopped before training began: there is no model in it")
    experiment = load_experiment(path / EXPERIMENT)
    # The run's own weights replace pretrained ones, so their file need not exist any more.
    bare = experiment.model_copy(
        update={"model": experiment.model.model_copy(update={"weights": None})}
    )
    method, network = build(bare, len(clients.classes))
    load_weights(network, checkpoint_weights(path))
    model = method.predictor(network).to(choose_device(device)).eval()
    model.class_names = tuple(clients.classes)  # type: ignore[assignment]
    return model
