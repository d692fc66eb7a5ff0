"""Served weights, schedules and head rounds over Flower: the same bits as in-process."""

import json

import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra")

from safetensors.torch import load_file

from feddg.api import run
from feddg.federation.validation import CHANGES
from feddg.runs.reading import read_run
from federations import same
from flower_grid import SMALL, Deployment, experiment

TRAIN = {
    **SMALL["train"],
    "rounds": 4,
    "local_steps": 2,
    "batch_size": 16,
    "schedule": "cosine",
    "warmup_rounds": 1,
    "head_rounds": 1,
    "label_smoothing": 0.1,
}
SERVER = {"averaging": "swa", "wise_ft": 0.7}


def kept(path):
    """Weights, means and kept models of a run."""
    index = json.loads((path / "checkpoint/checkpoint.json").read_text())
    state = load_file(path / "checkpoint" / index["state"])
    found = {name: tensor for name, tensor in state.items() if CHANGES not in name}
    for file in index["models"].values():
        found |= {f"{file}/{n}": t for n, t in load_file(path / "models" / file).items()}
    return found


def rows(path):
    evaluations = read_run(path).metrics.evaluations
    return {row.key: (row.accuracy, row.loss) for row in evaluations}


@pytest.mark.parametrize("method", ["fedavg", "fedbn"])
def test_both_engines_serve_the_same_bits(method, tmp_path):
    chosen = experiment(method=method, train=TRAIN, server=SERVER)
    expected = run(chosen, tmp_path / "in-process", cache=tmp_path / "cache", report=False)
    deployment = Deployment(tmp_path, chosen)
    deployment.start()
    found = kept(deployment.path)
    assert any(name.startswith("extras/served/tail/") for name in found)
    assert any(name.startswith("interpolated.safetensors/") for name in found)
    assert same(found, kept(expected.folder))


def test_sites_that_only_evaluate_measure_the_means_too(tmp_path):
    chosen = experiment(train=TRAIN, server=SERVER)
    own = Deployment(tmp_path / "own", chosen)
    own.start()
    judged = Deployment(tmp_path / "judged", chosen, **{"test": "", "evaluation-sites": "sketch"})
    nodes = {"images": "digits:sketch", "cache": str(tmp_path / "judge"), "device": "cpu"}
    judged.grid.connect("sketch", nodes)
    judged.start()
    ours, theirs = (rows(one.path) for one in (own, judged))
    assert {key[-1] for key in ours} == {"last", "swa", "ema", "wise_ft"}
    assert theirs == ours
