"""Camelyon17, iWildCam and Terra Incognita as they are unpacked."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import published_trees as trees
from feddg.data.data_set import load_source
from feddg.data.decoded import open_pixels
from feddg.errors import DataError
from published_trees import by_split, rows


@pytest.mark.parametrize("make", [trees.terra_folders, trees.terra_raw])
def test_terra_incognita_counts_an_image_of_two_animals_once(make, tmp_path: Path) -> None:
    table = load_source("terra_incognita", make(tmp_path))
    assert table.domain_names == ("location_100", "location_38", "location_43", "location_46")
    extra = [1, 0] if make is trees.terra_folders else [0, 0]
    # ... by its first class in the alphabet.
    counts = table.counts()
    assert counts.sum() == 4 * 10 * 2 + sum(extra)
    bird, coyote = counts[1, 0], counts[1, 3]
    assert (bird, coyote) == ((3, 2) if make is trees.terra_folders else (3, 1))


def test_terra_incognita_without_annotations_says_what_is_missing(tmp_path: Path) -> None:
    trees.image(tmp_path / "eccv_18_all_images_sm/1.jpg")
    with pytest.raises(DataError, match="no annotations below"):
        load_source("terra_incognita", tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"images": [], "annotations": []}'])
def test_terra_incognita_with_broken_annotations(tmp_path: Path, content: str) -> None:
    trees.terra_raw(tmp_path)
    (tmp_path / "eccv_18_annotation_files/x.json").write_text(content)
    with pytest.raises(DataError, match=r"x\.json is no file of annotations"):
        load_source("terra_incognita", tmp_path)


def test_camelyon17_has_the_official_split_and_its_hospitals(tmp_path: Path) -> None:
    table = load_source("camelyon17", trees.camelyon17(tmp_path))
    assert table.class_names == ("normal", "tumor")
    # Two images for each of two labels: of hospitals 0, 3, 4, by the file's split; 1, 2 whole.
    assert by_split(table) == {"train": 12, "id_val": 12, "val": 8, "test": 8}
    held = {role: set(table.domains[table.split == role].tolist()) for role in ("val", "test")}
    assert held == {"val": {1}, "test": {2}}
    assert table.clients.tolist() == [domain for _, _, domain in rows(table)]
    assert "patches/patient_004_node_0/" in table.paths[0], "zeros before a patient's number stay"


def test_camelyon17s_transparency_is_left_away(tmp_path: Path) -> None:
    table = load_source("camelyon17", trees.camelyon17(tmp_path))
    stored = np.asarray(Image.open(table.root / table.paths[0]))
    assert stored.shape[2] == 4
    _, pixels, _ = open_pixels(table, trees.SIDE, cache=None)
    assert pixels.gather([0]).shape == (1, 3, trees.SIDE, trees.SIDE)


def test_iwildcams_images_lie_in_train_whatever_their_split(tmp_path: Path) -> None:
    table = load_source("iwildcam", trees.iwildcam(tmp_path))
    assert all(path.startswith("train/") for path in table.paths)
    names = [f"location_{number}" for number in (1, 3, 4, 0, 2, 5)]
    assert list(table.domain_names) == names, "those that train come first"
    assert table.class_names == ("empty", "deer, red", "cat")
    assert by_split(table) == {"train": 18, "id_val": 18, "id_test": 18, "val": 6, "test": 12}
    for path, name, domain in rows(table):
        _, location, label, _ = path.removeprefix("train/").split("-")
        assert (table.class_names[int(label)], f"location_{location}") == (name, domain)
    assert table.clients.tolist() == [domain for _, _, domain in rows(table)]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("id_val", "extra", r"row \d+ of metadata.csv has 'extra' as split"),
        ("train-1-0-0.jpg", "../x.jpg", r"row \d+ of metadata.csv has '\.\./x\.jpg' as filename"),
        ("filename", "file", "no column 'filename'"),
    ],
)
def test_iwildcam_with_a_broken_metadata_file(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    file = trees.iwildcam(tmp_path) / "iwildcam_v2.0/metadata.csv"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(DataError, match=words):
        load_source("iwildcam", tmp_path)


@pytest.mark.parametrize("source", ["iwildcam", "camelyon17"])
def test_a_wilds_folder_that_is_none(source: str, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    with pytest.raises(DataError, match=r"holds no metadata\.csv.*Found: images"):
        load_source(source, tmp_path)


def test_metadata_without_its_images_names_one(tmp_path: Path) -> None:
    root = trees.iwildcam(tmp_path)
    (root / "iwildcam_v2.0/train").rename(root / "iwildcam_v2.0/test")
    with pytest.raises(DataError, match="lists images that are not there"):
        load_source("iwildcam", tmp_path)
