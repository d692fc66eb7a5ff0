"""The graph that leaves feddg: from RGB images to probabilities, label and energy."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from feddg.errors import AdaptationError
from feddg.evaluation.accuracy import energy
from feddg.evaluation.adaptation import Predictor
from feddg.models.backbones import use_plain_convolutions

InputKind = Literal["uint8", "float"]
OUTPUTS = ("probabilities", "label", "energy")


@runtime_checkable
class Traceable(Protocol):
    """A predictor whose answer branches on its weights, which a graph cannot do."""

    def traceable(self) -> nn.Module:
        """Returns the same predictor without branches."""
        ...


class DeployedClassifier(nn.Module):
    """A predictor with everything around it that an application would have to get right.

    Args:
        model: maps RGB images in [0, 1] to logits or log-probabilities.
        input_kind: ``uint8`` for images in 0..255, ``float`` for images in [0, 1].
    """

    def __init__(self, model: nn.Module, input_kind: InputKind) -> None:
        super().__init__()
        self.model, self.input_kind = model, input_kind

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Maps RGB ``(B, 3, S, S)`` to probabilities ``(B, C)``, label and energy ``(B,)``."""
        unit = images.float() / 255 if self.input_kind == "uint8" else images
        logits = self.model(unit).float()
        return logits.softmax(1), logits.argmax(1), energy(logits)


def deployed(model: nn.Module, input_kind: InputKind) -> DeployedClassifier:
    """Returns a copy of a predictor, ready to be traced on a CPU.

    Raises:
        AdaptationError: it remembers images, which a graph cannot.
    """
    if isinstance(model, Predictor) and model.keeps_state:
        raise AdaptationError(
            f"{model.name} cannot be exported: it remembers the images it has seen "
            f"({model.changes}), and a graph keeps no state; use it with `feddg predict --adapt`"
        )
    model = model.traceable() if isinstance(model, Traceable) else model
    own = copy.deepcopy(model).cpu().eval()
    use_plain_convolutions(own)
    return DeployedClassifier(own, input_kind).eval()


def example(size: int, count: int, kind: InputKind, seed: int = 0) -> Tensor:
    """Returns random images ``(count, 3, size, size)`` of the kind that a graph takes."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)
    return as_input(pixels, kind)


def as_input(pixels: Tensor, kind: InputKind) -> Tensor:
    """Returns uint8 images as a graph takes them."""
    return pixels.contiguous() if kind == "uint8" else pixels.float() / 255


def traced(graph: DeployedClassifier, size: int) -> Any:
    """Returns the graph as a ``torch.export`` program for any number of images."""
    batch = torch.export.Dim("batch", min=1)
    inputs = (example(size, 3, graph.input_kind),)
    with torch.no_grad(), quiet_exporters():
        program = torch.export.export(
            graph, inputs, dynamic_shapes={"images": {0: batch}}, strict=False
        )
    # The images that it was traced with would be pickled into the file.
    program._example_inputs = None  # type: ignore[assignment]
    return program


@contextmanager
def quiet_exporters() -> Iterator[None]:
    """Silences what PyTorch's exporters say to their own developers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
