"""The jobs that are timed: a federation made by feddg, and the plain loop on the same batches."""

import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy
import timm
import torch
import torchvision
from torch import Tensor, nn

from feddg.clients.client import Client
from feddg.data.data_set import register_source
from feddg.data.images import ImageTable
from feddg.experiment import Experiment
from feddg.federation.federation import Federation as Made
from feddg.models.backbones import build_network
from feddg.models.precision import autocast
from feddg.runs.prepare import in_process

CLASSES = 10


@register_source("noise")
def noise(root: Path | None) -> ImageTable:
    """Images of noise, 32 x 32, ten classes, two domains; ``FEDDG_NOISE_IMAGES`` says how many."""
    return _noise(int(os.environ.get("FEDDG_NOISE_IMAGES", "6000")))


@functools.cache
def _noise(count: int) -> ImageTable:
    held = max(20, count // 100)
    rng = numpy.random.default_rng(0)
    pixels = rng.integers(0, 256, (count + held, 32, 32, 3), dtype=numpy.uint8)
    return ImageTable(
        tuple(f"noise/{i}" for i in range(count + held)),
        numpy.arange(count + held) % CLASSES,
        (numpy.arange(count + held) >= count).astype(numpy.int64),
        tuple(str(c) for c in range(CLASSES)),
        ("seen", "held"),
        images=pixels,
    )


@dataclass(frozen=True)
class Job:
    """What is trained.

    Attributes:
        images: for jobs on noise, how many training images.
        fields: further fields of the experiment.
    """

    name: str
    images: int = 0
    fields: dict[str, Any] = field(default_factory=dict)

    def experiment(self, method: str, precision: str, pacs: Path, weights: Path) -> Experiment:
        """Returns the job as an experiment."""
        if self.images:
            os.environ["FEDDG_NOISE_IMAGES"] = str(self.images)
            data: dict[str, Any] = {"source": "noise", "image_size": 32, "id_val": 0, "id_test": 0}
            given: dict[str, Any] = {"data": data, "preset": "digits", "hold_out": "held"}
        else:
            given = {"data": {"source": "pacs", "root": str(pacs)}, "hold_out": "photo"}
            given["preset"] = "pacs"
            given["model"] = {"backbone": "resnet18", "weights": str(weights)}
        merged = {**given, "method": method, "precision": precision}
        for name, value in self.fields.items():
            before = merged.get(name, {})
            merged[name] = {**before, **value} if isinstance(value, dict) else value
        return Experiment(**merged)


def _resnet18(size: int) -> dict[str, Any]:
    clients = {"number": 100, "per_round": 4, "heterogeneity": 0.1}
    return {"data": {"image_size": size}, "clients": clients, "train": {"local_epochs": 1}}


JOBS = {
    "cnn32": Job(
        "cnn32",
        6000,
        {
            "clients": {"number": 100, "per_round": 20, "heterogeneity": 1.0},
            "model": {"backbone": "cnn", "weights": None},
            "train": {"local_epochs": 1, "batch_size": 32, "augmentation": "digits"},
        },
    ),
    "resnet18_64": Job("resnet18_64", 0, _resnet18(64)),
    "resnet18_128": Job("resnet18_128", 0, _resnet18(128)),
}
"""By name. The ResNets sample 4 of 100 clients a round: what a client costs is what matters."""


class Federation(Made):
    """A job under feddg, ready for its next round; nothing is written to disk but caches."""

    def __init__(self, experiment: Experiment, cache: Path | None = None) -> None:
        folder = cache or Path(tempfile.gettempdir()) / "feddg-speed"
        vars(self).update(vars(in_process(experiment, folder)))
        self.experiment = experiment

    def next_batches(self) -> list[tuple[Tensor, Tensor]]:
        """Returns the images (float, channels last) and labels of the next round's batches."""
        number = self.server.state.round + 1
        return [
            (batch.images, batch.labels)
            for id in self.server.sample(number)
            for batch in self._batches(id, number)
        ]

    def begin_everywhere(self) -> None:
        """Has every client do what it does once and keeps on disk: PARDON's copies."""
        for id in self.transport.clients:
            self.method.begin(self._client(id, 0))

    def _batches(self, id: int, number: int) -> Iterator[Any]:
        return self._client(id, number).batches()

    def _client(self, id: int, number: int) -> Client:
        broadcast = self.method.broadcast(self.server.state)
        return self.transport.client(id, replace(broadcast, round=number), self.worker)


class BareLoop:
    """A plain PyTorch loop: forward, loss, backward, step, on batches that lie ready.

    Args:
        federation: whose network, batches and normalisation policy it copies.
        precision: ``float32`` or ``bfloat16``.
        naive: torchvision's model as it comes: default memory layout, default Adam, float32.
        forwards: forward passes per batch; PARDON makes two.
        trains: whether there is more than them.
        recorded: whether its steps are to be recorded as a CUDA graph.
    """

    def __init__(
        self,
        federation: Federation,
        precision: str,
        *,
        naive: bool = False,
        forwards: int = 1,
        trains: bool = True,
        recorded: bool = False,
    ) -> None:
        worker, self.forwards, self.federation = federation.worker, forwards, federation
        device, self.trains = worker.device, trains
        self.format = torch.contiguous_format if naive else torch.channels_last
        self.network = _copy(federation).to(device).to(memory_format=self.format)  # type: ignore[call-overload]
        self._set_training()
        self.optimizer = torch.optim.Adam(
            self.network.parameters(),
            worker.train.lr,
            fused=None if naive or device.type not in ("cpu", "cuda") else True,
            capturable=recorded,
        )
        self.autocast: Callable[[], Any] = autocast(precision, device)

    def run(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        """Takes one step on each batch."""
        for images, labels in batches:
            with self.autocast(), torch.set_grad_enabled(self.trains):
                losses = [
                    nn.functional.cross_entropy(self.network(images), labels)
                    for _ in range(self.forwards)
                ]
            if not self.trains:
                continue
            self.optimizer.zero_grad()
            torch.stack(losses).sum().backward()
            self.optimizer.step()

    def _set_training(self) -> None:
        self.network.train()
        if self.federation.worker.freeze:
            for module in self.network.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()

    def evaluate(self, count: int, batch_size: int = 256) -> None:
        """Counts right answers of as many images of noise, which lie ready."""
        size = self.federation.experiment.data.image_size
        images = torch.rand(batch_size, 3, size, size).contiguous(memory_format=self.format)
        labels, right = torch.zeros(batch_size, dtype=torch.int64), 0
        self.network.eval()
        with torch.inference_mode(), self.autocast():
            for start in range(0, count, batch_size):
                many = min(batch_size, count - start)
                right += int((self.network(images[:many]).argmax(1) == labels[:many]).sum())
        self._set_training()

    def laid_out(self, batches: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Returns the batches in this loop's memory layout, so that it need not convert them."""
        return [(images.contiguous(memory_format=self.format), y) for images, y in batches]


def _copy(federation: Federation) -> nn.Module:
    """Builds the same architecture with torch and torchvision alone."""
    model, classes = federation.experiment.model, federation.worker.network.classes
    if model.backbone == "efficientnet_lite0":
        lite: nn.Module = timm.create_model("tf_efficientnet_lite0", num_classes=classes)
        return lite
    if model.backbone != "cnn":
        plain: nn.Module = torchvision.models.get_model(model.backbone, num_classes=classes)
        return plain
    return build_network("cnn", classes, weights=None)
