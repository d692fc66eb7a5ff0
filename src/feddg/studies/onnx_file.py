"""An ONNX file of ``feddg export`` as a classifier: all that it takes is in the file's metadata."""

from pathlib import Path
from typing import Any

import numpy
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from feddg.data.decoding import Reading, Resize, ValueRange
from feddg.errors import RunError
from feddg.studies.classifier import ImageClassifier, ImagePreparation


class OnnxMetadata(BaseModel):
    """What of a file's metadata an answer takes; read from texts, checked here."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    class_names: tuple[str, ...] = Field(min_length=1)
    image_size: int = Field(ge=1, le=4096)
    resize: Resize
    values: str = Field(alias="input")
    range: ValueRange = "auto"
    bands: tuple[int, ...] = ()
    tile: int | None = None
    bits: int = Field(0, ge=0, le=32)
    energy_threshold: float | None = None
    cautions: tuple[str, ...] = ()
    result: str = "The file does not say how good it was where nobody trained."
    experiment: str = ""
    method: str = ""
    backbone: str = ""
    model: str = ""
    round: int = 0
    weights: str = ""
    adaptation: str | None = None


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
        found = _metadata(file, self._session.get_modelmeta().custom_metadata_map)
        self._floats = "float32" in found.values
        self.class_names = found.class_names
        reading = Reading(found.range, found.bands, found.tile)
        self.preparation = ImagePreparation(found.image_size, found.resize, reading, found.bits)
        self.threshold, self.cautions = found.energy_threshold, found.cautions
        self.weights, self.result = found.weights, found.result
        kept = ("experiment", "method", "backbone", "model", "round", "weights", "adaptation")
        self.identity = found.model_dump(include=set(kept))

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


def _metadata(file: Path, texts: dict[str, str]) -> OnnxMetadata:
    try:
        return OnnxMetadata.model_validate({name: _value(text) for name, text in texts.items()})
    except ValidationError as error:
        fault = error.errors()[0]
        field = ".".join(map(str, fault["loc"]))
        raise RunError(
            f"{file} says nothing usable about its {field!r} ({fault['msg']}); name a file that "
            "`feddg export --onnx` wrote"
        ) from None


def _value(text: str) -> Any:
    """What the writer had: JSON where it is JSON, else the text."""
    try:
        found = from_json(text)
    except ValueError:
        return text
    return text if isinstance(found, int | float) and not isinstance(found, bool) else found
