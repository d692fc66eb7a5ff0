"""A model's file: what it says of itself, and its graph, from RGB images to probabilities."""

import copy
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy
import torch
from pydantic import AfterValidator, Field
from safetensors.torch import save_file
from torch import Tensor, nn

import feddg
from feddg.data.decoding import MOST_PIXELS, Reading, Resize, ValueRange, decode_image
from feddg.data.images import ImageSource
from feddg.data.pixels import as_unit
from feddg.diagnostics import Diagnostic
from feddg.errors import AdaptationError, RunError, need, schema_faults
from feddg.models.backbones import own_state
from feddg.models.convolutions import use_plain_convolutions
from feddg.models.network import Network
from feddg.models.trained import fingerprint
from feddg.prediction.adaptation import Predictor
from feddg.records import ClassNames, Row
from feddg.runs.energy import energy
from feddg.storage import file_faults, replace_file
from feddg.text import printable

OWN_WAY = "the method's own"
"""Text for a file without a test-time adaptation."""
OUTPUTS = ("probabilities", "label", "energy")
ABOUT = "feddg"
"""The name under which a file holds its description."""
Format = Literal["onnx", "torch", "safetensors"]
ENDINGS: dict[Format, str] = {"onnx": ".onnx", "torch": ".pt2", "safetensors": ".safetensors"}
OPSET = 18
MOST_FEATURES = 1 << 20
"""Most numbers in a row that a network from outside may take."""
RANDOM_IMAGES = 64
TOLERANCE = 1e-4
"""Largest allowed difference of a probability from the run's."""
Band = Annotated[int, Field(ge=1)]
Printable = Annotated[str, AfterValidator(printable)]
Outputs = tuple[numpy.ndarray, numpy.ndarray]
"""Probabilities ``(B, C)`` and labels ``(B,)``."""


class ModelIdentity(Row):
    """The origin of a model's weights.

    Attributes:
        experiment: the run's id.
        method: the method that trained it.
        backbone: its backbone.
        model: the selection rule that chose it.
        round: the round it is from.
        weights: a hash of the weights.
    """

    experiment: str = ""
    method: str = ""
    backbone: str = ""
    model: str = ""
    round: int = 0
    weights: str = ""


class ModelDescription(ModelIdentity):
    """The description in a model's file: what prediction needs, and the model's origin.

    Every format stores it as JSON, under the name :data:`ABOUT`.

    Attributes:
        class_names: the classes in the order of the probabilities.
        image_size: side of the square in pixels.
        resize: how an image becomes square.
        input: the images it takes, in words.
        range: which values are black and white, see :class:`feddg.data.decoding.Reading`.
        bands: which bands become colours.
        tile: side of the tiles into which large images are cut; None for no tiles.
        depths: the bits that the values of each deeper domain of the run use; none for 8 bits.
        features: numbers in a row, of a model that takes features instead of images.
        columns: options of the table of features it was trained on.
        feature_names: that table's columns of features, in order.
        energy_threshold: images with a higher energy are unlike the training images; None if
            unknown.
        diagnostics: warnings about the model.
        result: its accuracy on held-out domains, in one sentence.
        adaptation: the test-time adaptation it contains.
        format: format of the file; ``run`` for a run folder, ``hub`` for a shared folder.
        feddg: the version that wrote it.
        outputs: outputs of the graph.
        opset: ONNX opset.
        kept_by_clients: tensors that each client keeps for itself.
        checked: number of images on which its predictions were compared with the run's.
    """

    class_names: ClassNames
    image_size: int = Field(ge=1, le=4096)
    resize: Resize
    input: str
    range: ValueRange = "auto"
    bands: tuple[()] | tuple[Band] | tuple[Band, Band, Band] = ()
    tile: int | None = Field(None, ge=16)
    depths: tuple[Annotated[int, Field(ge=0, le=32)], ...] = ()
    features: int | None = Field(None, ge=1, le=MOST_FEATURES)
    columns: dict[str, object] = Field(default_factory=dict)
    feature_names: tuple[str, ...] = ()
    energy_threshold: float | None = None
    diagnostics: tuple[Diagnostic, ...] = ()
    result: Printable = "It comes from no run that says how good it was where nobody trained."
    adaptation: Printable | None = None
    format: str = ""
    feddg: str = ""
    outputs: tuple[str, ...] = ()
    opset: int | None = None
    kept_by_clients: int = 0
    checked: dict[str, int] | None = None

    @property
    def reading(self) -> Reading:
        """Which bands become colours, which values black and white, and what is cut into tiles."""
        return Reading(self.range, self.bands, self.tile)

    @property
    def bits(self) -> int:
        """The bits that the run's deepest domain uses; 0 for 8-bit images."""
        return max(self.depths, default=0)

    @property
    def known_depths(self) -> tuple[int, ...]:
        """The bits that images of the run's domains use, the deeper ones'."""
        return self.depths or (0,)

    def decode(self, source: ImageSource, most: int = MOST_PIXELS) -> numpy.ndarray:
        """Returns the pixels of a whole file, ``(image_size, image_size, 3)`` uint8.

        Its white is that of the least deep domain of the run that holds it.

        Raises:
            UnusableImageError: the file has no pixels, or more than ``most``.
        """
        size = self.image_size
        return decode_image(source, size, self.resize, self.reading, self.known_depths, most)

    def to_text(self) -> str:
        """Returns the known fields as JSON."""
        return self.model_dump_json(exclude_unset=True)


class DeployedClassifier(nn.Module):
    """A predictor with the processing before and after it that an application needs.

    Args:
        model: maps RGB images in [0, 1] to logits or log-probabilities.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Maps RGB ``(B, 3, S, S)`` to probabilities ``(B, C)``, label and energy ``(B,)``.

        The images are in 0..255. The label is -1 where probabilities are not finite.
        """
        logits = self.model(images.float() / 255).float()
        shares = logits.softmax(1)
        label = logits.argmax(1).masked_fill(shares.sum(1).isnan(), -1)
        return shares, label, energy(logits)


def deployed(model: nn.Module) -> DeployedClassifier:
    """Returns a copy of a predictor, ready for tracing on a CPU.

    Raises:
        AdaptationError: it remembers images, which a graph cannot do.
    """
    if isinstance(model, Predictor) and model.keeps_state:
        raise AdaptationError(
            f"{model.name} cannot be exported: it remembers the images it has seen "
            f"({model.changes}), and a graph keeps no state; use it with `feddg predict --adapt`"
        )
    network = copy.deepcopy(model).cpu().eval()
    use_plain_convolutions(network)
    return DeployedClassifier(network).eval().requires_grad_(False)


def example(size: int, count: int, seed: int = 0) -> Tensor:
    """Returns random images ``(count, 3, size, size)``, uint8."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)


def traced(graph: DeployedClassifier, size: int) -> object:
    """Returns the graph as a ``torch.export`` program for any number of images.

    Raises:
        RunError: the model cannot be traced.
    """
    batch = torch.export.Dim("batch", min=1)
    inputs = (example(size, 3),)
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            program = torch.export.export(
                graph, inputs, dynamic_shapes={"images": {0: batch}}, strict=False
            )
    except Exception as error:  # PyTorch's tracer raises many kinds
        reason = " ".join(str(error).split())[:200]
        raise RunError(f"this model cannot be written as a graph: {reason}") from None
    # The images that it was traced with would be pickled into the file.
    program._example_inputs = None  # type: ignore[assignment]
    return program


def difference(
    model: nn.Module, answer: Callable[[Tensor], Outputs], images: Tensor, path: Path
) -> float:
    """Returns the largest difference of probabilities between a file and the run.

    Raises:
        RunError: the difference is too large, or a label differs.
    """
    largest, device = 0.0, next(model.parameters()).device
    # One image, an odd number and all others: the batch must not matter.
    for part in (images[:1], images[1:8], images[8:]):
        with torch.inference_mode():
            expected = model(as_unit(part, device)).float().softmax(1).cpu().numpy()
        probabilities, labels = answer(part.contiguous())
        gap = float(numpy.abs(probabilities - expected).max())
        wrong = int((labels != expected.argmax(1)).sum())
        if wrong or not gap <= TOLERANCE:
            raise RunError(
                f"{path} was not written: on {wrong} of {len(part)} images it gives another label "
                f"than the run, and probabilities differ by up to {gap:.2g}"
            )
        largest = max(largest, gap)
    return largest


def write_file(path: Path, model: nn.Module, about: ModelDescription, images: Tensor) -> float:
    """Writes a file in the description's format; returns the value of :func:`difference`."""
    largest = 0.0

    def write(aside: Path) -> None:
        nonlocal largest
        if about.format == "safetensors":
            write_weights(
                aside, own_state(model) if isinstance(model, Network) else model.state_dict(), about
            )
            return
        write_program = _write_onnx if about.format == "onnx" else _write_program
        largest = difference(model, write_program(aside, program, about), images, path)

    if about.format != "safetensors":
        program = traced(deployed(model), images.shape[-1])
    with file_faults(RunError, f"cannot write {path}"):
        replace_file(path, write)
    return largest


def input_of_weights(network: Network, size: int, features: int | None) -> str:
    """Returns in words what a network's weights alone take: normalised colours, or features."""
    if features is not None:
        return f"features (batch, {features})"
    colours = network.mean, network.std
    mean, std = (", ".join(f"{value:g}" for value in values) for values in colours)
    return f"RGB in [0, 1] (batch, 3, {size}, {size}), minus ({mean}), divided by ({std})"


def write_model(model: nn.Module, path: Path, metadata: Mapping[str, Any]) -> Path:
    """Writes a model in the way of :func:`export_run`, without a model card.

    Args:
        model: maps RGB images in [0, 1] to logits, in eval mode; a ``Network`` is part of it.
        path: ends in ``.onnx``, ``.pt2`` or ``.safetensors``, which decides the format.
        metadata: ``class_names``, ``image_size``, ``resize``, and further fields of the
            description.

    Returns:
        ``path``.

    Raises:
        RunError: see :func:`export_run`; or the description cannot be written.
    """
    format = next((name for name, end in ENDINGS.items() if path.suffix.lower() == end), None)
    if format is None:
        raise RunError(f"{path} must end in one of {', '.join(ENDINGS.values())}")
    if format == "onnx":
        need("export", "ONNX", otherwise="use --torch")
    size = metadata["image_size"]
    if format == "safetensors":
        network = next(part for part in model.modules() if isinstance(part, Network))
        taken = input_of_weights(network, size, None)
    else:
        taken = f"RGB images (batch, 3, {size}, {size}), uint8 in 0..255"
    own = {"feddg": feddg.__version__, "format": format, "weights": fingerprint(model)}
    with schema_faults(RunError, f"{path} cannot be described: "):
        about = ModelDescription.model_validate({**metadata, **own, "input": taken})
    write_file(path, model, about, example(size, RANDOM_IMAGES))
    return path


def _write_onnx(aside: Path, program: Any, about: ModelDescription) -> Callable[[Tensor], Outputs]:
    import onnx

    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        made = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            verbose=False,
            input_names=["images"],
            output_names=list(OUTPUTS),
        )
    assert made is not None
    proto = made.model_proto
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    del proto.graph.value_info[:]  # speaks of the batch by the tracer's name
    onnx.helper.set_model_props(proto, {ABOUT: about.to_text()})
    onnx.checker.check_model(proto, full_check=True)
    aside.write_bytes(proto.SerializeToString())
    session = onnx_session(aside)

    def answer(images: Tensor) -> Outputs:
        outputs = session.run(list(OUTPUTS[:2]), {"images": images.numpy()})
        return outputs[0], outputs[1]

    return answer


def _write_program(
    aside: Path, program: Any, about: ModelDescription
) -> Callable[[Tensor], Outputs]:
    extra = {f"{ABOUT}.json": about.to_text()}
    with warnings.catch_warnings(action="ignore"):
        with aside.open("wb") as written:
            torch.export.save(program, written, extra_files=extra)
        with aside.open("rb") as file:
            loaded = torch.export.load(file).module()

    def answer(images: Tensor) -> Outputs:
        with torch.no_grad():
            probabilities, labels, _ = loaded(images)
        return probabilities.numpy(), labels.numpy()

    return answer


def write_weights(aside: Path, state: Mapping[str, Tensor], about: ModelDescription) -> None:
    """Writes a network's state as safetensors with its description."""
    # Copies: layers may share weights, and the format knows no such thing.
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    save_file(tensors, aside, {"format": "pt", ABOUT: about.to_text()})


def onnx_session(file: Path) -> Any:
    """Opens an ONNX file; see :class:`feddg.prediction.classifier.OnnxClassifier`."""
    need("export", str(file), ["onnxruntime"], "name the run folder")
    import onnxruntime

    if not file.is_file():
        raise RunError(f"there is no file {file}")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises many kinds on a damaged file
        reason = " ".join(str(error).split())[:200]
        raise RunError(f"{file} cannot be read as ONNX: {reason}") from None
