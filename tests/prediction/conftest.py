"""Fixtures of the tests of a model in use."""

import shutil

import pytest

from trained_runs import SHORT, write_images


@pytest.fixture
def images(tmp_path):
    """A folder of thirty images, deep inside."""
    write_images(tmp_path / "images" / "deep" / "er", 30)
    return tmp_path / "images"


@pytest.fixture
def averaged(train_once, tmp_path):
    """A copy of a run that serves an exponential mean, and asks for a decision about threes."""
    asked = {"every": 3, "decision": "3", "sensitivity": 0.9, "prevalence": 0.1}
    train = {**SHORT["train"], "rounds": 3}
    run = train_once(
        data={**SHORT["data"], "id_val": 0.2},
        train=train,
        evaluate=asked,
        server={"averaging": "ema"},
    )
    return shutil.copytree(run, tmp_path / "averaged")
