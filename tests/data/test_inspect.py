import json
from pathlib import Path

import numpy as np

from feddg.data.images import ImageTable
from feddg.data.inspect import inspect


def test_summary_by_hand_and_ready_for_json() -> None:
    table = ImageTable(
        paths=("a/cat/1", "a/cat/2", "a/dog/1", "b/Dog/1"),
        labels=np.array([1, 1, 2, 0]),
        domains=np.array([0, 0, 0, 1]),
        class_names=("Dog", "cat", "dog"),
        domain_names=("a", "b"),
        root=Path("pictures"),
        split=np.array(["train", "val", "train", "test"]),
    )
    found = inspect(table)
    assert (
        json.loads(json.dumps(found))
        == found
        == {
            "root": "pictures",
            "images": 4,
            "domains": ["a", "b"],
            "classes": ["Dog", "cat", "dog"],
            "counts": {"a": {"Dog": 0, "cat": 2, "dog": 1}, "b": {"Dog": 1, "cat": 0, "dog": 0}},
            "totals": {"a": 3, "b": 1},
            "missing": {"a": ["Dog"], "b": ["cat", "dog"]},
            "similar_classes": [["Dog", "dog"]],
            "split": {"train": 2, "val": 1, "test": 1},
        }
    )


def test_nothing_missing_is_said_as_nothing() -> None:
    table = ImageTable(
        ("a/x/1",), np.array([0]), np.array([0]), ("x",), ("a",), images=np.zeros((1, 2, 2, 3))
    )
    found = inspect(table)
    assert found["missing"] == {}
    assert found["similar_classes"] == []
    assert found["root"] is None
    assert found["split"] is None
