"""A run's trained model, ready to predict, as it is or under a test-time adaptation."""

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from feddg.errors import RunError
from feddg.evaluation.adaptation import Parts
from feddg.evaluation.adaptation import adapt as adapted
from feddg.experiment import Experiment, load_stored
from feddg.federation.local_training import load_weights
from feddg.methods.base import Method, has_global_model, local_names
from feddg.models.network import Network
from feddg.models.precision import choose_device
from feddg.runs.checkpoints import checkpoint_memories
from feddg.runs.folder import EXPERIMENT
from feddg.runs.kept_models import kept_weights, served_rule
from feddg.runs.prepare import build
from feddg.runs.reading import read_run
from feddg.runs.selection_rules import find_rule


@dataclass(frozen=True)
class Trained:
    """A model that a run has learned.

    Attributes:
        experiment: the run's.
        method: what was run.
        network: holds the global weights, in eval mode.
        parts: what is kept beside it.
        class_names: in the order of the logits.
        which: the selection rule whose model it is, as ``load_model`` takes it.
        round: the round it is from; that of its last model for a mean.
    """

    experiment: Experiment
    method: Method
    network: Network
    parts: Parts
    class_names: tuple[str, ...]
    which: str = "final"
    round: int = 0

    def predictor(self, adapt: str | None = None) -> nn.Module:
        """Returns the model that predicts: the method's own, or one under an adaptation.

        Raises:
            AdaptationError: the adaptation is unknown, or the model lacks what it needs.
        """
        model = self.method.predictor(self.network).eval()
        return model if adapt is None else adapted(model, adapt, self.parts)


def load_trained(folder: Path | str, device: str = "cpu", which: str | None = None) -> Trained:
    """Returns what the run in ``folder`` has learned; see :func:`load_model`.

    Raises:
        RunError: the folder holds no model, or none by that rule.
    """
    path = Path(folder)
    asked = None if which is None else find_rule(which)
    clients = read_run(path).clients
    if clients is None:
        raise RunError(f"{path} stopped before training began: there is no model in it")
    experiment = load_stored(path / EXPERIMENT)
    # The run's own weights replace pretrained ones, so their file need not exist any more.
    bare = experiment.model_copy(
        update={"model": experiment.model.model_copy(update={"weights": None})}
    )
    method, network = build(bare, len(clients.classes))
    rule = asked or served_rule(path)
    weights, round = kept_weights(path, rule)
    load_weights(network, weights)
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
    names = tuple(clients.classes)
    return Trained(experiment, method, network, parts, names, rule.model, round)


def load_model(
    folder: Path | str,
    device: str = "cpu",
    adapt: str | None = None,
    which: str | None = None,
) -> nn.Module:
    """Returns a run's global model, by default the one it serves, in eval mode.

    Args:
        folder: the run folder.
        device: where the model goes.
        adapt: a test-time adaptation, such as ``iabn`` or ``fixed:alpha=0.3``; none for the
            method's own way to predict. See :mod:`feddg.evaluation.adaptation`.
        which: the model by a selection rule: ``final``, ``tail``, ``ema``, ``best_in_domain``,
            ``best_held_out`` or ``interpolated``; by default what ``server.serve`` and
            ``server.interpolate`` of the experiment say.

    Returns:
        A module that maps RGB images in [0, 1], ``(B, 3, H, W)`` at the run's image size, to
        logits ``(B, classes)``; ``class_names`` holds the classes in order. Under an adaptation
        it has ``reset()``, to be called before images of another domain.

    Raises:
        RunError: the folder holds no model, or none by that rule.
        AdaptationError: the adaptation is unknown, or the model lacks what it needs.
    """
    trained = load_trained(folder, device, which)
    model = trained.predictor(adapt)
    model.class_names = trained.class_names  # type: ignore[assignment]
    return model
