"""Exported ONNX files against their runs: labels, probabilities, and images per CPU second.

    OMP_NUM_THREADS=1 python benchmarks/export/onnx_against_torch.py

Trains the small CNN, FedIG-A and ResNet-18 for a few steps on digits, exports each, and has run and
file answer 1,000 images, half digits, half random, in batches of 64, on one thread. CPU seconds, so
that other work on the machine matters less; the best of three passes. Prints a Markdown table.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy
import torch

from feddg.api import run
from feddg.experiment import Experiment
from feddg.prediction.classifier import ImageClassifier, OnnxClassifier, RunClassifier
from feddg.prediction.export import export_run
from feddg.runs.prepare import load_images

BATCH, PASSES = 64, 3
CASES = {
    "small CNN, 32 px": {"method": "fedavg"},
    "FedIG-A, 32 px": {"method": "fedig-a"},
    "ResNet-18, 64 px": {
        "method": "fedavg",
        "model": {"backbone": "resnet18", "weights": "none"},
        "data": {"source": "digits", "image_size": 64},
    },
}
TRAIN = {"rounds": 1, "local_steps": 10, "batch_size": 16, "augmentation": "none"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=1000)
    count = parser.parse_args().images
    torch.set_num_threads(1)
    print("| network | other labels | largest difference | ONNX Runtime | PyTorch |")
    print("|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for name, fields in CASES.items():
            base = {"data": "digits", "hold_out": "sketch", "train": TRAIN, "precision": "float32"}
            experiment = Experiment(**{**base, **fields})
            done = run(experiment, Path(folder), report=False)
            file = export_run(done.folder, Path(folder) / f"{experiment.id}.onnx", "onnx").path
            pixels = _images(experiment, count)
            own, found = RunClassifier(done.folder), OnnxClassifier(file, threads=1)
            shares, torch_speed = _answers(own, pixels)
            others, onnx_speed = _answers(found, pixels)
            wrong = int((shares.argmax(1) != others.argmax(1)).sum())
            gap = float(numpy.abs(shares - others).max())
            speeds = f"{onnx_speed:,.0f} | {torch_speed:,.0f}"
            print(f"| {name} | {wrong} of {count} | {gap:.0e} | {speeds} |")


def _images(experiment: Experiment, count: int) -> numpy.ndarray:
    images = load_images(experiment, None, lambda *_: None)
    digits = images.pixels.gather(torch.arange(count // 2)).permute(0, 2, 3, 1).numpy()
    noise = numpy.random.default_rng(0).integers(0, 256, (count - len(digits), *digits.shape[1:]))
    return numpy.concatenate([digits, noise.astype(numpy.uint8)])


def _answers(model: ImageClassifier, pixels: numpy.ndarray) -> tuple[numpy.ndarray, float]:
    speed, parts = 0.0, []
    for _ in range(PASSES):
        started = time.process_time()
        parts = [model.answer(pixels[i : i + BATCH])[0] for i in range(0, len(pixels), BATCH)]
        speed = max(speed, len(pixels) / (time.process_time() - started))
    return numpy.concatenate(parts), speed


if __name__ == "__main__":
    main()
