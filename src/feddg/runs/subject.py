"""A finished run, ready to be looked into: its images, method, network and checkpoint."""

from dataclasses import dataclass
from pathlib import Path

import numpy
from torch import nn

from feddg.clients.client import Worker
from feddg.errors import RunError
from feddg.experiment import Experiment, load_stored
from feddg.federation.local_training import load_weights
from feddg.messages import Weights, on_device
from feddg.methods.base import Method, State
from feddg.runs.folder import EXPERIMENT, RunFolder
from feddg.runs.prepare import Images, Progress, build, build_worker, load_images
from feddg.runs.reading import require_run
from feddg.runs.same_images import ImagesNow, check_images


@dataclass(frozen=True)
class Subject:
    """A finished run, ready to be looked into.

    Attributes:
        experiment: what was run.
        images: who holds what.
        method: what was trained.
        worker: its network, on its device.
        first: the network's state before training.
        state: the server's after the last round.
        memories: what clients remember, by id.
    """

    experiment: Experiment
    images: Images
    method: Method
    worker: Worker
    first: Weights
    state: State
    memories: dict[int, Weights]

    def network(self, weights: Weights) -> nn.Module:
        """The shared network with some weights, in eval mode."""
        load_weights(self.worker.network, weights)
        return self.worker.network.eval()

    def main_domains(self) -> numpy.ndarray:
        """The domain that most of a client's images have, ``(N,)``."""
        main: numpy.ndarray = numpy.argmax(self.images.partition.counts, axis=1)
        return main


def load_subject(folder: Path, cache: Path, progress: Progress) -> Subject:
    """Reads a run's folder, loads its images and builds its network.

    Raises:
        FeddgError: the folder holds no completed round, or its images are not those of the run.
    """
    require_run(folder)
    experiment = load_stored(folder / EXPERIMENT)
    with RunFolder(folder) as opened:
        checkpoint = opened.load_checkpoint()
    if checkpoint is None:
        raise RunError(f"{folder} has no completed round to look into")
    check_images(folder, lambda: ImagesNow(cache)(experiment))
    images = load_images(experiment, cache, progress)
    method, network = build(experiment, len(images.table.class_names))
    first = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
    worker = build_worker(images.trained_by(experiment), network, cache)
    first, state = on_device(first, worker.device), checkpoint.state.to(worker.device)
    return Subject(experiment, images, method, worker, first, state, checkpoint.memories)
