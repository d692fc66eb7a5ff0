"""A run's model as a file that works without feddg: ONNX, torch.export, or weights alone."""

import copy
import json
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
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
from feddg.errors import AdaptationError, FeddgError, RunError, field_fault
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

    One whose answer branches on its weights, which a graph cannot do, has a method ``traceable``
    that returns the same predictor without branches.

    Raises:
        AdaptationError: it remembers images, which a graph cannot.
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
    """Returns random images ``(count, 3, size, size)`` of the kind that a graph takes."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)
    return as_input(pixels, kind)


def as_input(pixels: Tensor, kind: InputKind) -> Tensor:
    """Returns uint8 images as a graph takes them."""
    return pixels.contiguous() if kind == "uint8" else pixels.float() / 255


def traced(graph: DeployedClassifier, size: int, adaptation: str | None = None) -> Any:
    """Returns the graph as a ``torch.export`` program for any number of images.

    Raises:
        RunError: it cannot be a graph.
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
    """The model of an ONNX file, computed by ONNX Runtime on the CPU.

    Args:
        file: what ``feddg export --onnx`` wrote.
        threads: CPU threads that compute; 0 for all.

    Raises:
        RunError: it cannot be read, is not one of ours, or the extra ``export`` is not installed.
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
    try:
        import onnxruntime
    except ImportError:
        raise RunError(
            f"{file} needs ONNX Runtime: pip install 'feddg[export]'; or name the run folder"
        ) from None
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
    """What the writer had: JSON where it is JSON, else the text."""
    try:
        found = from_json(text)
    except ValueError:
        return text
    return text if isinstance(found, int | float) and not isinstance(found, bool) else found


# Whether an exported file answers as its run does, on random images and on real ones.


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


Format = Literal["onnx", "torch", "safetensors"]
ENDINGS: dict[Format, str] = {"onnx": ".onnx", "torch": ".pt2", "safetensors": ".safetensors"}
OPSET = 18


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        path: the model.
        card: the model card beside it, Markdown.
        metadata: what the file says about itself.
        checked: images on which it answered as the run does; 0 for weights alone.
        difference: largest difference of a probability among them.
        diagnostics: the warnings about the model.
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
    """Writes a run's model as one file, and a model card beside it (``path`` with ``.md``).

    ``onnx`` and ``torch`` hold the whole way from RGB images ``(B, 3, S, S)``, any B, to
    ``probabilities`` ``(B, C)``, ``label`` ``(B,)`` and ``energy`` ``(B,)``; resizing to the S of
    the metadata stays outside. Before the file is put in place it answers random images and real
    ones of the run's source: labels are the run's, probabilities within 1e-4. ``safetensors`` holds
    the network's weights alone, read back and compared to the bit.

    Args:
        run: the run folder.
        path: the file; one that exists is replaced.
        format: which kind of file.
        adapt: a test-time adaptation without memory.
        which: the model by a selection rule, see :func:`feddg.runs.model.load_model`.
        input_kind: ``uint8`` images in 0..255, or ``float`` ones in [0, 1].
        strict: whether to refuse a model about which there is a warning.

    Raises:
        RunError: the folder holds no model, the file's name ends otherwise than its format asks,
            its card would replace a page that is none, the file cannot be written or answers
            differently, the extra ``export`` is not installed, or ``strict``.
        AdaptationError: the adaptation is unknown, does not suit the model, or keeps state.
    """
    if format == "safetensors" and adapt is not None:
        raise AdaptationError("weights alone hold no adaptation; export it with --onnx or --torch")
    _check_place(path, format)
    if format == "onnx":
        _require_onnx()
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
    """What a file says about the model of a run, under an adaptation.

    ``colours`` are the mean and the deviation that its network expects.
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
    """Writes a file of the format that a description names; see :func:`difference`."""
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
    """Writes a model of no run folder as :func:`export_run` would; without a card.

    Args:
        model: maps RGB images in [0, 1] to logits, in eval mode.
        path: ends in ``.onnx``, ``.pt2`` or ``.safetensors``, which says what is written.
        metadata: ``class_names``, ``image_size``, and what else the file should say of itself.

    Returns:
        ``path``.

    Raises:
        RunError: see :func:`export_run`.
    """
    format = next((name for name, end in ENDINGS.items() if path.suffix.lower() == end), None)
    if format is None:
        raise RunError(f"{path} must end in one of {', '.join(ENDINGS.values())}")
    if format == "onnx":
        _require_onnx()
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
    """Writes a network's state as safetensors, with its description; reads it back.

    Raises:
        RunError: it is not what was written.
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
    """Makes sure, before any work, that the file and its card replace nothing but their like."""
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


def _require_onnx() -> None:
    """Raises RunError where the extra is not installed."""
    try:
        for name in ("onnx", "onnxruntime", "onnxscript"):
            import_module(name)
    except ImportError as error:
        raise RunError(
            f"ONNX needs the package {error.name}: pip install 'feddg[export]'; or use --torch"
        ) from None


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def one_format(chosen: Sequence[tuple[str, Path | None]]) -> tuple[str, Path]:
    """Returns the format and the file, or folder, that were asked for.

    Raises:
        RunError: none was, or several.
    """
    found = [(format, path) for format, path in chosen if path is not None]
    if len(found) != 1:
        raise RunError("name one: --onnx FILE, --torch FILE, --safetensors FILE or --hub FOLDER")
    return found[0]


# The model card in a run folder: written once the run is complete, kept as its reader edits it.


MODEL_CARD = "model_card.md"
log = logging.getLogger("feddg")


def ensure_card(run: Path) -> Path | None:
    """Writes a complete run's ``model_card.md`` unless it has one; returns it.

    A card is there to be filled in (terms of the images, intended use), so it is never replaced.
    None where there is nothing to describe: no model that all clients share. What keeps a card from
    being written is logged; it is no reason for a run to fail.
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
