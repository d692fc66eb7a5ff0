"""A finished run, made ready to be looked into."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch import Tensor, nn

from feddg.clients.worker import Worker
from feddg.data.pixels import as_unit
from feddg.errors import RunError
from feddg.experiment import Experiment, load_stored
from feddg.federation.turns import load_weights
from feddg.files import is_file
from feddg.messages import Weights
from feddg.methods.base import Method, State, has_global_model
from feddg.runs.folder import EXPERIMENT, RunFolder
from feddg.runs.prepare import Images, Progress, build, build_worker, load_images
from feddg.runs.same_images import ImagesNow, check_images


@dataclass(frozen=True)
class Subject:
    """A finished run, ready to be looked into."""

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
    """Reads a run and its images.

    Args:
        folder: the run.
        cache: folder for decoded pixels and twins.
        progress: called with (what, done, total).

    Raises:
        RunError: there is no run, no completed round, or no model that all clients share.
    """
    if not is_file(folder / EXPERIMENT):
        raise RunError(f"{folder} holds no run: there is no {EXPERIMENT} in it")
    experiment = load_stored(folder / EXPERIMENT)
    with RunFolder(folder) as opened:
        checkpoint = opened.load_checkpoint()
    if checkpoint is None:
        raise RunError(f"{folder} has no completed round to look into")
    check_images(folder, lambda: ImagesNow(cache)(experiment))
    images = load_images(experiment, cache, progress)
    method, network = build(experiment, len(images.table.class_names))
    if not has_global_model(method, network):
        raise RunError(f"{folder}: under {method.name} there is no global model to look into")
    first = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
    worker = build_worker(experiment, network, cache)
    return Subject(experiment, images, method, worker, first, checkpoint.state, checkpoint.memories)


def over_batches(subject: Subject, rows: numpy.ndarray, work: Callable[[Tensor], Tensor]) -> Tensor:
    """What ``work`` makes of the images of some rows, on the CPU in float32."""
    worker, size = subject.worker, subject.experiment.evaluate.batch_size
    with torch.inference_mode(), worker.autocast():
        parts = [
            work(as_unit(subject.images.pixels.gather(part), worker.device)).float().cpu()
            for part in torch.from_numpy(rows).split(size)
        ]
    return torch.cat(parts)
