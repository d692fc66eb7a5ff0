"""Images saved again on both sides of a split are warned about, and others are not."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from feddg.data.near_copies import near_copies, perceptual_hashes
from feddg.data.pixels import ArrayPixels
from feddg.data.sets.digits import draw_digits
from feddg.diagnostics import collected
from feddg.experiment import Experiment
from feddg.runs.inspection import inspect_experiment
from feddg.runs.prepare import in_process


def scene(seed: int, side: int = 96) -> Image.Image:
    """Returns smooth random colours, as a photograph has them."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC)


class Counting(ArrayPixels):
    """Counts the images that are read."""

    read = 0

    def gather(self, rows, device=None):
        self.read += len(rows)
        return super().gather(rows, device)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two training domains and ``c``, which holds two of their images, saved again."""
    for place, domain in enumerate("abc"):
        for label in "xy":
            folder = tmp_path / "images" / domain / label
            folder.mkdir(parents=True)
            for number in range(10):
                scene(1000 * place + 100 * (label == "y") + number).save(folder / f"{number}.png")
    folder = tmp_path / "images/c/x"
    scene(3).save(folder / "poor.jpg", quality=30)  # a/x/3.png
    scene(1104).resize((60, 60), Image.Resampling.BICUBIC).save(folder / "small.png")  # b/y/4.png
    return tmp_path / "images"


def chosen(root: Path, **data: object) -> Experiment:
    fields = {"source": "folder", "root": root, "image_size": 32, "id_val": 0, "id_test": 0}
    model = {"backbone": "cnn", "weights": None}
    return Experiment(data=fields | data, hold_out="c", clients=2, model=model)


def test_images_saved_again_are_named_by_inspect_and_by_a_run(root, tmp_path):
    found = inspect_experiment(chosen(root), lambda *_: None)
    with collected() as said:
        in_process(chosen(root), tmp_path / "cache", lambda *_: None)
    (inspected,) = [one["text"] for one in found["diagnostics"] if one["code"] == "near-copies"]
    (text,) = [one.text for one in said if one.code == "near-copies"]
    assert text == inspected
    assert text.startswith("2 of 22 images")
    assert "a/x/3.png and c/x/poor.jpg" in text
    assert "b/y/4.png and c/x/small.png" in text


def test_that_nobody_looked_is_said_where_pixels_are_not_kept(root, tmp_path):
    with collected() as said:
        in_process(chosen(root, pixel_budget_gb=1e-6), tmp_path / "cache", lambda *_: None)
    codes = [one.code for one in said]
    assert "near-copies-not-looked-for" in codes
    assert "near-copies" not in codes


def test_nothing_is_said_where_copies_are_ignored(root, tmp_path):
    with collected() as said:
        in_process(chosen(root, duplicates="ignore"), tmp_path / "cache", lambda *_: None)
    assert not [one for one in said if one.code == "near-copies"]


def test_digits_drawn_alike_are_no_copies():
    images = ArrayPixels(draw_digits().images)
    rows = np.arange(len(images))
    assert not list(near_copies(images, rows[::2], rows[1::2]))


def test_a_blank_image_is_a_copy_of_none():
    images = ArrayPixels(np.full((2, 32, 32, 3), 255, np.uint8))
    assert not list(near_copies(images, np.array([0]), np.array([1])))


def test_blank_images_are_read_for_their_hash_only(subtests):
    for value, side in itertools.product([0, 77, 255], [20, 224]):
        with subtests.test(side=side, value=value):
            images = Counting(np.full((60, side, side, 3), value, np.uint8))
            assert not list(near_copies(images, np.arange(40), np.arange(40, 60)))
            assert images.read == 60


def test_images_that_are_all_alike_are_read_twice():
    images = Counting(np.stack([np.asarray(scene(0, 64))] * 60))
    assert len(list(near_copies(images, np.arange(40), np.arange(40, 60)))) == 800
    assert images.read == 2 * 60


@pytest.mark.parametrize("side", [20, 64, 224])
def test_the_hash_is_the_low_frequencies_sign_at_any_size(side):
    hashes = perceptual_hashes(
        ArrayPixels(np.stack([np.asarray(scene(seed, side)) for seed in range(3)])), np.arange(3)
    )
    same = perceptual_hashes(
        ArrayPixels(np.stack([np.asarray(scene(seed)) for seed in range(3)])), np.arange(3)
    )
    products = hashes @ same.T  # 64 minus twice the bits that differ
    assert (products.diagonal() >= 64 - 2 * 6).all()
    assert (products[~np.eye(3, dtype=bool)] < 40).all()
