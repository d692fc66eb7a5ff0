"""What people write on the command line."""

import pytest

from feddg.cli.parsing import assigned, held_out
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
