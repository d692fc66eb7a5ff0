"""How well the out-of-distribution score tells foreign images from those of training.

    feddg run --data digits --method fedavg --hold-out sketch --set data.id_test=0.2
    python benchmarks/out_of_distribution/measure.py RUN --foreign photos=PACS/photo

Energies of the served model on the in-domain test images, which neither training nor the threshold
has seen, against those of foreign images: the held-out domains, images of other sources, and what
shows nothing. AUROC 0.5 is guessing, 1 a clean separation. Prints a Markdown table.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
from torch import Tensor

from feddg.data.decoding import Reading, decode_image, quiet_pillow
from feddg.data.pixels import as_unit
from feddg.evaluation.accuracy import energy, energy_threshold
from feddg.evaluation.metrics import area_under_roc
from feddg.prediction.classifier import image_files
from feddg.rng import stream
from feddg.runs.execute import read_energy_threshold
from feddg.runs.model import load_trained
from feddg.runs.prepare import load_images
from feddg.storage import cache_folder

BATCH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--foreign", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--most", type=int, default=1000, help="images of each kind")
    chosen = parser.parse_args()
    trained = load_trained(chosen.run)
    model = trained.predictor()
    images = load_images(trained.experiment, cache_folder(), lambda *_: None)
    splits = images.splits
    light = read_energy_threshold(chosen.run, model)
    if light is None:  # a run that was stopped keeps none
        validation = _energies(model, images.pixels.gather(torch.from_numpy(splits.id_val)))
        threshold, measured = energy_threshold(validation), len(splits.id_val)
    else:
        threshold, measured = light.threshold, light.images
    if threshold is None:
        raise SystemExit(f"{chosen.run}: energies say nothing of this model")
    rows = splits.id_test if len(splits.id_test) else splits.id_val
    own = images.pixels.gather(torch.from_numpy(_some(rows, chosen.most)))
    inside = _energies(model, own)
    foreign = dict(_made_up(own))
    held = torch.from_numpy(_some(splits.test, chosen.most))
    foreign = {"the held-out domain": images.pixels.gather(held)} | foreign
    for said in chosen.foreign:
        name, _, folder = said.partition("=")
        foreign = {name: _from_files(Path(folder), trained.experiment, chosen.most)} | foreign
    print(
        f"threshold from {measured} images; in-domain test images: {len(own)}, of which "
        f"{_above(inside, threshold):.1%} above it"
    )
    print("| foreign images | number | AUROC | above the threshold |\n|---|---:|---:|---:|")
    for name, pixels in foreign.items():
        found = _energies(model, pixels)
        above, scores = _above(found, threshold), torch.cat([inside, found]).numpy()
        area = area_under_roc(numpy.arange(len(scores)) >= len(inside), scores)
        print(f"| {name} | {len(pixels)} | {area:.2f} | {above:.0%} |")


def _some(rows, most):
    order = torch.randperm(len(rows), generator=stream(0, "out-of-distribution score"))
    return rows[order[:most].numpy()]


def _made_up(own: Tensor) -> Iterator[tuple[str, Tensor]]:
    generator = stream(0, "foreign images")
    order = torch.randperm(own[0, 0].numel(), generator=generator)
    yield "test images with their pixels shuffled", own.flatten(2)[..., order].view(own.shape)
    yield "random noise", torch.randint(0, 256, own.shape, generator=generator, dtype=torch.uint8)
    shade = torch.randint(0, 256, (len(own), 3, 1, 1), generator=generator, dtype=torch.uint8)
    yield "blank images", shade.expand(own.shape)


def _from_files(folder: Path, experiment, most: int) -> Tensor:
    data = experiment.data
    files = list(image_files([folder]))
    step = max(1, len(files) // most)
    with quiet_pillow():
        pixels = [
            torch.from_numpy(decode_image(file, data.image_size, data.resize, Reading.of(data)))
            for file in files[::step][:most]
        ]
    return torch.stack(pixels).permute(0, 3, 1, 2)


def _energies(model, pixels: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.cat([energy(model(as_unit(part)).float()) for part in pixels.split(BATCH)])


def _above(energies: Tensor, threshold: float) -> float:
    return float((energies > threshold).float().mean())


if __name__ == "__main__":
    main()
