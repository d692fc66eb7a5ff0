"""A DICOM file is shown as a viewer shows it, or refused in a line; its tags stay in it."""

import io
import itertools
import json
import logging
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("pydicom", reason="pydicom is an optional extra")

import pydicom
from pydicom.encaps import encapsulate
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGLosslessSV1,
    RLELossless,
)

from dicoms import SECRETS, dicom, put_raw
from feddg.data.decoded import installed_decoders, open_pixels
from feddg.data.decoding import (
    Reading,
    UnusableImageError,
    decode_image,
    names_in,
    quiet_pillow,
)
from feddg.data.images import ImageBytes, from_folder
from feddg.data.inspection import about_ignored, ignored_files, stored_images, survey

SIDE = 16
RAMP = np.arange(SIDE * SIDE).reshape(SIDE, SIDE)


def grey(path):
    """The decoded image, of which all bands are the same: ``(SIDE, SIDE)`` int."""
    found = decode_image(path, SIDE).astype(int)
    assert (found == found[:, :, :1]).all()
    return found[:, :, 0]


def test_eight_bits_are_taken_as_they_are(tmp_path):
    dim = (RAMP // 4).astype(np.uint8)
    assert (grey(dicom(tmp_path / "a.dcm", dim)) == dim).all()
    assert (grey(dicom(tmp_path / "b.dicom", dim, syntax=ImplicitVRLittleEndian)) == dim).all()


def test_a_window_in_hounsfield_units_says_what_is_black_and_white(tmp_path):
    """CT: 12 bits stored, -1024 as intercept; the first of two windows, PS3.3 C.11.2.1.2.1."""
    stored = (RAMP * 16).astype(np.uint16)
    path = dicom(
        *(tmp_path / "a.dcm", stored),
        bits=12,
        RescaleSlope="1",
        RescaleIntercept="-1024",
        WindowCenter=["40", "-600"],
        WindowWidth=["400", "1500"],
    )
    units = stored.astype(float) - 1024
    expected = np.interp(units, [40 - 0.5 - 399 / 2, 40 - 0.5 + 399 / 2], [0, 255])
    assert abs(grey(path) - expected).max() <= 0.5001
    assert grey(path).min() == 0
    assert grey(path).max() == 255


@pytest.mark.parametrize(
    ("function", "shade"),
    [
        ("LINEAR", lambda v: np.interp(v, [99.5 - 49.5, 99.5 + 49.5], [0, 255])),
        ("LINEAR_EXACT", lambda v: np.interp(v, [50, 150], [0, 255])),
        ("SIGMOID", lambda v: 255 / (1 + np.exp(-4 * (v - 100) / 100))),
    ],
)
def test_the_three_functions_of_a_window(tmp_path, function, shade):
    stored = RAMP.astype(np.int16)
    tags = {"WindowCenter": "100", "WindowWidth": "100", "VOILUTFunction": function}
    found = grey(dicom(tmp_path / "a.dcm", stored, **tags))
    assert abs(found - shade(RAMP.astype(float))).max() <= 0.5001


def test_a_window_of_width_one_is_a_step(tmp_path):
    """PS3.3 C.11.2.1.2.1: black up to half below the centre, white above it."""
    for center, first in (("100", 100), ("0.5", 1), ("100.5", 101)):
        tags = {"WindowCenter": center, "WindowWidth": "1"}
        found = grey(dicom(tmp_path / "a.dcm", RAMP.astype(np.uint16), **tags))
        assert (found.ravel() == np.repeat([0, 255], [first, RAMP.size - first])).all(), center


def test_it_equals_pydicoms_own_window(tmp_path):
    stored = np.random.default_rng(0).integers(-2000, 2000, (SIDE, SIDE)).astype(np.int16)
    tags = {"RescaleSlope": "0.5", "RescaleIntercept": "10"}
    path = dicom(tmp_path / "a.dcm", stored, WindowCenter="50", WindowWidth="350", **tags)
    file = pydicom.dcmread(path)
    theirs = pydicom.pixels.apply_voi_lut(
        pydicom.pixels.apply_modality_lut(file.pixel_array, file), file
    )
    low, high = -(2**15) * 0.5 + 10, (2**15 - 1) * 0.5 + 10
    assert abs(grey(path) - 255 * (theirs - low) / (high - low)).max() <= 0.5001


def test_without_a_window_the_smallest_value_is_black_and_the_largest_white(tmp_path):
    stored = (RAMP * 5 - 700).astype(np.int16)
    assert abs(grey(dicom(tmp_path / "a.dcm", stored)) - RAMP).max() <= 1
    no_window = {"WindowCenter": "0", "WindowWidth": "0"}
    assert abs(grey(dicom(tmp_path / "b.dcm", stored, **no_window)) - RAMP).max() <= 1
    falling = {"RescaleSlope": "-2", "RescaleIntercept": "3"}
    assert abs(grey(dicom(tmp_path / "c.dcm", stored, **falling)) - RAMP[::-1, ::-1]).max() <= 1
    assert (grey(dicom(tmp_path / "d.dcm", np.full_like(stored, 9))) == 0).all()


def test_signed_numbers_of_fewer_bits_than_are_allocated(tmp_path):
    """Bits that are not stored may hold anything, as the sign does not reach them."""
    signed = (RAMP - 128) * 16
    stored = (signed & 0x0FFF | 0x7000).astype(np.uint16).view(np.int16)
    assert abs(grey(dicom(tmp_path / "a.dcm", stored, bits=12)) - RAMP).max() <= 1


def test_monochrome1_is_inverted(tmp_path):
    stored = RAMP.astype(np.uint8)
    path = dicom(tmp_path / "a.dcm", stored, PhotometricInterpretation="MONOCHROME1")
    assert (grey(path) == 255 - RAMP).all()


def test_a_large_one_has_the_bytes_of_a_small_one(tmp_path):
    """Of a large one every number is computed once, so its extremes are those of its pixels."""
    rng = np.random.default_rng(0)
    falling = {"RescaleSlope": "-0.7", "RescaleIntercept": "12.3"}
    window = {"WindowCenter": "40", "WindowWidth": "400"}
    peak = lut(np.abs(np.arange(-100, 300)) * 5)
    for kind, tags in itertools.product(
        (np.int16, np.uint16, np.uint8),
        (
            {},
            falling,
            window | falling,
            window | {"VOILUTFunction": "SIGMOID"},
            {"VOILUTSequence": peak},
            {"ModalityLUTSequence": peak},
        ),
    ):
        few = rng.integers(-900 if kind == np.int16 else 5, 200, (SIDE, SIDE)).astype(kind)
        small = dicom(tmp_path / "small.dcm", few, **tags)
        large = dicom(tmp_path / "large.dcm", np.tile(few, (64, 64)), **tags)
        found = decode_image(large, 64 * SIDE)
        assert (found == np.tile(decode_image(small, SIDE), (64, 64, 1))).all(), (kind, tags)


def groups(**tags):
    """Functional groups of one frame: for each macro its tags."""
    frame = pydicom.Dataset()
    for macro, values in tags.items():
        part = pydicom.Dataset()
        for name, value in values.items():
            setattr(part, name, value)
        setattr(frame, macro, pydicom.Sequence([part]))
    return pydicom.Sequence([frame])


def test_the_frame_of_an_enhanced_object_has_its_window_in_its_groups(tmp_path):
    """CT, MR, XA and tomosynthesis: PS3.3 C.7.6.16; what the frame says overrides the shared."""
    stored = (RAMP * 16).astype(np.uint16)
    slope = {"RescaleSlope": "1", "RescaleIntercept": "-1024", "RescaleType": "HU"}
    units = {"PixelValueTransformationSequence": slope}
    window = {"FrameVOILUTSequence": {"WindowCenter": "40", "WindowWidth": "400"}}
    other = {"FrameVOILUTSequence": {"WindowCenter": "-600", "WindowWidth": "1500"}}
    plain = {"RescaleIntercept": "-1024", "WindowCenter": "40", "WindowWidth": "400"}
    expected = grey(dicom(tmp_path / "plain.dcm", stored, bits=12, **plain))
    for shared, own in (
        ({}, units | window),
        (units | window, {}),
        (units, window),
        (units | other, window),
    ):
        tags = {
            "NumberOfFrames": 1,
            "SharedFunctionalGroupsSequence": groups(**shared),
            "PerFrameFunctionalGroupsSequence": groups(**own),
        }
        path = dicom(tmp_path / "a.dcm", stored, bits=12, **tags)
        assert (grey(path) == expected).all(), (shared, own)


def lut(values, first=0):
    table = pydicom.Dataset()
    table.add_new("LUTDescriptor", "US", [len(values), first, 16])
    table.add_new("LUTData", "OW", np.asarray(values, np.uint16).tobytes())
    return pydicom.Sequence([table])


def test_tables_in_place_of_slope_and_window(tmp_path):
    root = np.sqrt(np.arange(256) / 255) * 65535
    stored = RAMP.astype(np.uint16)
    found = grey(dicom(tmp_path / "a.dcm", stored, VOILUTSequence=lut(root)))
    assert abs(found - np.sqrt(RAMP / 255) * 255).max() <= 1
    path = dicom(tmp_path / "b.dcm", stored, ModalityLUTSequence=lut(np.arange(256)[::-1] * 2))
    assert abs(grey(path) - (255 - RAMP)).max() <= 1


def test_colours(tmp_path):
    colours = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3)).astype(np.uint8)
    assert (decode_image(dicom(tmp_path / "a.dcm", colours), SIDE) == colours).all()
    deep = colours.astype(np.uint16) << 4
    assert (decode_image(dicom(tmp_path / "b.dcm", deep, bits=12), SIDE) == colours).all()
    ybr = np.asarray(Image.fromarray(colours).convert("YCbCr"))
    path = dicom(tmp_path / "c.dcm", ybr, PhotometricInterpretation="YBR_FULL")
    assert abs(decode_image(path, SIDE).astype(int) - colours).max() <= 3


def test_a_palette(tmp_path):
    ramp = np.arange(256, dtype=np.uint16) * 257
    tables = {"Red": ramp, "Green": ramp[::-1], "Blue": np.zeros_like(ramp)}
    tags = {f"{c}PaletteColorLookupTableData": table.tobytes() for c, table in tables.items()}
    tags |= {f"{c}PaletteColorLookupTableDescriptor": [256, 0, 16] for c in tables}
    path = dicom(
        *(tmp_path / "a.dcm", RAMP.astype(np.uint8)),
        PhotometricInterpretation="PALETTE COLOR",
        **tags,
    )
    assert (decode_image(path, SIDE) == np.stack([RAMP, 255 - RAMP, 0 * RAMP], 2)).all()


def test_compressed_files_that_pydicom_or_pillow_decodes(tmp_path):
    path = dicom(tmp_path / "a.dcm", (RAMP * 4).astype(np.uint16), bits=12)
    file = pydicom.dcmread(path)
    file.compress(RLELossless)
    file.save_as(tmp_path / "rle.dcm")
    assert (grey(tmp_path / "rle.dcm") == grey(path)).all()
    jpeg = io.BytesIO()
    Image.fromarray(RAMP.astype(np.uint8)).save(jpeg, "JPEG", quality=100)
    pixels = {"PixelData": encapsulate([jpeg.getvalue()]), "syntax": JPEGBaseline8Bit}
    path = dicom(tmp_path / "jpeg.dcm", RAMP.astype(np.uint8), **pixels)
    assert abs(grey(path) - RAMP).max() <= 4


def test_the_settings_of_other_depths_do_not_touch_it(tmp_path):
    """What is black and white is the file's, at every site; a band may be chosen all the same."""
    path = dicom(tmp_path / "a.dcm", RAMP.astype(np.uint16), WindowCenter="128", WindowWidth="256")
    expected = decode_image(path, SIDE)
    for reading in (Reading("full"), Reading("percentile"), Reading("percentile", bands=(1,))):
        assert (decode_image(path, SIDE, reading=reading, bits=16) == expected).all()


def test_it_has_a_size_and_is_cut_into_tiles_like_any_image(tmp_path):
    path = dicom(tmp_path / "n/x/a.dcm", np.zeros((20, 40), np.uint16))
    assert names_in(path, "a.dcm", 20) == ["a.dcm#x0y0w20h20", "a.dcm#x20y0w20h20"]
    dicom(tmp_path / "n/y/b.dcm", np.zeros((20, 40), np.uint16))
    table = from_folder(tmp_path)
    assert table.paths == ("n/x/a.dcm", "n/y/b.dcm")
    assert survey(table).depths == {}
    assert stored_images(table)["n"]["modes"] == {"L": 2}
    assert stored_images(table)["n"]["bits"] == 8


def test_a_photo_named_dcm_is_read_and_a_file_that_says_it_is_a_tiff_too(tmp_path):
    Image.new("RGB", (8, 8), (1, 2, 3)).save(tmp_path / "a.dcm", "PNG")
    assert (decode_image(tmp_path / "a.dcm", 4) == (1, 2, 3)).all()
    path = dicom(tmp_path / "b.dcm", RAMP.astype(np.uint8))
    path.write_bytes(b"II*\0\10\0\0\0" + path.read_bytes()[8:])
    assert (grey(path) == RAMP).all()


@pytest.mark.parametrize("name", ["IM0001", "1.2.840.113619.2.55"])
def test_one_that_is_named_by_a_table_needs_no_ending_but_not_another_formats(tmp_path, name):
    path = dicom(tmp_path / name, RAMP.astype(np.uint8))
    assert (grey(path) == RAMP).all()
    with pytest.raises(UnusableImageError, match="not an image in a known format"):
        decode_image(path.rename(tmp_path / "a.png"), SIDE)


def test_it_is_decoded_from_memory(tmp_path):
    content = dicom(tmp_path / "a.dcm", RAMP.astype(np.uint8)).read_bytes()
    assert (grey(ImageBytes("upload.DCM", content)) == RAMP).all()


# Files that are refused: in one line that quotes no tag.


def without(name):
    def remove(file):
        delattr(file, name)

    return remove


def put(**tags):
    def change(file):
        for name, value in tags.items():
            setattr(file, name, value)

    return change


def raw(name, vr, content):
    return lambda file: put_raw(file, name, vr, content)


PLANTED = b"Planted^Hildegard "
REFUSED = {
    "several frames": (put(NumberOfFrames=12), "of 12 frames: write each as a file of its own"),
    "no pixels": (without("PixelData"), "damaged DICOM file, or one cut off"),
    "too few pixels": (put(PixelData=b"\1\2"), "damaged DICOM file, or one cut off"),
    "pixels of several frames in one": (put(PixelData=bytes(3 * SIDE**2)), "damaged DICOM file"),
    "no colour space": (without("PhotometricInterpretation"), "unknown photometric interpretation"),
    "no image at all": (without("Rows"), "without an image"),
    "an unknown colour space": (
        put(PhotometricInterpretation="PLANTED"),
        "unknown photometric interpretation",
    ),
    "a name for a number": (
        raw("RescaleSlope", "DS", PLANTED),
        "damaged DICOM file, or one cut off",
    ),
    "a name for the window": (
        raw("WindowCenter", "DS", PLANTED),
        "damaged DICOM file, or one cut off",
    ),
    "a name for the frames": (raw("NumberOfFrames", "IS", PLANTED), "damaged"),
    "a name for the bits": (raw("BitsStored", "US", PLANTED), "damaged DICOM file, or one cut off"),
    "values in the upper bits": (
        put(BitsStored=4, HighBit=7),
        "values above the lowest bits (HighBit): shift them",
    ),
    "a table without a description": (put(PhotometricInterpretation="PALETTE COLOR"), "damaged"),
}


def refusal(path, capfd, caplog):
    """The one line, once nothing else is found to have been said."""
    caplog.set_level(logging.DEBUG)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(UnusableImageError) as refused:
            decode_image(path, SIDE)
    out, err = capfd.readouterr()
    shown = [str(refused.value), out, err, caplog.text, *(str(each.message) for each in told)]
    assert not [secret for secret in SECRETS for text in shown if secret in text]
    assert "\n" not in shown[0]
    assert not told
    return shown[0]


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_without_its_tags(tmp_path, capfd, caplog, case):
    change, reason = REFUSED[case]
    path = dicom(tmp_path / "a.dcm", RAMP.astype(np.uint8))
    file = pydicom.dcmread(path)
    change(file)
    file.save_as(path)
    assert reason in refusal(path, capfd, caplog)


def test_what_needs_a_plugin_says_which(tmp_path, capfd, caplog):
    pixels = {"PixelData": encapsulate([b"\0" * 64]), "syntax": JPEGLosslessSV1}
    path = dicom(tmp_path / "a.dcm", RAMP.astype(np.uint8), **pixels)
    if not pydicom.pixels.get_decoder(JPEGLosslessSV1).is_available:
        assert "JPEG Lossless" in refusal(path, capfd, caplog)
    assert "pip install 'pylibjpeg[all]'" in refusal(path, capfd, caplog)


def test_a_jpeg_of_another_size_than_its_tags_say_needs_no_plugin(tmp_path, capfd, caplog):
    small = io.BytesIO()
    Image.fromarray(RAMP.astype(np.uint8)[: SIDE // 2]).save(small, "JPEG")
    pixels = {"PixelData": encapsulate([small.getvalue()]), "syntax": JPEGBaseline8Bit}
    path = dicom(tmp_path / "a.dcm", RAMP.astype(np.uint8), **pixels)
    assert refusal(path, capfd, caplog).endswith("a damaged DICOM file, or one cut off")


def test_what_a_plugin_was_missing_for_is_there_once_it_is_installed(tmp_path, monkeypatch):
    for label in ("ill", "well"):
        folder = tmp_path / "images" / "lab" / label
        folder.mkdir(parents=True)
        dicom(folder / "plain.dcm", RAMP.astype(np.uint8))
    square = io.BytesIO()
    Image.fromarray(np.full((SIDE, SIDE), 200, np.uint8)).save(square, "JPEG2000", no_jp2=True)
    pixels = {"PixelData": encapsulate([square.getvalue()]), "syntax": JPEG2000Lossless}
    dicom(folder / "squeezed.dcm", np.zeros((SIDE, SIDE), np.uint8), **pixels)

    def opened():
        table = from_folder(tmp_path / "images")
        return open_pixels(table, SIDE, cache=tmp_path / "cache")

    with monkeypatch.context() as without:
        without.setattr(pydicom.pixels.get_decoder(JPEG2000Lossless), "_available", {})
        _, store, bad = opened()
        assert [image.path for image in bad] == ["lab/well/squeezed.dcm"]
        assert "pip install 'pylibjpeg[all]'" in bad[0].reason
    also = {**installed_decoders(), "pylibjpeg": "2.1"}
    monkeypatch.setattr("feddg.data.decoded.installed_decoders", lambda: also)
    table, store, bad = opened()
    assert (len(table), bad) == (3, [])
    assert store.gather([table.paths.index("lab/well/squeezed.dcm")]).float().mean() > 100


def test_a_deflated_file_is_not_inflated(tmp_path, capfd, caplog):
    path = dicom(tmp_path / "a.dcm", RAMP.astype(np.uint8), syntax=DeflatedExplicitVRLittleEndian)
    assert "Explicit VR Little Endian" in refusal(path, capfd, caplog)


def test_a_compression_that_nobody_knows(tmp_path, capfd, caplog):
    known = dicom(tmp_path / "a.dcm", RAMP.astype(np.uint8)).read_bytes()
    path = tmp_path / "b.dcm"
    path.write_bytes(known.replace(b"1.2.840.10008.1.2.1\0", b"1.2.Planted^Hildega\0"))
    assert "pydicom does not know" in refusal(path, capfd, caplog)


def test_a_file_cut_off_anywhere_is_refused_or_read_without_its_tags(tmp_path, capfd, caplog):
    whole = dicom(tmp_path / "a.dcm", RAMP.astype(np.uint8)).read_bytes()
    path = tmp_path / "b.dcm"
    for length in range(0, len(whole) - 1, 37):
        path.write_bytes(whole[:length])
        refusal(path, capfd, caplog)


def test_bytes_changed_anywhere_are_answered_with_an_image_or_a_line(tmp_path, capfd, caplog):
    caplog.set_level(logging.DEBUG)
    whole = dicom(tmp_path / "a.dcm", RAMP.astype(np.uint16), WindowCenter="9").read_bytes()
    rng, path, reasons = np.random.default_rng(0), tmp_path / "b.dcm", set()
    for _ in range(300):
        content = bytearray(whole)
        for place in rng.integers(132, len(whole) - 2 * RAMP.size, 6):
            content[place] = rng.integers(256)
        path.write_bytes(content)
        with quiet_pillow():
            try:
                decode_image(path, SIDE)
            except UnusableImageError as error:
                reasons.add(str(error))
    assert reasons
    said = [*reasons, *capfd.readouterr(), caplog.text]
    assert not [secret for secret in SECRETS for text in said if secret in text]


def test_an_enormous_one_is_refused_before_it_is_decoded(tmp_path):
    path = dicom(tmp_path / "a.dcm", RAMP.astype(np.uint8), Rows=40_000, Columns=40_000)
    with pytest.raises(UnusableImageError, match="pixels"), quiet_pillow():
        decode_image(path, SIDE)


# Files whose names do not say that they are DICOM, and machines without pydicom.


def test_files_that_are_not_named_dcm_are_counted_in_one_line(tmp_path):
    for label in ("x", "y"):
        dicom(tmp_path / "n" / label / "a.dcm", RAMP.astype(np.uint8))
        dicom(tmp_path / "n" / label / "1.2.840.1.77", RAMP.astype(np.uint8))
        dicom(tmp_path / "n" / label / "IM0001", RAMP.astype(np.uint8))
    (tmp_path / "n" / "x" / "notes").write_text("no image")
    warning, note = about_ignored(ignored_files(from_folder(tmp_path)))
    assert (warning.severity, note.severity) == ("warning", "note")
    assert "4 files" in warning.text
    assert "DICOM" in warning.text
    assert ".dcm" in warning.advice
    assert "1 without a suffix" in note.text
    assert Path(tmp_path / "n/x/1.2.840.1.77").suffix not in note.text
    assert json.dumps(warning.text)
