"""Exports a run's model to a file that works without feddg: ONNX, torch.export, or weights."""

import copy
import json
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from PIL import Image
from pydantic import ValidationError
from pydantic_core import from_json
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import feddg
from feddg.data.data_set import load_images_of
from feddg.data.decoding import UnusableImageError, decode_image, make_square, quiet_pillow
from feddg.data.pixels import as_unit
from feddg.diagnostics import Diagnostic
from feddg.errors import AdaptationError, FeddgError, RunError, field_fault, need
from feddg.evaluation.accuracy import energy
from feddg.evaluation.adaptation import Predictor
from feddg.experiment import Experiment
from feddg.models.convolutions import use_plain_convolutions
from feddg.prediction.card import OWN_WAY, TAG, model_card
from feddg.prediction.classifier import ImageClassifier, ModelDescription, describe_model
from feddg.rng import stream
from feddg.runs.diagnostics import refuse_doubtful
from feddg.runs.execute import fingerprint
from feddg.runs.model import load_trained
from feddg.runs.reading import require_run
from feddg.storage import replace_file, replace_text

# The graph that leaves feddg: from RGB images to probabilities, label and energy.


InputKind = Literal["uint8", "float"]
OUTPUTS = ("probabilities", "label", "energy")


class DeployedClassifier(nn.Module):
    """A predictor with the processing before and after it that an application needs.

    Args:
        model: maps RGB images in [0, 1] to logits or log-probabilities.
        input_kind: ``uint8`` for images in 0..255, ``float`` for images in [0, 1].
    """

    def __init__(self, model: nn.Module, input_kind: InputKind) -> None:
        super().__init__()
        self.model, self.input_kind = model, input_kind

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Maps RGB ``(B, 3, S, S)`` to probabilities ``(B, C)``, label and energy ``(B,)``.

        The label is -1 where probabilities are not finite.
        """
        unit = images.float() / 255 if self.input_kind == "uint8" else images
        logits = self.model(unit).float()
        shares = logits.softmax(1)
        label = logits.argmax(1).masked_fill(shares.sum(1).isnan(), -1)
        return shares, label, energy(logits)


def deployed(model: nn.Module, input_kind: InputKind) -> DeployedClassifier:
    """Returns a copy of a predictor, ready for tracing on a CPU.

    A graph cannot branch on weights: a predictor that does has a method ``traceable`` that returns
    the same predictor without branches.

    Raises:
        AdaptationError: it remembers images, which a graph cannot do.
    """
    if isinstance(model, Predictor) and model.keeps_state:
        raise AdaptationError(
            f"{model.name} cannot be exported: it remembers the images it has seen "
            f"({model.changes}), and a graph keeps no state; use it with `feddg predict --adapt`"
        )
    traceable = getattr(model, "traceable", None)
    own = copy.deepcopy(traceable() if traceable else model).cpu().eval()
    use_plain_convolutions(own)
    return DeployedClassifier(own, input_kind).eval()


def example(size: int, count: int, kind: InputKind, seed: int = 0) -> Tensor:
    """Returns random images ``(count, 3, size, size)`` in the graph's input format."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)
    return as_input(pixels, kind)


def as_input(pixels: Tensor, kind: InputKind) -> Tensor:
    """Returns uint8 images in the graph's input format."""
    return pixels.contiguous() if kind == "uint8" else pixels.float() / 255


def traced(graph: DeployedClassifier, size: int, adaptation: str | None = None) -> Any:
    """Returns the graph as a ``torch.export`` program for any number of images.

    Raises:
        RunError: the model cannot be traced.
    """
    batch = torch.export.Dim("batch", min=1)
    inputs = (example(size, 3, graph.input_kind),)
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            program = torch.export.export(
                graph, inputs, dynamic_shapes={"images": {0: batch}}, strict=False
            )
    except Exception as error:  # PyTorch's tracer raises many kinds
        what = f"adaptation {adaptation}" if adaptation else "this method's predictor"
        reason = " ".join(str(error).split())[:200]
        raise RunError(f"{what} cannot be written as a graph: {reason}") from None
    # The images that it was traced with would be pickled into the file.
    program._example_inputs = None  # type: ignore[assignment]
    return program


# An ONNX file of ``feddg export`` as a classifier: all that it takes is in the file's metadata.


class OnnxClassifier(ImageClassifier):
    """The model of an ONNX file, run by ONNX Runtime on the CPU.

    Args:
        file: a file written by ``feddg export --onnx``.
        threads: number of CPU threads; 0 for all.

    Raises:
        RunError: the file cannot be read, is of another kind, or the extra ``export`` is not
            installed.
    """

    def __init__(self, file: Path, threads: int = 0) -> None:
        self._session = _session(file, threads)
        super().__init__(_metadata(file, self._session.get_modelmeta().custom_metadata_map))
        self._floats = "float32" in self.description.input

    def answer(self, pixels: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Maps ``(B, size, size, 3)`` uint8 to probabilities ``(B, C)`` and energies ``(B,)``."""
        images = numpy.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
        given = images.astype(numpy.float32) / 255 if self._floats else images
        probabilities, energies = self._session.run(["probabilities", "energy"], {"images": given})
        return probabilities, energies


def _session(file: Path, threads: int) -> Any:
    need("export", str(file), ["onnxruntime"], "name the run folder")
    import onnxruntime

    if not file.is_file():
        raise RunError(f"there is no file {file}")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    try:
        return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises many kinds on a damaged file
        reason = " ".join(str(error).split())[:200]
        raise RunError(f"{file} cannot be read as ONNX: {reason}") from None


def _metadata(file: Path, texts: dict[str, str]) -> ModelDescription:
    try:
        values = {name: _value(text) for name, text in texts.items()}
        return ModelDescription.model_validate(values)
    except ValidationError as error:
        raise RunError(
            f"{file} says nothing usable about its {field_fault(error)}; name a file that "
            "`feddg export --onnx` wrote"
        ) from None


def _value(text: str) -> Any:
    """Returns the value of a text: parsed JSON if possible, else the text."""
    try:
        found = from_json(text)
    except ValueError:
        return text
    return text if isinstance(found, int | float) and not isinstance(found, bool) else found


# Whether an exported file answers as its run does, on random images and on real ones.


RANDOM_IMAGES, REAL_IMAGES = 64, 128
TOLERANCE = 1e-4
"""Largest allowed difference of a probability from the run's."""
Outputs = tuple[numpy.ndarray, numpy.ndarray]
"""Probabilities ``(B, C)`` and labels ``(B,)``."""


def images_to_check(experiment: Experiment) -> tuple[Tensor, int]:
    """Returns uint8 images for the check, random and real ones, and the number of real ones."""
    size = experiment.data.image_size
    random = example(size, RANDOM_IMAGES, "uint8", experiment.seed)
    real = _real_images(experiment)
    return (
        torch.cat([random, torch.from_numpy(numpy.stack(real)).permute(0, 3, 1, 2)])
        if real
        else random
    ), len(real)


def _real_images(experiment: Experiment) -> list[numpy.ndarray]:
    """Returns some images of the run's data as in training; empty if they are not available."""
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
        RunError: the difference is too large, or a label differs.
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


Format = Literal["onnx", "torch", "safetensors"]
ENDINGS: dict[Format, str] = {"onnx": ".onnx", "torch": ".pt2", "safetensors": ".safetensors"}
OPSET = 18


@dataclass(frozen=True)
class Exported:
    """The result of an export.

    Attributes:
        path: path of the model.
        card: path of the model card in Markdown.
        metadata: the file's description of the model.
        checked: number of images on which predictions were compared with the run's; 0 for weights
            only.
        difference: largest difference of a probability on these images.
        diagnostics: warnings about the model.
    """

    path: Path
    card: Path
    metadata: dict[str, Any]
    checked: int
    difference: float
    diagnostics: tuple[Diagnostic, ...] = ()


def export_run(
    run: Path | str,
    path: Path,
    format: Format,
    *,
    adapt: str | None = None,
    which: str | None = None,
    input_kind: InputKind = "uint8",
    strict: bool = False,
) -> Exported:
    """Writes a run's model as one file, and a model card with the same name and ``.md``.

    ``onnx`` and ``torch`` map RGB images ``(B, 3, S, S)``, any B, to ``probabilities`` ``(B, C)``,
    ``label`` ``(B,)`` and ``energy`` ``(B,)``; resizing to the S of the metadata is not included.
    Before the file is moved to its place, its predictions for random and real images are checked:
    labels must equal the run's, probabilities may differ by 1e-4. ``safetensors`` contains only the
    network's weights, compared bit for bit.

    Args:
        run: the run folder.
        path: the file to write; an existing file is replaced.
        format: format of the file.
        adapt: a test-time adaptation without memory.
        which: the selection rule of the model, see :func:`feddg.runs.model.load_model`.
        input_kind: ``uint8`` images in 0..255, or ``float`` ones in [0, 1].
        strict: whether to refuse a model with warnings.

    Raises:
        RunError: the folder has no model, the file's suffix does not fit its format, the card would
            replace another kind of file, the file cannot be written or predicts differently, the
            extra ``export`` is not installed, or ``strict`` and there are warnings.
        AdaptationError: the adaptation is unknown, does not suit the model, or keeps state.
    """
    if format == "safetensors" and adapt is not None:
        raise AdaptationError("weights alone hold no adaptation; export it with --onnx or --torch")
    _check_place(path, format)
    if format == "onnx":
        need("export", "ONNX", otherwise="use --torch")
    require_run(Path(run))
    trained = load_trained(run, which=which)
    colours = trained.network.mean, trained.network.std
    about = _description(describe_model(Path(run), trained), format, adapt, input_kind, colours)
    if strict:
        refuse_doubtful(about.diagnostics)
    model: nn.Module = trained.network
    images = torch.empty(0)
    if format != "safetensors":
        model = trained.predictor(adapt)
        images, real = images_to_check(trained.experiment)
        checked = {"random_images": RANDOM_IMAGES, "real_images": real}
        about = about.model_copy(update={"checked": checked})
    gap = _write(path, model, about, images, input_kind)
    card = path.with_suffix(".md")
    replace_text(card, model_card(run, about))
    return Exported(path, card, about.fields(), len(images), gap, about.diagnostics)


def _description(
    about: ModelDescription,
    format: Format,
    adapt: str | None,
    input_kind: InputKind,
    colours: tuple[Sequence[float], Sequence[float]],
) -> ModelDescription:
    """Returns the description of a run's model in a file, with an adaptation.

    ``colours`` are the mean and standard deviation that its network expects.
    """
    shape = f"(batch, 3, {about.image_size}, {about.image_size})"
    changes: dict[str, Any] = {"format": format}
    if format == "safetensors":
        mean, std = (", ".join(f"{value:g}" for value in values) for values in colours)
        changes["input"] = f"RGB in [0, 1] {shape}, minus ({mean}), divided by ({std})"
        return ModelDescription(
            **about.model_dump(exclude={"energy_threshold"}, exclude_unset=True) | changes
        )
    values = "uint8 in 0..255" if input_kind == "uint8" else "float32 in [0, 1]"
    changes |= {
        "input": f"RGB images {shape}, {values}",
        "outputs": OUTPUTS,
        "adaptation": adapt or OWN_WAY,
    }
    if adapt is not None:  # the threshold is for energies of the model as it was trained
        changes["energy_threshold"] = None
    return about.model_copy(update=changes | ({"opset": OPSET} if format == "onnx" else {}))


def _write(
    path: Path, model: nn.Module, about: ModelDescription, images: Tensor, input_kind: InputKind
) -> float:
    """Writes a file in the description's format; returns the value of :func:`difference`."""
    largest = 0.0

    def write(aside: Path) -> None:
        nonlocal largest
        if about.format == "safetensors":
            write_weights(aside, model, about)
            return
        write_program = _write_onnx if about.format == "onnx" else _write_program
        largest = difference(model, write_program(aside, program, about), images, input_kind, path)

    if about.format != "safetensors":
        adaptation = about.adaptation if about.adaptation != OWN_WAY else None
        program = traced(deployed(model, input_kind), images.shape[-1], adaptation)
    try:
        replace_file(path, write)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from None
    return largest


def write_model(model: nn.Module, path: Path, metadata: Mapping[str, Any]) -> Path:
    """Writes any model in the way of :func:`export_run`, without a model card.

    Args:
        model: maps RGB images in [0, 1] to logits, in eval mode.
        path: ends in ``.onnx``, ``.pt2`` or ``.safetensors``, which decides the format.
        metadata: ``class_names``, ``image_size``, and further fields of the description.

    Returns:
        ``path``.

    Raises:
        RunError: see :func:`export_run`.
    """
    format = next((name for name, end in ENDINGS.items() if path.suffix.lower() == end), None)
    if format is None:
        raise RunError(f"{path} must end in one of {', '.join(ENDINGS.values())}")
    if format == "onnx":
        need("export", "ONNX", otherwise="use --torch")
    size = int(metadata["image_size"])
    about = ModelDescription(
        **metadata,
        feddg=feddg.__version__,
        format=format,
        weights=fingerprint(model),
        resize="squash",
        input=f"RGB images (batch, 3, {size}, {size}), uint8 in 0..255",
        result="It comes from no run that says how good it was where nobody trained.",
    )
    _write(path, model, about, example(size, RANDOM_IMAGES, "uint8"), "uint8")
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
    texts = {name: _as_text(value) for name, value in about.fields().items()}
    onnx.helper.set_model_props(proto, texts)
    onnx.checker.check_model(proto, full_check=True)
    aside.write_bytes(proto.SerializeToString())
    session = _session(aside, 0)

    def answer(images: Tensor) -> Outputs:
        found = session.run(list(OUTPUTS[:2]), {"images": images.numpy()})
        return found[0], found[1]

    return answer


def _write_program(
    aside: Path, program: Any, about: ModelDescription
) -> Callable[[Tensor], Outputs]:
    extra = {"feddg.json": json.dumps(about.fields(), ensure_ascii=False, indent=1)}
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


def write_weights(aside: Path, model: nn.Module, about: ModelDescription) -> None:
    """Writes a network's state as safetensors with its description, and reads it back.

    Raises:
        RunError: the file does not contain what was written.
    """
    state = model.state_dict()
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    text = json.dumps(about.fields(), ensure_ascii=False)
    save_file(tensors, aside, {"format": "pt", "feddg": text})
    with safe_open(aside, framework="pt") as file:
        same = all(torch.equal(file.get_tensor(name), tensors[name]) for name in tensors)
    if not same:
        raise RunError(f"{aside} does not hold the weights that were written; check the disk")


def _check_place(path: Path, format: Format) -> None:
    """Checks, before any work, that the file and card replace only files of their kind."""
    if path.suffix.lower() != ENDINGS[format]:
        raise RunError(f"{path} must end in {ENDINGS[format]}")
    if path.is_dir():
        raise RunError(f"cannot write {path}: it is a folder; name a file")
    card = path.with_suffix(".md")
    if card.is_dir() or (card.is_file() and TAG.encode() not in card.read_bytes()):
        raise RunError(
            f"{card} is there and is no model card, which is what would be written there; name the "
            "model's file otherwise"
        )


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def one_format(chosen: Sequence[tuple[str, Path | None]]) -> tuple[str, Path]:
    """Returns the one requested format and its file or folder.

    Raises:
        RunError: none or several were requested.
    """
    found = [(format, path) for format, path in chosen if path is not None]
    if len(found) != 1:
        raise RunError("name one: --onnx FILE, --torch FILE, --safetensors FILE or --hub FOLDER")
    return found[0]


# The model card in a run folder: written once the run is complete, kept as its reader edits it.


MODEL_CARD = "model_card.md"
log = logging.getLogger("feddg")


def ensure_card(run: Path) -> Path | None:
    """Writes a complete run's ``model_card.md`` if it has none; returns its path.

    Cards are edited by people (terms of the images, intended use), so they are never replaced.
    Returns None if there is no model shared by all clients. Errors are logged and do not fail the
    run.
    """
    card = run / MODEL_CARD
    if card.is_file():
        return card
    try:
        about = describe_model(run, load_trained(run)).model_copy(update={"adaptation": OWN_WAY})
        replace_text(card, model_card(run, about))
    except (RunError, OSError) as error:
        log.info("no model card: %s", error)
        return None
    return card
