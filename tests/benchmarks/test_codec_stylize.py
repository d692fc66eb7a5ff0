"""Images as files in another style: shapes, names, and what is broken."""

from pathlib import Path

import pytest
from PIL import Image

from scripts import load_script

stylize = load_script(Path(__file__).resolve().parents[2] / "benchmarks/codec/stylize.py")


@pytest.fixture
def image_folder(tmp_path):
    """Makes a folder of four images of a colour."""

    def make(colour):
        folder = tmp_path / colour
        folder.mkdir()
        for i in range(4):
            Image.new("RGB", (20, 24), colour).save(folder / f"{i}.png")
        return folder

    return make


def test_style_transfer_of_files(capsys, image_folder, tmp_path):
    source, style = image_folder("red"), image_folder("blue")
    arguments = [source, "--style", style, "--out", tmp_path / "out", "--size", "32"]
    stylize.main(list(map(str, arguments)))
    assert "4 images" in capsys.readouterr().out
    red, _, blue = Image.open(tmp_path / "out/0.png").convert("RGB").resize((1, 1)).getpixel((0, 0))
    assert blue > red


def test_style_transfer_keeps_shapes_goes_into_folders_and_skips_what_is_broken(capsys, tmp_path):
    images, out = tmp_path / "images", tmp_path / "images" / "stylized"
    (images / "inner").mkdir(parents=True)
    Image.new("RGB", (60, 20), "red").save(images / "wide.jpg")
    Image.new("RGB", (60, 20), "red").save(images / "wide.png")
    Image.new("RGB", (10, 40), "blue").save(images / "inner" / "tall.png")
    lying = Image.Exif()
    lying[0x0112] = 6  # the camera was turned: 40 x 20 in the file, 20 x 40 to the eye
    Image.new("RGB", (40, 20), "green").save(images / "turned.jpg", exif=lying)
    (images / "broken.jpg").write_text("not an image")
    arguments = [images, "--style", images / "wide.jpg", "--out", out]
    for _ in range(2):  # the second time, the first one's results lie among the images
        stylize.main([*map(str, arguments), "--size", "48"])
        shown, errors = capsys.readouterr()
        assert "4 images written" in shown
        assert "broken.jpg" in errors
    sizes = {}
    for path in out.rglob("*.png"):
        with Image.open(path) as image:
            sizes[str(path.relative_to(out))] = image.size
    assert sizes == {
        "inner/tall.png": (16, 48),
        "turned.png": (24, 48),
        "wide.jpg.png": (48, 16),
        "wide.png.png": (48, 16),
    }


def test_style_transfer_of_broken_files_alone_is_one_error(tmp_path, image_folder):
    broken = tmp_path / "broken.jpg"
    broken.write_text("not an image")
    style = image_folder("blue")
    arguments = [broken, "--style", style, "--out", tmp_path / "out"]
    with pytest.raises(SystemExit, match=r"^error: .*broken\.jpg"):
        stylize.main(list(map(str, arguments)))
