"""FEMNIST as the benchmark lists it."""

from pathlib import Path

import pytest

import published_trees as trees
from feddg.data.data_set import load_source
from feddg.errors import DataError
from feddg.runs.inspection import inspect_data
from published_trees import by_split, rows


@pytest.mark.parametrize("name", ["metadata.csv", "femnist_new_metadata.csv"])
def test_femnist_as_listed_by_the_benchmark(tmp_path: Path, name: str) -> None:
    table = load_source("femnist", trees.femnist_listed(tmp_path, name))
    assert by_split(table) == {"train": 8, "id_val": 8, "id_test": 8, "val": 4, "test": 4}
    assert table.domain_names == tuple(f"writer_{number}" for number in range(4))
    assert {name for _, name, _ in rows(table)} == {"0", "a"}


def test_femnist_without_a_list(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    with pytest.raises(DataError, match="femnist_new_metadata"):
        load_source("femnist", tmp_path)


def test_letters_of_both_cases_are_no_two_spellings_of_a_class(tmp_path: Path) -> None:
    root = trees.femnist_listed(tmp_path, "metadata.csv")
    found = inspect_data(data={"source": "femnist", "root": root}, image_size=8, clients=2)
    assert {"s", "S"} <= {*found["classes"]}
    assert "similar-names" not in {one["code"] for one in found["diagnostics"]}
