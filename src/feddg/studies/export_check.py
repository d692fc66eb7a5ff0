"""Whether an exported file answers as its run does, on random images and on real ones."""

from collections.abc import Callable
from pathlib import Path

import numpy
import torch
from PIL import Image
from torch import Tensor

from feddg.data.data_set import load_images_of
from feddg.data.decoding import UnusableImageError, decode_image, make_square, quiet_pillow
from feddg.data.pixels import as_unit
from feddg.errors import FeddgError, RunError
from feddg.experiment import Experiment
from feddg.rng import stream
from feddg.studies.deployed_graph import InputKind, as_input, example

RANDOM_IMAGES, REAL_IMAGES = 64, 128
TOLERANCE = 1e-4
"""Largest difference of a probability from the run's own."""
Outputs = tuple[numpy.ndarray, numpy.ndarray]
"""Probabilities ``(B, C)`` and labels ``(B,)``."""


def images_to_check(experiment: Experiment) -> tuple[Tensor, int]:
    """Returns uint8 images, random ones and real ones, and the number of real ones."""
    size = experiment.data.image_size
    random = example(size, RANDOM_IMAGES, "uint8", experiment.seed)
    real = _real_images(experiment)
    return (
        torch.cat([random, torch.from_numpy(numpy.stack(real)).permute(0, 3, 1, 2)])
        if real
        else random
    ), len(real)


def _real_images(experiment: Experiment) -> list[numpy.ndarray]:
    """Some images of the run's source as in training; none where it is not at hand."""
    data = experiment.data
    try:
        table = load_images_of(data)
    except FeddgError:
        return []
    order = torch.randperm(len(table), generator=stream(experiment.seed, "export check"))
    rows = order[:REAL_IMAGES].tolist()
    if table.images is not None:
        shown = (Image.fromarray(table.images[row]).convert("RGB") for row in rows)
        return [make_square(image, data.image_size, data.resize) for image in shown]
    assert table.root is not None
    found = []
    with quiet_pillow():
        for row in rows:
            try:
                file = table.root / table.paths[row]
                found.append(decode_image(file, data.image_size, data.resize))
            except UnusableImageError:
                continue
    return found


def difference(
    model: torch.nn.Module,
    answer: Callable[[Tensor], Outputs],
    images: Tensor,
    kind: InputKind,
    path: Path,
) -> float:
    """Returns the largest difference of probabilities between a file and the run.

    Raises:
        RunError: it is too large, or a label differs.
    """
    largest, device = 0.0, next(model.parameters()).device
    # One image, an odd number and all others: the batch must not matter.
    for part in (images[:1], images[1:8], images[8:]):
        with torch.inference_mode():
            expected = model(as_unit(part, device)).float().softmax(1).cpu().numpy()
        probabilities, labels = answer(as_input(part, kind))
        gap = float(numpy.abs(probabilities - expected).max())
        wrong = int((labels != expected.argmax(1)).sum())
        if wrong or not gap <= TOLERANCE:
            raise RunError(
                f"{path} was not written: on {wrong} of {len(part)} images it gives another label "
                f"than the run, and probabilities differ by up to {gap:.2g}"
            )
        largest = max(largest, gap)
    return largest
