"""Commands on folders of images."""

import json
import shutil

import numpy as np
from PIL import Image

TINY = ["--rounds", "1", "--local-epochs", "1", "--batch-size", "64", "--clients", "3", "-q"]


def test_inspect_lists_bad_files_and_clients(feddg, image_folder, tmp_path):
    bad = image_folder / "red/dark/zero.jpg"
    bad.touch()
    text = image_folder / "red/dark/text.jpg"
    text.write_text("not an image")
    held = ["--hold-out", "blue", "--clients", "2"]
    code, shown, _ = feddg("data", "inspect", "--root", image_folder, "--json", *held)
    assert code == 0
    found = json.loads(shown)
    assert found["counts"]["red"] == {"dark": 4, "light": 4}
    assert {image["path"] for image in found["bad_images"]} == {
        "red/dark/zero.jpg",
        "red/dark/text.jpg",
    }
    assert sum(client["red"] for client in found["clients"]) == found["splits"]["train"]
    assert feddg("data", "inspect", "--root", image_folder, *held)[0] == 0


def test_inspect_shows_how_images_are_stored_and_what_is_odd(feddg, image_folder):
    for number in range(3):
        values = np.full((30, 40), 100 + number, np.uint16)
        values[0, 0] = 2**11 - 1
        Image.fromarray(values).save(image_folder / f"blue/dark/deep{number}.tif")
    shutil.copy(image_folder / "red/dark/0.png", image_folder / "blue/dark/copy.png")
    (image_folder / "red/dark/slide.svs").touch()
    command = ["data", "inspect", "--root", image_folder, "--hold-out", "blue", "--clients", "2"]
    code, shown, _ = feddg(*command, "--json")
    assert code == 0
    found = json.loads(shown)
    blue, red = found["stored"]["blue"], found["stored"]["red"]
    assert (blue["smallest"], blue["largest"]) == ([20, 24], [40, 30])
    assert blue["modes"] == {"RGB": 9, "I;16": 3}
    assert (blue["bits"], blue["high"], blue["files"]) == (11, 2**11 - 1, 12)
    assert red["modes"] == {"RGB": 8}
    assert (red["bits"], red["low"], red["high"]) == (8, 30, 255)
    assert found["ignored"] == {".svs": 1}
    texts = [one["text"] for one in found["diagnostics"]]
    errors = [one["text"] for one in found["diagnostics"] if one["severity"] == "error"]
    assert any(".svs" in text for text in texts)
    assert any("red/dark/0.png = blue/dark/copy.png" in text for text in errors) or any(
        "blue/dark/copy.png = red/dark/0.png" in text for text in texts
    )
    code, shown, _ = feddg(*command)
    assert code == 0
    for words in ("how they are stored", "20 x 24", "40 x 30", "warning:", "OpenSlide"):
        assert words in shown


def test_a_folder_with_bad_images_trains_on_the_rest_and_says_so(feddg, image_folder, tmp_path):
    Image.new("CMYK", (9, 9)).save(image_folder / "red/dark/cmyk.jpg")
    Image.new("RGB", (1, 1)).save(image_folder / "red/dark/pixel.png")
    (image_folder / "red/dark/zero.jpg").touch()
    where = ["--data", "folder", "--root", image_folder, "--hold-out", "blue"]
    model = ["--backbone", "cnn", "--weights", "none", "--image-size", "16"]
    code, _, errors = feddg("run", *where, *model, *TINY, "--clients", "2")
    assert code == 0
    assert "zero.jpg" in errors or "1 " in errors
    (folder,) = (tmp_path / "runs").iterdir()
    bad = json.loads((folder / "clients.json").read_text())["bad_images"]
    assert [image["path"] for image in bad] == ["red/dark/zero.jpg"]


def test_style_transfer_of_files(feddg, image_folder, tmp_path):
    source, style = image_folder / "red/dark", image_folder / "blue/dark"
    arguments = [source, "--style", style, "--out", tmp_path / "out", "--size", "32"]
    code, shown, _ = feddg("style", "transfer", *arguments)
    assert code == 0
    assert "4 images" in shown
    red, _, blue = Image.open(tmp_path / "out/0.png").convert("RGB").resize((1, 1)).getpixel((0, 0))
    assert blue > red


def test_style_transfer_keeps_shapes_goes_into_folders_and_skips_what_is_broken(feddg, tmp_path):
    images, out = tmp_path / "images", tmp_path / "images" / "stylized"
    (images / "inner").mkdir(parents=True)
    Image.new("RGB", (60, 20), "red").save(images / "wide.jpg")
    Image.new("RGB", (60, 20), "red").save(images / "wide.png")
    Image.new("RGB", (10, 40), "blue").save(images / "inner" / "tall.png")
    lying = Image.Exif()
    lying[0x0112] = 6  # the camera was turned: 40 x 20 in the file, 20 x 40 to the eye
    Image.new("RGB", (40, 20), "green").save(images / "turned.jpg", exif=lying)
    (images / "broken.jpg").write_text("not an image")
    arguments = ["style", "transfer", images, "--style", images / "wide.jpg", "--out", out]
    for _ in range(2):  # the second time, the first one's results lie among the images
        code, shown, errors = feddg(*arguments, "--size", "48")
        assert code == 0
        assert "4 images written" in shown
        assert "broken.jpg" in errors
        assert "Traceback" not in errors
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


def test_style_transfer_of_broken_files_alone_is_one_error(feddg, tmp_path, image_folder):
    broken = tmp_path / "broken.jpg"
    broken.write_text("not an image")
    style = image_folder / "blue/dark"
    code, _, errors = feddg(
        "style", "transfer", broken, "--style", style, "--out", tmp_path / "out"
    )
    assert code == 1
    assert "broken.jpg" in errors
