"""A real SuperLink and SuperNodes on this machine. Minutes; run with -m slow."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra")

sys.path.insert(0, str(Path(__file__).parent))

from loopback import Loopback
from test_inprocess_grid import SITES, SMALL, weights

from feddg.experiment import Experiment
from feddg.runs.execute import run
from feddg.runs.records import read_run
from federations import same

pytestmark = pytest.mark.slow


@pytest.fixture
def deploy(tmp_path):
    """Starts deployments, and ends their processes."""
    started = []

    def start(**config):
        train = {**SMALL["train"], "rounds": 3}
        chosen = Experiment(**{**SMALL, "method": "pardon", "train": train})
        loopback = Loopback(tmp_path, chosen, SITES, **config)
        started.append(loopback)
        loopback.start_link()
        for site in SITES:
            loopback.register(site)
            loopback.start_node(site)
        return chosen, loopback

    yield start
    for loopback in started:
        loopback.stop()


def test_pardon_over_tls_gives_the_bits_of_the_in_process_transport(deploy, tmp_path):
    chosen, loopback = deploy()
    loopback.make_key("stranger")
    stranger = loopback.start_node("stranger")
    status = loopback.finish(loopback.run())
    assert status == "finished:completed", loopback.log("superlink")[-5000:]
    assert stranger.wait(60) != 0
    expected = run(chosen, tmp_path / "in-process", cache=tmp_path / "cache", report=False)
    assert same(weights(loopback.path), weights(expected.folder))
    assert read_run(loopback.path).status == "completed"
