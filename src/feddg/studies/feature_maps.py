"""t-SNE maps of features by class and by domain, as training goes on (PARDON, Figure 1)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from sklearn.manifold import TSNE
from torch import Tensor

from feddg.data.pixels import as_unit
from feddg.errors import RunError
from feddg.messages import Weights
from feddg.rng import stream
from feddg.runs.folder import SNAPSHOTS
from feddg.runs.prepare import Progress
from feddg.runs.subject import Subject
from feddg.storage import is_file, why

PER_DOMAIN = 150


def feature_maps(subject: Subject, folder: Path, progress: Progress) -> dict[str, Any]:
    """t-SNE maps of some images' features before training, at snapshots, and at the end."""
    rows = _some_of_each_domain(subject)
    table, held = subject.images.table, subject.images.splits
    weights = {0: subject.first} | snapshots(folder) | {subject.state.round: subject.state.weights}
    maps = []
    for done, (round_, of_round) in enumerate(sorted(weights.items())):
        progress("t-SNE", done, len(weights))
        network = subject.network(of_round)
        features = over_batches(subject, rows, network.features)  # type: ignore[arg-type]
        points = TSNE(
            perplexity=max(2.0, min(30.0, (len(rows) - 1) / 3)), init="pca", random_state=0
        ).fit_transform(features.numpy())
        maps.append({"round": round_, "points": numpy.round(points, 2).tolist()})
    unseen = {*held.test.tolist(), *held.val.tolist()}
    return {
        "classes": list(table.class_names),
        "domains": list(table.domain_names),
        "labels": table.labels[rows].tolist(),
        "of_domain": table.domains[rows].tolist(),
        "held_out": [row in unseen for row in rows.tolist()],
        "maps": maps,
    }


def snapshots(folder: Path) -> dict[int, Weights]:
    """Returns the global weights that a run kept of earlier rounds, by round."""
    found: dict[int, Weights] = {}
    for file in sorted((folder / SNAPSHOTS).glob("round-*.safetensors")):
        try:
            if is_file(file):
                found[int(file.stem.removeprefix("round-"))] = load_file(file)
        except (OSError, SafetensorError, ValueError) as error:
            raise RunError(f"{file} is damaged: {why(error)}. Delete it, or run again.") from None
    return found


def _some_of_each_domain(subject: Subject) -> numpy.ndarray:
    """Some rows of each domain, of training domains from the part nobody trained on if there is."""
    splits, domains = subject.images.splits, subject.images.table.domains
    unused = numpy.concatenate([splits.test, splits.val, splits.id_test, splits.id_val])
    chosen = []
    for domain in numpy.unique(domains):
        own = unused[domains[unused] == domain]
        if len(own) == 0:
            own = splits.train[domains[splits.train] == domain]
        chance = stream(subject.experiment.seed, "t-SNE", int(domain))
        chosen.append(own[torch.randperm(len(own), generator=chance)[:PER_DOMAIN].numpy()])
    return numpy.concatenate(chosen)


def over_batches(subject: Subject, rows: numpy.ndarray, work: Callable[[Tensor], Tensor]) -> Tensor:
    """What ``work`` makes of the images of some rows, on the CPU in float32."""
    worker, size = subject.worker, subject.experiment.evaluate.batch_size
    with torch.inference_mode(), worker.autocast():
        parts = [
            work(as_unit(subject.images.pixels.gather(part), worker.device)).float().cpu()
            for part in torch.from_numpy(rows).split(size)
        ]
    return torch.cat(parts)
