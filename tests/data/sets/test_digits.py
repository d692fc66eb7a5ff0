"""The built-in digits in four domains, and rotated MNIST."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import RidgeClassifier
from torch import nn

import published_trees as trees
from feddg.data.data_set import load_source
from feddg.data.images import ImageTable
from feddg.data.sets.digits import draw_digits
from feddg.diagnostics import collected
from feddg.errors import DataError

INK, CHALK, PHOTO, SKETCH = range(4)


@pytest.fixture(scope="module")
def table() -> ImageTable:
    return draw_digits()


def pixels(table: ImageTable, domain: int) -> np.ndarray:
    assert table.images is not None
    return table.images[table.domains == domain].astype(float) / 255


def test_every_scan_is_dealt_to_one_domain_and_classes_are_even(table: ImageTable) -> None:
    assert table.domain_names == ("ink", "chalk", "photo", "sketch")
    assert table.class_names == tuple("0123456789")
    scans = np.bincount(load_digits().target)
    assert table.counts().sum(axis=0).tolist() == scans.tolist()
    assert (np.ptp(table.counts(), axis=0) <= 1).all()
    assert np.ptp(table.counts().sum(axis=1)) <= 10


def test_images_paths_and_order(table: ImageTable) -> None:
    assert table.images is not None
    assert table.images.shape == (1797, 32, 32, 3)
    assert table.images.dtype == np.uint8
    assert table.root is None
    assert len(set(table.paths)) == 1797
    for path, domain, label in zip(table.paths, table.domains, table.labels):
        assert path.startswith(f"{table.domain_names[domain]}/{label}/")
    assert list(table.paths) == sorted(table.paths, key=lambda p: p.rsplit("/")[-1])
    assert len(np.unique(table.images.reshape(1797, -1), axis=0)) == 1797


def test_a_caller_may_write_on_its_own_copy(table: ImageTable) -> None:
    mine = draw_digits()
    assert mine.images is not None
    mine.images[:] = 0
    mine.labels[:] = 0
    untouched = draw_digits()
    assert untouched.images is not None
    assert untouched.images.any()
    assert untouched.labels.any()


def test_domains_differ_in_tone_colour_and_texture(table: ImageTable) -> None:
    brightness = [np.median(pixels(table, domain)) for domain in range(4)]
    assert brightness[SKETCH] > brightness[INK] > 0.6 > 0.35 > brightness[CHALK]
    colour = [np.ptp(pixels(table, domain), axis=3).mean() for domain in range(4)]
    assert colour[PHOTO] > colour[INK] > colour[SKETCH]
    assert colour[SKETCH] < 0.03
    variety = [pixels(table, domain).mean(axis=(1, 2)).std(axis=0).mean() for domain in range(4)]
    assert max(variety) == variety[PHOTO]


def linear_accuracy(table: ImageTable, train: np.ndarray, test: np.ndarray) -> float:
    assert table.images is not None
    grey = table.images.reshape(-1, 16, 2, 16, 2, 3).mean(axis=(2, 4, 5)).reshape(-1, 256) / 255
    model = RidgeClassifier().fit(grey[train], table.labels[train])
    return float(model.score(grey[test], table.labels[test]))


@pytest.mark.parametrize("domain", range(4))
def test_a_linear_model_reads_its_own_domain_but_hardly_an_unseen_one(
    table: ImageTable, domain: int
) -> None:
    inside = np.flatnonzero(table.domains == domain)
    outside = np.flatnonzero(table.domains != domain)
    held = inside[::4]
    own = linear_accuracy(table, np.setdiff1d(inside, held), held)
    unseen = linear_accuracy(table, outside, held)
    assert own > 0.2, "twice chance"
    assert own > unseen + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("domain", range(4))
def test_a_small_network_finds_an_unseen_domain_harder_but_not_hopeless(
    table: ImageTable, domain: int
) -> None:
    images = torch.from_numpy(table.images).permute(0, 3, 1, 2) / 127.5 - 1
    labels = torch.from_numpy(table.labels)
    seen = np.random.default_rng(0).permutation(np.flatnonzero(table.domains != domain))
    held, train = torch.from_numpy(seen[:135]), torch.from_numpy(seen[135:])
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
        layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4 * 4, 10))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(15):
        for batch in train[torch.randperm(len(train))].split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images[batch]), labels[batch]).backward()
            optimizer.step()
    network.eval()
    unseen = torch.from_numpy(np.flatnonzero(table.domains == domain))
    with torch.no_grad():
        inside, outside = (
            (network(images[rows]).argmax(1) == labels[rows]).float().mean().item()
            for rows in (held, unseen)
        )
    assert inside > outside + 0.05
    assert outside > 0.3, "three times chance"


@pytest.mark.parametrize("packed", [True, False])
def test_rotated_mnist_turns_each_digit_by_one_angle(tmp_path: Path, packed: bool) -> None:
    with collected() as said:
        table = load_source("rotated_mnist", trees.mnist(tmp_path, packed))
    assert "Rotated MNIST has 11667 images in angle_0; this copy holds 40" in said[0].text
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
