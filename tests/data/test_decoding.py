"""Every odd kind of image file becomes the right RGB pixels, or a reason."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps
from torchvision import transforms

from feddg.data.decoding import UnusableImageError, decode_image, make_square, quiet_pillow


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


@pytest.mark.parametrize("resize", ["squash", "crop", "pad"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 500), (500, 1), (3, 2)])
def test_extreme_shapes(resize, shape: tuple[int, int]) -> None:
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


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_tag_is_obeyed(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = saved(noise(7, 5), tmp_path / "turned.png", exif=exif)
    with Image.open(path) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).resize((6, 6), Image.BILINEAR))
    assert (decode_image(path, 6) == expected).all()


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


def png_that_claims(width: int, height: int, path: Path) -> Path:
    """A PNG header without the pixels it promises."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checked = kind + content
        return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )
    return path


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
