"""The benchmark of speed drives the same server as a run does; its round is the run's."""

import sys
from pathlib import Path

import pytest
import torch

import feddg
from feddg.prediction.model import load_model
from feddg.runs.reading import read_run
from scripts import load_script


@pytest.fixture
def jobs(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "benchmarks" / "speed")
    import jobs as module

    yield module
    sys.modules.pop("jobs")


def test_a_round_of_the_benchmark_gives_the_bits_of_a_run(jobs, tmp_path):
    experiment = feddg.Experiment(
        data={"source": "digits", "image_size": 8},
        hold_out="sketch",
        clients=2,
        train={"rounds": 1, "local_epochs": 1, "batch_size": 256},
        model={"backbone": "cnn", "weights": None},
    )
    federation = jobs.Federation(experiment, tmp_path / "cache")
    federation.server.setup()
    assert federation.next_batches()
    federation.server.round()
    run = feddg.run(experiment, tmp_path / "runs", cache=tmp_path / "cache", report=False)
    assert read_run(run.folder).rounds_done == 1
    trained = load_model(run.folder, which="final").state_dict()
    for name, tensor in federation.server.state.weights.items():
        assert torch.equal(trained[name], tensor), name


@pytest.mark.parametrize("steps", [2, 8])
def test_a_gpus_jobs_have_no_copies_among_the_images_that_measure(
    steps, jobs, tmp_path, monkeypatch
):
    gpu = load_script(Path(jobs.__file__).with_name("gpu.py"))
    monkeypatch.setitem(gpu.PIXELS, "cnn", 8)
    sizes = gpu.Sizes(pretend=False)
    made = gpu.federation(("cnn", "fedavg", steps), "cpu", sizes, str(tmp_path))
    assert len(made.next_batches()) == sizes.clients * steps
