"""Every odd kind of image file becomes the right RGB pixels, or a reason."""

import io
import itertools
import struct
import tracemalloc
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image, ImageOps
from torchvision import transforms

from feddg.data.decoded import open_pixels
from feddg.data.decoding import (
    OversizedImageError,
    Reading,
    Samples,
    Tile,
    UnusableImageError,
    bits_used,
    decode_image,
    decode_parts,
    make_square,
    names_in,
    quiet_pillow,
    tile_names,
    to_image,
    whole_images,
)
from feddg.data.images import (
    IMAGE_SUFFIXES,
    USABLE_FORMATS,
    ImageBytes,
    ImageTable,
    from_folder,
)
from feddg.data.inspection import about_survey, survey
from feddg.data.splits import hold_out
from feddg.errors import DataError
from feddg.prediction.classifier import count_files


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def smooth(width: int, height: int) -> Image.Image:
    across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([across, down, 255 - across], axis=2).astype(np.uint8))


def saved(image: Image.Image, path: Path, **options) -> Path:
    image.save(path, **options)
    return path


def test_squash_equals_torchvisions_resize(tmp_path: Path) -> None:
    image = noise(37, 23)
    expected = transforms.Resize((16, 16))(image)
    decoded = decode_image(saved(image, tmp_path / "a.png"), 16)
    assert decoded.shape == (16, 16, 3)
    assert decoded.dtype == np.uint8
    assert (decoded == np.asarray(expected)).all()


def test_colours_that_are_multiplied_with_their_opacity_are_laid_over_white_once(tmp_path):
    plain = np.array([[[60_000, 20_000, 0, 32_768], [500, 9, 40_000, 65_535]]], np.uint16)
    whole = plain.copy()
    whole[..., :3] = plain[..., :3].astype(float) * plain[..., 3:] / 65_535
    decoded = []
    for name, values in (("unassalpha", plain), ("assocalpha", whole)):
        path = tmp_path / f"{name}.tif"
        tifffile.imwrite(path, values, photometric="rgb", extrasamples=[name])
        decoded.append(decode_image(path, 2).astype(int))
    assert np.abs(decoded[0] - decoded[1]).max() <= 1


def test_blocks_that_overlap_in_threads_leave_warnings_and_limits_as_they_were():
    before = list(warnings.filters), Image.MAX_IMAGE_PIXELS
    one, other = quiet_pillow(), quiet_pillow(tiled=True)
    with ThreadPoolExecutor(1) as pool:
        one.__enter__()
        pool.submit(other.__enter__).result()
        one.__exit__(None, None, None)
        assert before[1] < Image.MAX_IMAGE_PIXELS
        pool.submit(other.__exit__, None, None, None).result()
    assert (list(warnings.filters), Image.MAX_IMAGE_PIXELS) == before


@pytest.mark.parametrize("shape", [(40, 20), (20, 40), (30, 30)])
def test_crop_equals_torchvisions_resize_and_center_crop(shape: tuple[int, int]) -> None:
    image = noise(*shape)
    expected = transforms.CenterCrop(10)(transforms.Resize(10)(image))
    difference = make_square(image, 10, "crop").astype(int) - np.asarray(expected)
    assert abs(difference).max() <= 1  # one resampling rounds once, two round twice


@pytest.mark.parametrize(("shape", "filled"), [((40, 20), (10, 5)), ((20, 40), (5, 10))])
def test_pad_keeps_the_whole_image_between_black_bars(
    shape: tuple[int, int], filled: tuple[int, int]
) -> None:
    padded = make_square(Image.new("RGB", shape, "white"), 10, "pad")
    width, height = filled
    top, left = (10 - height) // 2, (10 - width) // 2
    expected = np.zeros((10, 10, 3))
    expected[top : top + height, left : left + width] = 255
    assert (padded == expected).all()


def test_extreme_shapes(subtests: pytest.Subtests) -> None:
    for shape, resize in itertools.product(
        [(1, 1), (1, 500), (500, 1), (3, 2)], ["squash", "crop", "pad"]
    ):
        with subtests.test(resize=resize, shape=shape):
            square = make_square(Image.new("RGB", shape, (9, 99, 199)), 8, resize)
            assert square.shape == (8, 8, 3)
            assert (square == (9, 99, 199)).all(axis=2).any()


def test_a_single_pixel_fills_the_result(tmp_path: Path) -> None:
    path = saved(Image.new("RGB", (1, 1), (9, 99, 199)), tmp_path / "dot.png")
    assert (decode_image(path, 4) == (9, 99, 199)).all()


def test_grey_and_bilevel(tmp_path: Path) -> None:
    grey = saved(Image.new("L", (5, 5), 77), tmp_path / "grey.jpg")
    assert (decode_image(grey, 5) == 77).all()
    bilevel = saved(Image.new("1", (5, 5), 1), tmp_path / "bilevel.png")
    assert (decode_image(bilevel, 5) == 255).all()


def test_palette(tmp_path: Path) -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 200, 100, 50])
    assert (decode_image(saved(image, tmp_path / "p.png"), 4) == (200, 100, 50)).all()


@pytest.mark.parametrize("transparency", [1, bytes([255, 0])])
def test_transparent_palette_entries_are_white(tmp_path: Path, transparency) -> None:
    image = Image.new("P", (4, 4), 0)
    image.putpalette([200, 100, 50, 0, 0, 0])
    image.paste(1, (0, 0, 4, 2))
    decoded = decode_image(saved(image, tmp_path / "p.png", transparency=transparency), 4)
    assert (decoded[:2] == 255).all()
    assert (decoded[2:] == (200, 100, 50)).all()


@pytest.mark.parametrize(
    ("mode", "color", "expected"),
    [
        ("RGBA", (255, 0, 0, 255), (255, 0, 0)),
        ("RGBA", (0, 0, 0, 0), (255, 255, 255)),
        ("RGBA", (0, 100, 200, 51), (204, 224, 244)),  # a fifth of the colour over white
        ("LA", (100, 51), (224, 224, 224)),
    ],
)
def test_alpha_is_laid_over_white(tmp_path: Path, mode: str, color, expected) -> None:
    decoded = decode_image(saved(Image.new(mode, (3, 3), color), tmp_path / "alpha.png"), 3)
    assert abs(decoded.astype(int) - expected).max() <= 1


def test_a_transparent_colour_of_an_rgb_image_is_white(tmp_path: Path) -> None:
    image = Image.new("RGB", (4, 4), (10, 20, 30))
    image.paste((1, 2, 3), (0, 0, 4, 2))
    decoded = decode_image(saved(image, tmp_path / "t.png", transparency=(1, 2, 3)), 4)
    assert (decoded[:2] == 255).all()
    assert (decoded[2:] == (10, 20, 30)).all()


def test_cmyk(tmp_path: Path) -> None:
    cyan = saved(Image.new("CMYK", (8, 8), (255, 0, 0, 0)), tmp_path / "c.jpg", quality=100)
    assert abs(decode_image(cyan, 8).astype(int) - (0, 255, 255)).max() <= 2


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_16_bit_is_scaled_not_clipped(tmp_path: Path, suffix: str) -> None:
    values = np.array([[0, 257, 128 * 257, 65535]], dtype=np.uint16)
    path = saved(Image.fromarray(np.repeat(values, 4, axis=0)), tmp_path / f"deep.{suffix}")
    assert decode_image(path, 4)[0, :, 0].tolist() == [0, 1, 128, 255]


def test_floating_point_is_refused(tmp_path: Path) -> None:
    path = saved(Image.new("F", (4, 4), 0.5), tmp_path / "f.tif")
    with pytest.raises(UnusableImageError, match="floating-point"):
        decode_image(path, 4)


def test_orientation_tag_is_obeyed(
    subtests: pytest.Subtests, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for orientation in range(1, 9):
        with subtests.test(orientation=orientation):
            tmp_path = tmp_path_factory.mktemp("case")
            exif = Image.Exif()
            exif[0x0112] = orientation
            path = saved(noise(7, 5), tmp_path / "turned.png", exif=exif)
            with Image.open(path) as image:
                expected = np.asarray(ImageOps.exif_transpose(image).resize((6, 6), Image.BILINEAR))
            assert (decode_image(path, 6) == expected).all()


def test_tiles_of_a_deep_turned_tiff_show_all_of_it(tmp_path: Path) -> None:
    path, values = tmp_path / "turned.tif", np.arange(8 * 16, dtype=np.uint16).reshape(8, 16) * 500
    tifffile.imwrite(path, values, photometric="minisblack", extratags=[(274, "H", 1, 6, False)])
    whole = decode_image(path, 16)
    names = names_in(path, "turned.tif", 8)
    assert len(names) == 2
    tiles = decode_parts(path, [Tile.named(name).box for name in names], 8)
    upper, lower = np.split(np.rot90(values, -1) // 256, 2)
    for tile, part in zip(tiles, (upper, lower)):
        assert abs(tile[:, :, 0].astype(int) - part).max() <= 1
    assert whole.any()


def test_a_damaged_tag_block_is_ignored(tmp_path: Path) -> None:
    image = noise(6, 6)
    path = saved(image, tmp_path / "tags.png", exif=b"Exif\x00\x00 this is no tag block")
    with quiet_pillow():
        assert (decode_image(path, 6) == np.asarray(image)).all()


def test_the_first_frame_of_an_animation(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    path = saved(frames[0], tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert (decode_image(path, 4) == (255, 0, 0)).all()


def test_a_large_jpeg_is_decoded_like_a_small_one(tmp_path: Path) -> None:
    path = saved(smooth(640, 480), tmp_path / "large.jpg", quality=95)
    with Image.open(path) as image:
        expected = np.asarray(image.resize((32, 32), Image.BILINEAR)).astype(int)
    assert abs(decode_image(path, 32) - expected).max() <= 3


def png(path: Path, width: int, height: int, bits: int, colours: int, rows: bytes) -> Path:
    """Writes what is in the header and what is in the pixels, whether or not they agree."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checked = kind + content
        return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))

    header = struct.pack(">IIBBBBB", width, height, bits, colours, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + parts)
    return path


def png_that_claims(width: int, height: int, path: Path) -> Path:
    """A PNG header without the pixels it promises."""
    return png(path, width, height, 8, 2, b"")


@pytest.mark.parametrize("side", [9_460, 50_000])
def test_decompression_bombs_are_refused(tmp_path: Path, side: int) -> None:
    path = png_that_claims(side, side, tmp_path / "bomb.png")
    with quiet_pillow(), pytest.raises(UnusableImageError, match="pixels"):
        decode_image(path, 8)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_broken_files_have_a_reason(tmp_path: Path) -> None:
    jpeg = saved(noise(64, 64), tmp_path / "whole.jpg").read_bytes()
    reasons = {
        write(tmp_path / "cut.jpg", jpeg[: len(jpeg) // 2]): "truncated",
        write(tmp_path / "empty.jpg", b""): "empty file",
        write(tmp_path / "text.jpg", b"not a picture"): "not an image in a known format",
        png_that_claims(8, 8, tmp_path / "hollow.png"): "cannot be decoded",
        tmp_path / "gone.jpg": "file not found",
        tmp_path: "it is a folder",
    }
    for path, reason in reasons.items():
        with quiet_pillow(), pytest.raises(UnusableImageError, match=reason):
            decode_image(path, 8)


def test_the_result_can_be_written_to() -> None:
    assert all(
        make_square(noise(5, 5), 4, resize).flags.writeable for resize in ("squash", "crop", "pad")
    )


# From the numbers in a file to colours: depths, bands, ranges, tiles, formats.


SIDE = 16
RANDOM = np.random.default_rng(5)


def numbers(bits: int, bands: int = 3, side: int = SIDE) -> np.ndarray:
    values = RANDOM.integers(0, 2**bits, (side, side, bands))
    values[0, 0] = 2**bits - 1
    return values.astype(np.uint8 if bits <= 8 else np.uint16)


def tiff(path: Path, values: np.ndarray, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    photometric = "rgb" if values.ndim == 3 and values.shape[2] in (3, 4) else "minisblack"
    tifffile.imwrite(path, values, **{"photometric": photometric, **options})
    return path


def deep_png(path: Path, values: np.ndarray) -> Path:
    """Writes 16-bit colours, which Pillow cannot."""
    height, width, bands = values.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return png(path, width, height, 16, {3: 2, 4: 6}[bands], rows)


def scaled(values: np.ndarray, bits: int) -> np.ndarray:
    return np.floor(values.astype(float) * 255 / (2**bits - 1) + 0.5).astype(np.uint8)


def test_deep_tiffs_are_as_bright_as_their_sensor_saw_them(subtests, tmp_path_factory):
    for bands, bits in itertools.product([1, 3], [10, 11, 12, 14, 16]):
        with subtests.test(bits=bits, bands=bands):
            tmp_path = tmp_path_factory.mktemp("case")
            values = numbers(bits, bands)
            path = tiff(tmp_path / "a.tif", values if bands == 3 else values[:, :, 0])
            assert abs(decode_image(path, SIDE).astype(int) - scaled(values, bits)).max() <= 1


@pytest.mark.parametrize("bands", [3, 4])
def test_deep_pngs_in_colour(tmp_path, bands):
    values = numbers(12, bands)
    values[:, :, 3:] = 65535  # opaque
    path = deep_png(tmp_path / "a.png", values)
    assert abs(decode_image(path, SIDE).astype(int) - scaled(values[:, :, :3], 12)).max() <= 1


def test_what_is_opaque_at_the_sensors_depth_is_not_white(tmp_path):
    values = numbers(12, 4)
    values[:, :, 3:] = 4095
    path = deep_png(tmp_path / "a.png", values)
    found = decode_image(path, SIDE, bits=12)
    assert abs(found.astype(int) - scaled(values[:, :, :3], 12)).max() <= 1


def test_a_small_file_that_claims_a_volume_is_not_unpacked(tmp_path):
    volume = np.zeros((50, 16, 16), np.uint16)
    path = tiff(tmp_path / "a.tif", volume, volumetric=True, compression="zlib")
    with pytest.raises(UnusableImageError, match="a TIFF of a volume"):
        decode_image(path, SIDE)


@pytest.mark.parametrize("compression", ["lzw", "zstd"])
def test_compressed_tiffs_of_many_bands(tmp_path, compression):
    values = numbers(11, 6)
    options = {"planarconfig": "contig", "compression": compression}
    path = tiff(tmp_path / "a.tif", values, **options)
    found = decode_image(path, SIDE, reading=Reading(bands=(3, 2, 1)))
    assert abs(found.astype(int) - scaled(values[:, :, [2, 1, 0]], 11)).max() <= 1


def test_planar_tiffs(tmp_path):
    values = numbers(11)
    planes = np.moveaxis(values, 2, 0)
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, planes, photometric="rgb", planarconfig="separate")
    assert abs(decode_image(path, SIDE).astype(int) - scaled(values, 11)).max() <= 1


def test_full_range_is_that_of_the_file(tmp_path):
    values = numbers(11)
    path = tiff(tmp_path / "a.tif", values)
    assert abs(decode_image(path, SIDE, reading=Reading("full")) - (values / 257)).max() <= 1
    assert decode_image(path, SIDE, reading=Reading("full")).max() <= 8  # black, as asked for


def test_percentiles_of_each_band_become_black_and_white(tmp_path):
    values = RANDOM.normal(0, 1, (SIDE, SIDE, 3)).astype(np.float32)
    path = tiff(tmp_path / "a.tif", values)
    with pytest.raises(UnusableImageError, match=r"data\.range: percentile"):
        decode_image(path, SIDE)
    found = decode_image(path, SIDE, reading=Reading("percentile"))
    low, high = np.percentile(values, (1, 99), axis=(0, 1))
    assert abs(found - np.clip((values - low) / (high - low), 0, 1) * 255).max() <= 1


def plainly(values: np.ndarray, range_: str, most: int) -> np.ndarray:
    """The same in 64 bits, pixel by pixel."""
    if range_ != "percentile":
        counted = values.astype(np.int64).clip(0, most) * 255 + most // 2
        return (counted // most).astype(np.uint8)
    numbers = values.astype(np.float64)
    low, high = np.percentile(numbers, (1, 99), axis=(0, 1))
    width = np.where(high > low, high - low, 1.0)
    return (((numbers - low) / width).clip(0, 1) * 255).round().astype(np.uint8)


def test_large_images_have_the_bytes_of_plain_arithmetic(subtests):
    """Theirs is done once for each number; that of small ones, and of floats, pixel by pixel."""
    cases = [(kind, "percentile") for kind in ("u1", "<u2", ">u2", "<i2", "<i4", "<f4")]
    cases += [(kind, name) for kind in ("<u2", ">u2", "<i2", "<i4") for name in ("auto", "full")]
    for side, (kind, range_) in itertools.product([8, 600], cases):
        with subtests.test(side=side, kind=kind, range=range_):
            bytes_each = np.dtype(kind).itemsize
            largest = {1: 256, 2: 16_000, 4: 100_000}[bytes_each]
            least = 1 - largest if range_ == "percentile" and "u" not in kind else 0
            values = RANDOM.integers(least, largest, (side, side, 3)).astype(kind)
            values[0, 0] = largest - 1
            values[:, :, 2] = 7  # a band of one value
            depths = {"auto": (14, 24), "full": (16, 32), "percentile": (0, 0)}[range_]
            found = np.asarray(to_image(Samples(values), Reading(range_), 14))
            most = 2 ** depths[bytes_each == 4] - 1
            assert (found == plainly(values, range_, most)).all()


@pytest.mark.parametrize("range_", ["full", "percentile"])
def test_a_large_image_takes_a_few_times_its_own_memory(range_):
    values = np.zeros((1000, 1000, 3), np.uint16)
    values[:50] = 60_000
    tracemalloc.start()
    to_image(Samples(values), Reading(range_))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * values.nbytes


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_pixels_that_are_no_numbers_are_refused(tmp_path, number):
    values = RANDOM.normal(0, 1, (SIDE, SIDE, 3)).astype(np.float32)
    values[0, :2, 1] = number
    path = tiff(tmp_path / "a.tif", values)
    with pytest.raises(UnusableImageError, match=f"2 of its {SIDE * SIDE:,} pixels are"):
        decode_image(path, SIDE, reading=Reading("percentile"))


def test_percentiles_stretch_8_bit_images_too(tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(np.linspace(100, 120, SIDE * SIDE).astype(np.uint8).reshape(SIDE, SIDE)).save(
        path
    )
    found = decode_image(path, SIDE, reading=Reading("percentile"))
    assert (found.min(), found.max()) == (0, 255)


def test_negative_values_are_black_only_where_one_says_so(tmp_path):
    values = RANDOM.integers(-1000, 2000, (SIDE, SIDE)).astype(np.int16)
    path = tiff(tmp_path / "ct.tif", values)
    for reading in (Reading(), Reading("full")):
        with pytest.raises(UnusableImageError, match=r"negative values: set data\.range: percent"):
            decode_image(path, SIDE, reading=reading)
    found = decode_image(path, SIDE, reading=Reading("percentile"))[:, :, 0]
    low, high = np.percentile(values, (1, 99))
    assert abs(found - np.clip((values - low) / (high - low), 0, 1) * 255).max() <= 1


@pytest.mark.parametrize("range_", ["auto", "full", "percentile"])
def test_white_may_be_zero_at_any_depth(tmp_path, range_):
    values = np.linspace(0, 65535, SIDE * SIDE).astype(np.uint16).reshape(SIDE, SIDE)
    for name, numbers in (("deep", values), ("plain", (values >> 8).astype(np.uint8))):
        path = tiff(tmp_path / f"{name}.tif", numbers, photometric="miniswhite")
        found = decode_image(path, SIDE, reading=Reading(range_))
        dark = decode_image(tiff(tmp_path / "dark.tif", numbers), SIDE, reading=Reading(range_))
        assert abs(found.astype(int) - (255 - dark)).max() <= (range_ == "percentile")  # rounding


def test_deep_cmyk_is_no_rgb(tmp_path):
    path = tiff(tmp_path / "a.tif", numbers(16, 4), photometric="separated")
    with pytest.raises(UnusableImageError, match="CMYK of more than 8 bits: convert it to RGB"):
        decode_image(path, SIDE)


def test_jpeg_2000_in_colour_is_as_bright_as_its_sensor_saw_it(subtests, tmp_path_factory):
    for suffix, bands, (stored, used) in itertools.product(
        ["jp2", "j2k"], [3, 4], [(16, 12), (16, 16), (12, 12), (8, 8)]
    ):
        with subtests.test(stored=stored, used=used, bands=bands, suffix=suffix):
            tmp_path = tmp_path_factory.mktemp("case")
            imagecodecs = pytest.importorskip("imagecodecs")
            values = numbers(used, bands)
            values[:, :, 3:] = 2**stored - 1  # opaque
            path = tmp_path / f"a.{suffix}"
            options = {
                "codecformat": suffix,
                "bitspersample": stored,
                "level": 0,
                "reversible": True,
            }
            path.write_bytes(imagecodecs.jpeg2k_encode(values, **options))
            assert (
                abs(decode_image(path, SIDE).astype(int) - scaled(values[:, :, :3], used)).max()
                <= 1
            )


def test_near_infrared_in_place_of_transparency(tmp_path):
    values = numbers(8, 4)
    path = tiff(tmp_path / "rgbn.tif", values, extrasamples=["unassalpha"])
    assert (decode_image(path, SIDE, reading=Reading(bands=(1, 2, 3))) == values[:, :, :3]).all()
    false_colours = decode_image(path, SIDE, reading=Reading(bands=(4, 1, 2)))
    assert (false_colours == values[:, :, [3, 0, 1]]).all()
    grey = decode_image(path, SIDE, reading=Reading(bands=(4,)))
    assert (grey == values[:, :, 3:]).all()


def test_more_bands_than_pillow_knows(tmp_path):
    values = numbers(12, 8)
    path = tiff(tmp_path / "eight.tif", values, planarconfig="contig")
    with pytest.raises(UnusableImageError, match=r"8 bands: choose three with data\.bands"):
        decode_image(path, SIDE)
    with pytest.raises(UnusableImageError, match=r"8 bands, but data\.bands asks for 9"):
        decode_image(path, SIDE, reading=Reading(bands=(9, 1, 2)))
    found = decode_image(path, SIDE, reading=Reading(bands=(5, 3, 2)))
    expected = values[:, :, [4, 2, 1]]
    assert abs(found.astype(int) - scaled(expected, bits_used(expected))).max() <= 1


def test_the_depth_is_that_of_the_domain_not_of_each_image(tmp_path):
    for number in range(3):
        tiff(tmp_path / f"dark/x/{number}.tif", numbers(10)[:, :, 0])
    bright = tiff(tmp_path / "dark/x/9.tif", numbers(12)[:, :, 0])
    Image.new("L", (SIDE, SIDE), 7).save(tmp_path / "dark/x/plain.png")
    table = from_folder(tmp_path)
    kept, store, _ = open_pixels(table, SIDE, cache=None, depths=survey(table).depths)
    assert survey(table).depths == {"dark": 12}
    pixels = store.gather(range(len(kept))).permute(0, 2, 3, 1).numpy()
    assert pixels[kept.paths.index("dark/x/0.tif")].max() == 64  # 1023 of 4095
    assert pixels[kept.paths.index("dark/x/9.tif")].max() == 255
    assert (pixels[kept.paths.index("dark/x/plain.png")] == 7).all()
    assert bright.is_file()


def test_a_fourth_band_that_is_no_transparency_is_noticed(tmp_path):
    tiff(tmp_path / "air/x/a.tif", numbers(8, 4), extrasamples=["unassalpha"])
    logo = Image.new("RGBA", (SIDE, SIDE), (255, 0, 0, 0))
    logo.paste((0, 0, 255, 255), (4, 4, 12, 12))
    (tmp_path / "web/x").mkdir(parents=True)
    logo.save(tmp_path / "web/x/logo.png")
    found = survey(from_folder(tmp_path))
    assert found.veiled == {"air": "air/x/a.tif"}
    (finding,) = about_survey(found, Reading())
    assert "data.bands: [1, 2, 3]" in finding.advice
    assert list(about_survey(found, Reading(bands=(1, 2, 3)))) == []


@pytest.mark.parametrize("size", [(40, 24), (16, 16), (17, 40), (9, 50)])
def test_tiles_cover_an_image_and_are_named_by_their_place(size):
    width, height = size
    covered = np.zeros((height, width), bool)
    for name in tile_names("a/b/c.tif", width, height, 16):
        tile = Tile.named(name)
        assert tile.file == "a/b/c.tif"
        left, top, right, bottom = tile.box or (0, 0, width, height)
        assert right - left == min(width, 16)
        assert bottom - top == min(height, 16)
        covered[top:bottom, left:right] = True
    assert covered.all()
    assert tile_names("a", 16, 16, 16) == ["a"]


def test_large_images_become_tiles_that_stay_together(tmp_path):
    for domain in "pq":
        for label in "xy":
            for number in range(6):
                values = numbers(8, 3, 40)
                tiff(tmp_path / f"{domain}/{label}/{number}.tif", values)
    table = from_folder(tmp_path)
    kept, store, bad = open_pixels(table, SIDE, cache=tmp_path / "cache", reading=Reading(tile=20))
    assert len(kept) == 4 * len(table)
    assert not bad
    row = kept.paths.index("q/y/5.tif#x20y0w20h20")
    with Image.open(tmp_path / "q/y/5.tif") as image:
        part = image.crop((20, 0, 40, 20)).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    assert (store.gather([row])[0].permute(1, 2, 0).numpy() == np.asarray(part)).all()
    again, _, _ = open_pixels(table, SIDE, cache=None, reading=Reading(tile=20))
    assert again.paths == kept.paths
    images, image_of = whole_images(kept)
    assert images.paths == table.paths
    splits = hold_out(images, ["q"], id_val=0.3, id_test=0.3, seed=1).spread(image_of)
    assert sum(len(getattr(splits, r)) for r in ("train", "id_val", "id_test", "test")) == len(kept)
    roles = {}
    for role in ("train", "id_val", "id_test", "test"):
        for path in (kept.paths[row] for row in getattr(splits, role)):
            assert roles.setdefault(Tile.named(path).file, role) == role
    assert set(roles.values()) == {"train", "id_val", "id_test", "test"}


def test_tiles_are_of_one_file_of_one_domain_with_one_role():
    paths = ("1#x0y0w2h2", "1#x2y0w2h2", "1#x0y0w2h2")
    places = np.array([0, 0, 1])
    table = ImageTable(
        paths, places, places, ("x", "y"), ("a", "c"), images=np.zeros((3, 2, 2, 3), np.uint8)
    )
    whole, image_of = whole_images(table)
    assert image_of.tolist() == [0, 0, 1]
    assert whole.domains.tolist() == [0, 1]
    assert whole.paths == ("1", "1")
    with pytest.raises(DataError, match=r"'1#x2y0w2h2' .*test, .* train"):
        whole_images(replace(table, split=np.array(["train", "test", "test"])))


def test_an_image_too_large_to_decode_whole_is_cut(tmp_path, monkeypatch):
    for module in ("decoding", "inspection"):
        monkeypatch.setattr(f"feddg.data.{module}.MOST_PIXELS", 1000)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    tiff(tmp_path / "a/x/wide.tif", numbers(8, 3, 40))
    with pytest.raises(DataError, match=r"data\.tile: 512"):
        open_pixels(from_folder(tmp_path), SIDE, cache=None)
    kept, store, _ = open_pixels(from_folder(tmp_path), SIDE, cache=None, reading=Reading(tile=20))
    assert len(kept) == len(store.gather(range(4))) == 4


@pytest.mark.parametrize("bands", [4, 6, 13])
def test_images_of_many_bands_are_cut_too(tmp_path, bands):
    values = numbers(12, bands, 40)
    (tmp_path / "a/x").mkdir(parents=True)
    options = {"photometric": "minisblack", "planarconfig": "contig"}
    tifffile.imwrite(tmp_path / "a/x/sensor.tif", values, **options)
    reading = Reading(bands=(3, 2, 1), tile=20)
    kept, store, _ = open_pixels(from_folder(tmp_path), 20, cache=tmp_path / "c", reading=reading)
    assert kept.paths[1] == "a/x/sensor.tif#x20y0w20h20"
    found = store.gather([1])[0].permute(1, 2, 0).numpy()
    assert abs(found.astype(int) - scaled(values[:20, 20:, [2, 1, 0]], 12)).max() <= 1


def test_tiles_need_the_cache(tmp_path):
    tiff(tmp_path / "a/x/wide.tif", numbers(8, 3, 40))
    with pytest.raises(DataError, match="pixel_budget_gb"):
        open_pixels(
            from_folder(tmp_path),
            SIDE,
            cache=tmp_path / "cache",
            budget_bytes=100,
            reading=Reading(tile=20),
        )


def test_a_damaged_file_is_named_once_not_once_for_every_tile(tmp_path):
    path = tiff(tmp_path / "a/x/torn.tif", numbers(8, 3, 40))
    path.write_bytes(path.read_bytes()[:-4000])
    tiff(tmp_path / "a/x/whole.tif", numbers(8, 3, 40))
    _, _, bad = open_pixels(from_folder(tmp_path), SIDE, cache=None, reading=Reading(tile=20))
    assert [image.path for image in bad] == ["a/x/torn.tif"]


def test_every_suffix_that_counts_as_an_image_is_decoded(subtests, tmp_path_factory):
    for suffix in sorted(set(USABLE_FORMATS) - {".dcm", ".dicom"}):
        with subtests.test(suffix=suffix):
            tmp_path = tmp_path_factory.mktemp("case")
            path = tmp_path / f"a{suffix}"
            if USABLE_FORMATS[suffix] == "HEIF":
                from feddg.data.images import register_heif

                register_heif()
            Image.new("RGB", (64, 64), (200, 100, 50)).save(path, USABLE_FORMATS[suffix])
            assert abs(decode_image(path, 8).astype(int) - (200, 100, 50)).max() <= 40
            assert suffix in IMAGE_SUFFIXES


def test_photos_of_phones_need_a_package():
    assert (".heic" in USABLE_FORMATS) == (find_spec("pillow_heif") is not None)


def test_without_pydicom_one_line_says_what_to_install(tmp_path, monkeypatch):
    for module in ("data.images", "data.decoding", "data.inspection"):
        monkeypatch.setattr(f"feddg.{module}.IMAGE_SUFFIXES", frozenset({".png"}))
    file = tmp_path / "n/x/a.dcm"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"\0" * 128 + b"DICM")
    needed = r"\.dcm:? needs `pip install 'feddg\[dicom\]'`"
    with pytest.raises(DataError, match=needed):
        from_folder(tmp_path)
    with pytest.raises(DataError, match=needed):
        count_files([tmp_path])
    with pytest.raises(UnusableImageError, match=needed):
        decode_image(file, 8)
    with pytest.raises(UnusableImageError, match=needed):
        decode_image(ImageBytes("upload.dcm", file.read_bytes()), 8)


def test_parts_are_decoded_from_memory_once(tmp_path):
    data = io.BytesIO()
    Image.fromarray(numbers(8, 3, 40)).save(data, "PNG")
    path = tmp_path / "a.png"
    path.write_bytes(data.getvalue())
    left, right = decode_parts(path, [(0, 0, 20, 40), (20, 0, 40, 40)], 20)
    whole = np.asarray(Image.open(path))
    assert (left == np.asarray(Image.fromarray(whole[:, :20]).resize((20, 20), 2))).all()
    assert (right == np.asarray(Image.fromarray(whole[:, 20:]).resize((20, 20), 2))).all()


def test_a_small_file_that_claims_to_be_enormous_is_refused(tmp_path):
    """A TIFF of five bands, which Pillow does not know: its header says 40,000 x 40,000."""
    honest = io.BytesIO()
    tifffile.imwrite(
        honest, np.zeros((8, 8, 5), np.uint8), photometric="minisblack", planarconfig="contig"
    )
    content = honest.getvalue()
    with tifffile.TiffFile(io.BytesIO(content)) as file:
        places = [file.pages[0].tags[name].valueoffset for name in ("ImageWidth", "ImageLength")]
        code = "<I" if file.pages[0].tags["ImageWidth"].dtype == 4 else "<H"
    content = bytearray(content)
    for place in places:
        struct.pack_into(code, content, place, 40_000)
    with pytest.raises(OversizedImageError, match="40000 x 40000 pixels"), quiet_pillow():
        decode_image(ImageBytes("a.tif", bytes(content)), 16, reading=Reading(bands=(1, 2, 3)))
