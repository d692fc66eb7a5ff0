"""FEMNIST as LEAF makes it and as the benchmark lists it."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest

import published_trees as trees
from feddg.data.data_set import load_source
from feddg.errors import DataError
from published_trees import by_split, rows


def test_femnists_duplicates_are_used_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = trees.femnist_leaf(tmp_path)
    with caplog.at_level(logging.WARNING, logger="feddg"):
        table = load_source("femnist", root)
    # Four images of every writer in both parts; all writers but the first store one twice.
    assert "5 images are stored twice" in caplog.text
    assert by_split(table) == {"train": 3 * 4, "id_test": 3 * 4, "test": 4}
    assert table.domain_names == (*trees.WRITERS, "f9999_99")
    assert table.clients.tolist() == [domain for _, _, domain in rows(table)]
    assert {name for _, name, _ in rows(table)} == {"0", "A"}
    assert (len(table.class_names), table.class_names[36]) == (62, "a")
    content = json.loads(next((root / "data/train").glob("*.json")).read_text())
    first = np.round(np.array(content["user_data"][trees.WRITERS[0]]["x"][0]) * 255)
    assert (table.images[0, :, :, 1].ravel() == first).all(), "ink stays 0 and paper 255"


def test_femnist_whole_has_no_split(tmp_path: Path) -> None:
    root = trees.femnist_leaf(tmp_path)
    (root / "data/train").rename(root / "data/all_data")
    (root / "data/test").rename(root / "data/other")
    table = load_source("femnist", root)
    assert (len(table), table.split) == (12, None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content.pop("user_data"), "user_data: Field required"),
        (lambda content: content["user_data"].popitem(), "do not match"),
        (lambda content: content["user_data"]["f0000_14"]["y"].append(1), "do not match"),
        (lambda content: content["user_data"]["f0000_14"]["y"].__setitem__(0, 62), "image 0 of"),
        (lambda content: content["user_data"]["f0000_14"]["x"][1].pop(), "image 1 of"),
        (lambda content: content["user_data"]["f0000_14"]["x"][1].__setitem__(0, 7), "image 1 of"),
    ],
)
def test_femnist_with_a_broken_file(tmp_path: Path, change, words: str) -> None:
    file = next((trees.femnist_leaf(tmp_path) / "data/train").glob("*.json"))
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=words):
        load_source("femnist", tmp_path)


@pytest.mark.parametrize("name", ["metadata.csv", "femnist_new_metadata.csv"])
def test_femnist_as_listed_by_the_benchmark(tmp_path: Path, name: str) -> None:
    table = load_source("femnist", trees.femnist_listed(tmp_path, name))
    assert by_split(table) == {"train": 8, "id_val": 8, "id_test": 8, "val": 4, "test": 4}
    assert table.domain_names == tuple(f"writer_{number}" for number in range(4))
    assert {name for _, name, _ in rows(table)} == {"0", "a"}
