"""DICOM files, made by pydicom, with a patient in their tags."""

from pathlib import Path

import numpy as np
from pydicom.datadict import tag_for_keyword
from pydicom.dataelem import RawDataElement
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.sequence import Sequence
from pydicom.tag import Tag
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage

PATIENT = {
    "PatientName": "Planted^Hildegard",
    "PatientID": "PLANTED-4711",
    "PatientBirthDate": "19310203",
    "PatientAddress": "Planted Lane 7",
    "StudyDate": "20190817",
    "AccessionNumber": "PLANTED-ACC",
    "InstitutionName": "Planted Hospital",
    "StudyInstanceUID": "1.2.826.0.1.3680043.8.498.777001",
    "SeriesInstanceUID": "1.2.826.0.1.3680043.8.498.777002",
    "SOPInstanceUID": "1.2.826.0.1.3680043.8.498.777003",
}
"""What must be found nowhere but in the files themselves."""
SECRETS = (*PATIENT.values(), "Planted", "PLANTED", "Hildegard", "777003")


def put_raw(file: Dataset, name: str, kind: str, content: bytes) -> None:
    """Puts a tag that pydicom would refuse to write, such as a name where a number belongs."""
    tag = Tag(tag_for_keyword(name))
    file._dict[tag] = RawDataElement(tag, kind, len(content), content, 0, False, True, True)


def dicom(
    path: Path, pixels: np.ndarray, *, bits: int = 0, syntax: str = ExplicitVRLittleEndian, **tags
) -> Path:
    """Writes ``(height, width)`` or ``(height, width, 3)`` numbers, as they are, and tags."""
    file = Dataset()
    file.file_meta = FileMetaDataset()
    file.file_meta.TransferSyntaxUID = syntax
    file.file_meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    file.file_meta.MediaStorageSOPInstanceUID = PATIENT["SOPInstanceUID"]
    file.SOPClassUID = SecondaryCaptureImageStorage
    for name, value in PATIENT.items():
        setattr(file, name, value)
    named = Dataset()
    named.PatientName, named.PatientID = PATIENT["PatientName"], PATIENT["PatientID"]
    file.OtherPatientIDsSequence = Sequence([named])
    file.Rows, file.Columns = pixels.shape[:2]
    file.SamplesPerPixel = 1 if pixels.ndim == 2 else 3
    if pixels.ndim == 3:
        file.PlanarConfiguration = 0
    file.PhotometricInterpretation = "MONOCHROME2" if pixels.ndim == 2 else "RGB"
    file.BitsAllocated = 8 * pixels.itemsize
    file.BitsStored = bits or file.BitsAllocated
    file.HighBit = file.BitsStored - 1
    file.PixelRepresentation = int(pixels.dtype.kind == "i")
    for name, value in tags.items():
        setattr(file, name, value)
    if "PixelData" not in tags:
        file.PixelData = pixels.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    file.save_as(path, enforce_file_format=True)
    return path
