"""Decodes a DICOM file to an 8-bit image, grey values through its window, as a viewer shows it.

Only the tags that describe pixels are read. Messages of pydicom may quote other tags (a patient's
name): its warnings are silenced and its errors replaced by our own.
"""

import logging
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from PIL import Image, ImageFile
from pydicom import Dataset, dcmread
from pydicom.filereader import read_dataset, read_preamble
from pydicom.multival import MultiValue
from pydicom.pixels.decoders.base import get_decoder
from pydicom.pixels.processing import apply_color_lut, apply_modality_lut, apply_voi
from pydicom.pixels.utils import pixel_array
from pydicom.tag import Tag
from pydicom.uid import UID, DeflatedExplicitVRLittleEndian, JPEGBaseline8Bit

from feddg.data.decoding import by_number

PALETTE = "PALETTE COLOR"
GREY = ("MONOCHROME1", "MONOCHROME2")
COLOURS = (PALETTE, "RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")
_PLUGINS = "`pip install 'pylibjpeg[all]'`"
_TAGS = [
    *("Rows", "Columns", "NumberOfFrames", "SamplesPerPixel", "PhotometricInterpretation"),
    *("PlanarConfiguration", "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation"),
    *("ModalityLUTSequence", "RescaleSlope", "RescaleIntercept"),
    *("VOILUTSequence", "VOILUTFunction", "WindowCenter", "WindowWidth"),
    *("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"),
    *(f"{c}PaletteColorLookupTableDescriptor" for c in ("Red", "Green", "Blue")),
    *(f"{c}PaletteColorLookupTableData" for c in ("Red", "Green", "Blue")),
    *(f"Segmented{c}PaletteColorLookupTableData" for c in ("Red", "Green", "Blue")),
    *("ExtendedOffsetTable", "ExtendedOffsetTableLengths", "PixelData"),
]
_SPEAKS = re.compile(r"(pydicom|feddg\.data\.formats\.dicom)\b")
logging.getLogger("pydicom").setLevel(logging.CRITICAL)


class DicomError(ValueError):
    """Raised for a DICOM file that cannot be decoded; the message quotes none of its tags."""


class DicomImage(ImageFile.ImageFile):
    """A DICOM file as Pillow's image of mode ``L`` or ``RGB``, decoded when it is loaded."""

    format = "DICOM"
    format_description = "DICOM"

    def _open(self) -> None:
        file = cast(BinaryIO, self.fp)
        if file.read(132)[128:] != b"DICM":
            raise SyntaxError("no DICOM file")  # to Pillow: of another format
        with _own_words("a damaged DICOM file"):
            self._syntax, tags = read_header(file)
            self._size = int(tags.Columns), int(tags.Rows)
            self._mode = "L" if tags.PhotometricInterpretation in GREY else "RGB"
        self._decoded = False

    def load(self) -> Any:
        """Decodes the pixels, once."""
        if not self._decoded:
            cause = "a damaged DICOM file, or one cut off"
            if self._syntax.is_encapsulated and self._syntax != JPEGBaseline8Bit:  # Pillow has it
                cause += f", or {_PLUGINS} is needed for {self._syntax.name}"
            with _own_words(cause):
                file = cast(BinaryIO, self.fp)
                file.seek(0)
                self.im = Image.fromarray(to_pixels(dcmread(file, specific_tags=_TAGS))).im
            self._decoded = True
        return super().load()


def read_header(file: BinaryIO) -> tuple[UID, Dataset]:
    """Returns how a file's pixels are compressed, and the tags that describe the pixels.

    Raises:
        DicomError: it does not hold one image, or that image cannot be decoded here.
    """
    file.seek(0)
    read_preamble(file, force=False)
    meta = read_dataset(
        file,
        is_implicit_VR=False,
        is_little_endian=True,
        stop_when=lambda tag, kind, length: tag >> 16 != 2,
        specific_tags=[Tag("TransferSyntaxUID")],
    )
    syntax = UID(meta.TransferSyntaxUID)
    if syntax == DeflatedExplicitVRLittleEndian:  # pydicom would inflate it, however large it gets
        raise DicomError("a deflated DICOM file: write it as Explicit VR Little Endian")
    try:
        decoder = get_decoder(syntax)
    except NotImplementedError:
        raise DicomError("a DICOM file compressed in a way that pydicom does not know") from None
    if not decoder.is_available:
        raise DicomError(f"a DICOM file compressed as {syntax.name}, which needs {_PLUGINS}")
    file.seek(0)
    tags = dcmread(file, stop_before_pixels=True, specific_tags=_TAGS)
    if not (tags.get("Rows") and tags.get("Columns")):
        raise DicomError("a DICOM file without an image")
    frames = int(tags.get("NumberOfFrames") or 1)
    if frames > 1:
        raise DicomError(f"a DICOM file of {frames} frames: write each as a file of its own")
    if tags.get("PhotometricInterpretation") not in (*GREY, *COLOURS):
        raise DicomError("a DICOM file with an unknown photometric interpretation")
    return syntax, tags


def patient_of(file: Path) -> str:
    """Returns the ID of the patient in a DICOM file; empty if it names none or cannot be read."""
    try:
        with _own_words("a damaged DICOM file"), file.open("rb") as content:
            tags = dcmread(content, stop_before_pixels=True, specific_tags=["PatientID"])
            return str(tags.get("PatientID") or "").strip()
    except (DicomError, OSError):
        return ""


def to_pixels(tags: Dataset) -> np.ndarray:
    """Returns the image that a viewer shows by default.

    Args:
        tags: the tags of a file, including its pixels.

    Returns:
        ``(height, width)`` or ``(height, width, 3)`` uint8.
    """
    bits = int(tags.BitsStored)
    if tags.get("HighBit") not in (None, bits - 1):  # bits above the lowest count as unused
        raise DicomError("a DICOM file with values above the lowest bits (HighBit): shift them")
    stored = pixel_array(tags)  # of YBR as RGB; unused bits of a number are cleared
    # The one frame of an "enhanced" object has slope and window in its groups (PS3.3 C.7.6.16).
    for groups in ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"):
        for frame in (tags.get(groups) or ())[:1]:
            for macro in ("PixelValueTransformationSequence", "FrameVOILUTSequence"):
                for said in (frame.get(macro) or ())[:1]:
                    tags.update(said)
    if tags.PhotometricInterpretation in GREY:
        shown = by_number(stored, lambda n: np.rint(_brightness(n, tags).clip(0, 1) * 255))
        return 255 - shown if tags.PhotometricInterpretation == "MONOCHROME1" else shown
    if tags.PhotometricInterpretation == PALETTE:
        stored = apply_color_lut(stored, tags)
        bits = int(tags.RedPaletteColorLookupTableDescriptor[2])
    return (stored >> max(bits - 8, 0)).astype(np.uint8)


def _brightness(stored: np.ndarray, tags: Dataset) -> np.ndarray:
    """Maps stored values to [0, 1]: modality LUT, window or VOI LUT (PS3.3 C.11); 0 is black."""
    slope, shift = _number(tags, "RescaleSlope", 1.0), _number(tags, "RescaleIntercept", 0.0)
    by_table = bool(tags.get("ModalityLUTSequence"))
    values: np.ndarray = apply_modality_lut(stored, tags) if by_table else stored * slope + shift
    center, width = _number(tags, "WindowCenter"), _number(tags, "WindowWidth")
    bits = int(tags.BitsStored)
    if not math.isnan(center) and width > 0:
        function = tags.get("VOILUTFunction") or "LINEAR"
        if function == "SIGMOID":
            values, center, width = np.tanh(2 * (values - center) / width), 0.0, 2.0
        elif function == "LINEAR" and width >= 1:  # a width of 1 is a step
            center, width = center - 0.5, width - 1
        low, high = center - width / 2, center + width / 2
    elif tags.get("VOILUTSequence"):
        values = apply_voi(np.rint(values).astype(np.int32), tags)
        low, high = 0.0, 2.0 ** int(tags.VOILUTSequence[0].LUTDescriptor[2]) - 1
    elif bits <= 8 and not by_table:  # as other images of 8 bits: what the numbers can hold
        least = -(2 ** (bits - 1)) if tags.PixelRepresentation else 0
        low, high = sorted((least * slope + shift, (least + 2**bits - 1) * slope + shift))
    else:
        low, high = float(values.min()), float(values.max())
    return (values - low) / ((high - low) or 1e-9)


def _number(tags: Dataset, name: str, otherwise: float = math.nan) -> float:
    """Returns the first number of a tag, if it is finite."""
    value = tags.get(name)
    first = value[0] if isinstance(value, MultiValue) else value
    number = math.nan if first is None else float(first)
    return number if math.isfinite(number) else otherwise


@contextmanager
def _own_words(cause: str) -> Iterator[None]:
    """Silences pydicom; an error of pydicom becomes one that says ``cause``."""
    if not any(entry[3] == _SPEAKS for entry in warnings.filters):
        warnings.filterwarnings("ignore", module=_SPEAKS.pattern)
    try:
        yield
    except DicomError:
        raise
    except Exception:  # damaged files raise many kinds
        raise DicomError(cause) from None
