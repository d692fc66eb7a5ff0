"""What people write on the command line."""

import pytest

from feddg.cli.parsing import assigned, held_out, seeds
from feddg.errors import ExperimentError


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("sketch", {"test": ["sketch"], "val": []}),
        ("a,b", {"test": ["a", "b"], "val": []}),
        ("val=a,test=b", {"test": ["b"], "val": ["a"]}),
        ("val=a,b,test=c", {"test": ["c"], "val": ["a", "b"]}),
    ],
)
def test_hold_out_spellings(text, held):
    assert held_out(text) == held


def test_set_reads_numbers_flags_and_words():
    pairs = ["train.lr=1e-4", "method.local_clustering=false", "data.resize=pad", "seed=3"]
    assert assigned(pairs) == {
        "train": {"lr": 1e-4},
        "method": {"local_clustering": False},
        "data": {"resize": "pad"},
        "seed": 3,
    }
    with pytest.raises(ExperimentError, match="FIELD=VALUE"):
        assigned(["lr"])


@pytest.mark.parametrize(
    ("text", "read"), [("3", 3), ("7,8,9", [7, 8, 9]), ("7,", [7]), (" 7 , ", [7]), ("0,", [0])]
)
def test_seeds_are_how_many_or_which(text, read):
    assert seeds(text) == read


@pytest.mark.parametrize("text", ["", ",", "7,,8", "7,8,", ",7", "one"])
def test_seeds_written_otherwise_are_refused(text):
    with pytest.raises(ExperimentError, match="--seeds"):
        seeds(text)
