"""A benchmark data set is one new file: everything below works with no other edit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from feddg.data.data_set import DataSet
from feddg.errors import DataError

TOY = '''
"""Toy: three classes of colours in four kinds of noise."""

import numpy

from feddg.data.augmentations import AugmentSettings
from feddg.data.data_set import DataSet, register_data_set
from feddg.data.images import ImageTable


def draw_toy(root):
    """Returns 96 images of 16 by 16 pixels, the fourth domain's split between val and test."""
    labels, domains = numpy.arange(96) % 3, numpy.arange(96) // 24
    chance = numpy.random.default_rng(0)
    pixels = chance.integers(0, 60 + 30 * domains[:, None, None, None], (96, 16, 16, 3))
    pixels[numpy.arange(96), :, :, labels] += 100
    names = [f"{TOY.domains[d]}/{c}/{i}" for i, (d, c) in enumerate(zip(domains, labels))]
    roles = numpy.array(["train", "train", "val", "test"])[domains]
    return ImageTable(
        tuple(names), labels, domains, ("red", "green", "blue"), TOY.domains,
        images=pixels.astype(numpy.uint8), split=roles,
    )


TOY = register_data_set(
    DataSet(
        name="toy",
        summary="Toy: three colours in four kinds of noise",
        load=draw_toy,
        preset={
            "data": {"image_size": 16, "id_val": 0.1},
            "clients": {"number": 2},
            "model": "cnn",
            "train": {"rounds": 1, "batch_size": 8, "augmentation": "toy"},
        },
        domains=("calm", "low", "high", "wild"),
        validated_by={"calm": "wild", "wild": "low", "low": "high", "high": "calm"},
        augmentation=AugmentSettings(vertical_flip=0.5, quarter_turns=True),
        split_counts={"train": 48, "val": 24, "test": 24},
    )
)
'''
PROGRAM = """
import sys
import feddg
from feddg.comparing.cells import expand_plan
from feddg.comparing.plan import load_plan
from feddg.data.data_set import find_augmentation
from feddg.data.sources import source_names
from feddg.runs.reading import read_run

exec(sys.argv[2])

experiment = feddg.Experiment(data="toy", hold_out={"test": "wild", "val": "low"})
assert (experiment.preset, experiment.clients.number, experiment.data.image_size) == ("toy", 2, 16)
assert (experiment.model.backbone, experiment.train.augmentation) == ("cnn", "toy")
assert find_augmentation("toy").quarter_turns and "toy" in source_names()

def held(protocol):
    plan = {"base": {"data": "toy"}, "hold_out": protocol, "methods": ["fedavg"]}
    return [cell.experiment.hold_out for cell in expand_plan(load_plan(plan))]

assert [held.test for held in held("lodo")] == [("calm",), ("low",), ("high",), ("wild",)]
pairs = {held.test + held.val for held in held("ltdo")}
assert pairs == {("calm", "wild"), ("wild", "low"), ("low", "high"), ("high", "calm")}
assert len(held("ltdo-all")) == 12

evaluated = read_run(feddg.run(experiment, sys.argv[1], report=False).folder).evaluations
assert evaluated.domains("test") == ["wild"] and evaluated.domains("val") == ["low"]
official = read_run(feddg.run(feddg.Experiment(data="toy"), sys.argv[1], report=False).folder)
assert [row.examples for row in official.evaluations.at(1, "test")] == [24]
assert official.evaluations.domains("val") == ["high"]
"""


def in_a_new_process(tmp_path: Path, definition: str, path: str = "") -> None:
    paths = os.pathsep.join([path, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "FEDDG_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "runs"), definition]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_data_set_that_a_program_registers(tmp_path: Path) -> None:
    in_a_new_process(tmp_path, TOY)


def test_a_data_set_of_another_package(tmp_path: Path) -> None:
    about = tmp_path / "site/toys-1.0.dist-info"
    about.mkdir(parents=True)
    (tmp_path / "site/toys.py").write_text(TOY)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[feddg.sources]\ntoy = toys:TOY\n")
    in_a_new_process(tmp_path, "", str(tmp_path / "site"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "say what to do instead"),
        ({"domains": ("a", "b"), "validated_by": {"a": "b"}}, "for each of its domains, another"),
        ({"domains": ("a", "b"), "validated_by": {"a": "b", "b": "b"}}, "another"),
        ({"domains": ("a", "b"), "validated_by": {"a": "b", "b": "c"}}, "another"),
        ({"domains": ("a", "b"), "counts": {"a": 3}}, "counts must be by its domains"),
    ],
)
def test_definitions_that_contradict_themselves(fields: dict, words: str) -> None:
    load = (lambda root: None) if fields else None
    with pytest.raises(DataError, match=f"data set 'bad'.*{words}"):
        DataSet(name="bad", summary="", load=load, **fields)
