"""A run's model as a file that works without feddg: ONNX, torch.export, or weights alone."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import feddg
from feddg.errors import AdaptationError, RunError
from feddg.methods.base import local_names
from feddg.runs.execute import fingerprint, read_warning_light
from feddg.runs.findings import cautions, refuse_doubtful, result_sentence_of
from feddg.runs.model import Trained, load_trained
from feddg.storage import replace_file, replace_text
from feddg.studies.classifier import identity_of, preparation_of
from feddg.studies.deployed_graph import (
    OUTPUTS,
    InputKind,
    deployed,
    quiet_exporters,
    traced,
)
from feddg.studies.export_check import RANDOM_IMAGES, Outputs, difference, images_to_check
from feddg.studies.model_card import OWN_WAY, TAG, model_card

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
        cautions: what must be said of the model, one sentence each.
    """

    path: Path
    card: Path
    metadata: dict[str, Any]
    checked: int
    difference: float
    cautions: tuple[str, ...] = ()


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
        strict: whether to refuse a model that is no better than a constant one.

    Raises:
        RunError: the folder holds no model, the file's name ends otherwise than its format asks,
            its card would replace a page that is none, the file cannot be written or answers
            differently, the extra ``export`` is not installed, or ``strict``.
        AdaptationError: the adaptation is unknown, does not suit the model, or keeps state.
    """
    if format == "safetensors" and adapt is not None:
        raise AdaptationError("weights alone hold no adaptation; export it with --onnx or --torch")
    _check_place(path, format)
    onnx = _onnx() if format == "onnx" else None
    trained = load_trained(run, which=which)
    metadata = metadata_of(Path(run), trained, format, adapt, input_kind)
    said = tuple(metadata["cautions"])
    if strict:
        refuse_doubtful(said)
    if format == "safetensors":
        _put(path, lambda aside: _write_weights(aside, trained, metadata))
        return Exported(path, _write_card(Path(run), path, metadata), metadata, 0, 0.0, said)
    model = trained.predictor(adapt)
    size = trained.experiment.data.image_size
    program = _traced(deployed(model, input_kind), size, adapt)
    images, real = images_to_check(trained.experiment)
    metadata["checked"] = {"random_images": RANDOM_IMAGES, "real_images": real}
    found: list[float] = []

    def write(aside: Path) -> None:
        if onnx is not None:
            answer = _write_onnx(aside, program, metadata, onnx)
        else:
            answer = _write_program(aside, program, metadata)
        found.append(difference(model, answer, images, input_kind, path))

    _put(path, write)
    card = _write_card(Path(run), path, metadata)
    return Exported(path, card, metadata, len(images), found[0], said)


def metadata_of(
    run: Path,
    trained: Trained,
    format: Format | Literal["run"],
    adapt: str | None = None,
    input_kind: InputKind = "uint8",
) -> dict[str, Any]:
    """Returns what a model's file says about itself, or a run folder's card about its model.

    Args:
        run: the run folder.
        trained: its model.
        format: of the file; ``run`` for the folder itself.
        adapt: the test-time adaptation in it.
        input_kind: what images it takes.

    Raises:
        RunError: the folder is damaged.
    """
    own, look = trained.predictor(), preparation_of(run, trained)
    size, light = look.size, read_warning_light(run, own)
    values = "uint8 in 0..255" if input_kind == "uint8" else "float32 in [0, 1]"
    found: dict[str, Any] = {
        "format": format,
        "feddg": feddg.__version__,
        **identity_of(trained, fingerprint(own)),
        "class_names": list(trained.class_names),
        "image_size": size,
        "resize": look.resize,
        "range": look.reading.range,
        "bands": list(look.reading.bands),
        "tile": look.reading.tile,
        "bits": look.bits,
        "kept_by_clients": len(local_names(trained.method, trained.network)),
        "cautions": list(cautions(run, trained.which, trained.round)),
        "result": result_sentence_of(run, trained.which, trained.round),
    }
    if format == "safetensors":
        return found | {"input": f"RGB in [0, 1] (batch, 3, {size}, {size}), then ImageNet's mean"}
    found |= {
        "input": f"RGB images (batch, 3, {size}, {size}), {values}",
        "outputs": list(OUTPUTS),
        "adaptation": adapt or OWN_WAY,
        # The threshold is for energies of the model as it was trained.
        "energy_threshold": light.threshold if light is not None and adapt is None else None,
    }
    return found | ({"opset": OPSET} if format == "onnx" else {})


def _traced(graph: Any, size: int, adapt: str | None) -> Any:
    try:
        return traced(graph, size)
    except Exception as error:  # PyTorch's tracer raises many kinds
        what = f"adaptation {adapt}" if adapt else "this method's predictor"
        reason = " ".join(str(error).split())[:200]
        raise RunError(f"{what} cannot be written as a graph: {reason}") from None


def _write_onnx(
    aside: Path, program: Any, metadata: dict[str, Any], onnx: Any
) -> Callable[[Tensor], Outputs]:
    import onnxruntime

    with torch.no_grad(), quiet_exporters():
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
    onnx.helper.set_model_props(proto, {k: _as_text(v) for k, v in metadata.items()})
    onnx.checker.check_model(proto, full_check=True)
    aside.write_bytes(proto.SerializeToString())
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(aside), options, providers=["CPUExecutionProvider"])

    def answer(images: Tensor) -> Outputs:
        found = session.run(list(OUTPUTS[:2]), {"images": images.numpy()})
        return found[0], found[1]

    return answer


def _write_program(
    aside: Path, program: Any, metadata: dict[str, Any]
) -> Callable[[Tensor], Outputs]:
    extra = {"feddg.json": json.dumps(metadata, ensure_ascii=False, indent=1)}
    with quiet_exporters():
        with aside.open("wb") as written:
            torch.export.save(program, written, extra_files=extra)
        with aside.open("rb") as file:
            loaded = torch.export.load(file).module()

    def answer(images: Tensor) -> Outputs:
        with torch.no_grad():
            probabilities, labels, _ = loaded(images)
        return probabilities.numpy(), labels.numpy()

    return answer


def _write_weights(aside: Path, trained: Trained, metadata: dict[str, Any]) -> None:
    state = trained.network.state_dict()
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    text = json.dumps(metadata, ensure_ascii=False)
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


def _write_card(run: Path, path: Path, metadata: dict[str, Any]) -> Path:
    card = path.with_suffix(".md")
    replace_text(card, model_card(run, metadata))
    return card


def _put(path: Path, write: Callable[[Path], None]) -> None:
    try:
        replace_file(path, write)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from None


def _onnx() -> Any:
    """Returns the ``onnx`` package.

    Raises:
        RunError: the extra is not installed.
    """
    try:
        import onnx
        import onnxruntime
        import onnxscript
    except ImportError as error:
        raise RunError(
            f"ONNX needs the package {error.name}: pip install 'feddg[export]'; or use --torch"
        ) from None
    del onnxruntime, onnxscript
    return onnx


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def one_format(chosen: Sequence[tuple[Format, Path | None]]) -> tuple[Format, Path]:
    """Returns the format and the file that were asked for.

    Raises:
        RunError: none was, or several.
    """
    found = [(format, path) for format, path in chosen if path is not None]
    if len(found) != 1:
        raise RunError("name one file: --onnx FILE, --torch FILE or --safetensors FILE")
    return found[0]
