"""Rotated MNIST."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import published_trees as trees
from feddg.data.data_set import load_source
from feddg.errors import DataError


@pytest.mark.parametrize("packed", [True, False])
def test_rotated_mnist_turns_each_digit_by_one_angle(tmp_path: Path, packed: bool) -> None:
    table = load_source("rotated_mnist", trees.mnist(tmp_path, packed))
    assert table.counts().sum(axis=1).tolist() == [40] * 6
    assert table.counts().sum(axis=0).tolist() == [24] * 10
    digits = np.random.default_rng(4).integers(0, 256, (120, 28, 28), dtype=np.uint8)
    straight = {image.tobytes() for image in table.images[table.domains == 0, :, :, 0]}
    assert any(digit.tobytes() in straight for digit in digits)
    turned = [
        np.asarray(Image.fromarray(digit).rotate(45, Image.Resampling.BILINEAR)).tobytes()
        for digit in digits
    ]
    found = {image.tobytes() for image in table.images[table.domains == 3, :, :, 0]}
    assert 0 < len(found & set(turned)) <= 40


@pytest.mark.parametrize("damage", ["cut", "labels for images", "gone"])
def test_mnist_files_that_are_none(tmp_path: Path, damage: str) -> None:
    folder = trees.mnist(tmp_path, packed=False) / "MNIST/raw"
    file = folder / "t10k-images-idx3-ubyte"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "gone":
        file.unlink()
    else:
        file.write_bytes((folder / "t10k-labels-idx1-ubyte").read_bytes())
    with pytest.raises(DataError, match="t10k-images-idx3-ubyte"):
        load_source("rotated_mnist", tmp_path)
